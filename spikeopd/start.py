"""Where the commands begin: until one is loaded and can say it in a line, Ctrl-C ends it without a traceback."""

from __future__ import annotations

import signal
from importlib import import_module


def _run(module: str) -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody chose: a shell's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    signal.signal(signal.SIGINT, before)
    code: int = main()
    return code


def train() -> int:
    return _run("spikeopd.cli")


def evaluate() -> int:
    return _run("spikeopd.evaluation.cli")


def study() -> int:
    return _run("spikeopd.studies.cli")


def export() -> int:
    return _run("export.cli")


def run_lava() -> int:
    return _run("neuro_sim.cli")


def serve() -> int:
    return _run("neuro_sim.serve.cli")


def bench() -> int:
    return _run("neuro_sim.bench.cli")


def energy() -> int:
    return _run("energy.cli")
