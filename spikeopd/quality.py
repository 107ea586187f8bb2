r"""How good is this student: perplexity, KL to the teacher, rollout statistics, firing rates. One home for each number.

    perplexity   exp(mean of -log q(next token)), natural logarithms
    teacher KL   mean of KL(teacher || student) over the prefixes of a text, or of the student's own continuations
    Adj, Dist-4, Run   of generated continuations (App. B), and the collapse they show (Tab. 1)
    rate         spikes / (positions x T_s x neurons): layer by layer, over the sites of a scope

Functions of logits and of tokens are numpy. Functions of a student import torch when they are called, so that a bundle
is judged without it. Everything that is summed returns sums; the caller divides once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import EMBED_SITE

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
    from spikeopd.rollout import Rollout

Tokens = NDArray[np.int64]

# --- from logits -----------------------------------------------------------------------------------------------------


def log_likelihoods(logits: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.float64]:
    """log q of each target, [n], from logits [n, vocab]."""
    peak = logits.max(-1)
    norm = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
    chosen: NDArray[np.float64] = logits[np.arange(len(targets)), targets] - norm
    return chosen


def perplexity(nats: float, tokens: int, most: float = math.inf) -> float:
    """exp(nats / tokens). most: nats per token above which the number says nothing and is cut, so that it stays one."""
    mean = min(nats / tokens, most)
    return math.exp(mean) if mean < 700 else math.inf


# --- of generated continuations --------------------------------------------------------------------------------------


def adjacent_repetition(y: Tokens) -> float:
    """R_adj: share of positions that repeat their predecessor. y [K]."""
    return float((y[1:] == y[:-1]).mean()) if len(y) > 1 else 0.0


def maximum_run(y: Tokens) -> int:
    """Length of the longest stretch of one identical token."""
    breaks = np.flatnonzero(np.diff(y)) + 1
    return int(np.diff(np.concatenate(([0], breaks, [len(y)]))).max())


def distinct_4(y: Tokens) -> float:
    """Unique contiguous 4-grams over their number K - 3; 1 for fewer than four tokens."""
    if len(y) < 4:
        return 1.0
    grams = [tuple(row) for row in np.lib.stride_tricks.sliding_window_view(y, 4)]
    return len(set(grams)) / len(grams)


def repeated_4(y: Tokens) -> float:
    """Share of positions whose 4-gram already appeared earlier in the continuation: 1 - Dist-4 by definition."""
    return 1.0 - distinct_4(y)


def rollout_statistics(continuations: Tokens) -> dict[str, float]:
    """Means over continuations [rows, K]."""
    measures = {"adj": adjacent_repetition, "dist4": distinct_4, "run": maximum_run, "rep4": repeated_4}
    return {name: float(np.mean([measure(y) for y in continuations])) for name, measure in measures.items()}


@dataclass
class CollapseDetector:
    """Rollout-feedback collapse: the `window`-update means of Adj and 1 - Dist-4 exceed both limits (Tab. 1)."""

    window: int = 20
    adj_limit: float = 0.10
    dist4_limit: float = 0.05
    history: deque[tuple[float, float]] = field(default_factory=deque)
    onset: int | None = None

    def update(self, step: int, adj: float, dist4: float) -> bool:
        """Add one update's statistics; True from the update on at which collapse began."""
        self.history.append((adj, 1.0 - dist4))
        while len(self.history) > self.window:
            self.history.popleft()
        if self.onset is None and len(self.history) == self.window:
            means = np.mean(self.history, axis=0)
            if means[0] > self.adj_limit and means[1] > self.dist4_limit:
                self.onset = step
        return self.onset is not None

    def state(self) -> dict[str, object]:
        return {"history": [list(pair) for pair in self.history], "onset": self.onset}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.history = deque((float(a), float(b)) for a, b in state["history"])
        self.onset = state["onset"]


# --- firing rates ----------------------------------------------------------------------------------------------------

# Sites of fixed size whose spikes make the firing rate of a layer. The attention map is reported apart.
RATE_SITES = {"all": ("q", "k", "v", "r", "o", "x", "f", "y", "h"), "output": ("h",)}


def rate_sites(config: PreTrainedConfig, rate_scope: str) -> list[str]:
    """Those of RATE_SITES that this student's block has."""
    return [site for site in RATE_SITES[rate_scope] if site in config.layer_sites]


def layer_neurons(config: PreTrainedConfig, rate_scope: str) -> int:
    """N_l: neurons of one layer that count for its rate."""
    return sum(config.ffn_dim if site == "f" else config.hidden_size for site in rate_sites(config, rate_scope))


def rate_slots(config: PreTrainedConfig, rate_scope: str, positions: int = 1) -> int:
    """Places for a spike in one layer, positions x steps x N_l: a layer's rate is its spikes over this."""
    slots: int = positions * config.steps * layer_neurons(config, rate_scope)
    return slots


def layer_spikes(recorder: Recorder, layers: tuple[int, ...], rate_scope: str) -> Tensor:
    """Sum of spikes of each layer, [layers], in the graph if the recorder's spikes are. Layer -1: the embedding's."""
    import torch

    def of(layer: int) -> Tensor:
        # Counted in float32: bfloat16 stops counting at 256.
        sites = [site for site in (EMBED_SITE, *RATE_SITES[rate_scope]) if (layer, site) in recorder.spikes]
        first, *others = (recorder.spikes[layer, site].sum(dtype=torch.float32) for site in sites)
        return sum(others, first)

    return torch.stack([of(layer) for layer in layers])


# --- of a student beside its teacher ---------------------------------------------------------------------------------


def teacher_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) at each position: [...] from logits [..., vocab]."""
    log_p = teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - student.log_softmax(-1))).sum(-1)


def token_sums(
    student: BiSpikCLMForCausalLM, ids: Tensor, teacher: Tensor, teacher_head: nn.Module, chunk: int
) -> Tensor:
    """(sum of -log q(next token), sum of KL(teacher || student)) over ids [rows, n]; teacher: its features."""
    import torch

    from spikeopd.losses import chunked, forward_kl, hard_token

    features = student.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

    def part(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        logits = student.lm_head(q).float()
        return torch.stack((hard_token(logits, labels), forward_kl(logits, teacher_head(p).float())))

    return chunked(part, chunk, features, teacher[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def visited_kl(
    student: BiSpikCLMForCausalLM, sequences: Tensor, teacher: Tensor, teacher_head: nn.Module, chunk: int
) -> Tensor:
    """Sum of KL(teacher || student) over the K visited prefixes of sequences [rows, P + K].

    teacher: its features [rows, K, w] at them.
    """
    from spikeopd.losses import chunked, forward_kl

    features = student.model(sequences[:, :-1], use_cache=False).last_hidden_state[:, -teacher.shape[1] :]

    def part(q: Tensor, p: Tensor) -> Tensor:
        return forward_kl(student.lm_head(q).float(), teacher_head(p).float())

    return chunked(part, chunk, features.flatten(0, 1), teacher.flatten(0, 1))


def on_text(
    sums: Callable[[Tensor, Tensor], Tensor], teacher: PreTrainedModel, ids: Tensor, rows: int = 16
) -> dict[str, float]:
    """Perplexity of the student and KL(teacher || student) per token, on windows of text ids [n, length].

    sums: (ids, teacher features) -> `token_sums` of the student. It is a function because in training a parallel
    wrapper around the student must see every use of it.
    """
    import torch

    from spikeopd.models.teacher import run_teacher

    totals, count = torch.zeros(2, dtype=torch.float64), 0
    with torch.no_grad():
        for part in torch.split(ids, rows):
            target = run_teacher(teacher, part, internals=False).features
            totals += sums(part, target).double().cpu()
            count += part[:, 1:].numel()
    nats, kl = totals.tolist()
    return {"perplexity": perplexity(nats, count, most=50.0), "teacher_kl": kl / count}


def teacher_perplexity(teacher: PreTrainedModel, ids: Tensor, chunk: int, rows: int = 16) -> float:
    """The teacher's own perplexity on windows ids [n, length]: what a student's on the same ones is held against."""
    import torch

    from spikeopd.losses import chunked, hard_token
    from spikeopd.models.teacher import output_table, run_teacher

    head, nats, count = output_table(teacher), 0.0, 0
    with torch.no_grad():
        for part in torch.split(ids, rows):
            features = run_teacher(teacher, part, internals=False).features[:, :-1].flatten(0, 1)
            labels = part[:, 1:].flatten()
            nats += chunked(lambda p, y: hard_token(head(p).float(), y), chunk, features, labels).item()
            count += labels.numel()
    return perplexity(nats, count, most=50.0)


@contextmanager
def without_attention(student: BiSpikCLMForCausalLM) -> Iterator[None]:
    """R = 0: nothing of the prefix reaches a token. What that costs says how much of it a student uses."""

    def silence(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(argument.new_zeros(argument.shape) for argument in arguments)

    hooks = [layer.out_proj.register_forward_pre_hook(silence) for layer in student.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def on_own_text(
    sample: Callable[[Tensor, Tensor], Rollout],
    kl: Callable[[Tensor, Tensor], Tensor],
    teacher: PreTrainedModel,
    prompts: Tensor,
    uniform: Tensor,
    rows: int = 64,
) -> tuple[dict[str, float], Tensor]:
    """KL(teacher || student) on the student's own continuations of prompts [n, P], and their statistics.

    sample: (prompts, uniforms) -> Rollout; kl: (sequences, teacher features) -> `visited_kl`; uniform [n, K].
    Also returns the spikes of the layers that `sample` counts, [layers] (see `rate_slots`).
    """
    import torch

    from spikeopd.models.teacher import run_teacher

    k, total, tokens, spikes = uniform.shape[1], 0.0, [], []
    with torch.no_grad():
        for part, numbers in zip(torch.split(prompts, rows), torch.split(uniform, rows), strict=True):
            sampled = sample(part, numbers)
            target = run_teacher(teacher, sampled.sequences[:, :-1], internals=False).features[:, -k:]
            total += kl(sampled.sequences, target).item()
            tokens.append(sampled.sequences[:, -k:].cpu())
            spikes.append(sampled.spikes.double().cpu())
    found = {"self_kl": total / uniform.numel(), **rollout_statistics(torch.cat(tokens).numpy())}
    return found, torch.stack(spikes).sum(0)
