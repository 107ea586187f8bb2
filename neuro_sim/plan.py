"""The model as the event kernels want it: memory layout, checked ranges, tables and buffers."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim import kernel_base, kernels
from neuro_sim.intrinsics import LANES, LINE, SEGMENT_ROWS, STEP_GROUP, WORD
from neuro_sim.records import PLAN, WORK
from spikeopd.contracts import LAYER_SITES, MEMBRANE_MAX, Layer, Site, SpikeModel
from spikeopd.errors import InputError

Array = NDArray[Any]
MAX_STEPS = 32  # one bit per step in a uint32 mask
WEIGHTS = ("w_q", "w_o", "w_1", "w_2")  # K and V lie beside Q
HUGE_PAGE = 1 << 21
# With |I << shift| and |bias| up to 2**29 and thresholds above -2**28, no sum of the neuron leaves 32 bits.
CURRENT_LIMIT, THRESHOLD_LIMIT = 1 << 29, 1 << 28


def padded(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def event_layout(model: SpikeModel) -> SpikeModel:
    """Move the weights of an integer model to where the kernels want them. Values and shapes stay the same.

    All projections go into one block of memory (huge pages where the system has them), rows padded to whole cache
    lines, the rows of Q, K and V side by side: a spike reads one contiguous row. The tied table becomes [width, vocab]
    in memory, which serves the head's rows and the embedding's lookup alike, and is still seen as [vocab, width].
    The model's own fields are pointed at the new place, one by one, so that the old memory is free at once and the
    weights are never in memory twice. Layers that are there already stay.
    """
    shape = model.shape
    d, f = shape.hidden_size, shape.ffn_dim
    d_pad, f_pad = padded(d), padded(f)
    waiting = [layer for layer in model.layers if not _is_placed(layer, d_pad, f_pad)]
    arena = _aligned(len(waiting) * (d * (4 * d_pad + f_pad) + f * d_pad))
    for layer in waiting:
        sizes = {"qkv": (d, 3 * d_pad), "w_o": (d, d_pad), "w_1": (d, f_pad), "w_2": (f, d_pad)}
        places = {}
        for name, (rows, columns) in sizes.items():
            places[name], arena = arena[: rows * columns].reshape(rows, columns), arena[rows * columns :]
        for index, name in enumerate(("w_q", "w_k", "w_v")):
            _move(layer, name, places["qkv"][:, index * d_pad : (index + 1) * d_pad])
        for name in ("w_o", "w_1", "w_2"):
            _move(layer, name, places[name])
        give_back()
    table = model.embedding.table
    if table.strides != (1, padded(shape.vocab_size)):
        place = _aligned(table.shape[1] * padded(shape.vocab_size)).reshape(table.shape[1], -1)
        place[:, : shape.vocab_size] = table.T
        object.__setattr__(model.embedding, "table", place[:, : shape.vocab_size].T)
        del table
        give_back()
    for owner, name in ((model.embedding, "project_in"), (model.head, "project_out")):
        matrix = getattr(owner, name)
        if matrix is not None and matrix.strides != (padded(matrix.shape[1]), 1):
            _move(owner, name, _aligned(matrix.shape[0] * padded(matrix.shape[1])).reshape(matrix.shape[0], -1))
    return model


def _is_placed(layer: Layer, d_pad: int, f_pad: int) -> bool:
    q, k, v = (getattr(layer, name).ctypes.data for name in ("w_q", "w_k", "w_v"))
    strides = [layer.w_q.strides, layer.w_o.strides, layer.w_1.strides, layer.w_2.strides]
    due = [(3 * d_pad, 1), (d_pad, 1), (f_pad, 1), (d_pad, 1)]
    return strides == due and (k, v) == (q + d_pad, q + 2 * d_pad) and q % LINE == 0


def _move(owner: Any, name: str, place: Array) -> None:
    """Copy a matrix into `place` (its rows may be longer) and make the owner's field a view of it."""
    matrix = getattr(owner, name)
    place[:, : matrix.shape[1]] = matrix
    object.__setattr__(owner, name, place[:, : matrix.shape[1]])  # frozen to users; the value is the same


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
        kept=[getattr(layer, w) for layer in model.layers for w in WEIGHTS],
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


def check_model(model: SpikeModel) -> None:
    """Refuse what the engine cannot compute exactly."""
    shape = model.shape
    if model.precision != "int8":
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
    spare = max(widest * groups, plan.head_width) + kernel_base.LIST_PADDING
    list_size = spare + widest
    max_runs = groups * (kernel_base.PATTERNS - 1) * (widest // SEGMENT_ROWS + 1)
    slots = layers if record else 1
    counters = (threads, lanes, layers + 1, kernel_base.NUM_SITES, steps)
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
        runs=np.zeros((lanes, max_runs, kernel_base.RUN_FIELDS), np.int64),
        num_runs=np.zeros(lanes, np.int64),
        sums=np.zeros((threads, STEP_GROUP * kernel_base.MAX_COLUMNS), np.int16),
        currents=np.zeros((threads, max(steps * kernel_base.MAX_COLUMNS, kernel_base.HEAD_COLUMNS)), np.int32),
        wide=np.zeros((threads, kernel_base.HEAD_COLUMNS), np.int64),
        small=np.zeros((threads, kernels.small_size.py_func(steps, plan.head_pad)), np.int32),
        queries=np.zeros((threads, steps * plan.key_words), np.int64),
        spikes=np.zeros(counters, np.int64),
        saturations=np.zeros(counters, np.int64),
        additions=np.zeros((threads, lanes, layers, 2, steps), np.int64),
        active=np.zeros((threads, lanes, layers, kernel_base.NUM_DRIVERS), np.int64),
        counts=np.zeros((lanes, plan.hidden), np.int32),
        head_active=np.zeros(lanes, np.int64),
        narrow=np.zeros((lanes, plan.head_width_pad if plan.factorised else 0)),
        barrier=np.zeros(16, np.int64),
    )
