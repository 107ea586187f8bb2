"""spikeopd-energy: energy reports, comparisons, the paper's table and the cost tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.errors import InputError, run_command, say

if TYPE_CHECKING:
    from energy.report import Options
    from spikeopd.contracts import ModelShape

PROG = "spikeopd-energy"
FORMATS = ("text", "json", "csv", "markdown", "latex", "html")
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


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    body = {"report": _report, "compare": _compare, "paper": _paper, "costs": _costs, "example": _example}
    body[arguments.command](arguments)
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
    report.add_argument("--config", metavar="CONFIG", help="instead of a run: opt-125m, a checkpoint or bundle folder, "
                        "or its config.json")  # fmt: skip
    report.add_argument("--rates", metavar="RATES", help="with --config: a number, or a JSON file of rates per "
                        "component (a report in JSON will do)")  # fmt: skip
    report.add_argument("--context", type=int, metavar="N", help="with --config: tokens fed in one sequence")
    report.add_argument("--prompt", type=int, metavar="P", help="with --config: how many of them are prompt (default: "
                        "all)")  # fmt: skip
    report.add_argument("--num-steps", type=int, metavar="T", help="with --config: T_s, if the config has none")
    report.add_argument("--teacher", default="matched", metavar="NAME", help="opt-125m, opt-350m, opt-1.3b, a "
                        "config.json, or `matched`: OPT of the student's shape (default)")  # fmt: skip
    _pricing(report)
    _output(report)

    compare = _parser(commands.add_parser, "compare", "compare", "Several runs side by side, per token.")
    compare.add_argument("runs", nargs="+", metavar="[NAME=]RUN.json", help="runs, each with a name if wanted")
    compare.add_argument("--teacher", metavar="NAME", help="add a row for this teacher over the first run's tokens "
                         "(`matched`: OPT of its shape)")  # fmt: skip
    compare.add_argument("--spikegpt", action="store_true", help="add rows for the shapes of SpikeGPT 46M and 216M at "
                         "the first run's rate")  # fmt: skip
    _pricing(compare)
    _output(compare)

    paper = _parser(commands.add_parser, "paper", "paper", "The paper's efficiency columns, recomputed.")
    paper.add_argument("--tokens", type=int, default=512, metavar="N", help="sequence length of the recomputation "
                       "(default: 480 + 32, the lengths the paper states)")  # fmt: skip
    _output(paper)
    _output(_parser(commands.add_parser, "costs", "costs", "The cost tables with process node, source and how each "
                    "figure was verified."))  # fmt: skip
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
    parser.add_argument("--costs", default="horowitz45", metavar="NAME", help="a cost table (see `costs`) or a .json "
                        "file like them (default: horowitz45, the paper's)")  # fmt: skip
    parser.add_argument("--memory", default="sram-1mb", metavar="LEVEL", help="memory the traffic line is priced at "
                        "(default: sram-1mb; see `costs`)")  # fmt: skip
    parser.add_argument("--hops", default="0,0", metavar="EW,NS", help="mean tile hops of a spike, east-west and "
                        "north-south (default: 0,0)")  # fmt: skip


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="default: from the ending of --output, else text")
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--output", metavar="FILE", help="write here instead of to the terminal")
    parser.add_argument("--quiet", action="store_true", help="do not say where the file went")


def _report(arguments: argparse.Namespace) -> None:
    from energy.raster import raster_html
    from energy.render import render_report
    from energy.report import report_rates, report_run
    from spikeopd.contracts.run import load_run

    raster = ""
    if arguments.run is not None:
        flags = ("config", "rates", "context", "prompt", "num_steps")
        given = [flag for flag in flags if getattr(arguments, flag) is not None]
        if given:
            raise InputError(
                f"--{given[0].replace('_', '-')} does not go with a run; give RUN.json or --config, not both"
            )
        run = load_run(arguments.run)
        report = report_run(run, _options(arguments, run.shape))
        if _form(arguments) == "html" and run.trace is not None:
            try:
                raster = raster_html(run.trace, run.shape, run.trace_sha256)
            except (InputError, OSError) as error:  # the numbers need no trace
                say(f"{PROG}: warning: no spike raster: {error}")
    else:
        shape, rates, prompt, generated = _given_rates(arguments)
        name = f"{Path(arguments.config).name} at given rates"
        report = report_rates(shape, rates, prompt, generated, _options(arguments, shape), name)
    _emit(arguments, render_report(report, _form(arguments), raster))


def _given_rates(arguments: argparse.Namespace) -> tuple[ModelShape, dict[str, list[float]], int, int]:
    from energy.flops import load_shape
    from energy.rates import load_rates

    if arguments.config is None:
        raise InputError(
            f"give a RUN.json, or --config with --rates and --context; `{PROG} example` writes a run to try"
        )
    for flag in ("rates", "context"):
        if getattr(arguments, flag) is None:
            raise InputError(f"--config needs --{flag}")
    shape = load_shape(arguments.config, arguments.num_steps)
    context = arguments.context
    prompt = context if arguments.prompt is None else arguments.prompt
    if not 1 <= context <= shape.max_position_embeddings:
        raise InputError(f"--context must lie between 1 and the model's {shape.max_position_embeddings}, got {context}")
    if not 0 <= prompt <= context:
        raise InputError(f"--prompt must lie between 0 and --context {context}, got {prompt}")
    return shape, load_rates(arguments.rates, shape), prompt, context - prompt


def _compare(arguments: argparse.Namespace) -> None:
    from energy.comparison import compare
    from energy.render import render_tables
    from energy.report import report_run
    from energy.tables import compare_table
    from spikeopd.contracts.run import load_run

    runs = []
    for item in arguments.runs:
        name, _, path = item.rpartition("=") if not Path(item).exists() else ("", "", item)
        runs.append(load_run(path, name or None))
    arguments.teacher = arguments.teacher or "none"
    plain = argparse.Namespace(**(vars(arguments) | {"teacher": "matched"}))
    reports = [report_run(run, _options(plain, run.shape)) for run in runs]
    options = _options(plain, runs[0].shape)
    teacher = None if arguments.teacher == "none" else _teacher(arguments.teacher, runs[0].shape)
    rows = compare(reports, options.costs, teacher, runs[0].keys(), arguments.spikegpt)
    head = ["Energy compared", f"costs: {options.costs.name}, {options.costs.node_nm:g} nm; {options.costs.citation}"]
    _emit(arguments, render_tables([compare_table(rows)], _form(arguments), head))


def _paper(arguments: argparse.Namespace) -> None:
    from energy.paper import paper_head, paper_page, paper_tables
    from energy.render import render_tables

    if arguments.tokens < 1:
        raise InputError(f"--tokens must be at least 1, got {arguments.tokens}")
    form = _form(arguments)
    if form == "markdown":
        _emit(arguments, paper_page(render_tables, arguments.tokens))
    else:
        _emit(arguments, render_tables(paper_tables(arguments.tokens), form, paper_head()))


def _costs(arguments: argparse.Namespace) -> None:
    from energy.render import render_tables
    from energy.tables import cost_tables_tables

    head = ["Cost tables", "an event without a price is reported as not costed, never as free"]
    _emit(arguments, render_tables(cost_tables_tables(), _form(arguments), head))


def _example(arguments: argparse.Namespace) -> None:
    from importlib import resources

    from spikeopd.files import write_text

    text = resources.files("energy").joinpath(f"data/{EXAMPLE_FILE}").read_text(encoding="utf-8")
    path = _write(arguments.output, lambda target: write_text(target, text))
    if not arguments.quiet:
        print(f"wrote {path}; now: {PROG} report {path}", file=sys.stderr)


def _options(arguments: argparse.Namespace, student: ModelShape) -> Options:
    from energy.costs import load_costs, load_memory
    from energy.models import Hops
    from energy.report import Options

    name, teacher = _teacher(arguments.teacher, student)
    try:
        east_west, north_south = (float(part) for part in arguments.hops.split(","))
    except ValueError:
        raise InputError(f"--hops wants two numbers as EW,NS, got {arguments.hops!r}") from None
    if not (0 <= east_west < float("inf") and 0 <= north_south < float("inf")):
        raise InputError(f"--hops must not be negative, got {arguments.hops!r}")
    hops = Hops(east_west, north_south)
    return Options(load_costs(arguments.costs), load_memory(arguments.memory), teacher, name, hops)


def _teacher(name: str, student: ModelShape) -> tuple[str, ModelShape]:
    from dataclasses import replace

    from energy.flops import load_shape, published_name

    if name == "matched":
        shape = replace(student, num_steps=1)
        return published_name(shape) or "OPT of the same shape", shape
    return Path(name).name, load_shape(name, 1)


def _form(arguments: argparse.Namespace) -> str:
    if arguments.json:
        return "json"
    if arguments.format:
        return str(arguments.format)
    endings = {".json": "json", ".csv": "csv", ".md": "markdown", ".tex": "latex", ".html": "html", ".htm": "html"}
    return endings.get(Path(arguments.output or "").suffix, "text")


def _emit(arguments: argparse.Namespace, text: str) -> None:
    if arguments.output is None:
        sys.stdout.write(text)
        return
    from spikeopd.files import write_text

    path = _write(arguments.output, lambda target: write_text(target, text))
    if not arguments.quiet:
        print(f"wrote {path}", file=sys.stderr)


def _write(target: str, write: Any) -> Path:
    try:
        path: Path = write(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    return path


if __name__ == "__main__":
    raise SystemExit(main())
