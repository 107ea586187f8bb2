"""spikeopd-energy: reports, comparisons, the paper's table, the cost tables. Parses, calls `energy`, prints."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energy.render import FORMATS
from spikeopd.arguments import add_version, renamed
from spikeopd.errors import InputError, run_command, say

if TYPE_CHECKING:
    from energy.render.document import Document

PROG = "spikeopd-energy"
EXAMPLE_FILE = "example_run.json"
_EXAMPLES = {
    PROG: f"{PROG} example\n  {PROG} report {EXAMPLE_FILE} --format html --output energy.html",
    "report": f"{PROG} report {EXAMPLE_FILE} --costs loihi\n  {PROG} report --config opt-125m --num-steps 4 "
    "--rates 0.17 --context 512",
    "compare": f"{PROG} compare ours={EXAMPLE_FILE} again={EXAMPLE_FILE} --teacher matched\n  "
    f"{PROG} compare --twin --config opt-125m,opt-350m,opt-1.3b --num-steps 4 --rates 0.17 --context 512",
    "breakeven": f"{PROG} breakeven {EXAMPLE_FILE}\n  {PROG} breakeven --config opt-125m --num-steps 4 --rates 0.17 "
    "--context 512 --output breakeven.html",
    "audit": f"{PROG} audit\n  {PROG} audit paper --format markdown",
    "paper": f"{PROG} paper\n  {PROG} paper --format markdown --output paper_energy_table.md",
    "costs": f"{PROG} costs\n  {PROG} costs --format json",
    "example": f"{PROG} example\n  {PROG} example --output runs/{EXAMPLE_FILE}",
}


def _hops(text: str) -> tuple[float, float]:
    try:
        east_west, north_south = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--hops wants two numbers as EW,NS, got {text!r}") from None
    return east_west, north_south


_Option = tuple[str, str, Callable[[str], Any], str]  # flag, metavar, type, help
_PRICING: tuple[_Option, ...] = (
    ("--costs", "NAME", str, "a cost table (see `costs`) or a .json file like them (default: horowitz45, the paper's)"),
    ("--memory", "LEVEL", str, "memory the traffic line is priced at (default: sram-1mb; see `costs`)"),
    (
        "--hops",
        "EW,NS",
        _hops,
        "mean tile hops of a spike, east-west and north-south (default: as measured by --backend sanafe, else 0,0)",
    ),
)
_RATES: tuple[_Option, ...] = (
    ("--config", "CONFIG", str, "instead of a run: opt-125m, a checkpoint or bundle folder, or its config.json"),
    (
        "--rates",
        "RATES",
        str,
        "with --config: a number, or a JSON file of rates per component (a report in JSON will do)",
    ),
    ("--context", "N", int, "with --config: tokens fed in one sequence"),
    ("--prompt-length", "P", int, "with --config: how many of them are prompt (default: all)"),
    ("--num-steps", "T", int, "with --config: T_s, if the config has none"),
)
_PLACEMENT: _Option = (
    "--placement", "NAME", str, "where weights, cache and neurons lie: cores (default), chip or dram; see `costs`"
)  # fmt: skip
_SHAPES = tuple(option for option in _RATES if option[0] != "--prompt-length")
_TEACHER = "opt-125m, opt-350m, opt-1.3b, a model folder or its config.json (OPT, Llama family, GPT-2, GPT-NeoX), or "
_TEACHER += "`matched`: OPT of the student's shape (default)"
_BESIDE = "add a row for this teacher over the first run's tokens (`matched`: OPT of its shape)"
_TOKENS = "sequence length of the recomputation (default: 480 + 32, the lengths the paper states)"
_COMMANDS: dict[str, tuple[str, tuple[_Option, ...]]] = {
    "report": (
        "Energy of one run, or of given firing rates.",
        (*_RATES, ("--teacher", "NAME", str, _TEACHER), *_PRICING),
    ),
    "compare": (
        "Several runs side by side, per token; with --twin beside their quantised twins, memory inside.",
        (("--teacher", "NAME", str, _BESIDE), *_PRICING, _PLACEMENT, *_SHAPES),
    ),
    "breakeven": (
        "The firing rates below which a student costs less than its quantised twin and its teacher, with memory.",
        (*_SHAPES, ("--teacher", "NAME", str, _TEACHER), _PLACEMENT),
    ),
    "audit": ("Which conventions give the energies that a publication prints, and which cannot.", ()),
    "paper": ("The paper's efficiency columns, recomputed.", (("--tokens", "N", int, _TOKENS),)),
    "costs": ("The cost tables with process node, source and how each figure was verified.", ()),
    "example": (
        "Write a small run.json to try the commands on.",
        (("--output", "FILE", str, f"default: {EXAMPLE_FILE}"),),
    ),
}


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
        make = {
            "report": _report,
            "compare": _compare,
            "breakeven": _break_even,
            "audit": _audit,
            "paper": _paper,
            "costs": _costs,
        }[arguments.command]
        _emit(arguments, make(arguments))
    return 0


def build_parser() -> argparse.ArgumentParser:
    about = (
        "Energy of a spiking language model: counted events times published prices, beside the estimate from firing "
        "rates and beside its dense teacher."
    )
    parser = _parser(argparse.ArgumentParser, PROG, about)
    add_version(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (about, options) in _COMMANDS.items():
        command = _parser(commands.add_parser, name, about, help=about)
        for flag, metavar, kind, text in options:
            command.add_argument(flag, metavar=metavar, type=kind, help=text)
            if flag == "--prompt-length":
                renamed(command, "--prompt", flag, metavar=metavar, type=kind)
        if name == "compare":
            command.add_argument("runs", nargs="*", metavar="[NAME=]RUN.json", help="runs, each with a name if wanted")
            command.add_argument("--twin", action="store_true", help="add quantised twins, int8 and fp32 teachers, and "
                                 "break-even rates, with memory; --config may then name several, as A,B,C")  # fmt: skip
            command.add_argument("--spikegpt", action="store_true", help="add rows for the shapes of SpikeGPT 46M and "
                                 "216M at the first run's rate")  # fmt: skip
        if name == "audit":
            command.add_argument("cases", nargs="*", metavar="FILE.json", help="a printed table (docs/energy.md), or a "
                                 "shipped case by name; without any, all shipped cases")  # fmt: skip
        if name in ("report", "breakeven"):
            command.add_argument("run", nargs="?", metavar="RUN.json", help="a run of spikeopd-run-lava")
        if name != "example":
            command.add_argument("--format", choices=FORMATS, help="default: from the ending of --output, else text")
            command.add_argument("--json", action="store_true", help="the same as --format json")
            command.add_argument("--output", metavar="FILE", help="write here instead of to the terminal")
        command.add_argument("--quiet", action="store_true", help="do not say where the file went")
    return parser


def _parser(make: Any, name: str, description: str, **options: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = make(
        name,
        description=description,
        epilog=f"examples:\n  {_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    return parser


def _report(arguments: argparse.Namespace) -> Document:
    import energy

    flags = _run_or_rates(arguments, "config", "rates", "context", "prompt_length", "num_steps")
    if "prompt_length" in flags:
        flags["prompt"] = flags.pop("prompt_length")
    options = _given(arguments, "costs", "memory", "hops", "teacher")
    return energy.estimate(**flags, **options) if flags else energy.report(arguments.run, **options)


def _run_or_rates(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The flags of an estimate; none if a run is given instead."""
    flags = _given(arguments, *names)
    if arguments.run is not None:
        if flags:
            name = next(iter(flags)).replace("_", "-")
            raise InputError(f"--{name} does not go with a run; give RUN.json or --config, not both")
        return {}
    if arguments.config is None:
        raise InputError(
            f"give a RUN.json, or --config with --rates and --context; `{PROG} example` writes a run to try"
        )
    _need_rates(flags)
    return flags


def _need_rates(flags: dict[str, Any]) -> None:
    for flag in ("rates", "context"):
        if flag not in flags:
            raise InputError(f"--config needs --{flag}")


def _break_even(arguments: argparse.Namespace) -> Document:
    import energy

    flags = _run_or_rates(arguments, "config", "rates", "context", "num_steps")
    return energy.break_even(arguments.run, **flags, **_given(arguments, "teacher", "placement"))


def _compare(arguments: argparse.Namespace) -> Document:
    import energy
    from spikeopd.contracts import load_run

    runs = []
    for item in arguments.runs:
        name, _, path = item.rpartition("=") if not Path(item).exists() else ("", "", item)
        runs.append(load_run(path, name or None))
    options = _given(arguments, "costs", "memory", "hops", "teacher")
    shapes = _given(arguments, "config", "rates", "context", "num_steps", "placement")
    if arguments.twin:
        configs = shapes.pop("config", "").split(",") if "config" in shapes else []
        if configs:
            _need_rates(shapes)
        elif not runs:
            raise InputError("give a RUN.json, or --config with --rates and --context")
        return energy.compare_twins(runs, configs=configs, spikegpt=arguments.spikegpt, **options, **shapes)
    if shapes:
        raise InputError(f"--{next(iter(shapes)).replace('_', '-')} goes with --twin")
    if not runs:
        raise InputError(f"give at least one RUN.json; `{PROG} example` writes a run to try")
    return energy.compare(runs, spikegpt=arguments.spikegpt, **options)


def _audit(arguments: argparse.Namespace) -> Document:
    from energy.audit import audit_document

    return audit_document(arguments.cases)


def _paper(arguments: argparse.Namespace) -> Document:
    from energy.paper import paper_document

    return paper_document(**_given(arguments, "tokens"))


def _costs(arguments: argparse.Namespace) -> Document:
    from energy.render.tables import costs_document

    return costs_document()


def _example(arguments: argparse.Namespace) -> None:
    from importlib import resources

    from energy.render.document import save_text

    text = resources.files("energy").joinpath(f"data/{EXAMPLE_FILE}").read_text(encoding="utf-8")
    path = save_text(arguments.output or EXAMPLE_FILE, text)
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
