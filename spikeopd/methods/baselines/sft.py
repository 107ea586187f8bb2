"""SFT: hard next-token labels on corpus prefixes. No teacher, no reference, no rollouts, no spike loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spikeopd.losses import hard_token, linear_sums
from spikeopd.methods.adaptation import Adaptation, Policy, load_pair
from spikeopd.methods.baselines.common import corpus_windows
from spikeopd.methods.setup import Setup
from spikeopd.runlog import RunLog


class LabelledPolicy(Policy):
    def cross_entropy(self, ids: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """(weighted, plain) sum of - log q(x_{t+1} | x_<=t) over all corpus positions; the first has the gradient."""
        features = self.student.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

        def part(logits: Tensor, labels: Tensor) -> Tensor:
            return hard_token(logits, labels)[None]

        affine = self.student.lm_head.affine(features)
        return linear_sums(part, (weight,), self.chunk, affine, ids[:, 1:].flatten())


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    student, reference = load_pair(setup, student_path)
    policy = LabelledPolicy(student, setup.config.train.kl_chunk_tokens)
    return adapt(Adaptation(setup, log, policy, reference, resume=resume))


def adapt(run: Adaptation[LabelledPolicy]) -> dict[str, Any]:
    options = run.options
    tokens = options.batch_size * (options.prompt_length + options.max_completion_length - 1)
    scale = torch.tensor(1 / tokens, dtype=torch.float64, device=run.setup.device)
    for update in run.updates(options.updates):
        total = torch.zeros_like(scale)
        for ids in run.micro_batches(corpus_windows(run.setup, update)):
            share, entropy = run.call(run.objective.cross_entropy, ids, 1 / tokens)
            run.backward(share)
            total += entropy.double().sum()
        loss = (run.reduce(total) * scale).item()
        norm = run.step(loss, options.learning_rate)
        run.log(update, {"loss": loss, "cross_entropy": loss, "grad_norm": norm})
    return run.finish()
