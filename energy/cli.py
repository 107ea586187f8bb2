"""spikeopd-energy: reports, comparisons, the paper's table, the cost tables. Parses, calls `energy`, prints."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energy.render import FORMATS
from spikeopd.errors import InputError, run_command, say

if TYPE_CHECKING:
    from energy.render.document import Document

PROG = "spikeopd-energy"
EXAMPLE_FILE = "example_run.json"
_EXAMPLES = {
    "": f"{PROG} example\n  {PROG} report {EXAMPLE_FILE} --format html --output energy.html",
    "report": f"{PROG} report {EXAMPLE_FILE} --costs loihi\n  {PROG} report --config opt-125m --num-steps 4 "
    "--rates 0.17 --context 512",
    "compare": f"{PROG} compare ours={EXAMPLE_FILE} again={EXAMPLE_FILE} --teacher matched\n  "
    f"{PROG} compare {EXAMPLE_FILE} --teacher opt-125m --spikegpt --format markdown",
    "paper": f"{PROG} paper\n  {PROG} paper --format markdown --output paper_energy_table.md",
    "costs": f"{PROG} costs\n  {PROG} costs --format json",
    "example": f"{PROG} example\n  {PROG} example --output runs/{EXAMPLE_FILE}",
}
_RATES_FLAGS = ("rates", "context", "prompt", "num_steps")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "example":
        _example(arguments)
    else:
        make = {"report": _report, "compare": _compare, "paper": _paper, "costs": _costs}[arguments.command]
        _emit(arguments, make(arguments))
    return 0


def build_parser() -> argparse.ArgumentParser:
    about = (
        "Energy of a spiking language model: counted events times published prices, beside the estimate from firing "
        "rates and beside its dense teacher."
    )
    parser = _parser(argparse.ArgumentParser, "", PROG, about)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    report = _parser(commands.add_parser, "report", "report", "Energy of one run, or of given firing rates.")
    report.add_argument("run", nargs="?", metavar="RUN.json", help="a run of spikeopd-run-lava")
    report.add_argument(
        "--config",
        metavar="CONFIG",
        help="instead of a run: opt-125m, a checkpoint or bundle folder, or its config.json",
    )
    report.add_argument(
        "--rates",
        metavar="RATES",
        help="with --config: a number, or a JSON file of rates per component (a report in JSON will do)",
    )
    report.add_argument("--context", type=int, metavar="N", help="with --config: tokens fed in one sequence")
    report.add_argument(
        "--prompt", type=int, metavar="P", help="with --config: how many of them are prompt (default: all)"
    )
    report.add_argument("--num-steps", type=int, metavar="T", help="with --config: T_s, if the config has none")
    report.add_argument(
        "--teacher",
        metavar="NAME",
        help="opt-125m, opt-350m, opt-1.3b, a config.json, or `matched`: OPT of the student's shape (default)",
    )
    _pricing(report)
    _output(report)

    compare = _parser(commands.add_parser, "compare", "compare", "Several runs side by side, per token.")
    compare.add_argument("runs", nargs="+", metavar="[NAME=]RUN.json", help="runs, each with a name if wanted")
    compare.add_argument(
        "--teacher",
        metavar="NAME",
        help="add a row for this teacher over the first run's tokens (`matched`: OPT of its shape)",
    )
    compare.add_argument(
        "--spikegpt",
        action="store_true",
        help="add rows for the shapes of SpikeGPT 46M and 216M at the first run's rate",
    )
    _pricing(compare)
    _output(compare)

    paper = _parser(commands.add_parser, "paper", "paper", "The paper's efficiency columns, recomputed.")
    paper.add_argument(
        "--tokens",
        type=int,
        default=512,
        metavar="N",
        help="sequence length of the recomputation (default: 480 + 32, the lengths the paper states)",
    )
    _output(paper)
    about = "The cost tables with process node, source and how each figure was verified."
    _output(_parser(commands.add_parser, "costs", "costs", about))
    example = _parser(commands.add_parser, "example", "example", "Write a small run.json to try the commands on.")
    example.add_argument("--output", default=EXAMPLE_FILE, metavar="FILE", help=f"default: {EXAMPLE_FILE}")
    example.add_argument("--quiet", action="store_true", help="do not say where the file went")
    return parser


def _parser(make: Any, key: str, name: str, description: str) -> argparse.ArgumentParser:
    options = {"help": description} if key else {}
    parser: argparse.ArgumentParser = make(
        name,
        description=description,
        epilog=f"examples:\n  {_EXAMPLES[key]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    return parser


def _pricing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs",
        metavar="NAME",
        help="a cost table (see `costs`) or a .json file like them (default: horowitz45, the paper's)",
    )
    parser.add_argument(
        "--memory", metavar="LEVEL", help="memory the traffic line is priced at (default: sram-1mb; see `costs`)"
    )
    parser.add_argument(
        "--hops",
        type=_hops,
        metavar="EW,NS",
        help="mean tile hops of a spike, east-west and north-south (default: 0,0)",
    )


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="default: from the ending of --output, else text")
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--output", metavar="FILE", help="write here instead of to the terminal")
    parser.add_argument("--quiet", action="store_true", help="do not say where the file went")


def _hops(text: str) -> tuple[float, float]:
    try:
        east_west, north_south = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--hops wants two numbers as EW,NS, got {text!r}") from None
    return east_west, north_south


def _report(arguments: argparse.Namespace) -> Document:
    import energy

    flags = _given(arguments, "config", *_RATES_FLAGS)
    options = _given(arguments, "costs", "memory", "hops", "teacher")
    if arguments.run is not None:
        if flags:
            name = next(iter(flags)).replace("_", "-")
            raise InputError(f"--{name} does not go with a run; give RUN.json or --config, not both")
        return energy.report(arguments.run, **options)
    if arguments.config is None:
        raise InputError(
            f"give a RUN.json, or --config with --rates and --context; `{PROG} example` writes a run to try"
        )
    for flag in ("rates", "context"):
        if flag not in flags:
            raise InputError(f"--config needs --{flag}")
    return energy.estimate(**flags, **options)


def _compare(arguments: argparse.Namespace) -> Document:
    import energy
    from spikeopd.contracts import load_run

    runs = []
    for item in arguments.runs:
        name, _, path = item.rpartition("=") if not Path(item).exists() else ("", "", item)
        runs.append(load_run(path, name or None))
    options = _given(arguments, "costs", "memory", "hops", "teacher")
    return energy.compare(runs, spikegpt=arguments.spikegpt, **options)


def _paper(arguments: argparse.Namespace) -> Document:
    from energy.paper import paper_document

    return paper_document(arguments.tokens)


def _costs(arguments: argparse.Namespace) -> Document:
    from energy.render.tables import costs_document

    return costs_document()


def _example(arguments: argparse.Namespace) -> None:
    from importlib import resources

    from energy.render.document import save_text

    text = resources.files("energy").joinpath(f"data/{EXAMPLE_FILE}").read_text(encoding="utf-8")
    path = save_text(arguments.output, text)
    if not arguments.quiet:
        say(f"wrote {path}; now: {PROG} report {path}")


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of `energy`."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _emit(arguments: argparse.Namespace, document: Document) -> None:
    form = "json" if arguments.json else arguments.format
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if arguments.output is None:
            text = document.render(form or "text")
        else:
            path = document.save(arguments.output, form)
    for warning in caught:
        say(f"{PROG}: warning: {warning.message}")
    if arguments.output is None:
        sys.stdout.write(text)
    elif not arguments.quiet:
        say(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
