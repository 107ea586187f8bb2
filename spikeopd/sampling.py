"""The next token of every decoder: penalty, temperature, top-k, top-p, min-p, one uniform number through the inverse.

numpy only; the simulator, the evaluation and Stage 2 draw from here. A sequence never depends on the batch, the
micro-batch or the rank that it is decoded in, because its random numbers are keyed by what it is:

    generators       (seed, prompt, how often it came before): `spikeopd-run-lava`, bundles, the harness
    row_generators   (seed, row): `spikeopd-eval rollouts` of a checkpoint
    uniforms         (seed, update, row, position): the rollouts of Stage 2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.errors import ConfigError

Array = NDArray[Any]
LARGEST_SEED = 2**63 - 1  # that a user may give
ROWS, ROLLOUTS = 0xE7A1, 0x5B1CE  # keep the streams apart from each other and from the one that chooses prompts


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    min_p               drops tokens less likely than this share of the likeliest
    repetition_penalty  divides the positive logits of tokens seen before and multiplies the negative ones; 1 is off
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            problems.append(f"top-k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min-p must lie between 0 (off) and 1, got {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            problems.append(f"repetition-penalty must be above 0 (1 is off), got {self.repetition_penalty}")
        if not 0 <= self.seed <= LARGEST_SEED:
            problems.append(f"seed must lie between 0 and 2^63 - 1, got {self.seed}")
        if self.max_new_tokens < 0:
            problems.append(f"max-new-tokens must be 0 or more, got {self.max_new_tokens}")
        if problems:
            raise ConfigError("; ".join(problems))


# What a person who asks for nothing else gets from a small model: greedy decoding mostly repeats itself.
USUAL = Sampling(0.8, top_p=0.95)
GENERATION = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


def from_generation_config(config: Mapping[str, Any]) -> Sampling:
    """The sampling that a generation_config.json of transformers, or a bundle's `generation`, asks for.

    Without `do_sample` or a field of its own it asks for nothing: then it is the usual one.
    """
    if config.get("do_sample") is False:
        return Sampling()
    named = {name: kind(config[name]) for name, kind in GENERATION.items() if isinstance(config.get(name), int | float)}
    return replace(Sampling(1.0) if named else USUAL, **named)


def asked_for(given: Mapping[str, Any], usual: Sampling) -> Sampling:
    """The sampling of somebody who names some options: who names none gets the usual one whole.

    Who names any gets it and no other filter, so that `temperature` alone means what it says.
    """
    named = {name: value for name, value in given.items() if value is not None}
    base = Sampling(usual.temperature) if named.keys() & GENERATION.keys() else usual
    return replace(base, **named)


def choose(
    logits: Array, sampling: Sampling, generator: np.random.Generator, seen: Sequence[Sequence[int]] = ()
) -> int:
    """The next token. Ties go to the lower token number, so the choice is the same everywhere.

    seen: prompt and text so far, for the penalty on repetition.
    """
    if sampling.repetition_penalty != 1:
        logits = _penalised(logits, sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    logits = logits.astype(np.float64, copy=False)
    candidates = np.arange(logits.size)
    if 0 < sampling.top_k < logits.size:
        candidates = _largest(logits, sampling.top_k)
    kept = logits[candidates]
    with np.errstate(over="ignore"):  # the largest is 0 after the subtraction; the others may fall to -infinity
        weights = np.exp((kept - kept.max()) / sampling.temperature)
    if sampling.top_p < 1:
        keep = _nucleus(weights, sampling.top_p * weights.sum())
        candidates, weights = candidates[keep], weights[keep]
    if sampling.min_p > 0:
        keep = np.flatnonzero(weights >= sampling.min_p)  # the likeliest has weight 1
        candidates, weights = candidates[keep], weights[keep]
    cumulative = np.cumsum(weights)
    place = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(candidates[min(int(place), candidates.size - 1)])


def _penalised(logits: Array, penalty: float, seen: Sequence[Sequence[int]]) -> Array:
    tokens = np.unique(np.concatenate([np.asarray(part, np.int64) for part in (*seen, ())]))
    logits = logits.astype(np.float64)  # a copy
    logits[tokens] = np.where(logits[tokens] > 0, logits[tokens] / penalty, logits[tokens] * penalty)
    return logits


def _nucleus(weights: Array, limit: float, count: int = 128) -> Array:
    """The fewest of the largest weights that sum up to `limit`, in ascending order of index. Few are enough as a rule,
    so few are sorted: sorting a whole vocabulary costs more than making its logits.
    """
    while True:
        head = _largest(weights, count) if count < weights.size else np.arange(weights.size)
        order = head[np.argsort(-weights[head], kind="stable")]
        reached = np.cumsum(weights[order]) >= limit
        if reached[-1] or head.size == weights.size:
            return np.sort(order[: int(np.argmax(reached)) + 1])
        count *= 8


def _largest(logits: Array, count: int) -> Array:
    """The `count` largest by value, then by lower index; in ascending order of index."""
    limit = np.partition(logits, logits.size - count)[logits.size - count]
    above, ties = np.flatnonzero(logits > limit), np.flatnonzero(logits == limit)
    return np.sort(np.concatenate([above, ties[: count - above.size]]))


def generators(prompts: Sequence[Sequence[int]], seed: int) -> list[np.random.Generator]:
    """One random stream per sequence, fixed by seed, prompt and how often the same prompt came before.

    So a sequence's tokens depend neither on the other prompts of the run nor on their order.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    streams = []
    for prompt in prompts:
        key = tuple(prompt)
        streams.append(np.random.default_rng([seed, seen[key], *key]))
        seen[key] += 1
    return streams


def row_generators(seed: int, rows: int) -> list[np.random.Generator]:
    """One random stream per row, fixed by (seed, row)."""
    return row_generators_from(seed, 0, rows)


def row_generators_from(seed: int, first: int, rows: int) -> list[np.random.Generator]:
    """Those of the rows first … first + rows - 1."""
    return [_philox(seed ^ ROWS, row) for row in range(first, first + rows)]


def uniforms(seed: int, update: int, rows: int, length: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each row and position of an update, [rows, length]."""
    return _philox(seed ^ ROLLOUTS, update).random((rows, length))


def _philox(first: int, second: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([first, second], dtype=np.uint64)))
