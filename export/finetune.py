"""A short finish for few bits: the student learns to give its own old answers with the integers it will be exported as.

The student as it came is the teacher, on its own training text: no labels, no second model. The forward pass is the one
of `deploy_precision` (models/grid.py), so what is trained is what is deployed, and lowering rounds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from spikeopd.contracts import Array, Precision
from spikeopd.errors import InputError

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

BATCH = 8  # windows in an update
LEARNING_RATE = 5e-4
NORM = 1.0  # of the gradient


def finish(
    student: BiSpikCLMForCausalLM,
    windows: Array,
    precision: Precision,
    updates: int,
    say: Callable[[str], None] = lambda text: None,
) -> BiSpikCLMForCausalLM:
    """A copy of the student, trained for `updates` updates with the integer forward pass. windows: [n, length]."""
    config = student.config
    if config.readout != "residual" or config.word_embed_proj_dim != config.hidden_size:
        raise InputError(
            "--finetune trains the integer forward pass, which needs readout 'residual' and a token table as wide as "
            "the residual stream; this student has neither grid: export it without --finetune"
        )
    finished = copy.deepcopy(student)
    finished.config.deploy_precision = precision
    finished.requires_grad_(True)
    optimizer = torch.optim.AdamW(finished.parameters(), LEARNING_RATE, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    data = torch.from_numpy(windows)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - update / updates)
        batch = data[torch.randint(len(data), (BATCH,), generator=order)]
        with torch.no_grad():
            due = student(batch, use_cache=False).logits.float().log_softmax(-1)
        given = finished(batch, use_cache=False).logits.float().log_softmax(-1)
        loss = (due.exp() * (due - given)).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(finished.parameters(), NORM)
        optimizer.step()
        if update == 0 or (update + 1) % max(1, updates // 5) == 0:
            say(f"finish: update {update + 1} of {updates}, {loss.item():.4f} nats a token from the student")
    finished.train(False)
    finished.requires_grad_(False)
    return finished
