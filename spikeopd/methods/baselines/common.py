"""What several controls need: windows of the corpus, calibration rollouts, maps fitted in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikeopd.methods.adaptation import prompt_rows
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.rollout import rollout, uniforms


def corpus_windows(setup: Setup, update: int) -> tuple[Tensor, ...]:
    """This process's corpus windows of P + K tokens for an update, in micro-batches."""
    options = setup.config.stage2
    whole = prompt_rows(setup, update, options.prompt_length + options.max_completion_length)
    return setup.micro_batches(whole, options.micro_batch_size)


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
        size = options.micro_batch_size
        parts = zip(torch.split(prompts, size), torch.split(uniform, size), strict=True)
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
