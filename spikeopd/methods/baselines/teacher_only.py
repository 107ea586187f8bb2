"""OPD without the complete stability module: a divergence to the teacher on own rollouts, no reference, no spike loss.

Each control is SpikeOPD (`methods/opd.py`) under the options that it states here.
"""

from __future__ import annotations

from typing import Any

from spikeopd.methods import opd
from spikeopd.methods.adaptation import with_stage2
from spikeopd.methods.setup import Setup
from spikeopd.runlog import RunLog

MAX_NORM = 1.0


def vanilla(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Vanilla OPD: full-vocabulary divergence to the teacher (forward KL unless chosen otherwise) and nothing else."""
    changed = with_stage2(setup, teacher_coef=1.0, ref_coef=0.0, spike_coef=0.0, **changes)
    return opd.run(changed, log, student_path, resume=resume)


def small_lr(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """Small-LR OPD (Tab. 1): a third of the learning rate, for twice the updates."""
    options = setup.config.stage2
    changes = {"learning_rate": options.learning_rate / 3, "updates": 2 * options.updates}
    return vanilla(setup, log, student_path, resume=resume, **changes)


def clipped(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """Clipped OPD (Tab. 1): the global gradient norm clipped to 1."""
    return vanilla(setup, log, student_path, resume=resume, max_grad_norm=MAX_NORM)


def gkd(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """GKD (Agarwal et al. 2024), fully on-policy: generalised Jensen-Shannon divergence.

    The publication mixes corpus and own sequences by a fraction lambda; here lambda is 1, as for every other method.
    """
    return vanilla(setup, log, student_path, resume=resume, divergence="jsd")


def reverse_kl(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """Reverse-KL OPD, KL(student || teacher): the usual choice for dense students.

    MiniLLM (Gu et al. 2024) estimates it by policy gradients over sequences; here it is exact at every visited prefix.
    """
    return vanilla(setup, log, student_path, resume=resume, divergence="reverse_kl")
