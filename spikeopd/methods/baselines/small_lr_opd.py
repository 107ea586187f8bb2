"""Small-LR OPD (Tab. 1): Vanilla OPD at a third of the learning rate, for twice the updates."""

from __future__ import annotations

from typing import Any

from spikeopd.methods import opd
from spikeopd.methods.baselines.common import teacher_only
from spikeopd.methods.setup import Setup
from spikeopd.runlog import RunLog


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    options = setup.config.stage2
    changed = teacher_only(setup, learning_rate=options.learning_rate / 3, updates=2 * options.updates)
    return opd.run(changed, log, student_path, resume=resume)
