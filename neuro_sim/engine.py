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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim import kernels
from neuro_sim.intrinsics import LANES, LINE, SEGMENT_ROWS, STEP_GROUP, WORD
from neuro_sim.kernels import LANES_GIVEN, PLAN, WORK
from spikeopd.contracts import (
    EMBED_SITE,
    LAYER_SITES,
    MEMBRANE_MAX,
    Activity,
    Site,
    SpikeModel,
    SpikeTrace,
)
from spikeopd.errors import InputError

Array = NDArray[Any]
PREFILL_BLOCK = 32
SMALL_PROJECTION = 1 << 18  # weights of the first feed-forward projection
MAX_STEPS = 32  # one bit per step in a uint32 mask
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")
# With |I << shift| and |bias| up to 2**29 and thresholds above -2**28, no sum of the neuron leaves 32 bits.
CURRENT_LIMIT, THRESHOLD_LIMIT = 1 << 29, 1 << 28


def padded(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def event_layout(model: SpikeModel) -> SpikeModel:
    """The same model with every weight where the kernels want it; what already fits is not copied.

    Projections: rows padded to whole cache lines. The tied table becomes [width, vocab] in memory, which serves the
    head's rows and the embedding's lookup alike, and is seen as [vocab, width] by everyone else.
    Drop the original model afterwards, or its table stays in memory a second time.
    """
    table = _pad_rows(model.embedding.table.T).T
    layers = []
    for layer in model.layers:
        fitting: dict[str, Any] = {name: _pad_rows(getattr(layer, name)) for name in WEIGHTS}
        layers.append(replace(layer, **fitting))
    head = model.head
    if head.project_out is not None:
        head = replace(head, project_out=_pad_rows(head.project_out))
    embedding = replace(model.embedding, table=table)
    if embedding.project_in is not None:
        embedding = replace(embedding, project_in=_pad_rows(embedding.project_in))
    return replace(model, layers=tuple(layers), head=head, embedding=embedding)


def _pad_rows(matrix: Array) -> Array:
    """int8 rows, each starting a whole number of cache lines after the one before; the same array if it has them."""
    rows, columns = matrix.shape
    owner = matrix if matrix.base is None else matrix.base
    has_tail = isinstance(owner, np.ndarray) and owner.nbytes >= rows * padded(columns)
    if matrix.dtype == np.int8 and matrix.strides == (padded(columns), 1) and (columns == padded(columns) or has_tail):
        return matrix
    result = np.zeros((rows, padded(columns)), np.int8)
    result[:, :columns] = matrix
    return result[:, :columns]


class Record:
    """A record of `kernels`: named integers, and named arrays of which the kernels get the address.

    Attributes read either; `data` is what the compiled code takes. The arrays live as long as the record.
    """

    def __init__(self, kind: np.dtype[Any], **fields: Any) -> None:
        self.data = np.zeros(1, kind)
        self._fields = fields
        for name in kind.names or ():
            value = fields[name]
            self.data[name] = value.ctypes.data if isinstance(value, np.ndarray) else value

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(name) from None


def build_plan(model: SpikeModel) -> Record:
    """What the kernels read, from a model in `event_layout`."""
    shape = model.shape
    if model.precision != "int8":
        raise InputError("the event engine runs integer models only; use --backend dense for a float32 bundle")
    if not model.layers:
        raise InputError("the event engine needs a model with at least one layer")
    if not 1 <= shape.num_steps <= MAX_STEPS:
        raise InputError(f"the event engine handles 1 to {MAX_STEPS} steps per token, this model has {shape.num_steps}")
    _check_ranges(model)
    d, f = shape.hidden_size, shape.ffn_dim
    d_pad, f_pad = padded(d), padded(f)
    offsets, row = np.zeros(len(LAYER_SITES), np.int64), 0
    for index, site in enumerate(LAYER_SITES):
        offsets[index] = row
        row += 0 if site == "a" else (f_pad if site == "f" else d_pad)
    row += WORD  # whole words of masks are read, also at the end
    thresholds = np.full((len(model.layers), row), MEMBRANE_MAX + 1, np.int32)
    biases = np.zeros((len(model.layers), row), np.int32)
    gains = np.zeros((len(model.layers), 2, d_pad), np.int32)
    for index, layer in enumerate(model.layers):
        for place, site in zip(offsets.tolist(), LAYER_SITES, strict=True):
            values = layer.sites[site]
            if site != "a":
                thresholds[index, place : place + values.threshold.size] = _reachable(values.threshold)
                biases[index, place : place + values.bias.size] = values.bias
        gains[index, 0, :d], gains[index, 1, :d] = layer.gain_o, layer.gain_y
    embed_threshold, embed_bias = np.full(d_pad, MEMBRANE_MAX + 1, np.int32), np.zeros(d_pad, np.int32)
    embed_threshold[:d] = _reachable(model.embed_site.threshold)
    embed_bias[:d] = model.embed_site.bias
    head, table = model.head, model.embedding.table
    head_rows = table.T if head.project_out is None else head.project_out
    gamma = np.ones(d, np.int32) if head.gamma is None else head.gamma.astype(np.int32)
    none = np.zeros(0)
    return Record(
        PLAN,
        layers=len(model.layers),
        steps=shape.num_steps,
        hidden=d,
        hidden_pad=d_pad,
        ffn=f,
        ffn_pad=f_pad,
        heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        head_pad=padded(shape.head_dim, LANES),
        key_words=padded(shape.head_dim, WORD) // WORD,
        blocks=padded(shape.max_position_embeddings, WORD) // WORD,
        vocab=shape.vocab_size,
        vocab_pad=padded(shape.vocab_size),
        head_width=head_rows.shape[1],
        head_width_pad=padded(head_rows.shape[1]),
        factorised=int(shape.factorised),
        decay=int(model.decay),
        row=row,
        embed_shift=model.embed_site.shift,
        epsilon=head.epsilon,
        offsets=offsets,
        weights=np.array([[getattr(layer, w).ctypes.data for w in WEIGHTS] for layer in model.layers], np.int64),
        thresholds=thresholds,
        biases=biases,
        shifts=np.array([[layer.sites[site].shift for site in LAYER_SITES] for layer in model.layers], np.int64),
        map_thresholds=np.stack([_reachable(layer.sites["a"].threshold) for layer in model.layers]),
        gains=gains,
        embed_threshold=embed_threshold,
        embed_bias=embed_bias,
        head_rows=head_rows,
        table=table,
        gamma=gamma,
        head_sums=_pad_floats(_head_sums(head_rows, gamma)),
        row_scale=_pad_floats(head.row_scale),
        bias=_pad_floats(head.bias),
        out_scale=none if head.out_scale is None else _pad_floats(head.out_scale),
        out_bias=none if head.out_bias is None else _pad_floats(head.out_bias),
    )


def _pad_floats(values: Array) -> Array:
    result = np.zeros(padded(values.size))
    result[: values.size] = values
    return result


def _head_sums(rows: Array, gamma: Array) -> Array:
    """sum_i gamma_i rows[i]: exact integers below 2**53, so float64 holds them. Row by row, to need no wide copy."""
    sums = np.zeros(rows.shape[1], np.int64)
    for factor, row in zip(gamma.tolist(), rows, strict=True):
        sums += factor * row.astype(np.int64)
    return sums.astype(np.float64)


def _reachable(threshold: Array) -> Array:
    """A membrane cannot exceed its 24 bits, so any higher threshold is never reached: one just above says the same."""
    return np.minimum(threshold, MEMBRANE_MAX + 1).astype(np.int32)


def _check_ranges(model: SpikeModel) -> None:
    """Refuse a model whose sums could leave 32 bits; nothing that fits the hardware comes near."""
    shape, embedding = model.shape, model.embedding
    inner = 128 * (128 * shape.word_embed_proj_dim if shape.factorised else 1)
    factor = int(np.abs(embedding.row_scale.astype(np.int64)).max()) * int(
        np.abs(embedding.channel_gain.astype(np.int64)).max()
    )
    residual = (inner * factor >> embedding.shift) + 1 + int(np.abs(embedding.position.astype(np.int64)).max(initial=0))
    _check_site("embed", model.embed_site, residual)
    inputs = {"f": shape.hidden_size, "y": shape.ffn_dim}
    for index, layer in enumerate(model.layers):
        where = f"layer {index} site "
        for site in ("q", "k", "v", "o", "f", "y"):
            _check_site(where + site, layer.sites[site], 128 * inputs.get(site, shape.hidden_size))
        _check_site(where + "a", layer.sites["a"], shape.head_dim)
        if layer.sites["a"].bias.any():
            raise InputError(f"{where}a: the attention map has no bias; this model sets one")
        _check_site(where + "r", layer.sites["r"], shape.max_position_embeddings)
        for site, gain in (("x", layer.gain_o), ("h", layer.gain_y)):
            residual += int(np.abs(gain.astype(np.int64)).max(initial=0))
            _check_site(where + site, layer.sites[site], residual)


def _check_site(where: str, site: Site, current: int) -> None:
    bias = int(np.abs(site.bias.astype(np.int64)).max(initial=0))
    low = int(site.threshold.min(initial=0))
    if (current << site.shift) > CURRENT_LIMIT or bias > CURRENT_LIMIT or low < -THRESHOLD_LIMIT:
        raise InputError(
            f"{where}: currents up to {current << site.shift}, biases up to {bias} or thresholds down to {low} do not "
            "fit the engine's 32-bit sums; export the model with smaller ones, or use --backend dense"
        )


@dataclass
class Cache:
    """K and V spikes of one sequence, one bit per element and step. Its memory is reserved once and never grows.

    keys   uint64 [layers, heads, T_s, words of head_dim, positions]
    values uint64 [layers, heads, T_s, words of positions, head_dim]: transposed, so that attention counts bits
    """

    keys: Array
    values: Array
    position: int = 0

    @staticmethod
    def empty(plan: Record) -> Cache:
        lead = (plan.layers, plan.heads, plan.steps)
        # zeros are pages the system hands out when they are first written: a short sequence costs little
        keys = np.zeros((*lead, plan.key_words, plan.blocks * WORD), np.uint64)
        return Cache(keys, np.zeros((*lead, plan.blocks, plan.head_pad), np.uint64))


def make_work(plan: Record, lanes: int, threads: int, record: bool) -> Record:
    """Buffers of one decoder, reused by every block of up to `lanes` tokens."""
    steps, layers, groups = plan.steps, plan.layers, -(-plan.steps // STEP_GROUP)
    widest = max(plan.hidden, plan.ffn)
    list_size = max(widest * groups, plan.head_width) + kernels.LIST_PADDING
    max_runs = groups * (kernels.PATTERNS - 1) * (widest // SEGMENT_ROWS + 1)
    slots = layers if record else 1
    counters = (threads, lanes, layers + 1, kernels.NUM_SITES, steps)
    return Record(
        WORK,
        lanes=lanes,
        record=int(record),
        list_size=list_size,
        max_runs=max_runs,
        residual=np.zeros((lanes, steps, plan.hidden_pad), np.int32),
        embed_masks=np.zeros((lanes, plan.row), np.uint32),
        masks=np.zeros((slots, lanes, plan.row), np.uint32),
        map_words=np.zeros((slots, lanes, plan.heads, steps, plan.blocks), np.uint64),
        rows=np.zeros((lanes, list_size), np.int32),
        factors=np.zeros((lanes, list_size), np.int32),
        runs=np.zeros((lanes, max_runs, kernels.RUN_FIELDS), np.int64),
        num_runs=np.zeros(lanes, np.int64),
        sums=np.zeros((threads, STEP_GROUP * kernels.MAX_COLUMNS), np.int16),
        currents=np.zeros((threads, max(steps * kernels.MAX_COLUMNS, kernels.HEAD_COLUMNS)), np.int32),
        wide=np.zeros((threads, kernels.HEAD_COLUMNS), np.int64),
        small=np.zeros((threads, kernels.small_size.py_func(steps, plan.head_pad)), np.int32),
        queries=np.zeros((threads, steps * plan.key_words), np.int64),
        spikes=np.zeros(counters, np.int64),
        saturations=np.zeros(counters, np.int64),
        additions=np.zeros((threads, lanes, layers, 2, steps), np.int64),
        active=np.zeros((threads, lanes, layers, kernels.NUM_DRIVERS), np.int64),
        counts=np.zeros((lanes, plan.hidden), np.int32),
        head_active=np.zeros(lanes, np.int64),
        narrow=np.zeros((lanes, plan.head_width_pad if plan.factorised else 0)),
        barrier=np.zeros(16, np.int64),
    )


class Team:
    """`threads - 1` waiting threads that run the same compiled call as the caller's thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(threads - 1)]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for index, jobs in enumerate(self._jobs):
            threading.Thread(target=self._serve, args=(index + 1, jobs), daemon=True).start()

    def _serve(self, index: int, jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            try:
                kernels.decode_block(*job, index, self.threads)
                self._done.put(None)
            except BaseException as error:  # reported by run(), in the caller's thread
                self._done.put(error)

    def run(self, plan: Record, work: Record, given: Record) -> None:
        job = (plan.data, work.data, given.data)
        for jobs in self._jobs:
            jobs.put(job)
        kernels.decode_block(*job, 0, self.threads)
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
        self.model = event_layout(model)
        self.plan = build_plan(self.model)
        self.threads = threads or default_threads(model)
        if self.threads < 1 or lanes < 1:
            raise InputError(f"threads and lanes must be at least 1, got {threads} and {lanes}")
        self.lanes = lanes
        self._team = Team(self.threads)
        self._work: dict[tuple[int, bool], Record] = {}
        # Compile (or load from numba's cache) before a second thread could do the same, on an empty block.
        nothing = np.zeros(1, LANES_GIVEN)
        kernels.decode_block(self.plan.data, self._buffers(1, False).data, nothing, 0, 1)

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
        plan, model = self.plan, self.model
        record = any(trace is not None for trace in traces)
        work = self._buffers(len(tokens), record)
        for lane, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            work.residual[lane, :, : plan.hidden] = self._current(token, position)
        for counters in (work.spikes, work.saturations, work.additions, work.active):
            counters[:, : len(tokens)] = 0
        rows = np.where(want_logits, np.cumsum(want_logits) - 1, -1)
        logits = np.empty((int(np.sum(want_logits)), plan.vocab_pad))
        given = Record(
            LANES_GIVEN,
            count=len(tokens),
            positions=np.asarray(positions, np.int64),
            keys=np.array([cache.keys.ctypes.data for cache in caches], np.int64),
            values=np.array([cache.values.ctypes.data for cache in caches], np.int64),
            logits_row=rows.astype(np.int64),
            logits=logits,
        )
        self._team.run(plan, work, given)
        counted = [work.spikes, work.saturations, work.additions, work.active]
        totals = [counter[:, : len(tokens)].sum(0) for counter in counted]
        activities = []
        for lane, position in enumerate(positions):
            lane_totals = [total[lane] for total in totals]
            activities.append(_activity(model, plan, lane_totals, int(work.head_active[lane]), position))
            trace = traces[lane]
            if trace is not None:
                _record(model, plan, work, lane, position, trace)
                trace.tokens.append(int(tokens[lane]))
        return logits[:, : plan.vocab], activities

    def _current(self, token: int, position: int) -> Array:
        """Embedding.current, with the factorised product done by the row kernel."""
        embedding, plan = self.model.embedding, self.plan
        if not 0 <= token < plan.vocab:
            raise InputError(f"token {token} is outside the vocabulary of {plan.vocab}")
        if embedding.project_in is None:
            return embedding.current(token, position)
        row = embedding.table[token].astype(np.int32)
        columns = padded(plan.hidden)
        sums, wide = np.empty(columns, np.int32), np.empty(columns, np.int64)
        rows = np.arange(row.size, dtype=np.int32)
        kernels.project_row(embedding.project_in.ctypes.data, columns, rows, row, sums, wide)
        value = wide[: plan.hidden] * int(embedding.row_scale[token]) * embedding.channel_gain.astype(np.int64)
        half = (1 << embedding.shift) >> 1
        return np.asarray(((value + half) >> embedding.shift) + embedding.position[position], dtype=np.int32)


def default_threads(model: SpikeModel) -> int:
    """The cores this process may use; one for a model so small that meeting would cost more than it saves."""
    if len(model.layers) and model.layers[0].w_1.size < SMALL_PROJECTION:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _activity(model: SpikeModel, plan: Record, totals: list[Array], head_active: int, position: int) -> Activity:
    """All events of one token from the few numbers the kernels count; the rest are fan-outs.

    The head is counted for every token, as the contract has it, also for a prompt's tokens whose logits nobody wants.
    """
    spikes, saturations, additions, active = totals
    shape, layers, steps, context = model.shape, plan.layers, plan.steps, position + 1
    d, f, width = plan.hidden, plan.ffn, shape.word_embed_proj_dim
    site = {name: spikes[:layers, index] for index, name in enumerate(LAYER_SITES)}
    embed = spikes[layers : layers + 1, 0]
    entering = np.concatenate([embed, site["h"][:-1]])
    cells = {name: np.full((layers, steps), shape.site_size(name, position), np.int64) for name in LAYER_SITES}
    sops = {
        "qkv": entering * (3 * d),
        "coincidence": site["q"] * context,
        "av": site["a"] * plan.head_dim,
        "output": site["r"] * d,
        "residual": site["o"] + site["y"],
        "ffn_in": site["x"] * f,
        "ffn_out": site["f"] * d,
    }
    read = active.sum(0)
    map_bytes = int((site["a"].sum(1) * plan.head_dim // 8).sum())
    tail = shape.vocab_size * width if plan.factorised else 0
    head_macs = d * plan.head_width + tail
    head_active_macs = head_active * plan.head_width + tail
    embed_macs = width * d if plan.factorised else 0
    gain_item = model.layers[0].gain_o.itemsize if layers else 0
    return Activity(
        tokens=1,
        spikes={EMBED_SITE: embed} | site,
        cells={EMBED_SITE: np.full((1, steps), d, np.int64)} | cells,
        saturations={EMBED_SITE: saturations[layers : layers + 1, 0]}
        | {name: saturations[:layers, index] for index, name in enumerate(LAYER_SITES)},
        sops=sops,
        sops_unmasked=np.zeros((layers, steps), np.int64),
        additions={k: v.copy() for k, v in sops.items()} | {"coincidence": additions[:, 0], "av": additions[:, 1]},
        macs={"embed": embed_macs, "head": head_macs, "head_active": head_active_macs},
        bytes={
            "qkv": int(read[kernels.FROM_INPUT]) * 3 * d,
            "coincidence": 0,
            "av": 0,
            "output": int(read[kernels.FROM_R]) * d,
            "residual": int(read[kernels.FROM_O] + read[kernels.FROM_Y]) * gain_item,
            "ffn_in": int(read[kernels.FROM_X]) * f,
            "ffn_out": int(read[kernels.FROM_F]) * d,
            "embed": width + d * model.embedding.position.itemsize + embed_macs,
            "head": head_active_macs,
            "kv_read": layers * (context * steps * d // 8) + map_bytes,
            "kv_write": layers * (2 * steps * d // 8),
        },
    )


def _record(model: SpikeModel, plan: Record, work: Record, lane: int, position: int, trace: SpikeTrace) -> None:
    """Unpack the masks of every site into the trace."""
    bits = np.arange(plan.steps, dtype=np.uint32)[:, None]

    def unpack(masks: Array) -> Array:
        return ((masks[None] >> bits) & 1).astype(bool)

    trace.add(-1, EMBED_SITE, unpack(work.embed_masks[lane, : plan.hidden]))
    for layer in range(plan.layers):
        for index, site in enumerate(LAYER_SITES):
            if site == "a":
                words = work.map_words[layer, lane].astype("<u8", copy=False)
                pairs = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")  # [heads, T_s, positions]
                spikes = pairs[:, :, : position + 1].transpose(1, 0, 2).reshape(plan.steps, -1).astype(bool)
            else:
                start = int(plan.offsets[index])
                spikes = unpack(work.masks[layer, lane, start : start + model.shape.site_size(site, position)])
            trace.add(layer, site, spikes)


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
        self.block = block
        self._batch = EventBatch(self.engine, [trace], block)

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
