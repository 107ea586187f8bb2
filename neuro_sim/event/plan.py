"""The model as the event kernels want it: memory layout, checked ranges, tables and buffers."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.event import constants
from neuro_sim.event.constants import LANES, LINE, NIBBLE_OFFSET, SEGMENT_ROWS, STEP_GROUP, WORD
from neuro_sim.event.records import PLAN, WORK
from neuro_sim.graded import refuse_graded
from spikeopd.contracts import (
    LAYER_SITES,
    MEMBRANE_MAX,
    Layer,
    ModelShape,
    Precision,
    Site,
    SpikeModel,
    projections,
    readout_unit,
)
from spikeopd.errors import InputError

Array = NDArray[Any]
MAX_STEPS = 32  # one bit per step in a uint32 mask
LAYER_WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2")
WEIGHTS = ("w_q", "w_o", "w_1", "w_2")  # K and V lie beside Q
HUGE_PAGE = 1 << 21
# With |I << shift| and |bias| up to 2**29 and thresholds above -2**28, no sum of the neuron leaves 32 bits.
CURRENT_LIMIT, THRESHOLD_LIMIT = 1 << 29, 1 << 28


def padded(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def event_layout(model: SpikeModel) -> SpikeModel:
    """The same model with its weights where the kernels want them; `model` itself is not touched.

    Weights that are there already (see `place_weights`) are shared, all others copied: who holds on to `model` then
    has them in memory twice.
    """
    arrays = {name: getattr(owner, field) for name, owner, field in _matrices(model)}
    place_weights(model.shape, model.precision, arrays)

    def placed(owner: Any) -> dict[str, Any]:
        return {field: arrays[name] for name, other, field in _matrices(model) if other is owner}

    return replace(
        model,
        layers=tuple(replace(layer, **placed(layer)) for layer in model.layers),
        embedding=replace(model.embedding, **placed(model.embedding)),
        head=replace(model.head, **placed(model.head)),
    )


def _matrices(model: SpikeModel) -> Iterator[tuple[str, Any, str]]:
    """Name in a bundle, owner and field of every matrix that has a place."""
    for index, layer in enumerate(model.layers):
        for field in LAYER_WEIGHTS:
            yield f"layers.{index}.{field}", layer, field
    yield "embedding.table", model.embedding, "table"
    if model.shape.factorised:
        yield "embedding.project_in", model.embedding, "project_in"
        yield "head.project_out", model.head, "project_out"


def plain_layout(model: SpikeModel) -> SpikeModel:
    """The model as every backend reads it: weights that `place_weights` packed are int8 arrays again."""
    if model.precision != "int4":
        return model

    sizes = {c.name: c.fan_out or 0 for c in projections(model.shape)}

    def layer(values: Layer) -> Layer:
        weights: dict[str, Any] = {name: unpack_pairs(getattr(values, name), size) for name, size in sizes.items()}
        return replace(values, **weights)

    return replace(model, layers=tuple(layer(values) for values in model.layers))


def pack_pairs(weights: Array, columns: int) -> Array:
    """int8 [in, out] from -8 to 7 to uint8 [in, columns / 2], columns a multiple of 2 LINE and the rest padding.

    Byte i of a line holds column i in its low half and column LINE + i in its high half, both plus NIBBLE_OFFSET.
    """
    if weights.dtype == np.uint8:
        return weights
    rows, outputs = weights.shape
    shifted = np.full((rows, columns), NIBBLE_OFFSET, np.uint8)
    shifted[:, :outputs] = weights + NIBBLE_OFFSET
    low, high = np.moveaxis(shifted.reshape(rows, -1, 2, LINE), 2, 0)
    return np.ascontiguousarray(low | (high << 4)).reshape(rows, columns // 2)


def unpack_pairs(packed: Array, outputs: int) -> Array:
    """The inverse of `pack_pairs`; int8 weights stay as they are."""
    if packed.dtype != np.uint8:
        return packed
    lines = packed.reshape(len(packed), -1, 1, LINE)
    halves = np.concatenate([lines & 15, lines >> 4], 2).astype(np.int8) - NIBBLE_OFFSET
    return np.ascontiguousarray(halves.reshape(len(packed), -1)[:, :outputs])


def place_weights(shape: ModelShape, precision: Precision, arrays: dict[str, Array]) -> None:
    """Move the weights of an integer model, under the names of a bundle, to where the kernels want them.

    All projections go into one block of memory (huge pages where the system has them), rows padded to whole cache
    lines, the rows of Q, K and V side by side: a spike reads one contiguous row. The tied table becomes [width, vocab]
    in memory, which serves the head's rows and the embedding's lookup alike, and is still seen as [vocab, width].
    Values and shapes stay the same, except for 4-bit weights: they become uint8, two in a byte (`pack_pairs`), and only
    this engine reads them so (`plain_layout` undoes it). Entries of `arrays` are replaced one by one, so if nobody else
    holds the old arrays their memory is free at once and the weights are never in memory twice: hand this to
    `load_bundle`.
    """
    if arrays["embedding.table"].dtype != np.int8:
        return
    d, f = shape.hidden_size, shape.ffn_dim
    paired = int(precision == "int4")
    d_pad, f_pad = (padded(size, LINE << paired) >> paired for size in (d, f))  # bytes of a row
    layers = [{name: f"layers.{index}.{name}" for name in LAYER_WEIGHTS} for index in range(shape.num_hidden_layers)]
    waiting = [names for names in layers if not _is_placed([arrays[name] for name in names.values()], d_pad, f_pad)]
    arena = _aligned(len(waiting) * (d * (4 * d_pad + f_pad) + f * d_pad))
    for names in waiting:
        sizes = {"qkv": (d, 3 * d_pad), "w_o": (d, d_pad), "w_1": (d, f_pad), "w_2": (f, d_pad)}
        places = {}
        for name, (rows, columns) in sizes.items():
            places[name], arena = arena[: rows * columns].reshape(rows, columns), arena[rows * columns :]
        for index, name in enumerate(("w_q", "w_k", "w_v")):
            places[name] = places["qkv"][:, index * d_pad : (index + 1) * d_pad]
        for name, key in names.items():
            if paired:
                arrays[key] = pack_pairs(arrays[key], places[name].shape[1] << paired)
            _move(arrays, key, places[name])
        give_back()
    table = arrays["embedding.table"]
    if table.strides != (1, padded(shape.vocab_size)):
        place = _aligned(table.shape[1] * padded(shape.vocab_size)).reshape(table.shape[1], -1)
        place[:, : shape.vocab_size] = table.T
        arrays["embedding.table"] = place[:, : shape.vocab_size].T
        del table
        give_back()
    for key in ("embedding.project_in", "head.project_out") if shape.factorised else ():
        rows, columns = arrays[key].shape
        if arrays[key].strides != (padded(columns), 1):
            _move(arrays, key, _aligned(rows * padded(columns)).reshape(rows, -1))


def _is_placed(weights: Sequence[Array], d_pad: int, f_pad: int) -> bool:
    q, k, v = (matrix.ctypes.data for matrix in weights[:3])
    due = [(3 * d_pad, 1)] * 3 + [(d_pad, 1), (f_pad, 1), (d_pad, 1)]
    return [w.strides for w in weights] == due and (k, v) == (q + d_pad, q + 2 * d_pad) and q % LINE == 0


def _move(arrays: dict[str, Array], key: str, place: Array) -> None:
    """Copy a matrix into `place`, whose rows may be longer, and put the view of it in its stead."""
    place = place.view(arrays[key].dtype)
    columns = arrays[key].shape[1]
    place[:, :columns] = arrays[key]
    arrays[key] = place[:, :columns]


def _find_trim() -> Callable[[int], int] | None:
    """The C library's malloc_trim, where there is one."""
    try:
        trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # Windows
        trim = None
    return trim


_malloc_trim = _find_trim()


def give_back() -> None:
    """Return freed memory to the system; the C library would keep what lies between other blocks."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _lazy_zeros(shape: tuple[int, ...]) -> Array:
    """uint64 zeros on ordinary pages that the system hands out when they are first written.

    numpy's zeros may recycle memory, which has to be cleared, or take huge pages, of which a few words touch all.
    """
    size = 8 * math.prod(shape)
    if sys.platform == "win32":
        return np.zeros(shape, np.uint64)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        block.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(block, np.uint64).reshape(shape)


def _aligned(size: int) -> Array:
    """Zeroed bytes that start on a cache line, or on a huge page if they fill one."""
    unit = HUGE_PAGE if size >= HUGE_PAGE else LINE
    block = np.zeros(size + unit, np.int8)
    start = -block.ctypes.data % unit
    return block[start : start + size]


class Record:
    """A record of `kernels`: named integers, and named arrays of which the kernels get the address.

    Attributes read either; `address` is what the compiled code takes. The arrays live as long as the record.
    """

    def __init__(self, kind: np.dtype[Any], **fields: Any) -> None:
        self.data = np.zeros(1, kind)
        self._fields = fields
        for name in kind.names or ():
            value = fields[name]
            self.data[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
        self.address = self.data.ctypes.data

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(name) from None


def build_plan(model: SpikeModel) -> Record:
    """What the kernels read, from a model in `event_layout`."""
    shape = model.shape
    d, f = shape.hidden_size, shape.ffn_dim
    paired = int(model.precision == "int4")
    d_pad, f_pad = padded(d, LINE << paired), padded(f, LINE << paired)
    offsets, row = np.zeros(len(LAYER_SITES), np.int64), 0
    for index, site in enumerate(LAYER_SITES):
        offsets[index] = row
        row += padded(shape.site_size(site, 0), LINE << paired) if site != "a" and site in shape.layer_sites else 0
    row += WORD  # whole words of masks are read, also at the end
    thresholds = np.full((len(model.layers), row), MEMBRANE_MAX + 1, np.int32)
    biases = np.zeros((len(model.layers), row), np.int32)
    shifts = np.zeros((len(model.layers), len(LAYER_SITES)), np.int64)
    current = shape.residual_write == "current"
    writes = np.zeros((len(model.layers), 2, d_pad), np.int32)
    write_shifts = np.zeros_like(writes)
    for index, layer in enumerate(model.layers):
        for site, values in layer.sites.items():
            column = LAYER_SITES.index(site)
            shifts[index, column] = values.shift
            if site != "a":
                place = slice(offsets[column], offsets[column] + values.threshold.size)
                thresholds[index, place], biases[index, place] = _reachable(values.threshold), values.bias
        for half, name in enumerate("oy"):
            writes[index, half, :d] = getattr(layer, f"bias_{name}" if current else f"gain_{name}")
            if current:
                write_shifts[index, half, :d] = getattr(layer, f"shift_{name}")
    map_biases, distances = _map_biases(model)
    embed_threshold, embed_bias = np.full(d_pad, MEMBRANE_MAX + 1, np.int32), np.zeros(d_pad, np.int32)
    embed_threshold[:d] = _reachable(model.embed_site.threshold)
    embed_bias[:d] = model.embed_site.bias
    head, table = model.head, model.embedding.table
    head_rows = table.T if head.project_out is None else head.project_out
    gamma = np.ones(d, np.int32) if head.gamma is None else head.gamma.astype(np.int32)
    two_products = head.gamma is None
    width = shape.word_embed_proj_dim if two_products else shape.vocab_size
    identity = two_products and not shape.factorised  # in front of the 14-bit integers
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
        head_width=width,
        head_width_pad=padded(width),
        factorised=int(shape.factorised),
        two_products=int(two_products),
        current_write=int(current),
        residual_readout=int(shape.readout == "residual"),
        unit=readout_unit(model),
        distances=distances,
        inhibiting=int(shape.inhibiting),
        decay=int(model.decay),
        row=row,
        paired=paired,
        embed_shift=model.embed_site.shift,
        epsilon=head.epsilon,
        offsets=offsets,
        weights=np.array([[getattr(layer, w).ctypes.data for w in WEIGHTS] for layer in model.layers], np.int64),
        kept=[getattr(layer, w) for layer in model.layers for w in WEIGHTS],
        thresholds=thresholds,
        biases=biases,
        shifts=shifts,
        map_thresholds=np.stack([_reachable(layer.sites["a"].threshold) for layer in model.layers]),
        map_biases=map_biases,
        inhibition=np.array([layer.inhibition for layer in model.layers if shape.inhibiting], np.int32),
        writes=writes,
        write_shifts=write_shifts,
        embed_threshold=embed_threshold,
        embed_bias=embed_bias,
        head_rows=head_rows,
        table=table,
        gamma=gamma,
        head_sums=_pad_floats(np.ones(width) if identity else _head_sums(head_rows, gamma)),
        row_scale=_pad_floats(head.row_scale),
        bias=_pad_floats(head.bias),
        out_scale=none if head.out_scale is None else _pad_floats(head.out_scale),
        out_bias=none if head.out_bias is None else _pad_floats(head.out_bias),
    )


def _map_biases(model: SpikeModel) -> tuple[Array, int]:
    """The attention's biases as `attend_biased` reads them, and how many distances they tell apart; 0: none is set."""
    sites = [layer.sites["a"].bias.reshape(model.shape.num_attention_heads, -1) for layer in model.layers]
    if not any(bias.any() for bias in sites):
        return np.zeros(0, np.int32), 0
    distances = max(bias.shape[1] for bias in sites)
    table = np.zeros((len(sites), model.shape.num_attention_heads, 2 * LANES + WORD + distances), np.int32)
    for rows, bias in zip(table, sites, strict=True):
        far = LANES + distances - bias.shape[1]
        rows[:, :far] = bias[:, -1:]
        rows[:, far : LANES + distances] = bias[:, ::-1]
    return table, distances


def check_model(model: SpikeModel) -> None:
    """Refuse what the engine cannot compute exactly."""
    shape = model.shape
    if shape.graded:
        refuse_graded("event")
    if not model.integer:
        raise InputError("the event engine runs integer models only; use --backend dense for a float32 bundle")
    if not model.layers:
        raise InputError("the event engine needs a model with at least one layer")
    if not 1 <= shape.num_steps <= MAX_STEPS:
        raise InputError(f"the event engine handles 1 to {MAX_STEPS} steps per token, this model has {shape.num_steps}")
    _check_ranges(model)


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
    factor = _largest(embedding.row_scale) * _largest(embedding.channel_gain)
    residual = (inner * factor >> embedding.shift) + 1 + _largest(embedding.position)
    _check_site("embed", model.embed_site, residual)
    for index, layer in enumerate(model.layers):
        where = f"layer {index} site "
        for connection in projections(shape):
            if connection.target in layer.sites:
                assert connection.fan_in is not None
                _check_site(where + connection.target, layer.sites[connection.target], 128 * connection.fan_in)
        _check_site(where + "a", layer.sites["a"], shape.head_dim)
        reached = layer.sites["r"]
        if layer.inhibition is not None:  # a spike of the map then brings membrane units of its own
            each = (1 << reached.shift) + _largest(layer.inhibition)
            _check_site(where + "r", replace(reached, shift=0), shape.max_position_embeddings * each)
        else:
            _check_site(where + "r", reached, shape.max_position_embeddings)
        for site, write in (("x", "o"), ("h", "y")):
            residual += _largest_write(layer, write)
            _check_site(where + site, layer.sites[site], residual)


def _largest_write(layer: Layer, write: str) -> int:
    """What one sublayer can add to the residual stream at most."""
    gain, bias, shift = (getattr(layer, f"{name}_{write}") for name in ("gain", "bias", "shift"))
    if gain is not None:
        return _largest(gain)
    weights = unpack_pairs(layer.w_o if write == "o" else layer.w_2, bias.size)
    raised = weights.clip(0).sum(0, dtype=np.int64)  # every positive weight of a neuron, and none of the others
    most = np.maximum(raised, raised - weights.sum(0, dtype=np.int64))
    return _largest(most << shift) + _largest(bias)


def _largest(values: Array) -> int:
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def _check_site(where: str, site: Site, current: int) -> None:
    bias = _largest(site.bias)
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

    def __post_init__(self) -> None:
        self.key_address, self.value_address = self.keys.ctypes.data, self.values.ctypes.data

    @staticmethod
    def empty(plan: Record) -> Cache:
        lead = (plan.layers, plan.heads, plan.steps)
        keys = _lazy_zeros((*lead, plan.key_words, plan.blocks * WORD))
        return Cache(keys, _lazy_zeros((*lead, plan.blocks, plan.head_pad)))


def make_work(plan: Record, lanes: int, threads: int, record: bool) -> Record:
    """Buffers of one decoder, reused by every block of up to `lanes` tokens."""
    steps, layers, groups = plan.steps, plan.layers, -(-plan.steps // STEP_GROUP)
    widest = max(plan.hidden, plan.ffn)
    spare = max(widest * groups, plan.head_width) + constants.LIST_PADDING
    list_size = spare + widest
    max_runs = groups * (constants.PATTERNS - 1) * (widest // SEGMENT_ROWS + 1)
    slots, scratch = layers if record else 1, max(constants.lists_size(widest), constants.NORM_FIELDS * lanes)
    counters = (threads, lanes, layers + 1, constants.NUM_SITES, steps)
    return Record(
        WORK,
        lanes=lanes,
        record=int(record),
        list_size=list_size,
        spare=spare,
        max_runs=max_runs,
        residual=np.zeros((lanes, steps, plan.hidden_pad), np.int32),
        embed_masks=np.zeros((lanes, plan.row), np.uint32),
        masks=np.zeros((slots, lanes, plan.row), np.uint32),
        map_words=np.zeros((slots, lanes, plan.heads, steps, plan.blocks), np.uint64),
        rows=np.zeros((lanes, list_size), np.int32),
        factors=np.zeros((lanes, list_size), np.int32),
        runs=np.zeros((lanes, max_runs, constants.RUN_FIELDS), np.int64),
        num_runs=np.zeros(lanes, np.int64),
        scratch_size=scratch,
        scratch=np.zeros((threads, scratch), np.int64),
        sums=np.zeros((threads, STEP_GROUP * constants.MAX_COLUMNS), np.int16),
        currents=np.zeros((threads, max(steps * constants.MAX_COLUMNS, constants.HEAD_COLUMNS)), np.int32),
        wide=np.zeros((threads, constants.HEAD_COLUMNS), np.int64),
        small=np.zeros((threads, constants.small_size(steps, plan.head_pad)), np.int32),
        queries=np.zeros((threads, steps * plan.key_words), np.int64),
        spikes=np.zeros(counters, np.int64),
        saturations=np.zeros(counters, np.int64),
        additions=np.zeros((threads, lanes, layers, 2, steps), np.int64),
        active=np.zeros((threads, lanes, layers, constants.NUM_DRIVERS), np.int64),
        counts=np.zeros((lanes, plan.hidden), np.int64),
        head_active=np.zeros(lanes, np.int64),
        narrow=np.zeros((lanes, plan.head_width_pad if plan.two_products else 0)),
        barrier=np.zeros(16, np.int64),
    )
