"""Vector primitives on rows of weights: sums of the rows that spikes select, and the products of the head.

All take plain addresses (int64); widths are multiples of `LINE` unless said otherwise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from neuro_sim.event.constants import AHEAD, LANES, LINE, NIBBLE_OFFSET, NIBBLE_ROWS, RUN_FIELDS, STEP_GROUP
from neuro_sim.event.vector_ir import (
    I8,
    I16,
    I32,
    I64,
    Loop,
    call,
    changed,
    integer,
    load,
    prefetch,
    primitive,
    repeated,
    splat,
    store,
)  # fmt: skip

# --- sums ------------------------------------------------------------------------------------------------------------


def _row_addresses(builder: Any, weights: Any, stride: Any, rows: Any, count: int, skip: int = 0) -> list[Any]:
    pointer = builder.inttoptr(rows, I32.as_pointer())
    indices = [builder.load(builder.gep(pointer, [integer(k + skip)])) for k in range(count)]
    return [builder.add(weights, builder.mul(builder.sext(i, I64), stride)) for i in indices]


def _make_add_rows(count: int) -> Any:
    def build(b: Any, weights: Any, stride: Any, rows: Any, columns: Any, steps: Any, sums: Any) -> None:
        narrow, wide = ir.VectorType(I8, LINE), ir.VectorType(I16, LINE)
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, weights, stride, rows, count, skip=AHEAD)
        step_bytes = b.mul(columns, integer(2))
        fires = [b.icmp_signed("!=", b.and_(steps, integer(1 << t)), integer(0)) for t in range(STEP_GROUP)]
        loop = Loop(b, columns, LINE, [])
        total = None
        for base in bases:
            row = b.sext(load(b, b.add(base, loop.index), narrow), wide)
            total = row if total is None else b.add(total, row)
        for base in ahead:
            prefetch(b, b.add(base, loop.index))
        here = b.add(sums, b.add(loop.index, loop.index))
        for t, fired in enumerate(fires):
            with b.if_then(fired):
                address = b.add(here, b.mul(step_bytes, integer(t)))
                store(b, b.add(load(b, address, wide, 2), total), address, 2)
        loop.close([])

    return primitive(build, 6)


# add_rows_N(weights, row stride, int32 row numbers, columns, 4-bit step mask, int16 sums [4, columns]):
# the sum of N rows is added to the sums of every step in the mask. The N rows that stand AHEAD places further in the
# list are prefetched, so it must be padded. Four streams at a time fetch fastest from memory.
add_rows_4, add_rows_2, add_rows_1 = (_make_add_rows(n) for n in (4, 2, 1))


def _make_add_pairs(count: int) -> Any:
    """As `_make_add_rows` for weights of 4 bits: the low halves of a line are LINE columns, the high ones the next."""

    def build(b: Any, weights: Any, stride: Any, rows: Any, columns: Any, steps: Any, sums: Any) -> None:
        narrow, wide = ir.VectorType(I8, LINE), ir.VectorType(I16, LINE)
        offset = repeated(NIBBLE_OFFSET * count, LINE, I16)
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, weights, stride, rows, count, skip=AHEAD)
        step_bytes = b.mul(columns, integer(2))
        fires = [b.icmp_signed("!=", b.and_(steps, integer(1 << t)), integer(0)) for t in range(STEP_GROUP)]
        loop = Loop(b, b.lshr(columns, integer(1)), LINE, [])
        sums_of_pairs = [ir.Constant(narrow, None)] * 2
        for base in bases:
            sums_of_pairs = _add_nibbles(b, sums_of_pairs, b.add(base, loop.index))
        for base in ahead:
            prefetch(b, b.add(base, loop.index))
        halves = [b.sub(b.zext(half, wide), offset) for half in sums_of_pairs]
        here = b.add(sums, b.mul(loop.index, integer(4)))
        for t, fired in enumerate(fires):
            with b.if_then(fired):
                for part, half in enumerate(halves):
                    address = b.add(b.add(here, b.mul(step_bytes, integer(t))), integer(2 * LINE * part))
                    store(b, b.add(load(b, address, wide, 2), half), address, 2)
        loop.close([])

    return primitive(build, 6)


def _add_nibbles(b: Any, sums: list[Any], address: Any) -> list[Any]:
    """Low and high halves of a line of 4-bit weights, added to two vectors of bytes."""
    pair = load(b, address, ir.VectorType(I8, LINE))
    low, high = b.and_(pair, repeated(15, LINE, I8)), b.lshr(pair, repeated(4, LINE, I8))
    return [b.add(sums[0], low), b.add(sums[1], high)]


# add_pairs_N: the same for rows of 4-bit weights as `plan.pack_pairs` lays them out. columns: a multiple of 2 * LINE;
# the stride is in bytes.
add_pairs_8, add_pairs_4, add_pairs_2, add_pairs_1 = (_make_add_pairs(n) for n in (8, 4, 2, 1))


def _make_collect(paired: bool) -> Any:
    """Line of columns by line: the sums of all steps stay in registers while the rows of a line come from the cache."""
    narrow, wide, full = (ir.VectorType(kind, LINE) for kind in (I8, I16, I32))
    parts = 2 if paired else 1  # vectors of columns in a line
    zero = ir.Constant(wide, None)

    def add_bytes(b: Any, weights: Any, stride: Any, row: Any, count: Any, ahead: Any) -> list[Any]:
        rows = Loop(b, count, 1, [zero])
        (address,) = _row_addresses(b, weights, stride, b.add(row, b.mul(rows.index, integer(4))), 1)
        prefetch(b, b.add(address, ahead))
        return rows.close([b.add(rows.carried[0], b.sext(load(b, address, narrow), wide))])

    def add_halves(b: Any, weights: Any, stride: Any, row: Any, count: Any, ahead: Any) -> list[Any]:
        """Sixteen at a time, as many as 8 bits hold."""
        blocks = Loop(b, count, NIBBLE_ROWS, [zero, zero])
        left = b.sub(count, blocks.index)
        few = b.select(b.icmp_signed("<", left, integer(NIBBLE_ROWS)), left, integer(NIBBLE_ROWS))
        rows = Loop(b, few, 1, [ir.Constant(narrow, None)] * 2)
        place = b.add(row, b.mul(b.add(blocks.index, rows.index), integer(4)))
        (address,) = _row_addresses(b, weights, stride, place, 1)
        prefetch(b, b.add(address, ahead))
        sums = rows.close(_add_nibbles(b, rows.carried, address))
        totals = blocks.close([b.add(old, b.zext(new, wide)) for old, new in zip(blocks.carried, sums, strict=True)])
        offset = splat(b, b.trunc(b.mul(count, integer(NIBBLE_OFFSET)), I16), LINE)
        return [b.sub(total, offset) for total in totals]

    def build(
        b: Any, weights: Any, stride: Any, rows: Any, runs: Any, num_runs: Any, columns: Any, steps: Any, currents: Any,
        ahead: Any,
    ) -> None:  # fmt: skip
        lines = Loop(b, columns, LINE * parts, [])
        line = b.add(weights, b.udiv(lines.index, integer(parts)))
        each = Loop(b, num_runs, 1, [zero] * (STEP_GROUP * parts))
        run = b.add(runs, b.mul(each.index, integer(8 * RUN_FIELDS)))
        first, count, pattern, group = (load(b, b.add(run, integer(8 * k)), I64, 8) for k in range(RUN_FIELDS))
        row = b.add(rows, b.mul(first, integer(4)))
        totals = (add_halves if paired else add_bytes)(b, line, stride, row, count, ahead)
        sums = list(each.carried)
        for t in range(STEP_GROUP):
            fired = b.icmp_signed("!=", b.and_(pattern, integer(1 << t)), integer(0))
            mine = slice(t * parts, (t + 1) * parts)
            sums[mine] = changed(
                b, fired, sums[mine], lambda old: [b.add(x, y) for x, y in zip(old, totals, strict=True)]
            )

        def widen(old: list[Any]) -> list[Any]:
            for t in range(STEP_GROUP):
                step = b.add(b.mul(group, integer(STEP_GROUP)), integer(t))
                with b.if_then(b.icmp_signed("<", step, steps)):
                    at = b.add(currents, b.mul(b.add(b.mul(step, columns), lines.index), integer(4)))
                    for part in range(parts):
                        address = b.add(at, integer(4 * LINE * part))
                        value = b.sext(old[t * parts + part], full)
                        store(b, b.add(load(b, address, full, 4), value), address, 4)
            return [zero] * len(old)

        each.close(changed(b, b.icmp_signed(">=", group, integer(0)), sums, widen))
        lines.close([])

    return primitive(build, 9)


# collect_rows(weights, row stride, int32 row numbers, int64 runs, number of runs (at least 1), columns, T_s,
#              int32 currents [T_s, columns], bytes): all runs of `kernels.list_rows`, added to the currents. Of every
# row it also prefetches what lies so many bytes further on; 0 for nothing.
# collect_pairs: the same for weights of 4 bits; columns a multiple of 2 * LINE.
collect_rows, collect_pairs = _make_collect(False), _make_collect(True)


def _widen_sums(b: Any, sums: Any, currents: Any, columns: Any, num_steps: Any) -> None:
    narrow, wide = ir.VectorType(I16, LINE), ir.VectorType(I32, LINE)
    loop = Loop(b, b.mul(columns, num_steps), LINE, [])
    source, target = b.add(sums, b.mul(loop.index, integer(2))), b.add(currents, b.mul(loop.index, integer(4)))
    store(b, b.add(load(b, target, wide, 4), b.sext(load(b, source, narrow, 2), wide)), target, 4)
    store(b, ir.Constant(narrow, None), source, 2)
    loop.close([])


# widen_sums(int16 sums [n, columns], int32 currents [n, columns], columns, n): currents += sums; sums = 0
widen_sums = primitive(_widen_sums, 4)


# Lanes of one 256-bit multiply-add: x86 interleaves two rows within halves of a register, so its 32-bit sums come in
# this order of columns. move_sums puts them right.
PAIR_LOW = [0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27]
PAIR_HIGH = [4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31]


def has_multiply_add() -> bool:
    """Whether this CPU has AVX2's multiply-add of 16-bit pairs; numba's cache is per CPU, so it may be compiled in."""
    return llvm.get_process_triple().startswith("x86_64") and bool(llvm.get_host_cpu_features().get("avx2"))


def make_scale_rows(count: int, paired: bool) -> Any:
    """count rows times int32 factors; `paired` uses 16-bit multiply-adds and therefore needs factors below 2**15."""

    def generic(b: Any, bases: list[Any], scales: list[Any], index: Any, total: Any) -> Any:
        narrow, wide = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES)
        for base, scale in zip(bases, scales, strict=True):
            row = b.sext(load(b, b.add(base, index), narrow), wide)
            total = b.add(total, b.mul(row, splat(b, scale, LANES)))
        return total

    def pairs(b: Any, bases: list[Any], scales: list[Any], index: Any, total: Any) -> Any:
        narrow, middle = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)
        half = ir.VectorType(I32, LANES // 2)
        split = [ir.Constant(ir.VectorType(I32, LANES // 2), list(range(k, k + LANES // 2))) for k in (0, LANES // 2)]
        sums = [b.shuffle_vector(total, total, part) for part in split]
        rows = [b.sext(load(b, b.add(base, index), narrow), middle) for base in bases]
        for k in range(0, count, 2):
            low, high = b.and_(scales[k], integer(0xFFFF, I32)), b.shl(scales[k + 1], integer(16, I32))
            factor = b.bitcast(splat(b, b.or_(low, high), LANES // 2), middle)
            for part, order in enumerate((PAIR_LOW, PAIR_HIGH)):
                mixed = b.shuffle_vector(rows[k], rows[k + 1], ir.Constant(ir.VectorType(I32, LANES), order))
                product = call(b, "llvm.x86.avx2.pmadd.wd", [], half, [mixed, factor])
                sums[part] = b.add(sums[part], product)
        return b.shuffle_vector(*sums, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))

    def build(
        b: Any, weights: Any, stride: Any, rows: Any, factors: Any, columns: Any, sums: Any, later: Any, later_rows: Any
    ) -> None:
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, later, stride, later_rows, count)
        pointer = b.inttoptr(factors, I32.as_pointer())
        scales = [b.load(b.gep(pointer, [integer(k)])) for k in range(count)]
        loop = Loop(b, columns, LINE, [])
        for base in ahead:
            prefetch(b, b.add(base, loop.index))
        for part in range(0, LINE, LANES):
            index = b.add(loop.index, integer(part))
            address = b.add(sums, b.mul(index, integer(4)))
            total = load(b, address, ir.VectorType(I32, LANES), 4)
            store(b, (pairs if paired else generic)(b, bases, scales, index, total), address, 4)
        loop.close([])

    return primitive(build, 8)


# scale_rows_N(weights, row stride, int32 row numbers, int32 factors, columns, int32 sums, other weights, other row
#              numbers): sums += factors @ rows; the other N rows are prefetched.
# pair_rows_4 is for factors that fit int16 and leaves each 16 sums in the order of PAIR_LOW, PAIR_HIGH.
MULTIPLY_ADD = has_multiply_add()
pair_rows_4 = make_scale_rows(4, paired=MULTIPLY_ADD)
scale_rows_4, scale_rows_1 = make_scale_rows(4, paired=False), make_scale_rows(1, paired=False)


def make_move_sums(paired: bool) -> Any:
    order = [PAIR_LOW[k] for k in range(0, 16, 2)] + [PAIR_HIGH[k] for k in range(0, 16, 2)]
    inverse = [order.index(column) for column in range(LANES)] if paired else list(range(LANES))

    def build(b: Any, sums: Any, wide: Any, columns: Any) -> None:
        small, large = ir.VectorType(I32, LANES), ir.VectorType(I64, LANES)
        loop = Loop(b, columns, LANES, [])
        source, target = b.add(sums, b.mul(loop.index, integer(4))), b.add(wide, b.mul(loop.index, integer(8)))
        values = load(b, source, small, 4)
        values = b.shuffle_vector(values, values, ir.Constant(small, inverse))
        store(b, b.add(load(b, target, large, 8), b.sext(values, large)), target, 8)
        store(b, ir.Constant(small, None), source, 4)
        loop.close([])

    return primitive(build, 3)


# move_sums(int32 sums, int64 wide, columns): wide += sums; sums = 0. move_pairs does it for sums of pair_rows_4.
move_sums, move_pairs = make_move_sums(False), make_move_sums(MULTIPLY_ADD)


def _add_scaled(b: Any, row: Any, factor: Any, columns: Any, wide: Any) -> None:
    large = ir.VectorType(I64, LANES)
    scale = splat(b, factor, LANES)
    loop = Loop(b, columns, LANES, [])
    weights = b.sext(load(b, b.add(row, loop.index), ir.VectorType(I8, LANES)), large)
    target = b.add(wide, b.mul(loop.index, integer(8)))
    store(b, b.add(load(b, target, large, 8), b.mul(weights, scale)), target, 8)
    loop.close([])


# add_scaled(int8 row, factor, columns, int64 wide): wide += factor * row, for factors of any size
add_scaled = primitive(_add_scaled, 4)


def _centre(b: Any, wide: Any, sums: Any, norm: Any, columns: Any, out: Any) -> None:
    real = ir.DoubleType()
    vector = ir.VectorType(real, LANES)
    unit, mu, inverse = (splat(b, load(b, b.add(norm, integer(8 * k)), real, 8), LANES) for k in range(3))
    loop = Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, integer(8))
    total = b.sitofp(load(b, b.add(wide, offset), ir.VectorType(I64, LANES), 8), vector)
    shifted = b.fsub(b.fdiv(total, unit), b.fmul(mu, load(b, b.add(sums, offset), vector, 8)))
    store(b, b.fmul(shifted, inverse), b.add(out, offset), 8)
    loop.close([])


# centre(int64 wide, float64 sums, float64 (unit, mu, inverse), columns, float64 out):
# out = (wide / unit - mu * sums) * inverse, rounded after every operation as numpy does
centre = primitive(_centre, 5)


def _affine(b: Any, values: Any, scales: Any, offsets: Any, columns: Any, out: Any) -> None:
    vector = ir.VectorType(ir.DoubleType(), LANES)
    loop = Loop(b, columns, LANES, [])
    place = b.mul(loop.index, integer(8))
    value, scale, offset = (load(b, b.add(address, place), vector, 8) for address in (values, scales, offsets))
    store(b, b.fadd(b.fmul(scale, value), offset), b.add(out, place), 8)
    loop.close([])


# affine(float64 values, float64 scales, float64 offsets, columns, float64 out): out = scales * values + offsets
affine = primitive(_affine, 5)


def _to_float(b: Any, wide: Any, columns: Any) -> None:
    loop = Loop(b, columns, LANES, [])
    address = b.add(wide, b.mul(loop.index, integer(8)))
    value = load(b, address, ir.VectorType(I64, LANES), 8)
    store(b, b.sitofp(value, ir.VectorType(ir.DoubleType(), LANES)), address, 8)
    loop.close([])


# to_float(int64 wide, columns): the numbers become float64 in place
to_float = primitive(_to_float, 2)
