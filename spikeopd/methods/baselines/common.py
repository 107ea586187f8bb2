"""What several controls need: changed options, corpus updates, calibration rollouts, maps fitted in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.methods.loop import finish_update, local_gradients
from spikeopd.methods.opd import STAGE, prompt_rows
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.rollout import rollout, uniforms


def with_stage2(setup: Setup, **changes: Any) -> Setup:
    """The same setup under other Stage-2 options: a control states what it leaves out."""
    return replace(setup, config=replace(setup.config, stage2=replace(setup.config.stage2, **changes)))


def teacher_only(setup: Setup, **changes: Any) -> Setup:
    """Without the complete stability module: neither reference policy nor spike loss."""
    return with_stage2(setup, teacher_coef=1.0, ref_coef=0.0, spike_coef=0.0, **changes)


def corpus_step(
    setup: Setup,
    objective: Any,
    optimizer: torch.optim.Optimizer,
    update: int,
    sums_of: Callable[[Tensor], Tensor],
    scale: Tensor,
) -> tuple[Tensor, float, float]:
    """One optimizer step on corpus windows of P + K tokens: (sums over the batch, loss, gradient norm).

    sums_of(ids) gives sums [branches] of a micro-batch; the loss is their product with `scale`.
    """
    options, accelerator = setup.config.stage2, setup.accelerator
    whole = prompt_rows(setup, update, options.prompt_length + options.max_completion_length)
    parts = setup.rows(whole).split(options.micro_batch_size)
    total = torch.zeros(len(scale), dtype=torch.float64, device=setup.device)
    for index, ids in enumerate(parts):
        with local_gradients(accelerator, objective, last=index == len(parts) - 1):
            sums = sums_of(ids)
            accelerator.backward((sums * scale.float()).sum() * accelerator.num_processes)
        total += sums.detach().double()
    total = accelerator.reduce(total, "sum")
    loss = (total * scale).sum().item()
    norm = finish_update(setup, objective, optimizer, STAGE, update, loss, options.max_grad_norm, options.learning_rate)
    return total, loss, norm


@torch.no_grad()
def calibration_rollouts(setup: Setup, student: BiSpikCLMForCausalLM, batches: int) -> list[Tensor]:
    """Sequences [B, P + K] of the first minibatches, rolled out by the student as it starts.

    Every process computes all of them, so that what is calibrated is the same everywhere, and after a resume.
    """
    options, seed = setup.config.stage2, setup.config.train.seed
    found = []
    for update in range(batches):
        prompts = prompt_rows(setup, update, options.prompt_length).to(setup.device)
        uniform = uniforms(seed, update, options.batch_size, options.max_completion_length)
        parts = zip(prompts.split(options.micro_batch_size), uniform.split(options.micro_batch_size), strict=True)
        with setup.accelerator.autocast():
            found.append(torch.cat([rollout(student, p, u, options.temperature).sequences for p, u in parts]))
    return found


@torch.no_grad()
def fit_linear(layer: nn.Linear, x: Tensor, y: Tensor, ridge: float = 1e-3) -> None:
    """Set the layer to the least-squares map from x [n, in] to y [n, out], with a little weight decay.

    Training-only maps are not part of a student's folder. Started at random and trained at the small learning rate
    of Stage 2 they would stay random, and the student would be bent to fit them.
    """
    x, y = x.double(), y.double()
    centre_x, centre_y = x.mean(0), y.mean(0)
    a, b = x - centre_x, y - centre_y
    gram = a.T @ a + ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, a.T @ b).T
    layer.weight.copy_(weight)
    layer.bias.copy_(centre_y - weight @ centre_x)
