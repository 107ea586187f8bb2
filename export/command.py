"""What `spikeopd-export CHECKPOINT` does: load, lower, measure, write, read back, compare, report."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.bundle_writer import BundleOptions, bundle_draft, check_output
from export.calibrate import search_clips
from export.checkpoint import (
    check_context,
    check_tokens,
    find_checkpoint,
    find_tokenizer,
    load_student,
    read_config,
    text_windows,
    token_ids,
)
from export.evaluate import compare
from export.netx import write_netx
from export.quantize import lower, model_shape
from export.report import REPORT_SCHEMA, model_bytes, parameter_count, support, tensor_table
from export.verify import verify_bundle, verify_nir
from spikeopd.files import write_json
from spikeopd.text.tokenizer import load_tokenizer

WINDOW = 128  # tokens per evaluation window


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


def run_export(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the bundle and return its report; `seconds` is added for the caller and not stored in the bundle."""
    watch = Stopwatch()
    # What can be refused without loading the model is refused here.
    folder = find_checkpoint(args.checkpoint)
    config = read_config(folder)
    check_output(Path(args.output))
    context = args.context if args.context is not None else 4 if args.nir_profile == "unrolled" else 1
    check_context(config, context)
    tokenizer_file = find_tokenizer(folder, args.tokenizer)
    tokenizer = load_tokenizer(tokenizer_file)
    say(f"loading {folder}")
    student = load_student(folder)
    shape, tokens = model_shape(student), token_ids(student)
    size = sum(parameter.numel() for parameter in student.parameters())
    watch.stage("load")
    # The counting oracle costs seconds per token at a hundred million parameters: ask for less there.
    evaluation = min(2048, max(128, int(1e10 / size))) if args.evaluation_tokens is None else args.evaluation_tokens
    verification = min(64, max(4, int(1e9 / size))) if args.verification_tokens is None else args.verification_tokens
    length = min(WINDOW, shape.max_position_embeddings, max(evaluation, verification, 2))
    measure = max(1, evaluation // length)  # windows for perplexity; verification may need more
    windows = text_windows(args.source, tokenizer, length, max(measure, -(-verification // length)))
    check_tokens(windows, shape)
    if windows.size < verification:
        say(f"{args.source} gives {windows.size} tokens for verification, not {verification}")
    watch.stage("text")
    clips = None
    if args.calibrate:
        say(f"calibrating on {args.calibrate} tokens")
        training = text_windows(args.source, tokenizer, length, max(1, args.calibrate // length), "train")
        clips = search_clips(student, training)
        watch.stage("calibrate")
    say(f"lowering {size:,} parameters to {args.precision}")
    lowered = lower(student, args.precision, clips)
    watch.stage("lower")
    measured = None
    if evaluation:
        say(f"perplexity before and after on {windows[:measure].size} tokens of {args.source}")
        measured = {"text": f"{args.source} (validation)", **compare(student, lowered.model, windows[:measure])}
        watch.stage("evaluate")
    options = BundleOptions(
        target=args.to,
        profile=args.nir_profile,
        neuron=args.neuron,
        context=context,
        tokenizer=tokenizer_file,
        tokens=tokens,
        source={"checkpoint": folder.resolve().name},
    )
    del student  # the proof needs the integers only; modules refer to each other, so collect
    gc.collect()
    say(f"writing {args.output}")
    with bundle_draft(lowered.model, args.output, options) as (draft, manifest):
        watch.stage("write")
        prompts = choose_prompts(windows, verification)
        say(f"reading back and comparing {sum(map(len, prompts))} tokens spike for spike")
        verified = verify_bundle(lowered.model, draft, prompts, allow_lossy=args.allow_lossy)
        if args.to == "nir":
            verified["nir"] = verify_nir(lowered.model, draft, prompts[0], manifest)
        watch.stage("verify")
        file = draft / ("model.nir" if args.to == "nir" else "arrays.h5")
        parameters = parameter_count(lowered.model)
        report = {
            "schema": REPORT_SCHEMA,
            "target": args.to,
            "precision": args.precision,
            "parameters": parameters,
            "array_bytes": model_bytes(lowered.model),
            "file_bytes": file.stat().st_size,
            "bytes_per_parameter": round(file.stat().st_size / parameters, 4),
            "calibrated": bool(args.calibrate),
            "evaluation": measured,
            "verification": verified,
            "allow_lossy": args.allow_lossy,
            "lossy": verified["differences"],
            "support": support(args.to, args.neuron, args.nir_profile, args.precision),
            "tensors": tensor_table(lowered.errors),
        }
        if args.to == "lava":
            report["netx"] = write_netx(lowered.model, draft)
        write_json(draft / "report.json", report)
    return {**report, "seconds": watch.total()}


def choose_prompts(windows: Any, tokens: int) -> list[list[int]]:
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
    checked = report["verification"]
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
            f"spike agreement   {e['spike_agreement'] * 100:.2f} % with the float student",
        ]
    state = "spikes and logits equal" if not checked["differences"] else f"DIFFERS: {checked['differences'][0]}"
    lines.append(
        f"verified          {checked['tokens']} tokens, {checked['neuron_steps_compared']:,} neuron steps: {state}"
    )
    if "nir" in checked:
        n = checked["nir"]
        share = n["equal_output_spikes"] * 100
        lines.append(f"read literally    {share:.2f} % equal output spikes on {n['tokens']} token(s) ({n['executed']})")
    for row in report["support"]:
        lines.append(f"{row['status']:<17} {row['part']}" + (f": {row['note']}" if row["note"] else ""))
    if "netx" in report:
        worst = max(file["relative_weight_error"] for file in report["netx"]["files"].values())
        lines.append(f"lossy             {len(report['netx']['files'])} netx files, weights off by up to {worst:.1%}")
        lines += [f"                  netx cannot express {what}" for what in report["netx"]["cannot_express"]]
    lines += [
        f"clipped           {t['name']}: {t['clipped']} of {t['elements']} values"
        for t in report["tensors"]
        if t["clipped"]
    ]
    return "\n".join(lines)
