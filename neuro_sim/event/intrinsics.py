"""Vector primitives of neurons, attention and threads, callable from numba code (`vector_ir` says how they are made).

All take plain addresses (int64); widths are multiples of `LINE` unless said otherwise. Rows of weights have a file of
their own, `row_intrinsics`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from neuro_sim.event.constants import LANES, WORD
from neuro_sim.event.vector_ir import (
    I1,
    I8,
    I32,
    I64,
    Loop,
    call,
    integer,
    load,
    popcount,
    prefetch,
    primitive,
    repeated,
    splat,
    store,
)  # fmt: skip
from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN

# --- single values in memory ----------------------------------------------------------------------------------------


def _make_read(kind: Any, signed: bool = True) -> Any:
    def build(b: Any, address: Any) -> Any:
        value = load(b, address, kind, kind.width // 8)
        return value if kind.width == 64 else (b.sext(value, I64) if signed else b.zext(value, I64))

    return primitive(build, 1, types.int64)


def _make_write(kind: Any) -> Any:
    def build(b: Any, address: Any, value: Any) -> None:
        store(b, value if kind.width == 64 else b.trunc(value, kind), address, kind.width // 8)

    return primitive(build, 2)


read_int32, read_uint32, read_int64 = _make_read(I32), _make_read(I32, signed=False), _make_read(I64)
write_int32, write_int64 = _make_write(I32), _make_write(I64)
read_float = primitive(lambda b, address: load(b, address, ir.DoubleType(), 8), 1, types.float64)


def _make_write_float() -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0], 8)
        return context.get_dummy_value()

    @intrinsic
    def write(typing_context: Any, address: Any, value: Any) -> Any:
        return types.void(types.int64, types.float64), codegen

    return write


write_float = _make_write_float()


def record_at(kind: Any) -> Any:
    """An intrinsic from an address to the record of this dtype there."""
    record = from_dtype(kind)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        return record(types.int64), codegen

    return at


count_bits = primitive(lambda b, word: popcount(b, word), 1, types.int64)


def _clear(b: Any, address: Any, size: Any) -> None:
    pointer = b.inttoptr(address, I8.as_pointer())
    call(b, "llvm.memset", [I8.as_pointer(), I64], ir.VoidType(), [pointer, integer(0, I8), size, ir.Constant(I1, 0)])


clear = primitive(_clear, 2)  # clear(address, bytes)


# --- neurons --------------------------------------------------------------------------------------------------------


def _decayed(b: Any, membrane: Any, decay: Any, lanes: int) -> Any:
    """sign(v) * ((|v| * decay) >> 12) in 32 bits: |v| = hi * 4096 + lo, and hi * decay + (lo * decay >> 12) is exact.

    The masks tell LLVM that both factors fit 13 bits, so it can multiply 16-bit halves.
    """
    zero = ir.Constant(membrane.type, None)
    negative = b.icmp_signed("<", membrane, zero)
    magnitude = b.select(negative, b.sub(zero, membrane), membrane)
    fraction, mask = repeated(DECAY_BITS, lanes), repeated((1 << DECAY_BITS) - 1, lanes)
    high = b.mul(b.and_(b.lshr(magnitude, fraction), mask), decay)
    low = b.lshr(b.mul(b.and_(magnitude, mask), decay), fraction)
    result = b.add(high, low)
    return b.select(negative, b.sub(zero, result), result)


def _decay_factor(b: Any, decay: Any, lanes: int) -> Any:
    return b.and_(splat(b, b.trunc(decay, I32), lanes), repeated((2 << DECAY_BITS) - 1, lanes))


def _clipped(b: Any, wide: Any, lanes: int) -> tuple[Any, Any]:
    """Clip to the membrane's 24 bits: (value, which lanes saturated)."""
    top, bottom = repeated(MEMBRANE_MAX, lanes), repeated(MEMBRANE_MIN, lanes)
    value = b.select(b.icmp_signed(">", wide, top), top, wide)
    value = b.select(b.icmp_signed("<", value, bottom), bottom, value)
    return value, b.icmp_signed("!=", value, wide)


def _count_bits(b: Any, flags: Any, address: Any) -> None:
    """Add the number of set lanes to an int64 in memory."""
    bits = b.zext(b.bitcast(flags, ir.IntType(flags.type.count)), I64)
    store(b, b.add(load(b, address, I64, 8), popcount(b, bits)), address, 8)


def _fire(
    b: Any, currents: Any, step_stride: Any, thresholds: Any, biases: Any, shift: Any, decay: Any,
    columns: Any, num_steps: Any, masks: Any, spikes: Any, saturations: Any,
) -> Any:  # fmt: skip
    vector = ir.VectorType(I32, LANES)
    iota = ir.Constant(vector, list(range(LANES)))
    factor = _decay_factor(b, decay, LANES)
    shifts = splat(b, b.trunc(shift, I32), LANES)
    zero = ir.Constant(vector, None)
    loop = Loop(b, columns, LANES, [integer(0)])
    offset = b.mul(loop.index, integer(4))
    threshold, bias = load(b, b.add(thresholds, offset), vector, 4), load(b, b.add(biases, offset), vector, 4)
    left = b.trunc(b.sub(columns, loop.index), I32)
    valid = b.icmp_signed("<", iota, splat(b, left, LANES))
    steps = Loop(b, num_steps, 1, [zero, zero, zero])
    membrane, reset, mask = steps.carried
    current = load(b, b.add(b.add(currents, offset), b.mul(steps.index, step_stride)), vector, 4)
    wide = b.sub(b.add(b.add(_decayed(b, membrane, factor, LANES), b.shl(current, shifts)), bias), reset)
    membrane, saturated = _clipped(b, wide, LANES)
    fired = b.and_(b.icmp_signed(">=", membrane, threshold), valid)
    bit = splat(b, b.trunc(b.shl(integer(1), steps.index), I32), LANES)
    counter = b.mul(steps.index, integer(8))
    _count_bits(b, fired, b.add(spikes, counter))
    _count_bits(b, b.and_(saturated, valid), b.add(saturations, counter))
    spiked = b.or_(mask, b.select(fired, bit, zero))
    steps.close([membrane, b.select(fired, threshold, zero), spiked])
    store(b, spiked, b.add(masks, offset), 4)
    active = b.zext(b.bitcast(b.icmp_signed("!=", spiked, zero), ir.IntType(LANES)), I64)
    return loop.close([b.add(loop.carried[0], popcount(b, active))])[0]


# fire(int32 currents [T_s, .], bytes between steps, int32 thresholds, int32 biases, shift, decay, columns, T_s,
#      uint32 masks out, int64 spikes [T_s], int64 saturations [T_s]) -> neurons that spiked at all:
# the integer neuron for `columns` (any number) neurons; bit t of a mask is the spike of step t. Whole vectors of
# LANES are read and written: lanes beyond `columns` get mask 0 and count nothing.
fire = primitive(_fire, 11, types.int64)


def _add_gains(b: Any, residual: Any, step_stride: Any, masks: Any, gains: Any, columns: Any, num_steps: Any) -> None:
    vector = ir.VectorType(I32, LANES)
    zero = ir.Constant(vector, None)
    loop = Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, integer(4))
    mask, gain = load(b, b.add(masks, offset), vector, 4), load(b, b.add(gains, offset), vector, 4)
    steps = Loop(b, num_steps, 1, [])
    bit = splat(b, b.trunc(b.shl(integer(1), steps.index), I32), LANES)
    fired = b.icmp_signed("!=", b.and_(mask, bit), zero)
    address = b.add(b.add(residual, offset), b.mul(steps.index, step_stride))
    store(b, b.add(load(b, address, vector, 4), b.select(fired, gain, zero)), address, 4)
    steps.close([])
    loop.close([])


# add_gains(int32 residual [T_s, .], bytes between steps, uint32 masks, int32 gains, columns, T_s)
add_gains = primitive(_add_gains, 6)


def _add_currents(
    b: Any, residual: Any, residual_stride: Any, currents: Any, current_stride: Any, shifts: Any, biases: Any,
    columns: Any, num_steps: Any,
) -> None:  # fmt: skip
    vector = ir.VectorType(I32, LANES)
    loop = Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, integer(4))
    shift, bias = load(b, b.add(shifts, offset), vector, 4), load(b, b.add(biases, offset), vector, 4)
    steps = Loop(b, num_steps, 1, [])
    current = load(b, b.add(b.add(currents, offset), b.mul(steps.index, current_stride)), vector, 4)
    address = b.add(b.add(residual, offset), b.mul(steps.index, residual_stride))
    written = b.add(b.shl(current, shift), bias)
    store(b, b.add(load(b, address, vector, 4), written), address, 4)
    steps.close([])
    loop.close([])


# add_currents(int32 residual [T_s, .], bytes between steps, int32 currents [T_s, .], bytes between steps, int32 shifts,
#              int32 biases, columns, T_s): residual += (currents << shifts) + biases
add_currents = primitive(_add_currents, 8)


# --- attention on packed spikes -------------------------------------------------------------------------------------


def _pack_word(b: Any, masks: Any, step: Any) -> Any:
    vector = ir.VectorType(I32, WORD)
    bit = splat(b, b.trunc(b.shl(integer(1), step), I32), WORD)
    set_ = b.icmp_signed("!=", b.and_(load(b, masks, vector, 4), bit), ir.Constant(vector, None))
    return b.bitcast(set_, I64)


# pack_word(uint32 masks [64], step) -> the spikes of 64 neurons at one step
pack_word = primitive(_pack_word, 2, types.int64)


def _active_word(b: Any, masks: Any) -> Any:
    vector = ir.VectorType(I32, WORD)
    return b.bitcast(b.icmp_signed("!=", load(b, masks, vector, 4), ir.Constant(vector, None)), I64)


# active_word(uint32 masks [64]) -> which of 64 neurons spiked at all; lowest_bit(word) -> the place of its lowest bit
active_word = primitive(_active_word, 1, types.int64)
lowest_bit = primitive(lambda b, word: call(b, "llvm.cttz", [I64], I64, [word, ir.Constant(I1, 1)]), 1, types.int64)


def _prefetch_words(builder: Any, address: Any) -> None:
    """LANES words of spikes."""
    for line in range(0, 8 * LANES, 64):
        prefetch(builder, builder.add(address, integer(line)))


def _make_attend(biased: bool) -> Any:
    def build(
        b: Any, keys: Any, step_bytes: Any, word_bytes: Any, num_words: Any, queries: Any, num_steps: Any,
        threshold: Any, shift: Any, decay: Any, context: Any, chosen: Any, chosen_bytes: Any, coincidences: Any,
        spikes: Any, saturations: Any, ahead: Any, ahead_bytes: Any, biases: Any, distances: Any,
    ) -> None:  # fmt: skip
        vector, words, bits = ir.VectorType(I32, LANES), ir.VectorType(I64, LANES), ir.IntType(LANES)
        zero, iota = ir.Constant(vector, None), ir.Constant(vector, list(range(LANES)))
        factor = _decay_factor(b, decay, LANES)
        shifts, level = splat(b, b.trunc(shift, I32), LANES), splat(b, b.trunc(threshold, I32), LANES)
        whole = b.and_(b.add(context, integer(WORD - 1)), integer(-WORD))  # the last word is written to its end
        nearest = b.sub(b.add(distances, integer(LANES)), context)  # place in `biases` of position 0
        loop = Loop(b, whole, LANES, [])
        if biased:
            place = b.add(nearest, loop.index)
            place = b.select(b.icmp_signed("<", place, integer(0)), integer(0), place)
            bias = load(b, b.add(biases, b.mul(place, integer(4))), vector, 4)
        real = b.icmp_signed("<", iota, splat(b, b.trunc(b.sub(context, loop.index), I32), LANES))
        first = b.add(keys, b.mul(loop.index, integer(8)))
        out = b.add(chosen, b.udiv(loop.index, integer(8)))
        steps = Loop(b, num_steps, 1, [zero, zero])
        membrane, reset = steps.carried
        start = b.add(first, b.mul(steps.index, step_bytes))
        _prefetch_words(b, b.add(b.add(ahead, b.mul(loop.index, integer(8))), b.mul(steps.index, ahead_bytes)))
        query = b.add(queries, b.mul(b.mul(steps.index, num_words), integer(8)))
        inner = Loop(b, num_words, 1, [zero])
        mask = splat(b, load(b, b.add(query, b.mul(inner.index, integer(8))), I64, 8), LANES)
        both = b.and_(load(b, b.add(start, b.mul(inner.index, word_bytes)), words, 8), mask)
        (counts,) = inner.close([b.add(inner.carried[0], b.trunc(popcount(b, both), vector))])
        wide = b.sub(b.add(_decayed(b, membrane, factor, LANES), b.shl(counts, shifts)), reset)
        if biased:
            wide = b.add(wide, bias)
        membrane, saturated = _clipped(b, wide, LANES)
        fired = b.and_(b.icmp_signed(">=", membrane, level), real)
        found = b.add(coincidences, b.mul(steps.index, integer(4 * LANES)))
        store(b, b.add(load(b, found, vector, 4), b.select(real, counts, zero)), found, 4)
        _count_bits(b, fired, b.add(spikes, b.mul(steps.index, integer(8))))
        _count_bits(b, b.and_(saturated, real), b.add(saturations, b.mul(steps.index, integer(8))))
        store(b, b.bitcast(fired, bits), b.add(out, b.mul(steps.index, chosen_bytes)), 2)
        steps.close([membrane, b.select(fired, level, zero)])
        loop.close([])

    return primitive(build, 19)


# attend_keys(keys, bytes between steps of a key, bytes between its words, words per key, query words [T_s, words], T_s,
#             threshold, shift, decay, context, uint64 spikes out [T_s, .], bytes between its steps,
#             int32 coincidences [T_s, 16], int64 spikes [T_s], int64 saturations [T_s], what to prefetch, bytes between
#             its steps, int32 biases, distances)
# Attention neurons of all positions below `context`: counts = popcount(query & key), then the integer neuron. Every
# pair is updated, with or without a coincidence, so a bias may fire it. attend_biased adds the distance bias:
# biases[LANES + distances - 1 - (i - j)] for the pair (i, j), and the first LANES entries for every larger distance.
# As many words as it reads of keys it prefetches of the values, which come next.
attend_keys, attend_biased = _make_attend(False), _make_attend(True)


def _sum_values(b: Any, values: Any, row_bytes: Any, num_words: Any, spikes: Any, sums: Any, ahead: Any) -> None:
    words, vector = ir.VectorType(I64, LANES), ir.VectorType(I32, LANES)
    loop = Loop(b, b.sdiv(row_bytes, integer(8)), LANES, [])
    start = b.add(values, b.mul(loop.index, integer(8)))
    inner = Loop(b, num_words, 1, [ir.Constant(words, None)])
    spike = splat(b, load(b, b.add(spikes, b.mul(inner.index, integer(8))), I64, 8), LANES)
    place = b.mul(inner.index, row_bytes)
    both = b.and_(load(b, b.add(start, place), words, 8), spike)
    _prefetch_words(b, b.add(b.add(ahead, place), b.mul(loop.index, integer(8))))
    (total,) = inner.close([b.add(inner.carried[0], popcount(b, both))])
    store(b, b.trunc(total, vector), b.add(sums, b.mul(loop.index, integer(4))), 4)
    loop.close([])


# sum_values(value words [num_words, n], bytes of a row (8 n), num_words, spike words [num_words], int32 sums [n],
#            what to prefetch): sums[i] = number of positions whose attention spike meets value bit i. n: a multiple
# of LANES. As many words as it reads it prefetches.
sum_values = primitive(_sum_values, 6)


def _put_bits(b: Any, words: Any, masks: Any, step: Any, position: Any, count: Any) -> None:
    vector, small = ir.VectorType(I64, LANES), ir.VectorType(I32, LANES)
    place = splat(b, b.and_(position, integer(WORD - 1)), LANES)
    clear = splat(b, b.not_(b.shl(integer(1), b.and_(position, integer(WORD - 1)))), LANES)
    loop = Loop(b, count, LANES, [])
    mask = b.zext(load(b, b.add(masks, b.mul(loop.index, integer(4))), small, 4), vector)
    bits = b.shl(b.and_(b.lshr(mask, splat(b, step, LANES)), repeated(1, LANES, I64)), place)
    address = b.add(words, b.mul(loop.index, integer(8)))
    store(b, b.or_(b.and_(load(b, address, vector, 8), clear), bits), address, 8)
    loop.close([])


# put_bits(words [n], uint32 masks [n], step, position, n): set bit `position % 64` of every word to the step's spike
put_bits = primitive(_put_bits, 5)


# --- threads --------------------------------------------------------------------------------------------------------


def _atomic_add(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


def _atomic_load(b: Any, address: Any) -> Any:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _atomic_store(b: Any, address: Any, value: Any) -> None:
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


atomic_add = primitive(_atomic_add, 2, types.int64)
atomic_load = primitive(_atomic_load, 1, types.int64)
atomic_store = primitive(_atomic_store, 2)
