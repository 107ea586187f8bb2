"""`export.export`: load, lower, measure, write, read back, compare, report. `spikeopd-export` calls this and prints."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from export.bundle_writer import BundleOptions, Target, bundle_draft, check_output
from export.calibrate import search_clips
from export.checkpoint import check_context, check_tokens, find_tokenizer, generation_values, text_windows, token_ids
from export.evaluate import compare
from export.finetune import BATCH, finish
from export.lava.bundle import ARRAYS
from export.lava.netx import write_netx
from export.nir.graph import Neuron, Profile
from export.quantize import lower, model_shape
from export.report import REPORT_SCHEMA, model_bytes, parameter_count, support, tensor_table
from export.verify import run_student, verify_bundle, verify_nir
from spikeopd.contracts import Array, Precision, is_integer
from spikeopd.contracts.bundle import is_weight
from spikeopd.errors import InputError
from spikeopd.files import write_json
from spikeopd.registry import GRADED
from spikeopd.students import find_student, load_student, read_config
from spikeopd.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

WINDOW = 128  # tokens per evaluation window
WORTH_FINISHING = 0.01  # loss of perplexity above which the summary speaks of --finetune
TRAINED = "exact: the student was trained with these integers"


@dataclass(frozen=True)
class Exported:
    """A written bundle and what was measured and proved on the way.

    report   as report.json has it          seconds  by stage; not stored in the bundle
    """

    path: Path
    report: dict[str, Any]
    seconds: dict[str, float]

    @property
    def verified(self) -> bool:
        """Whether the re-read bundle gave the model's spikes and logits, all of them."""
        return not self.report["verification"]["differences"]

    def __str__(self) -> str:
        return summary(self.report, self.path)


class Stopwatch:
    """Seconds per stage, in order."""

    def __init__(self) -> None:
        self.start = self.mark = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.mark = round(now - self.mark, 3), now

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": round(time.perf_counter() - self.start, 3)}


def export(
    student: BiSpikCLMForCausalLM | Path | str,
    output: Path | str,
    *,
    to: Target | None = None,
    precision: Precision = "int8",
    profile: Profile = "cell",
    neuron: Neuron = "exact",
    context: int | None = None,
    tokenizer: Path | str | None = None,
    source: str = "python-docs",
    calibrate: int = 0,
    finetune: int = 0,
    evaluation_tokens: int | None = None,
    verification_tokens: int | None = None,
    allow_lossy: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a student as a bundle that needs neither torch nor the checkpoint, and prove that it is the same model.

    Args:
        student: a loaded student, its folder, or the run folder around it.
        output: folder to write; an old bundle is replaced, anything else is refused.
        to: "nir", "lava" for arrays and a process graph, or "arrays" for the integers alone, which is the only form
            of a quantised twin; None: "nir", of a twin "arrays".
        precision: "int8" or "int4", spike-exact on every backend, or "float32", the student's own numbers.
        profile, neuron, context: form of the NIR file, see docs/export.md. context: tokens of the unrolled profile.
        tokenizer: tokenizer file or its folder; None: the student's own.
        source: text for perplexity, calibration and verification.
        calibrate: training tokens on which each neuron's clipping scale is searched; 0: none.
        finetune: updates in which the student learns to keep its answers with the integers; 0: none.
        evaluation_tokens, verification_tokens: how much to measure and to compare; None: by the model's size.
        allow_lossy: write even if verification finds a difference, and list it.
        say: receives a line before each slow step.

    Raises `CheckFailed`, and writes nothing, if the bundle read back differs from the model in a single spike or logit.
    A student trained with the integer forward pass is itself compared with the bundle, too.
    """
    counts = {"evaluation_tokens": evaluation_tokens, "verification_tokens": verification_tokens}
    _check_arguments(
        to, precision, profile, neuron, {**counts, "calibrate": calibrate, "finetune": finetune, "context": context}
    )
    watch = Stopwatch()
    # What can be refused without loading the model is refused here.
    output = Path(output)
    folder = find_student(student) if isinstance(student, Path | str) else Path(student.name_or_path or ".")
    config = read_config(folder) if isinstance(student, Path | str) else student.config.to_dict()
    check_output(output)
    if (kind := config.get("neuron", "lif")) not in ("lif", *GRADED):
        raise InputError(
            f"student {folder}: its neuron is {kind!r}; a bundle holds 'lif' or 'quantised': it cannot be exported"
        )
    to = to or ("arrays" if kind in GRADED else "nir")
    if kind in GRADED:
        _check_twin(folder, to, precision)
    context = context if context is not None else 4 if profile == "unrolled" else 1
    check_context(config, context)
    trained = is_integer(precision) and config.get("deploy_precision") == precision
    if trained and (calibrate or finetune):
        option = "--calibrate" if calibrate else "--finetune"
        raise InputError(f"{option} finds integers, but this student was trained with its own; drop it")
    tokenizer_file = find_tokenizer(folder, tokenizer)
    words = load_tokenizer(tokenizer_file)
    say(f"loading {folder}" if isinstance(student, Path | str) else "copying the student")
    model = load_student(folder) if isinstance(student, Path | str) else _plain_copy(student)
    shape, tokens = model_shape(model), token_ids(model)
    size = sum(int(parameter.numel()) for parameter in model.parameters())
    watch.stage("load")
    # The counting oracle costs seconds per token at a hundred million parameters: ask for less there.
    evaluation = min(2048, max(128, int(1e10 / size))) if evaluation_tokens is None else evaluation_tokens
    verification = min(64, max(4, int(1e9 / size))) if verification_tokens is None else verification_tokens
    length = min(WINDOW, shape.max_position_embeddings, max(evaluation, verification, 2))
    measure = max(1, evaluation // length)  # windows for perplexity; verification may need more
    windows = text_windows(source, words, length, max(measure, -(-verification // length)))
    check_tokens(windows, shape)
    if windows.size < verification:
        say(f"{source} gives {windows.size} tokens for verification, not {verification}")
    watch.stage("text")
    clips = None
    if calibrate:
        say(f"calibrating on {calibrate} tokens")
        samples = text_windows(source, words, length, max(1, calibrate // length), "train")
        clips = search_clips(model, samples, precision)
        watch.stage("calibrate")
    student_before = model
    if finetune:
        say(f"finishing with {finetune} updates in {precision}")
        samples = text_windows(source, words, length, finetune * BATCH, "train")
        model, trained = finish(model, samples, precision, finetune, say), True
        watch.stage("finetune")
    say(f"lowering {size:,} parameters to {precision}")
    lowered = lower(model, precision, clips)
    watch.stage("lower")
    measured = None
    if evaluation:
        say(f"perplexity before and after on {windows[:measure].size} tokens of {source}")
        measured = {"text": f"{source} (validation)", **compare(student_before, lowered.model, windows[:measure])}
        watch.stage("evaluate")
    prompts = choose_prompts(windows, verification)
    own = run_student(model, prompts) if trained else None
    del model, student_before  # the proof needs the integers only; modules refer to each other, so collect
    gc.collect()
    options = BundleOptions(
        target=to,
        profile=profile,
        neuron=neuron,
        context=context,
        tokenizer=tokenizer_file,
        tokens=tokens,
        generation=generation_values(folder),
        source={"checkpoint": folder.resolve().name},
    )
    say(f"writing {output}")
    with bundle_draft(lowered.model, output, options) as (draft, manifest):
        watch.stage("write")
        say(f"reading back and comparing {sum(map(len, prompts))} tokens spike for spike")
        verified = verify_bundle(lowered.model, draft, prompts, student=own, allow_lossy=allow_lossy)
        if to == "nir":
            verified["nir"] = verify_nir(lowered.model, draft, prompts[0], manifest)
        watch.stage("verify")
        file = draft / ("model.nir" if to == "nir" else ARRAYS)
        parameters = parameter_count(lowered.model)
        report = {
            "schema": REPORT_SCHEMA,
            "target": to,
            "precision": precision,
            "parameters": parameters,
            "array_bytes": model_bytes(lowered.model),
            "file_bytes": file.stat().st_size,
            "bytes_per_parameter": round(file.stat().st_size / parameters, 4),
            "calibrated": bool(calibrate),
            **({"finetune_updates": finetune} if finetune else {}),
            **({"lowering": TRAINED} if trained else {}),
            "evaluation": measured,
            "verification": verified,
            "allow_lossy": allow_lossy,
            "lossy": verified["differences"],
            "support": support(to, neuron, profile, precision),
            "tensors": tensor_table(lowered.errors),
        }
        if to == "lava":
            report["netx"] = write_netx(lowered.model, draft)
        write_json(draft / "report.json", report)
    return Exported(output, report, watch.total())


def _plain_copy(student: BiSpikCLMForCausalLM) -> BiSpikCLMForCausalLM:
    """The caller's student as a checkpoint would give it: float32, on the CPU, in evaluation mode."""
    model = copy.deepcopy(student)
    model.to(dtype=torch.float32, device="cpu")  # type: ignore[call-arg] # transformers wraps `to` and hides its type
    model.train(False)
    return model


def _check_twin(folder: Path, to: Target, precision: Precision) -> None:
    if to != "arrays":
        raise InputError(
            f"student {folder}: a quantised twin, whose activations are counts: no {to} neuron computes them; "
            "export it with --to arrays"
        )
    if precision == "float32":
        raise InputError(f"student {folder}: a quantised twin has integers only; drop --precision float32")


def _check_arguments(
    to: Target | None, precision: Precision, profile: Profile, neuron: Neuron, counts: dict[str, int | None]
) -> None:
    """Contradictions are refused before anything slow starts."""
    if counts["context"] is not None and profile != "unrolled":
        raise InputError("--context sizes the unrolled profile; add --nir-profile unrolled or drop it")
    if to in ("lava", "arrays"):
        if not is_integer(precision):
            raise InputError(f"--to {to} writes integers; drop --precision float32 (the NIR target has it)")
        if profile != "cell" or neuron != "exact":
            raise InputError(f"--nir-profile and --neuron shape a NIR file; drop them with --to {to}")
    least = {"evaluation_tokens": 0, "verification_tokens": 1, "calibrate": 0, "finetune": 0, "context": 1}
    for name, value in counts.items():
        if value is not None and value < least[name]:
            raise InputError(f"--{name.replace('_', '-')} {value}: give {least[name]} or more")
    for name in ("calibrate", "finetune"):
        if counts[name] and not is_integer(precision):
            raise InputError(f"--{name} finds integers; it has no meaning with --precision float32")
    if counts["calibrate"] and counts["finetune"]:
        raise InputError("--calibrate chooses scales that --finetune would choose again; give one of the two")


def choose_prompts(windows: Array, tokens: int) -> list[list[int]]:
    """Verification prompts that together hold `tokens` tokens, from the beginnings of different windows."""
    longest = min(windows.shape[1], max(1, -(-tokens // min(4, len(windows)))))
    prompts: list[list[int]] = []
    for window in windows:
        take = min(longest, tokens - sum(map(len, prompts)))
        if take <= 0:
            break
        prompts.append([int(token) for token in window[:take]])
    return prompts


def summary(report: dict[str, Any], output: Path) -> str:
    """The report for a terminal."""
    checked, trained = report["verification"], report.get("lowering")
    lines = [
        f"bundle            {output}  ({report['target']}, {report['precision']})",
        f"size              {report['file_bytes'] / 1e6:.2f} MB, "
        f"{report['bytes_per_parameter']:.3f} bytes per parameter",
    ]
    if report["evaluation"]:
        e = report["evaluation"]
        before, after = e["perplexity_student"], e["perplexity_lowered"]
        lines += [
            f"perplexity        {before:.3f} -> {after:.3f} ({(after / before - 1) * 100:+.2f} %), "
            f"{e['tokens']} tokens of {e['text']}",
            f"token agreement   {e['token_agreement'] * 100:.2f} %",
            f"spike agreement   {e['spike_agreement'] * 100:.2f} % with the {'' if trained else 'float '}student",
        ]
    if trained:
        lines.append(f"integers          {trained}; its own spikes and logits were compared")
    state = "spikes and logits equal" if not checked["differences"] else f"DIFFERS: {checked['differences'][0]}"
    lines.append(
        f"verified          {checked['tokens']} tokens, {checked['neuron_steps_compared']:,} neuron steps: {state}"
    )
    if (e := report["evaluation"]) and report["precision"] == "int4" and "finetune_updates" not in report:
        loss = e["perplexity_lowered"] / e["perplexity_student"] - 1
        if loss > WORTH_FINISHING and not trained:
            lines.append(
                f"4 bits cost       {loss:.1%} of perplexity; a short finish may win some of it back: --finetune 200"
            )
    if "nir" in checked:
        n = checked["nir"]
        what = "spikes" if "equal_output_spikes" in n else "values"
        share = n[f"equal_output_{what}"] * 100
        lines.append(f"read literally    {share:.2f} % equal output {what} on {n['tokens']} token(s) ({n['executed']})")
    for row in report["support"]:
        lines.append(f"{row['status']:<17} {row['part']}" + (f": {row['note']}" if row["note"] else ""))
    if "netx" in report:
        worst = max(file["relative_weight_error"] for file in report["netx"]["files"].values())
        lines.append(f"lossy             {len(report['netx']['files'])} netx files, weights off by up to {worst:.1%}")
        lines += [f"                  netx cannot express {what}" for what in report["netx"]["cannot_express"]]
    lines += [
        f"clipped           {t['name']}: {t['clipped']} of {t['elements']} values"
        for t in report["tensors"]
        if t["clipped"] and not (report["precision"] == "int4" and is_weight(t["name"]))  # there clipping is chosen
    ]
    return "\n".join(lines)
