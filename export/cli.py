"""spikeopd-export: a trained student to a bundle that simulators and other tools can execute, with proof."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spikeopd.errors import InputError, run_command

PROG = "spikeopd-export"
EXAMPLES = """`spikeopd-export map BUNDLE` places a bundle on Loihi 2 cores; see `spikeopd-export map --help`.

examples:
  spikeopd-export runs/tiny/checkpoint --to nir --output runs/tiny/bundle
  spikeopd-export map runs/tiny/bundle --context 256"""
MAP_EXAMPLES = """examples:
  spikeopd-export map runs/tiny/bundle
  spikeopd-export map runs/tiny/bundle --context 2048 --picture placement.png --json"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _run, argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["map"]:
        from export.map_command import run_map

        print(run_map(map_parser().parse_args(arguments[1:])))
        return 0
    return run_export(export_parser().parse_args(arguments))


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Lower a trained student to integers and write a bundle that needs neither torch nor the "
        "checkpoint. The bundle is read back and compared spike for spike before it appears.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and model.safetensors")
    parser.add_argument("--to", choices=("nir", "lava"), default="nir", help="kind of bundle (default: nir)")
    parser.add_argument("--output", required=True, metavar="BUNDLE", help="folder to write; an old bundle is replaced")
    parser.add_argument("--precision", choices=("int8", "float32"), default="int8", help="default: int8, spike-exact")
    parser.add_argument(
        "--nir-profile",
        choices=("cell", "unrolled"),
        default="cell",
        help="cell: nested blocks, attention of one pair to be replicated (default); "
        "unrolled: every token and pair of a small context, for conformance",
    )
    parser.add_argument("--context", type=int, metavar="L", help="tokens of the unrolled profile (default: 4)")
    parser.add_argument(
        "--neuron",
        choices=("exact", "lif"),
        default="exact",
        help="exact: the neuron as a loop of standard nodes (default); lif: plain nir.LIF",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (default: the checkpoint's)")
    parser.add_argument(
        "--text",
        default="python-docs",
        metavar="SOURCE",
        help="text for evaluation, calibration and the verification prompts (default: python-docs)",
    )
    parser.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="TOKENS",
        help="search each neuron's clipping scale on this many training tokens (default: 0, off)",
    )
    parser.add_argument(
        "--evaluation-tokens",
        type=int,
        metavar="N",
        help="tokens for perplexity before and after, 0 for none (default: 2048, fewer for large models)",
    )
    parser.add_argument(
        "--verification-tokens",
        type=int,
        metavar="N",
        help="tokens compared spike for spike, at least 1 (default: 64, fewer for large models)",
    )
    parser.add_argument(
        "--allow-lossy",
        action="store_true",
        help="write the bundle even if verification finds a difference; the report lists it",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def map_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} map",
        description="Place a bundle on Loihi 2 neuro-cores under stated limits and check every design rule.",
        epilog=MAP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by spikeopd-export")
    parser.add_argument("--context", type=int, metavar="L", help="tokens held in the K/V cache (default: the model's)")
    parser.add_argument("--picture", metavar="PNG", help="draw the placement (needs matplotlib)")
    parser.add_argument("--strict", action="store_true", help="exit 3 when a design rule is violated")
    parser.add_argument("--json", action="store_true", help="print the map as one JSON object")
    return parser


def run_export(args: argparse.Namespace) -> int:
    _check_arguments(args)
    start = time.perf_counter()
    stages: dict[str, float] = {}

    def say(text: str) -> None:
        if not args.quiet:
            print(f"{PROG}: {text}", file=sys.stderr)

    def done(stage: str, since: float) -> float:
        stages[stage] = round(time.perf_counter() - since, 3)
        return time.perf_counter()

    from export.checkpoint import check_tokens, find_checkpoint, find_tokenizer, load_student, text_windows, token_ids

    folder = find_checkpoint(args.checkpoint)
    tokenizer = find_tokenizer(folder, args.tokenizer)
    say(f"loading {folder}")
    student = load_student(folder)
    from export.bundle_writer import BundleOptions, bundle_draft
    from export.evaluate import compare
    from export.quantize import lower, model_shape
    from export.report import REPORT_SCHEMA, model_bytes, parameter_count, support, tensor_table
    from export.verify import verify_bundle, verify_nir
    from spikeopd.files import write_json

    shape = model_shape(student)
    mark = done("load", start)
    size = sum(parameter.numel() for parameter in student.parameters())
    # A decoder that counts everything costs seconds per token at a hundred million parameters: ask for less there.
    evaluation = _default(args.evaluation_tokens, min(2048, max(128, int(1e10 / size))))
    verification = _default(args.verification_tokens, min(64, max(4, int(1e9 / size))))
    length = min(128, shape.max_position_embeddings, max(evaluation, verification, 2))
    windows = text_windows(args.text, tokenizer, length, max(1, evaluation // length))
    check_tokens(windows, shape)
    mark = done("text", mark)
    clips = None
    if args.calibrate:
        from export.calibrate import search_clips

        say(f"calibrating on {args.calibrate} tokens")
        training = text_windows(args.text, tokenizer, length, max(1, args.calibrate // length), "train")
        clips = search_clips(student, training)
        mark = done("calibrate", mark)
    say(f"lowering {size:,} parameters to {args.precision}")
    lowered = lower(student, args.precision, clips)
    mark = done("lower", mark)
    measured: dict[str, Any] | None = None
    if evaluation:
        say(f"perplexity before and after on {windows.size} tokens of {args.text}")
        measured = {"text": f"{args.text} (validation)", **compare(student, lowered.model, windows)}
        mark = done("evaluate", mark)
    ids = token_ids(student)
    del student  # the proof needs the integers only
    options = BundleOptions(
        target=args.to,
        profile=args.nir_profile,
        neuron=args.neuron,
        context=args.context or (4 if args.nir_profile == "unrolled" else 1),
        tokenizer=tokenizer,
        tokens=ids,
        source={"checkpoint": folder.resolve().name},
    )
    say(f"writing {args.output}")
    with bundle_draft(lowered.model, args.output, options) as (draft, manifest):
        mark = done("write", mark)
        prompts = _prompts(windows, verification)
        say(f"reading back and comparing {sum(map(len, prompts))} tokens spike for spike")
        verified = verify_bundle(lowered.model, draft, prompts, allow_lossy=args.allow_lossy)
        if args.to == "nir":
            verified["nir"] = verify_nir(lowered.model, draft, prompts[0], manifest)
        mark = done("verify", mark)
        model_file = draft / ("model.nir" if args.to == "nir" else "arrays.h5")
        parameters = parameter_count(lowered.model)
        report = {
            "schema": REPORT_SCHEMA,
            "target": args.to,
            "precision": args.precision,
            "parameters": parameters,
            "array_bytes": model_bytes(lowered.model),
            "file_bytes": model_file.stat().st_size,
            "bytes_per_parameter": round(model_file.stat().st_size / parameters, 4),
            "calibrated": bool(args.calibrate),
            "evaluation": measured,
            "verification": verified,
            "allow_lossy": args.allow_lossy,
            "support": support(args.to, args.neuron, args.nir_profile, args.precision),
            "tensors": tensor_table(lowered.errors),
        }
        if args.to == "lava":
            from export.netx import write_netx

            report["netx"] = write_netx(lowered.model, draft)
        write_json(draft / "report.json", report)
    done("total", start)
    report["seconds"] = stages
    if args.json:
        print(json.dumps(report, allow_nan=False))
    else:
        print(_summary(report, Path(args.output)))
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Contradictions are refused before anything slow starts."""
    if args.context is not None and args.nir_profile != "unrolled":
        raise InputError("--context sizes the unrolled profile; add --nir-profile unrolled or drop it")
    if args.to == "lava":
        if args.precision != "int8":
            raise InputError("--to lava writes integers; drop --precision float32 (the NIR target has it)")
        if args.nir_profile != "cell" or args.neuron != "exact":
            raise InputError("--nir-profile and --neuron shape a NIR file; drop them with --to lava")
    for name, least in (("evaluation_tokens", 0), ("verification_tokens", 1), ("calibrate", 0), ("context", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value}: give {least} or more")
    if args.calibrate and args.precision != "int8":
        raise InputError("--calibrate chooses integer scales; it has no meaning with --precision float32")


def _default(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _prompts(windows: Any, tokens: int) -> list[list[int]]:
    """Verification prompts that together hold `tokens` tokens, from the beginnings of different windows."""
    longest = min(windows.shape[1], max(1, -(-tokens // min(4, len(windows)))))
    prompts = []
    for window in windows:
        take = min(longest, tokens - sum(map(len, prompts)))
        if take <= 0:
            break
        prompts.append([int(token) for token in window[:take]])
    return prompts


def _summary(report: dict[str, Any], output: Path) -> str:
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
    lines += [
        f"{row['status']:<17} {row['part']}" + (f": {row['note']}" if row["note"] else "") for row in report["support"]
    ]
    clipped = [t for t in report["tensors"] if t["clipped"] and not report["calibrated"]]
    lines += [f"clipped           {t['name']}: {t['clipped']} of {t['elements']} values" for t in clipped]
    return "\n".join(lines)
