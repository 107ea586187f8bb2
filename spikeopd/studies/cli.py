"""spikeopd-study: a table and a figure of the paper from one command, at any scale. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.arguments import add_version, seeds
from spikeopd.errors import ConfigError, run_command

if TYPE_CHECKING:
    from spikeopd.studies.study import Request

PROG = "spikeopd-study"
EPILOG = """studies: stability, controlled, ablation, initialization, rollout-length, layers, scale, diagnostics,
stage1, sparsity

A study can be interrupted and started again: finished single runs are found by their content and not repeated,
also by other studies with the same --output.

examples:
  spikeopd-study diagnostics --config tiny --output runs/studies
  spikeopd-study stability --teacher tiny-rule --seeds 0-2 --jobs 2 --dry-run
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Repeat a comparison of the paper: run what is missing, print our values beside the paper's.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    parser.add_argument("study", nargs="?", metavar="NAME", help="one of the studies below")
    parser.add_argument("--list", action="store_true", help="list the studies with their rows, and stop")
    parser.add_argument("--config", default="tiny", metavar="RECIPE", help="recipe name or YAML path (default: tiny)")
    parser.add_argument("--output", default="runs/studies", metavar="DIR", help="studies and their pool of runs")
    parser.add_argument(
        "--seeds", nargs="+", metavar="SEED", help="numbers or ranges such as 0-9 (default: the paper's)"
    )
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose label holds one of these texts")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, one thread each (default: 1)")
    parser.add_argument(
        "--start",
        action="append",
        metavar="[SIZE=]DIR",
        help="student all runs start from (default: Stage 1 is run); of scale, one for each size, e.g. 0.125B=DIR",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes, and GPUs, that train one run together; Stage 1 takes N times the sequences an update",
    )
    parser.add_argument("--teacher", metavar="NAME", help="teacher of Stage 2, e.g. tiny-rule (default: the recipe's)")
    parser.add_argument(
        "--benchmarks", metavar="DIR", help="zero-shot data, for the column Avg. (spikeopd-eval zeroshot)"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="of the benchmarks (default: all eight)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each benchmark (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="list the single runs and which are finished")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    return parser


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_intermixed_args(argv)
    # `--seeds 0 1 stage2.updates=60`: an override behind the seeds or tasks is an override.
    for name in ("seeds", "tasks", "rows"):
        words = getattr(arguments, name) or []
        arguments.overrides += [word for word in words if "=" in word]
        setattr(arguments, name, [word for word in words if "=" not in word])
    if arguments.study is not None and "=" in arguments.study:
        raise ConfigError(f"{arguments.study}: give the name of a study first ({PROG} --list)")
    if arguments.list:
        print(_listing())
        return 0
    if arguments.study is None:
        parser.print_help()
        return 0
    request = _request(arguments)
    from spikeopd.studies.study import carry_out, plan

    if arguments.dry_run:
        entries = plan(request)
        print(json.dumps({"runs": entries}) if arguments.json else "\n".join(map(_entry, entries)))
        return 0

    def note(message: str) -> None:
        if not arguments.quiet:
            print(f"{PROG}: {message}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the blocks that end the processes
    whole = carry_out(request, note)
    text = whole.pop("text")
    print(json.dumps(whole) if arguments.json else text)
    note(f"wrote {request.folder}")
    return 0


def _request(arguments: argparse.Namespace) -> Request:
    from spikeopd.config import load_config
    from spikeopd.evaluation.tasks import choose
    from spikeopd.studies.definitions import find
    from spikeopd.studies.study import Request

    study = find(arguments.study)
    return Request(
        study,
        load_config(arguments.config, arguments.overrides),
        Path(arguments.output),
        seeds(arguments.seeds) if arguments.seeds else study.seeds,
        arguments.jobs,
        starts(arguments.start or []),
        arguments.teacher,
        tuple(arguments.overrides),
        arguments.benchmarks,
        tuple(benchmark.name for benchmark in choose(arguments.tasks)) if arguments.tasks else (),
        arguments.limit,
        asked=bool(arguments.seeds),
        only=tuple(arguments.rows),
        processes=arguments.processes,
    )


def starts(words: Sequence[str]) -> str | dict[str, str] | None:
    """`DIR`, or `SIZE=DIR` as often as there are sizes."""
    if not words:
        return None
    if len(words) == 1 and ("=" not in words[0] or Path(words[0]).exists()):
        return words[0]
    sized = dict(word.split("=", 1) for word in words if "=" in word)
    if len(sized) != len(words):
        raise ConfigError(f"--start {' --start '.join(words)}: give one folder, or SIZE=DIR once for each size")
    return sized


def _entry(entry: dict[str, Any]) -> str:
    state = "finished" if entry["finished"] else "to do"
    more = f"waits for {entry['waits_for']}" if "waits_for" in entry else entry.get("key", "")
    count = f" x{entry['runs']}" if entry.get("runs", 1) > 1 else ""
    return f"{state:<9} {entry['run']}{count}  {more}"


def _listing() -> str:
    from spikeopd.config import load_config
    from spikeopd.studies.definitions import STUDIES

    config = load_config("tiny")
    lines = []
    for study in STUDIES.values():
        lines.append(f"{study.name:<16}{study.title}; {len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}")
        lines.append(" " * 16 + ", ".join(row.label for row in study.rows(config)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
