"""Continued SpAD: the targets of Stage 1 for as many updates as Stage 2 has, on corpus windows. No rollouts.

Batch, window and learning rate are Stage 2's, so that the budget is the other methods'; the gradient is clipped as in
Stage 1, whose objective it continues. The alignment maps of Stage 1 are not part of a student's folder; they are fitted
to the checkpoint before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.contracts import EMBED_SITE
from spikeopd.methods.adaptation import Adaptation, Policy, load_pair, prompt_rows, with_stage2
from spikeopd.methods.alignment import Alignment, TeacherShape, branch_sizes, branch_weights, logged_branches
from spikeopd.methods.baselines.common import corpus_windows, fit_linear
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import TeacherOutput, output_table, run_teacher
from spikeopd.runlog import RunLog


class AlignedPolicy(Policy):
    """The student with Stage 1's maps and Stage 1's sums."""

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int, alignment: Alignment, temperature: float) -> None:
        super().__init__(student, chunk)
        self.alignment, self.temperature = alignment, temperature

    def sums(
        self, ids: Tensor, teacher: TeacherOutput, teacher_head: nn.Module, scale: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        return self.alignment.sums(self.student, ids, teacher, teacher_head, self.temperature, self.chunk, scale)


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    setup = with_stage2(setup, max_grad_norm=setup.config.stage1.max_grad_norm)
    student, reference = load_pair(setup, student_path)
    policy = make_policy(setup, student)
    fit_alignment(setup, policy)
    return adapt(Adaptation(setup, log, policy, reference, resume=resume))


def adapt(run: Adaptation[AlignedPolicy]) -> dict[str, Any]:
    setup, options, policy = run.setup, run.options, run.objective
    length = options.prompt_length + options.max_completion_length
    shape, head = TeacherShape.of(setup.teacher.config), output_table(setup.teacher)
    sizes = branch_sizes(run.reference.config, shape, options.batch_size, length).to(setup.device)
    weights = branch_weights(setup.config.stage1).to(setup.device)
    scale = weights / sizes
    middle = setup.config.stage1.lambda_middle > 0
    for update in run.updates(options.updates):
        total = torch.zeros_like(sizes)
        for ids in run.micro_batches(corpus_windows(setup, update)):
            target = run_teacher(setup.teacher, ids, internals=True, middle=middle)
            share, sums = run.call(policy.sums, ids, target, head, scale.tolist())
            run.backward(share)
            total += sums.double()
        total = run.reduce(total)
        loss = (total * scale).sum().item()
        norm = run.step(loss, options.learning_rate)
        branches = logged_branches(total / sizes, weights)
        run.log(update, {"loss": loss, **branches, "grad_norm": norm})
    return run.finish()


def make_policy(setup: Setup, student: BiSpikCLMForCausalLM) -> AlignedPolicy:
    config = setup.config
    torch.manual_seed(config.train.seed + 1)  # the same on every process
    maps = Alignment(student.config, TeacherShape.of(setup.teacher.config)).to(setup.device)
    return AlignedPolicy(student, config.train.kl_chunk_tokens, maps, config.stage1.kd_temperature)


@torch.no_grad()
def fit_alignment(setup: Setup, policy: AlignedPolicy, batches: int = 5) -> None:
    """Closed-form P_e, P_h and LayerNorm scale and shift on the first corpus minibatches."""
    options, maps = setup.config.stage2, policy.alignment
    length = options.prompt_length + options.max_completion_length
    layers = policy.student.config.num_hidden_layers
    mine: dict[int, list[Tensor]] = {layer: [] for layer in range(-1, layers)}
    theirs: dict[int, list[Tensor]] = {layer: [] for layer in range(-1, layers)}
    for update in range(batches):
        whole = prompt_rows(setup, update, length).to(setup.device)
        for ids in torch.split(whole, options.micro_batch_size):
            recorder = Recorder(sites=(EMBED_SITE, "h"))
            with setup.accelerator.autocast():
                policy.student.model(ids, use_cache=False, recorder=recorder)
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
        assert isinstance(norm, nn.LayerNorm)
        if isinstance(feature, nn.Linear):
            fit_linear(feature, x, y)
        normed = nn.functional.layer_norm(feature(x), norm.normalized_shape, eps=norm.eps)
        spread = normed.var(0, unbiased=False).clamp(min=1e-6)
        slope = ((normed - normed.mean(0)) * (y - y.mean(0))).mean(0) / spread
        norm.weight.copy_(slope)
        norm.bias.copy_(y.mean(0) - slope * normed.mean(0))
