"""spikeopd-export: a trained student to a bundle that simulators and other tools can execute, with proof."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import export
from spikeopd.arguments import add_version
from spikeopd.errors import ConfigError, check_writable, run_command, say_loading

PROG = "spikeopd-export"
EXAMPLES = """`spikeopd-export map BUNDLE` places a bundle on Loihi 2 cores; see `spikeopd-export map --help`.

examples:
  spikeopd-export runs/tiny --to nir --output runs/tiny/bundle
  spikeopd-export map runs/tiny/bundle --context 256"""
MAP_EXAMPLES = """examples:
  spikeopd-export map runs/tiny/bundle
  spikeopd-export map runs/tiny/bundle --context 128 --picture placement.png --json"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _run, argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["map"]:
        return _map(map_parser().parse_args(arguments[1:]))
    return _export(export_parser().parse_args(arguments))


def _export(args: argparse.Namespace) -> int:
    def say(text: str) -> None:
        if not args.quiet:
            print(f"{PROG}: {text}", file=sys.stderr)

    if args.to == "sanafe":
        return _network(args, say)
    from spikeopd.students import find_student, read_config

    read_config(find_student(args.checkpoint))  # a wrong path need not wait for torch
    say_loading(args.quiet)
    exported = export.export(
        args.checkpoint,
        args.output,
        to=args.to,
        precision=args.precision,
        profile=args.nir_profile,
        neuron=args.neuron,
        context=args.context,
        tokenizer=args.tokenizer,
        source=args.source,
        calibrate=args.calibrate,
        finetune=args.finetune,
        evaluation_tokens=args.evaluation_tokens,
        verification_tokens=args.verification_tokens,
        allow_lossy=args.allow_lossy,
        say=say,
    )
    report = {**exported.report, "seconds": exported.seconds}
    print(json.dumps(report, allow_nan=False) if args.json else exported)
    return 0


def _network(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """--to sanafe: of a bundle or of a checkpoint."""
    for name in ("precision", "nir_profile", "neuron", "tokenizer", "source", "calibrate", "evaluation_tokens"):
        if getattr(args, name) != export_parser().get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --to sanafe; drop it")
    say(f"mapping {args.checkpoint}")
    network = export.export_network(args.checkpoint, args.output, context=args.context, tokens=args.verification_tokens)
    print(json.dumps(network.report, allow_nan=False) if args.json else network)
    return 0


def _map(args: argparse.Namespace) -> int:
    if args.picture:
        check_writable(args.picture, "--picture", in_folder=True)
    found = export.resource_map(args.bundle, args.context)
    if args.picture:
        found.save_picture(args.picture)
    if args.strict:
        found.check()
    print(json.dumps(found.report, allow_nan=False) if args.json else found)
    return 0


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Lower a trained student to integers and write a bundle that needs neither torch nor the "
        "checkpoint. The bundle is read back and compared spike for spike before it appears.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a trained student, or the run folder around it; with --to sanafe also a bundle",
    )
    parser.add_argument(
        "--to",
        choices=("nir", "lava", "arrays", "sanafe"),
        help="kind of bundle (default: nir; of a quantised twin arrays, the integers alone); sanafe: not a bundle but "
        "a network for that simulator (docs/sanafe.md)",
    )
    parser.add_argument("--output", required=True, metavar="BUNDLE", help="folder to write; an old bundle is replaced")
    parser.add_argument(
        "--precision",
        choices=("int8", "int4", "float32"),
        default="int8",
        help="default: int8; int8 and int4 are spike-exact",
    )
    parser.add_argument(
        "--nir-profile",
        choices=("cell", "unrolled"),
        default="cell",
        help="cell: nested blocks, attention of one pair to be replicated (default); "
        "unrolled: every token and pair of a small context, for conformance",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="L",
        help="tokens of the unrolled profile (default: 4), or of the cache (sanafe, default: 32)",
    )
    parser.add_argument(
        "--neuron",
        choices=("exact", "lif"),
        default="exact",
        help="exact: the neuron as a loop of standard nodes (default); lif: plain nir.LIF",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer file or its folder (default: the checkpoint's)")
    parser.add_argument(
        "--source",
        "--text",
        default="python-docs",
        metavar="NAME",
        help="text for evaluation, calibration and the verification prompts (default: python-docs); --text is the same",
    )
    parser.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="TOKENS",
        help="search each neuron's clipping scale on this many training tokens (default: 0, off)",
    )
    parser.add_argument(
        "--finetune",
        type=int,
        default=0,
        metavar="N",
        help="teach the student its own answers with the integers of --precision for N updates (default: 0, off)",
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
