"""The event-driven decoder: it reads only the weight rows that spikes select, and counts every event.

`EventDecoder` computes exactly what `DenseDecoder` computes (spikes, logits, counts) with the kernels of `kernels.py`.
Three ways in, one mechanism (a block of lanes, see there): `step` feeds one token, `prefill` feeds a prompt in blocks,
`EventBatch.step` feeds one token of each of several sequences. docs/engine.md explains layout and speed.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.event.constants import LIST_PADDING
from neuro_sim.event.native import Passes, load_passes
from neuro_sim.event.plan import Cache, Record, build_plan, check_model, event_layout, make_work, padded, plain_layout
from neuro_sim.event.records import LANES_GIVEN
from neuro_sim.event.tally import Tally, record_spikes
from spikeopd.contracts import Activity, SpikeModel, SpikeTrace
from spikeopd.errors import InputError

Array = NDArray[Any]
PREFILL_BLOCK = 32
SMALL_PROJECTION = 1 << 18  # weights of the first feed-forward projection


class Team:
    """`threads - 1` waiting threads that run the same compiled call as the caller's thread."""

    def __init__(self, passes: Passes, threads: int) -> None:
        self._passes, self.threads = passes, threads
        self._jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(threads - 1)]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for index, jobs in enumerate(self._jobs):
            threading.Thread(target=self._serve, args=(index + 1, jobs), daemon=True).start()

    def _serve(self, index: int, jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            try:
                plan, work, given = job
                self._passes.decode_block(plan, work, given, index, self.threads)
                self._done.put(None)
            except BaseException as error:  # reported by run(), in the caller's thread
                self._done.put(error)

    def run(self, plan: Record, work: Record, given: Record) -> None:
        job = (plan.address, work.address, given.address)
        for jobs in self._jobs:
            jobs.put(job)
        self._passes.decode_block(*job, 0, self.threads)
        for _ in self._jobs:
            if error := self._done.get():
                raise error

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        self._jobs = []


class Engine:
    """Model, buffers and threads; sequences come and go as `Cache` objects."""

    def __init__(self, model: SpikeModel, threads: int | None = None, lanes: int = PREFILL_BLOCK) -> None:
        check_model(model)
        self.model = event_layout(model)
        self.plan = build_plan(self.model)
        self._tally = Tally(self.model, self.plan)
        self.threads = threads or default_threads(model)
        if self.threads < 1 or lanes < 1:
            raise InputError(f"threads and lanes must be at least 1, got {threads} and {lanes}")
        self.lanes = lanes
        self._passes = load_passes()
        self._team = Team(self._passes, self.threads)
        self._work: dict[tuple[int, bool], Record] = {}

    def close(self) -> None:
        self._team.close()

    def _buffers(self, lanes: int, record: bool) -> Record:
        """Buffers for one lane or for a full block, made when first needed."""
        size = 1 if lanes == 1 else max(self.lanes, lanes)
        for (capacity, recording), work in self._work.items():
            if recording == record and (capacity == 1) == (lanes == 1) and capacity >= lanes:
                return work
        self._work[size, record] = make_work(self.plan, size, self.threads, record)
        return self._work[size, record]

    def feed(
        self,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        positions: Sequence[int],
        want_logits: Sequence[bool],
        traces: Sequence[SpikeTrace | None],
    ) -> tuple[Array, list[Activity]]:
        """One block: lane i feeds tokens[i] at positions[i] of caches[i]. Logits of the wanted lanes, activity of all.

        Lanes of one cache must be successive positions in order. The caches' own positions are not touched.
        """
        plan = self.plan
        record = any(trace is not None for trace in traces)
        work = self._buffers(len(tokens), record)
        count = len(tokens)
        work.residual[:count, :, : plan.hidden] = self._currents(tokens, positions)[:, None]
        counters = (work.spikes, work.saturations, work.additions, work.active)
        for counter in counters:
            counter[:, :count] = 0
        rows = [-1] * count
        for row, lane in enumerate(lane for lane in range(count) if want_logits[lane]):
            rows[lane] = row
        logits = np.empty((max(rows) + 1, plan.vocab_pad))
        # one row each of positions, keys, values and rows of logits
        lanes = np.array([list(positions), [c.key_address for c in caches], [c.value_address for c in caches], rows])
        given = Record(
            LANES_GIVEN,
            count=count,
            positions=lanes[0],
            keys=lanes[1],
            values=lanes[2],
            logits_row=lanes[3],
            logits=logits,
        )
        self._team.run(plan, work, given)
        spikes, saturations, additions, active = (
            counter[0, :count] if self.threads == 1 else counter[:, :count].sum(0) for counter in counters
        )
        head_active = np.full(count, plan.hidden) if plan.residual_readout else work.head_active[:count]
        activities = self._tally.activities(spikes, saturations, additions, active, head_active, lanes[0])
        for lane, (position, trace) in enumerate(zip(positions, traces, strict=True)):
            if trace is not None:
                record_spikes(self.model, plan, work, lane, position, trace)
                trace.tokens.append(int(tokens[lane]))
        return logits[:, : plan.vocab], activities

    def _currents(self, tokens: Sequence[int], positions: Sequence[int]) -> Array:
        """Embedding.current of every lane, with the factorised product done by the row kernel."""
        embedding, plan = self.model.embedding, self.plan
        for token in tokens:
            if not 0 <= token < plan.vocab:
                raise InputError(f"token {token} is outside the vocabulary of {plan.vocab}")
        chosen, places = np.asarray(tokens), np.asarray(positions)
        if embedding.project_in is None:
            return embedding.current(chosen, places)
        columns = padded(plan.hidden)
        sums, wide = np.empty(columns, np.int32), np.empty((len(chosen), columns), np.int64)
        factors = embedding.table[chosen].astype(np.int32)
        rows = np.zeros(factors.shape[1] + LIST_PADDING, np.int32)
        rows[: factors.shape[1]] = np.arange(factors.shape[1])
        for lane, row in enumerate(factors):
            self._passes.project_row(embedding.project_in, columns, rows, row, sums, wide[lane])
        return embedding.scaled(wide[:, : plan.hidden], chosen, places)


def default_threads(model: SpikeModel) -> int:
    """The cores this process may use; one for a model so small that meeting would cost more than it saves."""
    if model.shape.hidden_size * model.shape.ffn_dim < SMALL_PROJECTION:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EventBatch:
    """Several sequences decoded side by side: a weight row that several of them need is read once."""

    def __init__(self, engine: Engine, traces: Sequence[SpikeTrace | None], block: int = PREFILL_BLOCK) -> None:
        self.engine, self.traces, self.block = engine, list(traces), block
        self.caches = [Cache.empty(engine.plan) for _ in traces]

    def prefill(self, sequence: int, tokens: Sequence[int], last_only: bool = True) -> tuple[Array, list[Activity]]:
        """Feed several tokens of one sequence in blocks. Logits of the last token ([vocab]), or of all ([n, vocab])."""
        if not tokens:
            raise InputError("prefill needs at least one token")
        cache = self.caches[sequence]
        check_room(self.engine.model, cache.position + len(tokens) - 1)
        rows, activities = [], []
        for start in range(0, len(tokens), self.block):
            part = tokens[start : start + self.block]
            count, first = len(part), cache.position
            want = [not last_only] * count
            want[-1] = want[-1] or start + count == len(tokens)
            positions, traces = range(first, first + count), [self.traces[sequence]] * count
            logits, counted = self.engine.feed(part, [cache] * count, positions, want, traces)
            cache.position += count
            rows.append(logits)
            activities += counted
        return (rows[-1][-1] if last_only else np.concatenate(rows)), activities

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> tuple[Array, list[Activity]]:
        """Feed one token of each of the named sequences; logits [n, vocab] and activities in the same order."""
        caches = [self.caches[index] for index in sequences]
        for cache in caches:
            check_room(self.engine.model, cache.position)
        positions, traces = [cache.position for cache in caches], [self.traces[index] for index in sequences]
        result = self.engine.feed(tokens, caches, positions, [True] * len(tokens), traces)
        for cache in caches:
            cache.position += 1
        return result


class EventDecoder:
    """DenseDecoder's interface on the event engine: `logits, activity = decoder.step(token)`; plus `prefill`."""

    def __init__(
        self, model: SpikeModel, trace: SpikeTrace | None = None, threads: int | None = None, block: int = PREFILL_BLOCK
    ) -> None:
        self.engine = Engine(model, threads, block)
        self.model = self.engine.model
        self.threads = self.engine.threads
        self.block = block
        self._batch = EventBatch(self.engine, [trace], block)

    @property
    def plain_model(self) -> SpikeModel:
        """The model with weights as every backend reads them; for 4 bits that is a copy."""
        return plain_layout(self.model)

    @property
    def trace(self) -> SpikeTrace | None:
        return self._batch.traces[0]

    @trace.setter
    def trace(self, trace: SpikeTrace | None) -> None:
        self._batch.traces[0] = trace

    @property
    def position(self) -> int:
        """Tokens fed so far in this sequence."""
        return self._batch.caches[0].position

    def reset(self) -> None:
        """Forget the sequence. The cache's memory stays; everything in it is written again before it is read."""
        self._batch.caches[0].position = 0

    def step(self, token: int) -> tuple[Array, Activity]:
        """Feed one token; return its logits (float64 [vocab]) and the events it caused."""
        logits, activities = self._batch.step([0], [token])
        return logits[0], activities[0]

    def prefill(self, tokens: Sequence[int], last_only: bool = True) -> tuple[Array, list[Activity]]:
        """Feed several tokens in blocks. Logits of the last token only ([vocab]), or of all ([n, vocab])."""
        return self._batch.prefill(0, tokens, last_only)

    def batch(self, traces: Sequence[SpikeTrace | None]) -> EventBatch:
        """New sequences on the same model, buffers and threads, one for each entry of `traces`."""
        return EventBatch(self.engine, traces, self.block)

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


def check_room(model: SpikeModel, position: int) -> None:
    limit = model.shape.max_position_embeddings
    if position >= limit:
        raise InputError(f"the context is full: {limit} tokens is this model's limit")
