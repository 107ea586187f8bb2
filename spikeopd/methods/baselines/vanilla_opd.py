"""Vanilla OPD: full-vocabulary forward KL to the teacher on the student's own rollouts, and nothing else."""

from __future__ import annotations

from typing import Any

from spikeopd.methods import opd
from spikeopd.methods.baselines.common import teacher_only
from spikeopd.methods.setup import Setup
from spikeopd.runlog import RunLog


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.run(teacher_only(setup), log, student_path, resume=resume)
