"""Reverse-KL OPD: KL(student || teacher), full vocabulary, on own rollouts: the usual choice for dense students.

MiniLLM (Gu et al. 2024) estimates it by policy gradients over sequences; here it is exact at every visited prefix.
"""

from __future__ import annotations

from typing import Any

from spikeopd import losses
from spikeopd.methods import opd
from spikeopd.methods.baselines.common import teacher_only
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.runlog import RunLog


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.adapt(teacher_only(setup), log, student_path, objective, opd.update_step, resume=resume)


def objective(setup: Setup, student: BiSpikCLMForCausalLM) -> opd.PolicyObjective:
    return opd.PolicyObjective(student, setup.config.train.kl_chunk_tokens, losses.reverse_kl)
