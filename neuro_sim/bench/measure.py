"""Speed of the event engine on a bundle: prompts read and tokens written, by context, threads and batch."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuro_sim.api import Bundle, Model
from neuro_sim.backends import Running
from spikeopd.contracts import APPENDIX_E_PJ, Activity
from spikeopd.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One test. Speeds are tokens of all sequences together; `cpu_ms` is CPU time of the whole process per token.

    test  "prompt N": a prompt of N tokens is read; "decode N @ C": N tokens are written behind a context of C
    """

    test: str
    threads: int
    batch: int
    tokens_per_second: float
    deviation: float
    cpu_ms: float
    sops_per_token: float
    pj_per_token: float
    firing_rate: float
    peak_mib: float


@dataclass(frozen=True)
class Plan:
    """What to measure: every combination. Each is measured `rounds` times after one round that warms up."""

    prompts: Sequence[int]
    decode: int
    contexts: Sequence[int]
    threads: Sequence[int | None]
    batches: Sequence[int]
    rounds: int = 5

    def check(self, room: int) -> None:
        longest = max([0, *self.prompts, *(context + self.decode for context in self.contexts if self.decode)])
        if longest > room:
            raise ConfigError(f"{longest} tokens do not fit: this model's context holds {room}")
        if min([1, *self.prompts, *self.contexts, *self.batches]) < 1 or self.rounds < 1 or self.decode < 0:
            raise ConfigError("lengths, contexts, batches and rounds must be at least 1")


def measure(bundle: Bundle, plan: Plan, tell: Callable[[str], None]) -> Iterator[Row]:
    plan.check(bundle.shape.max_position_embeddings)
    for threads in plan.threads:
        with bundle.load("event", Running(threads)) as model:
            for length in plan.prompts:
                tell(f"prompt {length}, {model.threads} thread(s)")
                yield _row(model, f"prompt {length}", 1, plan.rounds, _reading(model, length))
            for context in plan.contexts if plan.decode else ():
                for batch in plan.batches:
                    name = f"decode {plan.decode} @ {context}"
                    tell(f"{name}, batch {batch}, {model.threads} thread(s)")
                    yield _row(model, name, batch, plan.rounds, _writing(model, context, plan.decode, batch))


Round = Callable[[], tuple[float, float, list[Activity]]]  # wall seconds, CPU seconds, what was counted


def _row(model: Model, test: str, batch: int, rounds: int, once: Round) -> Row:
    once()
    results = [once() for _ in range(rounds)]
    counted = Activity.total(results[-1][2])
    speeds = [counted.tokens / wall for wall, _, _ in results]
    sops = sum(int(counts.sum()) for counts in counted.sops.values())
    macs = counted.macs["embed"] + counted.macs["head"]
    spikes, cells = (
        sum(int(value.sum()) for site, value in table.items() if site != "a")
        for table in (counted.spikes, counted.cells)
    )
    return Row(
        test=test,
        threads=model.threads,
        batch=batch,
        tokens_per_second=statistics.median(speeds),
        deviation=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        cpu_ms=1e3 * min(cpu for _, cpu, _ in results) / counted.tokens,
        sops_per_token=sops / counted.tokens,
        pj_per_token=(APPENDIX_E_PJ["ac"] * sops + APPENDIX_E_PJ["mac"] * macs) / counted.tokens,
        firing_rate=spikes / max(1, cells),
        peak_mib=peak_mib(),
    )


def _reading(model: Model, length: int) -> Round:
    tokens = random_tokens(model, length, 0)
    decoder: Any = model.decoder

    def once() -> tuple[float, float, list[Activity]]:
        batch = decoder.batch([None])
        wall, cpu = time.perf_counter(), time.process_time()
        _, counted = batch.prefill(0, tokens)
        return time.perf_counter() - wall, time.process_time() - cpu, counted

    return once


def _writing(model: Model, context: int, count: int, width: int) -> Round:
    """Random tokens rather than the model's own: a text that repeats itself would be another test."""
    decoder: Any = model.decoder
    sequences = [random_tokens(model, context + count, row) for row in range(width)]

    def once() -> tuple[float, float, list[Activity]]:
        batch = decoder.batch([None] * width)
        for row, tokens in enumerate(sequences):
            batch.prefill(row, tokens[:context])
        counted: list[Activity] = []
        wall, cpu = time.perf_counter(), time.process_time()
        for place in range(context, context + count):
            _, activities = batch.step(range(width), [tokens[place] for tokens in sequences])
            counted += activities
        return time.perf_counter() - wall, time.process_time() - cpu, counted

    return once


def random_tokens(model: Model, count: int, seed: int) -> list[int]:
    vocabulary = model.bundle.shape.vocab_size
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, count)]


def peak_mib() -> float:
    """Most memory this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
