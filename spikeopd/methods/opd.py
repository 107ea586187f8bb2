r"""Stage 2, SpikeOPD: adapt the student on its own generations without collapsing (Method, App. B). Readable alone.

One update:  prompts from (seed, update) -> the *active* student rolls out K tokens -> teacher, active student and
frozen reference score the same prefixes -> L = L_OPD + 0.75 L_ref + 0.30 L_spk -> Adam. Only theta changes.

    L_OPD  mean KL(teacher || student)       L_ref  mean KL(student || reference)       over B K visited prefixes
    L_spk  per monitored layer, on the firing rate of the whole batch (losses.spike_loss)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd import checkpoint, quality
from spikeopd.errors import CheckFailed
from spikeopd.losses import chunked, forward_kl, reverse_kl, spike_coefficients
from spikeopd.methods.loop import (
    Objective,
    finish_update,
    local_gradients,
    make_optimizer,
    run_updates,
    save_student,
)
from spikeopd.methods.setup import Setup, load_student, validate
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import fingerprint, freeze, output_table, run_teacher
from spikeopd.quality import RATE_SITES, CollapseDetector, layer_spikes, rate_slots, rollout_statistics
from spikeopd.rollout import Rollout, rollout, uniforms
from spikeopd.runlog import RunLog
from spikeopd.text.tokens import batch

STAGE = "stage2"
Divergence = Callable[[Tensor, Tensor], Tensor]  # (student logits, teacher logits) -> sum over positions
MakeObjective = Callable[[Setup, BiSpikCLMForCausalLM], "PolicyObjective"]
# (setup, objective, optimizer, reference, update) -> values for the log
UpdateStep = Callable[[Setup, Any, torch.optim.Optimizer, BiSpikCLMForCausalLM, int], dict[str, float]]


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


class PolicyObjective(Objective):
    """The active student; `terms` gives the sums of the output losses and the spikes of the monitored layers."""

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int, divergence: Divergence = forward_kl) -> None:
        super().__init__(student)
        self.chunk, self.divergence = chunk, divergence

    def rollout(
        self, prompts: Tensor, uniform: Tensor, temperature: float, layers: tuple[int, ...], scope: str
    ) -> Rollout:
        return rollout(self.student, prompts, uniform, temperature, layers, scope)

    def terms(
        self,
        visited: Visited,
        teacher_head: nn.Module,
        reference_head: nn.Module | None,
        layers: tuple[int, ...],
        scope: str,
    ) -> tuple[Tensor, Tensor]:
        """([sum of the teacher's divergence, sum of KL(student || reference)], [spikes of each layer])."""
        k = visited.teacher.shape[1]
        recorder = Recorder(RATE_SITES[scope], layers, tokens=slice(-k, None)) if layers else None
        inputs = visited.sequences[:, :-1]
        features = (
            self.student.model(inputs, use_cache=False, recorder=recorder).last_hidden_state[:, -k:].flatten(0, 1)
        )

        def part(q: Tensor, p: Tensor, r: Tensor | None = None) -> Tensor:
            logits = self.student.lm_head(q).float()
            with torch.no_grad():
                teacher = teacher_head(p).float()
                reference = reference_head(r).float() if r is not None and reference_head is not None else None
            anchored = logits.new_zeros(()) if reference is None else reverse_kl(logits, reference)
            return torch.stack((self.divergence(logits, teacher), anchored))

        frozen = (visited.teacher,) if visited.reference is None else (visited.teacher, visited.reference)
        sums = chunked(part, self.chunk, features, *(tensor.flatten(0, 1) for tensor in frozen))
        spikes = layer_spikes(recorder, layers, scope) if recorder is not None else sums.new_zeros(0)
        return sums, spikes

    def teacher_kl(self, sequences: Tensor, teacher: Tensor, teacher_head: nn.Module) -> Tensor:
        """Sum of KL(teacher || student) over the visited prefixes, whatever divergence the method trains with."""
        return quality.visited_kl(self.student, sequences, teacher, teacher_head, self.chunk)


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    """Adapt the student found at `student_path`; leaves `final/` and returns the summary."""
    return adapt(setup, log, student_path, policy, update_step, resume=resume)


def policy(setup: Setup, student: BiSpikCLMForCausalLM) -> PolicyObjective:
    return PolicyObjective(student, setup.config.train.kl_chunk_tokens)


def adapt(
    setup: Setup, log: RunLog, student_path: str, make: MakeObjective, step: UpdateStep, *, resume: bool = False
) -> dict[str, Any]:
    """What SpikeOPD shares with its controls: start, collapse guard, end. `make` gives the objective, `step` an update.

    A method without rollouts of its own has no `adj` among a step's values; the collapse guard then has nothing to see.
    """
    config, options = setup.config, setup.config.stage2
    started = time.monotonic()
    student = load_student(student_path, config).to(setup.device)
    reference = freeze(copy.deepcopy(student))
    frozen = {"teacher": (setup.teacher, fingerprint(setup.teacher)), "reference": (reference, fingerprint(reference))}
    objective, optimizer = make_optimizer(setup, make(setup, student), options.learning_rate)
    length = min(config.data.sequence_length, student.config.max_position_embeddings)
    before = validate(setup, objective, length) | self_generated(setup, objective)
    log.note(
        f"stage 2 starts at perplexity {before['perplexity']:.1f}, KL to the teacher on its own prefixes "
        f"{before['self_kl']:.3f}"
    )
    detector = CollapseDetector(options.collapse_window, options.collapse_adj, options.collapse_dist4)
    recent: list[dict[str, float]] = []

    def state() -> dict[str, Any]:
        return detector.state() | {"recent": recent}

    def restore(stored: Mapping[str, Any]) -> None:
        detector.restore(dict(stored))
        recent[:] = stored["recent"]

    def after(update: int, values: dict[str, float]) -> str | None:
        if config.train.eval_every and update % config.train.eval_every == 0:
            values.update(validate(setup, objective, length))
        if "adj" not in values:
            return None
        recent.append({key: values[key] for key in ("adj", "dist4", "run")})
        del recent[: -options.collapse_window]
        collapsed = detector.update(update, values["adj"], values["dist4"])
        values["collapsed"] = float(collapsed)
        if collapsed and detector.onset == update:
            log.note(
                f"stage 2: rollouts collapsed at update {update} ({options.collapse_window}-update means: adjacent "
                f"repetition above {options.collapse_adj}, 1 - Dist-4 above {options.collapse_dist4}); "
                f"on_collapse={options.on_collapse}"
            )
        return "stop" if collapsed and options.on_collapse != "log" else None

    # A rollback needs a checkpoint older than the window in which the collapse showed.
    needed = options.collapse_window // config.train.save_every + 2 if options.on_collapse == "rollback" else 0
    done = run_updates(
        setup, log, STAGE, objective, optimizer, options.updates,
        lambda update: step(setup, objective, optimizer, reference, update),
        resume=resume, state=state, restore=restore, after=after,
        show=("loss", "opd", "adj", "dist4"), keep=max(needed, config.train.keep_checkpoints),
    )  # fmt: skip
    summary: dict[str, Any] = {"method": options.method, "updates": done, "onset": detector.onset}
    if detector.onset is not None and options.on_collapse == "rollback":
        summary["rolled_back_to"] = roll_back(
            setup, log, objective, reference, detector.onset - options.collapse_window
        )
    for name, (model, mark) in frozen.items():
        if fingerprint(model) != mark:
            raise CheckFailed(f"stage 2: the frozen {name} changed during training; this run must not be used")
    save_student(setup, objective, log.folder / "final")
    result = validate(setup, objective, length) | self_generated(setup, objective)
    rollouts = {key: sum(v[key] for v in recent) / len(recent) for key in recent[0]} if recent else {}
    return summary | {
        "start": before,
        "final": result,
        "last_rollouts": rollouts,
        "seconds": round(time.monotonic() - started, 1),
    }


def update_step(
    setup: Setup, objective: Any, optimizer: torch.optim.Optimizer, reference: BiSpikCLMForCausalLM, update: int
) -> dict[str, float]:
    """One optimizer step (App. B, update sequence)."""
    options = setup.config.stage2
    parts = visit(setup, objective, reference, update)
    values = descend(setup, objective, reference, parts)
    norm = finish_update(
        setup, objective, optimizer, STAGE, update, values["loss"], options.max_grad_norm, options.learning_rate
    )
    return values | continuation_statistics(setup, parts) | {"grad_norm": norm}


def prompt_rows(setup: Setup, update: int, length: int) -> Tensor:
    """The corpus windows of an update, [B, length]: every method of Stage 2 draws them alike."""
    options, seed = setup.config.stage2, setup.config.train.seed
    return torch.from_numpy(
        batch(setup.prompts, batch_size=options.batch_size, length=length, seed=seed + 1, step=update)
    )


def visit(setup: Setup, objective: Any, reference: BiSpikCLMForCausalLM, update: int) -> list[Visited]:
    """Steps 1-3: prompts, rollouts of the active student, scores of the frozen models. No gradients."""
    options, seed = setup.config.stage2, setup.config.train.seed
    k, size = options.max_completion_length, options.micro_batch_size
    prompt_parts = setup.rows(prompt_rows(setup, update, options.prompt_length)).split(size)
    uniform_parts = setup.rows(uniforms(seed, update, options.batch_size, k)).split(size)
    every = tuple(range(reference.config.num_hidden_layers))
    parts = []
    for rows, uniform in zip(prompt_parts, uniform_parts, strict=True):
        sampled = objective("rollout", rows, uniform, options.temperature, every, options.rate_scope)
        parts.append(score(setup, reference, sampled, k))
    return parts


@torch.no_grad()
def score(setup: Setup, reference: BiSpikCLMForCausalLM, sampled: Rollout, k: int) -> Visited:
    """What teacher and reference say about the visited prefixes."""
    options = setup.config.stage2
    inputs = sampled.sequences[:, :-1]
    teacher = run_teacher(setup.teacher, inputs, internals=False).features[:, -k:]
    if not (options.ref_coef or options.spike_coef):
        return Visited(sampled.sequences, teacher, None, sampled.spikes, None)
    layers = monitored(options.spike_layers)
    recorder = Recorder(RATE_SITES[options.rate_scope], layers, tokens=slice(-k, None))
    with setup.accelerator.autocast():  # in the active student's precision, or the two would differ from the start
        features = reference.model(inputs, use_cache=False, recorder=recorder).last_hidden_state[:, -k:]
    spikes = layer_spikes(recorder, layers, options.rate_scope) if options.spike_coef else None
    return Visited(sampled.sequences, teacher, features if options.ref_coef else None, sampled.spikes, spikes)


def descend(setup: Setup, objective: Any, reference: BiSpikCLMForCausalLM, parts: list[Visited]) -> dict[str, float]:
    """Steps 4-6 up to the gradient: full-vocabulary sums and the spike loss, divided once, then backward."""
    options, accelerator = setup.config.stage2, setup.accelerator
    positions = options.batch_size * options.max_completion_length
    slots = rate_slots(reference.config, options.rate_scope, positions)
    layers = monitored(options.spike_layers) if options.spike_coef else ()
    # The rates of the whole batch are known before any backward pass: the rollout has them.
    rates = accelerator.reduce(torch.stack([part.spikes for part in parts]).sum(0), "sum") / slots
    spike_loss, slope = rates.new_zeros(()), rates.new_zeros(0)
    if layers:
        reference_rates = (
            accelerator.reduce(torch.stack([part.reference_spikes for part in parts]).sum(0), "sum") / slots
        )
        spike_loss, slope = spike_coefficients(
            rates[list(layers)], reference_rates, options.rate_min, options.rate_max, options.rho
        )
    coefficients = torch.tensor([options.teacher_coef, options.ref_coef], device=setup.device)
    total = torch.zeros(2, dtype=torch.float64, device=setup.device)
    for index, part in enumerate(parts):
        with local_gradients(accelerator, objective, last=index == len(parts) - 1):
            sums, spikes = objective(
                "terms", part, output_table(setup.teacher), reference.lm_head, layers, options.rate_scope
            )
            loss = (sums * coefficients).sum() / positions
            if layers:
                loss = loss + options.spike_coef * (slope * spikes).sum() / slots
            accelerator.backward(loss * accelerator.num_processes)
        total += sums.detach().double()
    opd, anchored = (accelerator.reduce(total, "sum") / positions).tolist()
    return {
        "loss": options.teacher_coef * opd + options.ref_coef * anchored + options.spike_coef * spike_loss.item(),
        "opd": opd,
        "ref": anchored,
        "spk": spike_loss.item(),
        "rate": rates.mean().item(),
        **{f"{STAGE}/rate/layer{layer + 1}": value for layer, value in enumerate(rates.tolist())},
    }


def monitored(spike_layers: tuple[int, ...]) -> tuple[int, ...]:
    """S_spk counted from 0."""
    return tuple(layer - 1 for layer in spike_layers)


def continuation_statistics(setup: Setup, parts: list[Visited]) -> dict[str, Any]:
    """Adj, Dist-4, Run and repeated 4-grams of this update's rollouts, over all processes; samples if asked for."""
    k = setup.config.stage2.max_completion_length
    tokens = setup.accelerator.gather(torch.cat([part.sequences[:, -k:] for part in parts])).cpu()
    wanted = setup.config.stage2.log_samples
    samples = {"samples": [setup.tokenizer.decode(row) for row in tokens[:wanted].tolist()]} if wanted else {}
    return rollout_statistics(tokens.numpy()) | samples


def self_generated(setup: Setup, objective: Any, rows: int = 32) -> dict[str, float]:
    """KL(teacher || student) on the student's own continuations of fixed validation prompts, and their statistics."""
    options, head = setup.config.stage2, output_table(setup.teacher)
    prompts = torch.from_numpy(
        batch(setup.validation, batch_size=rows, length=options.prompt_length, seed=0, step=0)
    ).to(setup.device)
    found, _ = quality.on_own_text(
        lambda part, uniform: objective("rollout", part, uniform, options.temperature, (), options.rate_scope),
        lambda sequences, target: objective("teacher_kl", sequences, target, head),
        setup.teacher,
        prompts,
        uniforms(0, 0, rows, options.max_completion_length),
    )
    return {name: found[name] for name in ("self_kl", "adj", "dist4", "run")}


def roll_back(setup: Setup, log: RunLog, objective: Any, reference: BiSpikCLMForCausalLM, healthy: int) -> int:
    """Return to the newest checkpoint from before the collapse showed; to the Stage-1 student if there is none."""
    for path in reversed(checkpoint.checkpoints(log.folder / STAGE / "checkpoints")):
        update = checkpoint.read_state(path)["update"]
        if update <= healthy:
            checkpoint.load(path, objective, None)
            return int(update)
    setup.accelerator.unwrap_model(objective).student.load_state_dict(reference.state_dict())
    return 0
