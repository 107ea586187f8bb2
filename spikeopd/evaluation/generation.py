"""Continuing prompts with any `Scorer`. The tokens do not depend on the batch they are decoded in. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spikeopd.evaluation.scoring import Scorer
from spikeopd.sampling import Sampling, choose, generators

Stop = Callable[[list[int]], bool]


def generate(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streams: Sequence[np.random.Generator] | None = None,
    stop: Stop | None = None,
) -> list[list[int]]:
    """Up to `sampling.max_new_tokens` tokens after each prompt. `stop` sees a sequence's tokens so far and may end it.

    streams: the random numbers of each prompt; by default those of `spikeopd-run-lava`.
    """
    length = sampling.max_new_tokens
    made: list[list[int]] = [[] for _ in prompts]
    if length < 1:
        return made
    streams = generators(prompts, sampling.seed) if streams is None else streams
    done = [False] * len(made)
    session, logits = scorer.start(prompts)
    for step in range(length):
        for row, tokens in enumerate(made):
            if not done[row]:
                tokens.append(choose(logits[row], sampling, streams[row]))
                done[row] = stop is not None and stop(tokens)
        if all(done) or step == length - 1:
            break
        # A finished sequence is fed on so that the others keep their places; its tokens are not looked at.
        logits = session.feed([tokens[-1] for tokens in made])
    return made


def in_batches(count: int, size: int) -> Iterator[slice]:
    for first in range(0, count, size):
        yield slice(first, min(count, first + size))
