"""Continuing prompts with any `Scorer`: greedy, or sampled over the full vocabulary. numpy only.

A sequence's random numbers follow from (seed, row) alone, so the batch it is decoded in does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.evaluation.scoring import Scorer

STREAM = 0xE7A1  # apart from the numbers that choose the prompts
Stop = Callable[[list[int]], bool]


def uniforms(seed: int, row: int, length: int) -> NDArray[np.float64]:
    """`length` numbers in [0, 1) for one sequence."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed ^ STREAM, row], dtype=np.uint64)))
    return generator.random(length)


def choose(logits: NDArray[Any], uniform: float | None, temperature: float) -> int:
    """The most likely token (uniform None), or the one at `uniform` of the cumulative distribution."""
    if uniform is None:
        return int(np.argmax(logits))
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # the smallest temperatures: -inf, and all weight on the maximum
        cumulative = np.exp((wide - wide.max()) / temperature).cumsum()
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(min(place, len(logits) - 1))


def generate(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    first_row: int = 0,
    stop: Stop | None = None,
) -> list[list[int]]:
    """Up to `length` tokens after each prompt. `stop` sees a sequence's tokens so far and may end it.

    first_row: the number of the first prompt among all that are to be continued, when they come in several calls.
    """
    if length < 1:
        return [[] for _ in prompts]
    rows = len(prompts)
    random = [uniforms(seed, first_row + row, length) if temperature else None for row in range(rows)]
    made: list[list[int]] = [[] for _ in prompts]
    done = [False] * rows
    session, logits = scorer.start(prompts)
    for step in range(length):
        for row in range(rows):
            if done[row]:
                continue
            uniform = random[row]
            made[row].append(choose(logits[row], None if uniform is None else float(uniform[step]), temperature))
            done[row] = stop is not None and stop(made[row])
        if all(done) or step == length - 1:
            break
        # A finished sequence is fed on so that the others keep their places; its tokens are not looked at.
        logits = session.feed([tokens[-1] for tokens in made])
    return made


def in_batches(count: int, size: int) -> Iterator[range]:
    for first in range(0, count, size):
        yield range(first, min(count, first + size))
