r"""Stage 2, SpikeOPD: adapt the student on its own generations without collapsing (Method, App. B).

One update (`adapt`): prompts from (seed, update) -> the *active* student rolls out K tokens -> teacher, active student
and frozen reference score the same prefixes -> L = L_OPD + 0.75 L_ref + 0.30 L_spk -> Adam. Only theta changes.

    L_OPD  mean KL(teacher || student)       L_ref  mean KL(student || reference)       over B K visited prefixes
    L_spk  per monitored layer, on the firing rate of the whole batch (losses.spike_loss)
    Beside them, if asked for: a target for the firing rates (methods/sparsity.py)

Sampling is in `rollout.py`; clipping, Adam, logging and checkpoints are in `methods/run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spikeopd import registry
from spikeopd.config import Stage2Config
from spikeopd.contracts import EMBED_SITE
from spikeopd.losses import linear_sums, reverse_kl, spike_coefficients
from spikeopd.methods.adaptation import Adaptation, Policy, Q, load_pair, prompt_rows
from spikeopd.methods.setup import Setup
from spikeopd.methods.sparsity import RateTarget
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.quality import RATE_SITES, layer_spikes, rate_slots, rollout_statistics
from spikeopd.rollout import Rollout, uniforms
from spikeopd.runlog import RunLog

Divergence = Callable[[Tensor, Tensor], Tensor]  # (student logits, teacher logits) -> sum over positions
D = TypeVar("D", bound="DistilledPolicy")


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """Adapt the student found at `student_path`; leaves `final/` and returns the summary."""
    student, reference = load_pair(setup, student_path)
    policy = DistilledPolicy(student, setup.config.train.kl_chunk_tokens, chosen_divergence(setup.config.stage2))
    return adapt(Adaptation(setup, log, policy, reference, resume=resume))


def adapt(run: Adaptation[D]) -> dict[str, Any]:
    """The loop of Stage 2 (App. B, update sequence)."""
    options = run.options
    for update in run.updates(options.updates):
        parts = visit(run, update)  # steps 1-3: prompts, rollouts, what the frozen models say about them
        values = descend(run, parts)  # steps 4-6: L and its gradient
        norm = run.step(values["loss"], options.learning_rate)  # step 7: Adam
        run.log(update, values | continuation_statistics(run, parts) | {"grad_norm": norm})
    return run.finish()


def chosen_divergence(options: Stage2Config) -> Divergence:
    """The divergence to the teacher that `stage2.divergence` names, under the options it reads."""
    chosen = registry.DIVERGENCES[options.divergence]
    return partial(registry.load(chosen.target), **{n: getattr(options, key) for n, key in chosen.options.items()})


@dataclass(frozen=True)
class Visited:
    """One micro-batch of visited prefixes and what the frozen models say about them.

    sequences [b, P + K]; teacher, reference: features [b, K, w] that meet their output tables;
    spikes, reference_spikes: [layers] sums over the K positions.
    """

    sequences: Tensor
    teacher: Tensor
    reference: Tensor | None
    spikes: Tensor
    reference_spikes: Tensor | None


def visit(run: Adaptation[Q], update: int) -> list[Visited]:
    """Steps 1-3: prompts, rollouts of the active student, scores of the frozen models. No gradients."""
    setup, options, policy = run.setup, run.options, run.objective
    k, size = options.max_completion_length, options.micro_batch_size
    prompts = setup.micro_batches(prompt_rows(setup, update, options.prompt_length), size)
    numbers = setup.micro_batches(uniforms(setup.config.train.seed, update, options.batch_size, k), size)
    # The embedding's neurons, layer -1, count for a rate target alone.
    every = tuple(range(-1 if options.rate_target else 0, run.reference.config.num_hidden_layers))
    parts = []
    for rows, uniform in zip(prompts, numbers, strict=True):
        sampled = run.call(policy.rollout, rows, uniform, options.temperature, every, options.rate_scope)
        parts.append(score(setup, run.reference, sampled))
    return parts


@torch.no_grad()
def score(setup: Setup, reference: BiSpikCLMForCausalLM, sampled: Rollout) -> Visited:
    """What teacher and reference say about the visited prefixes s_t = (prompt, y_<t)."""
    options = setup.config.stage2
    inputs, k = sampled.sequences[:, :-1], options.max_completion_length
    teacher = run_teacher(setup.teacher, inputs, internals=False).features[:, -k:]
    if not (options.ref_coef or options.spike_coef):
        return Visited(sampled.sequences, teacher, None, sampled.spikes, None)
    layers = monitored(options)
    recorder = Recorder(RATE_SITES[options.rate_scope], layers, tokens=slice(-k, None))
    with setup.accelerator.autocast():  # in the active student's precision, or the two would differ from the start
        features = reference.model(inputs, use_cache=False, recorder=recorder).last_hidden_state[:, -k:]
    spikes = layer_spikes(recorder, layers, options.rate_scope) if options.spike_coef else None
    return Visited(sampled.sequences, teacher, features if options.ref_coef else None, sampled.spikes, spikes)


def monitored(options: Stage2Config) -> tuple[int, ...]:
    """S_spk counted from 0."""
    return tuple(layer - 1 for layer in options.spike_layers)


class DistilledPolicy(Policy):
    """The active student under a divergence to the teacher; `terms` gives what the loss is made of."""

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int, divergence: Divergence) -> None:
        super().__init__(student, chunk)
        self.divergence = divergence

    def terms(
        self,
        visited: Visited,
        teacher_head: nn.Module,
        reference_head: nn.Module,
        layers: tuple[int, ...],
        scope: str,
        weights: tuple[float, float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weighted sum, [sum of the teacher's divergence, sum of KL(student || reference)], [spikes of each layer]).

        weights: of the two sums. The sums have no gradient of their own (`losses.linear_sums`).
        """
        k = visited.teacher.shape[1]
        recorder = Recorder((EMBED_SITE, *RATE_SITES[scope]), layers, tokens=slice(-k, None)) if layers else None
        output = self.student.model(visited.sequences[:, :-1], use_cache=False, recorder=recorder)

        def part(logits: Tensor, p: Tensor, r: Tensor | None = None) -> Tensor:
            with torch.no_grad():
                teacher = teacher_head(p).float()
                reference = None if r is None else reference_head(r).float()
            anchored = logits.new_zeros(()) if reference is None else reverse_kl(logits, reference)
            return torch.stack((self.divergence(logits, teacher), anchored))

        affine = self.student.lm_head.affine(output.last_hidden_state[:, -k:].flatten(0, 1))
        frozen = (visited.teacher,) if visited.reference is None else (visited.teacher, visited.reference)
        flat = (tensor.flatten(0, 1) for tensor in frozen)
        loss, sums = linear_sums(part, weights, self.chunk, affine, *flat)
        spikes = layer_spikes(recorder, layers, scope) if recorder is not None else sums.new_zeros(0)
        return loss, sums, spikes


def descend(run: Adaptation[D], parts: list[Visited]) -> dict[str, Any]:
    """Steps 4-6 up to the gradient: full-vocabulary sums and the spike loss, divided once, then backward."""
    setup, options, reference = run.setup, run.options, run.reference
    positions = options.batch_size * options.max_completion_length
    slots = rate_slots(reference.config, options.rate_scope, positions)
    layers = monitored(options) if options.spike_coef else ()
    # The rates of the whole batch are known before any backward pass: the rollout has them.
    counted_spikes = run.reduce(torch.stack([part.spikes for part in parts]).sum(0))
    dial = RateTarget.of(options, reference.config, positions, options.rate_scope)
    pull = None if dial is None else dial.at(run.done, counted_spikes)
    rates = (counted_spikes if dial is None else counted_spikes[1:]) / slots
    recorded = layers if dial is None else dial.layers
    places = [recorded.index(layer) for layer in layers]
    spike_loss, slope = rates.new_zeros(()), rates.new_zeros(0)
    if layers:
        counted = [part.reference_spikes for part in parts if part.reference_spikes is not None]
        reference_rates = run.reduce(torch.stack(counted).sum(0)) / slots
        spike_loss, slope = spike_coefficients(
            rates[list(layers)], reference_rates, options.rate_min, options.rate_max, options.rho
        )
    weights = (options.teacher_coef / positions, options.ref_coef / positions)
    total = torch.zeros(2, dtype=torch.float64, device=setup.device)
    heads = output_table(setup.teacher), reference.lm_head
    for part in run.micro_batches(parts):
        loss, sums, spikes = run.call(run.objective.terms, part, *heads, recorded, options.rate_scope, weights)
        if layers:
            loss = loss + options.spike_coef * (slope * spikes[places]).sum() / slots
        if pull is not None:
            loss = loss + pull(spikes)
        run.backward(loss)
        total += sums.double()
    opd, anchored = (run.reduce(total) / positions).tolist()
    paper = options.teacher_coef * opd + options.ref_coef * anchored + options.spike_coef * spike_loss.item()
    return {
        "loss": paper if pull is None else paper + pull.loss,
        **({} if pull is None else {"rate_loss": pull.loss, "network_rate": pull.rate}),
        "opd": opd,
        "ref": anchored,
        "spk": spike_loss.item(),
        "rate": rates.mean().item(),
        **{f"stage2/rate/layer{layer + 1}": value for layer, value in enumerate(rates.tolist())},
    }


def continuation_statistics(run: Adaptation[Q], parts: list[Visited]) -> dict[str, Any]:
    """Adj, Dist-4, Run and repeated 4-grams of this update's rollouts, over all processes; samples if asked for."""
    k, wanted = run.options.max_completion_length, run.options.log_samples
    tokens = run.setup.accelerator.gather(torch.cat([part.sequences[:, -k:] for part in parts])).cpu()
    samples = {"samples": [run.setup.tokenizer.decode(row) for row in tokens[:wanted].tolist()]} if wanted else {}
    return rollout_statistics(tokens.numpy()) | samples
