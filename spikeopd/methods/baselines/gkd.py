"""GKD (Agarwal et al. 2024), fully on-policy: generalised Jensen-Shannon divergence to the teacher on own rollouts.

The publication mixes corpus and own sequences by a fraction lambda; here lambda is 1, as for every other method.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from spikeopd.losses import jsd
from spikeopd.methods import opd
from spikeopd.methods.baselines.common import teacher_only
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.runlog import RunLog


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.adapt(teacher_only(setup), log, student_path, objective, opd.update_step, resume=resume)


def objective(setup: Setup, student: BiSpikCLMForCausalLM) -> opd.PolicyObjective:
    divergence = partial(jsd, beta=setup.config.stage2.jsd_beta)
    return opd.PolicyObjective(student, setup.config.train.kl_chunk_tokens, divergence)
