"""Continued SpAD: the five targets of Stage 1 for as many updates as Stage 2 has, on corpus windows. No rollouts.

Batch, window and learning rate are Stage 2's, so that the budget is the other methods'. The alignment maps of Stage 1
are not part of a student's folder; they are fitted to the checkpoint before the first update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spikeopd.contracts import EMBED_SITE
from spikeopd.methods import opd
from spikeopd.methods.alignment import (
    BRANCHES,
    Alignment,
    SpADObjective,
    TeacherShape,
    branch_sizes,
    branch_weights,
)
from spikeopd.methods.baselines.common import corpus_step, fit_linear
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.runlog import RunLog


class ContinuedObjective(opd.PolicyObjective):
    """The student with Stage 1's maps and Stage 1's sums."""

    sums = SpADObjective.sums

    def __init__(self, setup: Setup, student: BiSpikCLMForCausalLM) -> None:
        super().__init__(student, setup.config.train.kl_chunk_tokens)
        self.options = setup.config.stage1
        torch.manual_seed(setup.config.train.seed + 1)  # the same on every process
        self.alignment = Alignment(student.config, TeacherShape.of(setup.teacher.config)).to(setup.device)


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    return opd.adapt(setup, log, student_path, objective, update_step, resume=resume)


def objective(setup: Setup, student: BiSpikCLMForCausalLM) -> ContinuedObjective:
    made = ContinuedObjective(setup, student)
    fit_alignment(setup, made)
    return made


@torch.no_grad()
def fit_alignment(setup: Setup, objective: ContinuedObjective, batches: int = 5) -> None:
    """Closed-form P_e, P_h and LayerNorm scale and shift on the first corpus minibatches."""
    options, maps = setup.config.stage2, objective.alignment
    length = options.prompt_length + options.max_completion_length
    layers = objective.student.config.num_hidden_layers
    mine: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(-1, layers)}
    theirs: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(-1, layers)}
    for update in range(batches):
        for ids in opd.prompt_rows(setup, update, length).to(setup.device).split(options.micro_batch_size):
            recorder = Recorder(sites=(EMBED_SITE, "h"))
            with setup.accelerator.autocast():
                objective.student.model(ids, use_cache=False, recorder=recorder)
            teacher = run_teacher(setup.teacher, ids, internals=True)
            mine[-1].append(recorder.spikes[-1, EMBED_SITE].mean(0).flatten(0, 1))
            theirs[-1].append(teacher.embeddings.flatten(0, 1))
            for layer, matched in enumerate(maps.layers):
                mine[layer].append(recorder.spikes[layer, "h"].mean(0).flatten(0, 1))
                theirs[layer].append(teacher.hidden[matched].flatten(0, 1))
    fit_linear(maps.embedding, torch.cat(mine[-1]), torch.cat(theirs[-1]))
    for layer in range(layers):
        x, y = torch.cat(mine[layer]), torch.cat(theirs[layer])
        feature, norm = maps.feature[layer], maps.norm[layer]
        if isinstance(feature, nn.Linear):
            fit_linear(feature, x, y)
        normed = nn.functional.layer_norm(feature(x), norm.normalized_shape, eps=norm.eps)
        spread = normed.var(0, unbiased=False).clamp(min=1e-6)
        slope = ((normed - normed.mean(0)) * (y - y.mean(0))).mean(0) / spread
        norm.weight.copy_(slope)
        norm.bias.copy_(y.mean(0) - slope * normed.mean(0))


def update_step(
    setup: Setup, objective: Any, optimizer: torch.optim.Optimizer, reference: BiSpikCLMForCausalLM, update: int
) -> dict[str, float]:
    options = setup.config.stage2
    length = options.prompt_length + options.max_completion_length
    shape, head = TeacherShape.of(setup.teacher.config), output_table(setup.teacher)
    sizes = branch_sizes(reference.config, shape, options.batch_size, length).to(setup.device)
    weights = branch_weights(setup.config.stage1).to(setup.device)
    sums, loss, norm = corpus_step(
        setup, objective, optimizer, update,
        lambda ids: objective("sums", ids, run_teacher(setup.teacher, ids, internals=True), head), weights / sizes,
    )  # fmt: skip
    return {"loss": loss, **dict(zip(BRANCHES, (sums / sizes).tolist(), strict=True)), "grad_norm": norm}
