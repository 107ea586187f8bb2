"""Clipped OPD (Tab. 1): Vanilla OPD with the global gradient norm clipped to 1."""

from __future__ import annotations

from typing import Any

from spikeopd.methods import opd
from spikeopd.methods.baselines.common import teacher_only
from spikeopd.methods.setup import Setup
from spikeopd.runlog import RunLog

MAX_NORM = 1.0


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.run(teacher_only(setup, max_grad_norm=MAX_NORM), log, student_path, resume=resume)
