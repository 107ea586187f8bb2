"""EOPD, the paper's control: the teacher's entropy chooses the divergence at each visited prefix.

Below the threshold reverse KL over the whole vocabulary, above it forward KL over the teacher's Top-50 tokens. The
threshold is the 80th percentile of the teacher's entropy on one minibatch of the checkpoint's rollouts, then fixed.
L_spk stays, the reference policy does not. The publication (Jin et al. 2026) keeps reverse KL everywhere and *adds*
forward KL where the entropy is high.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from spikeopd import losses
from spikeopd.methods import opd
from spikeopd.methods.adaptation import Adaptation, load_pair, with_stage2
from spikeopd.methods.baselines.common import calibration_rollouts
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.runlog import RunLog


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    setup = with_stage2(setup, ref_coef=0.0)
    student, reference = load_pair(setup, student_path)
    switched = partial(entropy_switched, limit=entropy_threshold(setup, student), top=setup.config.stage2.teacher_top_k)
    policy = opd.DistilledPolicy(student, setup.config.train.kl_chunk_tokens, switched)
    return opd.adapt(Adaptation(setup, log, policy, reference, resume=resume))


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats at each position, [...] from logits [..., vocab]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def top_forward_kl(student: Tensor, teacher: Tensor, top: int) -> Tensor:
    """sum of p log(p/q) over the `top` likeliest tokens of the teacher; p and q stay normalised over all tokens."""
    log_p, chosen = teacher.log_softmax(-1).topk(min(top, teacher.shape[-1]), dim=-1)
    return (log_p.exp() * (log_p - student.log_softmax(-1).gather(-1, chosen))).sum()


def entropy_switched(student: Tensor, teacher: Tensor, limit: float, top: int) -> Tensor:
    """Reverse KL where the teacher's entropy is at most `limit`, Top-k forward KL where it is above."""
    high = entropy(teacher) > limit
    return losses.reverse_kl(student[~high], teacher[~high]) + top_forward_kl(student[high], teacher[high], top)


@torch.no_grad()
def entropy_threshold(setup: Setup, student: BiSpikCLMForCausalLM) -> float:
    options, head = setup.config.stage2, output_table(setup.teacher)
    (sequences,) = calibration_rollouts(setup, student, 1)
    found = []
    for rows in torch.split(sequences, options.micro_batch_size):
        features = run_teacher(setup.teacher, rows[:, :-1], internals=False).features
        visited = features[:, -options.max_completion_length :].flatten(0, 1)
        found += [entropy(head(part).float()) for part in torch.split(visited, setup.config.train.kl_chunk_tokens)]
    return torch.cat(found).quantile(options.entropy_quantile).item()
