"""OPRD, the paper's control: align hidden states instead of outputs, on the active student's rollouts.

Each student layer's spikes, averaged over the T_s steps, go through a learned linear map to the matched teacher
layer; the loss is c MSE. c is fixed on the first five minibatches so that the student's gradient has the norm which
full forward KL gives there. No output loss, no reference, no spike loss. In the publication (Yang et al. 2026)
student and teacher are dense and of one family, and selected layers are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.losses import layer_map, masked_square_error
from spikeopd.methods import opd
from spikeopd.methods.adaptation import Adaptation, Policy, load_pair, with_stage2
from spikeopd.methods.alignment import TeacherShape
from spikeopd.methods.baselines.common import calibration_rollouts, fit_linear
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.quality import layer_neurons
from spikeopd.runlog import RunLog

BEHIND_HIDDEN = ("model.final_layer_norm", "model.logit_scale", "model.project_out", "lm_head.bias")


class RepresentationPolicy(Policy):
    """The student with one linear map per layer; `coefficient` is fixed before the first update."""

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int, teacher: TeacherShape) -> None:
        super().__init__(student, chunk)
        config = student.config
        self.matched = layer_map(config.num_hidden_layers, teacher.num_hidden_layers)
        self.maps = nn.ModuleList(nn.Linear(config.hidden_size, teacher.hidden_size) for _ in self.matched)
        self.coefficient = 1.0

    def hidden(self, sequences: Tensor, k: int) -> list[Tensor]:
        """Time-averaged spikes of each layer at the visited prefixes, [b, K, d]."""
        recorder = Recorder(("h",), tokens=slice(-k, None))
        self.student.model(sequences[:, :-1], use_cache=False, recorder=recorder)
        return [recorder.spikes[layer, "h"].mean(0) for layer in range(len(self.matched))]

    def square_errors(self, sequences: Tensor, teacher: list[Tensor]) -> Tensor:
        """Sum over layers, positions and coordinates of (P_l(h_l) - H_T)^2."""
        mine = self.hidden(sequences, teacher[0].shape[1])
        pairs = zip(self.maps, mine, teacher, strict=True)
        return torch.stack([masked_square_error(linear(h), target) for linear, h, target in pairs]).sum()


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    setup = with_stage2(setup, teacher_coef=1.0, ref_coef=0.0, spike_coef=0.0)
    student, reference = load_pair(setup, student_path)
    return adapt(Adaptation(setup, log, make_policy(setup, student), reference, resume=resume))


def adapt(run: Adaptation[RepresentationPolicy]) -> dict[str, Any]:
    setup, options, policy = run.setup, run.options, run.objective
    count, shape = entries(setup, len(policy.matched)), run.reference.config
    slots = options.batch_size * options.max_completion_length * shape.steps
    for update in run.updates(options.updates):
        parts = opd.visit(run, update)
        total = torch.zeros((), dtype=torch.float64, device=setup.device)
        for part in run.micro_batches(parts):
            hidden = teacher_hidden(setup, part.sequences, policy.matched)
            square = run.call(policy.square_errors, part.sequences, hidden)
            run.backward(policy.coefficient * square / count)
            total += square.detach().double()
        mean = (run.reduce(total) / count).item()
        loss = policy.coefficient * mean
        norm = run.step(loss, options.learning_rate)
        spikes = run.reduce(torch.stack([part.spikes for part in parts]).sum(0))
        rate = spikes.mean().item() / (slots * layer_neurons(shape, options.rate_scope))
        values = {"loss": loss, "mse": mean, "coefficient": policy.coefficient, "rate": rate}
        run.log(update, values | opd.continuation_statistics(run, parts) | {"grad_norm": norm})
    return run.finish()


def make_policy(setup: Setup, student: BiSpikCLMForCausalLM) -> RepresentationPolicy:
    shape = TeacherShape.of(setup.teacher.config)
    policy = RepresentationPolicy(student, setup.config.train.kl_chunk_tokens, shape).to(setup.device)
    calibrate(setup, policy)
    # What lies behind the last hidden state has no part in this loss.
    for name, parameter in student.named_parameters():
        if name.startswith(BEHIND_HIDDEN):
            parameter.requires_grad_(False)
    return policy


def entries(setup: Setup, layers: int) -> int:
    """Coordinates the squared errors of a whole batch are averaged over."""
    options = setup.config.stage2
    width: int = setup.teacher.config.hidden_size
    return options.batch_size * options.max_completion_length * layers * width


def teacher_hidden(setup: Setup, sequences: Tensor, matched: list[int]) -> list[Tensor]:
    k = setup.config.stage2.max_completion_length
    hidden = run_teacher(setup.teacher, sequences[:, :-1], internals=True).hidden
    return [hidden[layer][:, -k:] for layer in matched]


def calibrate(setup: Setup, policy: RepresentationPolicy) -> None:
    """Fit the maps, then fix c = mean of |grad full KL| / |grad MSE| over the first minibatches.

    Norms are those of the student's parameters; the maps have no gradient of the KL to compare with.
    """
    options, k = setup.config.stage2, setup.config.stage2.max_completion_length
    batches = calibration_rollouts(setup, policy.student, options.calibration_batches)
    with torch.no_grad():
        targets = [teacher_hidden(setup, sequences, policy.matched) for sequences in batches]
        with setup.accelerator.autocast():
            mine = [policy.hidden(sequences, k) for sequences in batches]
        for layer, linear in enumerate(policy.maps):
            assert isinstance(linear, nn.Linear)
            x, y = (torch.cat([part[layer].flatten(0, 1) for part in side]) for side in (mine, targets))
            fit_linear(linear, x, y)
    ratios = []
    for sequences, target in zip(batches, targets, strict=True):
        with torch.no_grad():
            features = run_teacher(setup.teacher, sequences[:, :-1], internals=False).features[:, -k:]
        with setup.accelerator.autocast():
            total = policy.teacher_kl(sequences, features, output_table(setup.teacher))
            square = policy.square_errors(sequences, target) / entries(setup, len(policy.matched))
        full = _student_norm(policy, total / (options.batch_size * k))
        ratios.append(full / max(_student_norm(policy, square), 1e-12))
    policy.coefficient = sum(ratios) / len(ratios)


def _student_norm(policy: RepresentationPolicy, loss: Tensor) -> float:
    parameters = [p for p in policy.student.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.stack([g.double().square().sum() for g in gradients if g is not None]).sum().sqrt().item()
