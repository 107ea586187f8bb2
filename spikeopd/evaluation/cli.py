"""spikeopd-eval: zero-shot benchmarks, perplexity and rollouts of checkpoints, Hugging Face models and bundles.

Each function calls the Python function behind a subcommand and prints; whatever is heavy is imported by it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spikeopd.arguments import seeds
from spikeopd.errors import ConfigError, InputError, check_writable, run_command, say_loading
from spikeopd.evaluation.arguments import PROG, build_parser
from spikeopd.paths import check_model

if TYPE_CHECKING:
    from spikeopd.evaluation.models import Model
    from spikeopd.reporting import Progress, Report
    from spikeopd.runlog import RunLog


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
    else:
        RUN[arguments.command](arguments)
    return 0


def zeroshot(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation import zeroshot as harness
    from spikeopd.evaluation.models import offline
    from spikeopd.evaluation.tasks import choose, data_files

    # What is wrong is refused before a model is loaded.
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: give at least one question")
    benchmarks = choose(arguments.tasks)
    runs = harness.models_of(arguments.model, seeds(arguments.seeds or ()))
    data_dir = Path(arguments.benchmarks).expanduser() if arguments.benchmarks else None
    if data_dir is not None:
        offline()
        data_files(data_dir, benchmarks)
    log = _open_log(arguments)
    report = harness.report(
        arguments.model,
        runs,
        lambda name: _load(arguments, name),
        benchmarks,
        data_dir=data_dir,
        limit=arguments.limit,
        metric=arguments.metric,
        beside=arguments.paper,
        batch_size=arguments.batch_size,
        progress=_progress(log, "request"),
        note=lambda line: log.note(f"{PROG}: {line}"),
        against=arguments.against,
    )
    _finish(arguments, log, report)


def perplexity(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation.perplexity import describe, perplexity
    from spikeopd.evaluation.scoring import Limits

    log = _open_log(arguments)
    model = _load(arguments, arguments.model)
    result = perplexity(
        model,
        arguments.source,
        split=arguments.split,
        window=arguments.window,
        stride=arguments.stride,
        max_tokens=arguments.max_tokens,
        limits=Limits.on(model.about.get("device", "cpu"), arguments.batch_size),
        progress=_progress(log, "window"),
    )
    _finish(arguments, log, describe(model, result))


def rollouts(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation.rollouts import describe, rollouts

    log = _open_log(arguments)
    model = _load(arguments, arguments.model)
    result = rollouts(
        model,
        arguments.source,
        split=arguments.split,
        prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        length=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        samples=arguments.samples,
        max_tokens=arguments.max_tokens,
        batch_size=arguments.batch_size,
        progress=_progress(log, "sequence"),
    )
    _finish(arguments, log, describe(model, result, arguments.paper))


def diagnose(arguments: argparse.Namespace) -> None:
    others = {}
    for word in arguments.others:
        label, equals, path = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: give a name and a checkpoint, for example SpikeOPD=runs/tiny/final")
        others[label] = path
    from spikeopd.students import find_student

    log = _open_log(arguments)
    for path in (arguments.model, *others.values()):
        find_student(path)  # before torch is imported
    check_model(arguments.teacher, "--teacher")
    from spikeopd.diagnostics.diagnose import diagnose
    from spikeopd.diagnostics.prefixes import BankOptions

    report = diagnose(
        arguments.model,
        others,
        log.folder,
        teacher=arguments.teacher,
        bank=arguments.bank,
        source=arguments.source,
        split=arguments.split,
        max_tokens=arguments.max_tokens,
        options=BankOptions(
            arguments.num_prompts,
            arguments.prompt_length,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.seed,
        ),
        batch_size=arguments.batch_size,
        device=arguments.device or "cpu",
        figures=arguments.figures,
        progress=_progress(log, "checkpoint"),
        note=log.note,
    )
    _finish(arguments, log, report)


def _open_log(arguments: argparse.Namespace) -> RunLog:
    """The folder this evaluation is written to, and its progress."""
    from spikeopd.runlog import RunLog

    name = re.sub(r"[^\w.-]+", "_", arguments.model.strip("./")) or "model"
    folder = Path(arguments.output) if arguments.output else Path("runs") / "eval" / f"{arguments.command}-{name}"
    check_writable(folder / "summary.json", "--output")  # now, not after the whole evaluation
    say_loading(arguments.quiet)
    return RunLog(folder, quiet=arguments.quiet)


def _progress(log: RunLog, unit: str) -> Progress:
    return lambda what, total: log.progress(what, total, unit=unit)


def _load(arguments: argparse.Namespace, name: str) -> Model:
    from spikeopd.evaluation.models import open_model

    return open_model(name, tokenizer=arguments.tokenizer, device=arguments.device, precision=arguments.precision)


def _finish(arguments: argparse.Namespace, log: RunLog, report: Report) -> None:
    """Write summary.json and print the result."""
    from spikeopd.runlog import environment

    device = arguments.device or "auto"
    whole = {"command": arguments.command, **report.summary, "environment": environment(device=device, seeds={})}
    try:
        log.summary(whole)
    except OSError as error:
        raise InputError(f"--output {log.folder}: cannot be written ({error.strerror or error})") from error
    print((log.folder / "summary.json").read_text("utf-8").strip() if arguments.json else report.text)
    log.note(f"{PROG}: wrote {log.folder / 'summary.json'}")


RUN = {"zeroshot": zeroshot, "perplexity": perplexity, "rollouts": rollouts, "diagnose": diagnose}

if __name__ == "__main__":
    sys.exit(main())
