"""SFT: hard next-token labels on corpus prefixes. No teacher, no reference, no rollouts, no spike loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikeopd.losses import chunked, hard_token
from spikeopd.methods import opd
from spikeopd.methods.baselines.common import corpus_step
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.runlog import RunLog


class SFTObjective(opd.PolicyObjective):
    def cross_entropy(self, ids: Tensor) -> Tensor:
        """Sum of - log q(x_{t+1} | x_<=t) over all corpus positions, [1]."""
        features = self.student.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

        def part(q: Tensor, labels: Tensor) -> Tensor:
            return hard_token(self.student.lm_head(q).float(), labels)[None]

        return chunked(part, self.chunk, features, ids[:, 1:].flatten())


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.adapt(setup, log, student_path, objective, update_step, resume=resume)


def objective(setup: Setup, student: BiSpikCLMForCausalLM) -> SFTObjective:
    return SFTObjective(student, setup.config.train.kl_chunk_tokens)


def update_step(
    setup: Setup, objective: Any, optimizer: torch.optim.Optimizer, reference: BiSpikCLMForCausalLM, update: int
) -> dict[str, float]:
    options = setup.config.stage2
    tokens = options.batch_size * (options.prompt_length + options.max_completion_length - 1)
    scale = torch.tensor([1 / tokens], dtype=torch.float64, device=setup.device)
    _, loss, norm = corpus_step(setup, objective, optimizer, update, lambda ids: objective("cross_entropy", ids), scale)
    return {"loss": loss, "cross_entropy": loss, "grad_norm": norm}
