"""Vector primitives of the event engine, written as LLVM IR and callable from numba code.

numba cannot express three things the engine lives on: int8 rows summed in int16 registers, 32-bit lanes that stay
32-bit (numba promotes to 64), and spikes packed into words. LLVM's generic vectors can, on any CPU, so each primitive
below builds a few lines of IR. All take plain addresses (int64); widths are multiples of `LINE` unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from neuro_sim.event.constants import AHEAD, LANES, LINE, NIBBLE_OFFSET, NIBBLE_ROWS, RUN_FIELDS, STEP_GROUP, WORD
from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def _primitive(build: Callable[..., Any], num_args: int, result: Any = types.void) -> Any:
    """Wrap `build(builder, *addresses_and_integers)` as a numba intrinsic of int64 arguments."""
    signature = result(*[types.int64] * num_args)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = build(builder, *args)
        return context.get_dummy_value() if value is None else value

    names = ", ".join(f"a{i}" for i in range(num_args))
    scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
    # numba reads the argument count from the function's signature, hence the generated definition.
    exec(f"def primitive(typing_context, {names}):\n    return signature, codegen", scope)
    return intrinsic(scope["primitive"])


def _int(value: int, kind: Any = I64) -> Any:
    return ir.Constant(kind, value)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector with `value` in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _int(0, I32))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), None))


def _constants(value: int, lanes: int, kind: Any = I32) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _call(builder: Any, name: str, kinds: list[Any], result: Any, args: list[Any]) -> Any:
    function = builder.module.declare_intrinsic(name, kinds, ir.FunctionType(result, [a.type for a in args]))
    return builder.call(function, args)


def _prefetch(builder: Any, address: Any) -> None:
    """Into the second-level cache: it has more lines on their way at a time than the first."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    read, keep, data = _int(0, I32), _int(2, I32), _int(1, I32)
    _call(builder, "llvm.prefetch", [I8.as_pointer()], ir.VoidType(), [pointer, read, keep, data])


def _prefetch_words(builder: Any, address: Any) -> None:
    """LANES words of spikes."""
    for line in range(0, 8 * LANES, 64):
        _prefetch(builder, builder.add(address, _int(line)))


def _popcount(builder: Any, value: Any) -> Any:
    kind = value.type
    # llvmlite does not know how LLVM names the variant for a vector
    name = f"v{kind.count}i{kind.element.width}" if isinstance(kind, ir.VectorType) else f"i{kind.width}"
    return _call(builder, f"llvm.ctpop.{name}", [], kind, [value])


class _Loop:
    """`for i in range(0, stop, step)` in IR with carried values; at least one turn. Use as a context manager."""

    def __init__(self, builder: Any, stop: Any, step: int, carried: list[Any]) -> None:
        self.builder, self.stop, self.step = builder, stop, step
        before = builder.block
        self.body, self.after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.index = builder.phi(I64)
        self.index.add_incoming(_int(0), before)
        self.carried = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)

    def close(self, updated: list[Any]) -> list[Any]:
        builder = self.builder
        following = builder.add(self.index, _int(self.step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.carried, updated, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self.stop), self.body, self.after)
        builder.position_at_end(self.after)
        return updated


# --- single values in memory ----------------------------------------------------------------------------------------


def _make_read(kind: Any, signed: bool = True) -> Any:
    def build(b: Any, address: Any) -> Any:
        value = _load(b, address, kind, kind.width // 8)
        return value if kind.width == 64 else (b.sext(value, I64) if signed else b.zext(value, I64))

    return _primitive(build, 1, types.int64)


def _make_write(kind: Any) -> Any:
    def build(b: Any, address: Any, value: Any) -> None:
        _store(b, value if kind.width == 64 else b.trunc(value, kind), address, kind.width // 8)

    return _primitive(build, 2)


read_int32, read_uint32, read_int64 = _make_read(I32), _make_read(I32, signed=False), _make_read(I64)
write_int32, write_int64 = _make_write(I32), _make_write(I64)
read_float = _primitive(lambda b, address: _load(b, address, ir.DoubleType(), 8), 1, types.float64)


def _make_write_float() -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _store(builder, args[1], args[0], 8)
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


count_bits = _primitive(lambda b, word: _popcount(b, word), 1, types.int64)


def _clear(b: Any, address: Any, size: Any) -> None:
    pointer = b.inttoptr(address, I8.as_pointer())
    _call(b, "llvm.memset", [I8.as_pointer(), I64], ir.VoidType(), [pointer, _int(0, I8), size, ir.Constant(I1, 0)])


clear = _primitive(_clear, 2)  # clear(address, bytes)


# --- rows of int8 weights -------------------------------------------------------------------------------------------


def _row_addresses(builder: Any, weights: Any, stride: Any, rows: Any, count: int, skip: int = 0) -> list[Any]:
    pointer = builder.inttoptr(rows, I32.as_pointer())
    indices = [builder.load(builder.gep(pointer, [_int(k + skip)])) for k in range(count)]
    return [builder.add(weights, builder.mul(builder.sext(i, I64), stride)) for i in indices]


def _make_add_rows(count: int) -> Any:
    def build(b: Any, weights: Any, stride: Any, rows: Any, columns: Any, steps: Any, sums: Any) -> None:
        narrow, wide = ir.VectorType(I8, LINE), ir.VectorType(I16, LINE)
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, weights, stride, rows, count, skip=AHEAD)
        step_bytes = b.mul(columns, _int(2))
        fires = [b.icmp_signed("!=", b.and_(steps, _int(1 << t)), _int(0)) for t in range(STEP_GROUP)]
        loop = _Loop(b, columns, LINE, [])
        total = None
        for base in bases:
            row = b.sext(_load(b, b.add(base, loop.index), narrow), wide)
            total = row if total is None else b.add(total, row)
        for base in ahead:
            _prefetch(b, b.add(base, loop.index))
        here = b.add(sums, b.add(loop.index, loop.index))
        for t, fired in enumerate(fires):
            with b.if_then(fired):
                address = b.add(here, b.mul(step_bytes, _int(t)))
                _store(b, b.add(_load(b, address, wide, 2), total), address, 2)
        loop.close([])

    return _primitive(build, 6)


# add_rows_N(weights, row stride, int32 row numbers, columns, 4-bit step mask, int16 sums [4, columns]):
# the sum of N rows is added to the sums of every step in the mask. The N rows that stand AHEAD places further in the
# list are prefetched, so it must be padded. Four streams at a time fetch fastest from memory.
add_rows_4, add_rows_2, add_rows_1 = (_make_add_rows(n) for n in (4, 2, 1))


def _make_add_pairs(count: int) -> Any:
    """As `_make_add_rows` for weights of 4 bits: the low halves of a line are LINE columns, the high ones the next."""

    def build(b: Any, weights: Any, stride: Any, rows: Any, columns: Any, steps: Any, sums: Any) -> None:
        narrow, wide = ir.VectorType(I8, LINE), ir.VectorType(I16, LINE)
        offset = _constants(NIBBLE_OFFSET * count, LINE, I16)
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, weights, stride, rows, count, skip=AHEAD)
        step_bytes = b.mul(columns, _int(2))
        fires = [b.icmp_signed("!=", b.and_(steps, _int(1 << t)), _int(0)) for t in range(STEP_GROUP)]
        loop = _Loop(b, b.lshr(columns, _int(1)), LINE, [])
        sums_of_pairs = [ir.Constant(narrow, None)] * 2
        for base in bases:
            sums_of_pairs = _add_nibbles(b, sums_of_pairs, b.add(base, loop.index))
        for base in ahead:
            _prefetch(b, b.add(base, loop.index))
        halves = [b.sub(b.zext(half, wide), offset) for half in sums_of_pairs]
        here = b.add(sums, b.mul(loop.index, _int(4)))
        for t, fired in enumerate(fires):
            with b.if_then(fired):
                for part, half in enumerate(halves):
                    address = b.add(b.add(here, b.mul(step_bytes, _int(t))), _int(2 * LINE * part))
                    _store(b, b.add(_load(b, address, wide, 2), half), address, 2)
        loop.close([])

    return _primitive(build, 6)


def _add_nibbles(b: Any, sums: list[Any], address: Any) -> list[Any]:
    """Low and high halves of a line of 4-bit weights, added to two vectors of bytes."""
    pair = _load(b, address, ir.VectorType(I8, LINE))
    low, high = b.and_(pair, _constants(15, LINE, I8)), b.lshr(pair, _constants(4, LINE, I8))
    return [b.add(sums[0], low), b.add(sums[1], high)]


# add_pairs_N: the same for rows of 4-bit weights as `plan.pack_pairs` lays them out. columns: a multiple of 2 * LINE;
# the stride is in bytes.
add_pairs_8, add_pairs_4, add_pairs_2, add_pairs_1 = (_make_add_pairs(n) for n in (8, 4, 2, 1))


def _changed(b: Any, condition: Any, values: list[Any], change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """values, or what `change` makes of them if the condition holds."""
    before = b.block
    with b.if_then(condition):
        changed = change(values)
        inside = b.block
    phis = []
    for old, new in zip(values, changed, strict=True):
        phi = b.phi(old.type)
        phi.add_incoming(old, before)
        phi.add_incoming(new, inside)
        phis.append(phi)
    return phis


def _make_collect(paired: bool) -> Any:
    """Line of columns by line: the sums of all steps stay in registers while the rows of a line come from the cache."""
    narrow, wide, full = (ir.VectorType(kind, LINE) for kind in (I8, I16, I32))
    parts = 2 if paired else 1  # vectors of columns in a line
    zero = ir.Constant(wide, None)

    def add_bytes(b: Any, weights: Any, stride: Any, row: Any, count: Any, ahead: Any) -> list[Any]:
        rows = _Loop(b, count, 1, [zero])
        (address,) = _row_addresses(b, weights, stride, b.add(row, b.mul(rows.index, _int(4))), 1)
        _prefetch(b, b.add(address, ahead))
        return rows.close([b.add(rows.carried[0], b.sext(_load(b, address, narrow), wide))])

    def add_halves(b: Any, weights: Any, stride: Any, row: Any, count: Any, ahead: Any) -> list[Any]:
        """Sixteen at a time, as many as 8 bits hold."""
        blocks = _Loop(b, count, NIBBLE_ROWS, [zero, zero])
        left = b.sub(count, blocks.index)
        few = b.select(b.icmp_signed("<", left, _int(NIBBLE_ROWS)), left, _int(NIBBLE_ROWS))
        rows = _Loop(b, few, 1, [ir.Constant(narrow, None)] * 2)
        place = b.add(row, b.mul(b.add(blocks.index, rows.index), _int(4)))
        (address,) = _row_addresses(b, weights, stride, place, 1)
        _prefetch(b, b.add(address, ahead))
        sums = rows.close(_add_nibbles(b, rows.carried, address))
        totals = blocks.close([b.add(old, b.zext(new, wide)) for old, new in zip(blocks.carried, sums, strict=True)])
        offset = _splat(b, b.trunc(b.mul(count, _int(NIBBLE_OFFSET)), I16), LINE)
        return [b.sub(total, offset) for total in totals]

    def build(
        b: Any, weights: Any, stride: Any, rows: Any, runs: Any, num_runs: Any, columns: Any, steps: Any, currents: Any,
        ahead: Any,
    ) -> None:  # fmt: skip
        lines = _Loop(b, columns, LINE * parts, [])
        line = b.add(weights, b.udiv(lines.index, _int(parts)))
        each = _Loop(b, num_runs, 1, [zero] * (STEP_GROUP * parts))
        run = b.add(runs, b.mul(each.index, _int(8 * RUN_FIELDS)))
        first, count, pattern, group = (_load(b, b.add(run, _int(8 * k)), I64, 8) for k in range(RUN_FIELDS))
        row = b.add(rows, b.mul(first, _int(4)))
        totals = (add_halves if paired else add_bytes)(b, line, stride, row, count, ahead)
        sums = list(each.carried)
        for t in range(STEP_GROUP):
            fired = b.icmp_signed("!=", b.and_(pattern, _int(1 << t)), _int(0))
            mine = slice(t * parts, (t + 1) * parts)
            sums[mine] = _changed(
                b, fired, sums[mine], lambda old: [b.add(x, y) for x, y in zip(old, totals, strict=True)]
            )

        def widen(old: list[Any]) -> list[Any]:
            for t in range(STEP_GROUP):
                step = b.add(b.mul(group, _int(STEP_GROUP)), _int(t))
                with b.if_then(b.icmp_signed("<", step, steps)):
                    at = b.add(currents, b.mul(b.add(b.mul(step, columns), lines.index), _int(4)))
                    for part in range(parts):
                        address = b.add(at, _int(4 * LINE * part))
                        value = b.sext(old[t * parts + part], full)
                        _store(b, b.add(_load(b, address, full, 4), value), address, 4)
            return [zero] * len(old)

        each.close(_changed(b, b.icmp_signed(">=", group, _int(0)), sums, widen))
        lines.close([])

    return _primitive(build, 9)


# collect_rows(weights, row stride, int32 row numbers, int64 runs, number of runs (at least 1), columns, T_s,
#              int32 currents [T_s, columns], bytes): all runs of `kernels.list_rows`, added to the currents. Of every row
# it also prefetches what lies so many bytes further on; 0 for nothing.
# collect_pairs: the same for weights of 4 bits; columns a multiple of 2 * LINE.
collect_rows, collect_pairs = _make_collect(False), _make_collect(True)


def _widen_sums(b: Any, sums: Any, currents: Any, columns: Any, num_steps: Any) -> None:
    narrow, wide = ir.VectorType(I16, LINE), ir.VectorType(I32, LINE)
    loop = _Loop(b, b.mul(columns, num_steps), LINE, [])
    source, target = b.add(sums, b.mul(loop.index, _int(2))), b.add(currents, b.mul(loop.index, _int(4)))
    _store(b, b.add(_load(b, target, wide, 4), b.sext(_load(b, source, narrow, 2), wide)), target, 4)
    _store(b, ir.Constant(narrow, None), source, 2)
    loop.close([])


# widen_sums(int16 sums [n, columns], int32 currents [n, columns], columns, n): currents += sums; sums = 0
widen_sums = _primitive(_widen_sums, 4)


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
            row = b.sext(_load(b, b.add(base, index), narrow), wide)
            total = b.add(total, b.mul(row, _splat(b, scale, LANES)))
        return total

    def pairs(b: Any, bases: list[Any], scales: list[Any], index: Any, total: Any) -> Any:
        narrow, middle = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)
        half = ir.VectorType(I32, LANES // 2)
        split = [ir.Constant(ir.VectorType(I32, LANES // 2), list(range(k, k + LANES // 2))) for k in (0, LANES // 2)]
        sums = [b.shuffle_vector(total, total, part) for part in split]
        rows = [b.sext(_load(b, b.add(base, index), narrow), middle) for base in bases]
        for k in range(0, count, 2):
            low, high = b.and_(scales[k], _int(0xFFFF, I32)), b.shl(scales[k + 1], _int(16, I32))
            factor = b.bitcast(_splat(b, b.or_(low, high), LANES // 2), middle)
            for part, order in enumerate((PAIR_LOW, PAIR_HIGH)):
                mixed = b.shuffle_vector(rows[k], rows[k + 1], ir.Constant(ir.VectorType(I32, LANES), order))
                product = _call(b, "llvm.x86.avx2.pmadd.wd", [], half, [mixed, factor])
                sums[part] = b.add(sums[part], product)
        return b.shuffle_vector(*sums, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))

    def build(
        b: Any, weights: Any, stride: Any, rows: Any, factors: Any, columns: Any, sums: Any, later: Any, later_rows: Any
    ) -> None:
        bases = _row_addresses(b, weights, stride, rows, count)
        ahead = _row_addresses(b, later, stride, later_rows, count)
        pointer = b.inttoptr(factors, I32.as_pointer())
        scales = [b.load(b.gep(pointer, [_int(k)])) for k in range(count)]
        loop = _Loop(b, columns, LINE, [])
        for base in ahead:
            _prefetch(b, b.add(base, loop.index))
        for part in range(0, LINE, LANES):
            index = b.add(loop.index, _int(part))
            address = b.add(sums, b.mul(index, _int(4)))
            total = _load(b, address, ir.VectorType(I32, LANES), 4)
            _store(b, (pairs if paired else generic)(b, bases, scales, index, total), address, 4)
        loop.close([])

    return _primitive(build, 8)


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
        loop = _Loop(b, columns, LANES, [])
        source, target = b.add(sums, b.mul(loop.index, _int(4))), b.add(wide, b.mul(loop.index, _int(8)))
        values = _load(b, source, small, 4)
        values = b.shuffle_vector(values, values, ir.Constant(small, inverse))
        _store(b, b.add(_load(b, target, large, 8), b.sext(values, large)), target, 8)
        _store(b, ir.Constant(small, None), source, 4)
        loop.close([])

    return _primitive(build, 3)


# move_sums(int32 sums, int64 wide, columns): wide += sums; sums = 0. move_pairs does it for sums of pair_rows_4.
move_sums, move_pairs = make_move_sums(False), make_move_sums(MULTIPLY_ADD)


def _add_scaled(b: Any, row: Any, factor: Any, columns: Any, wide: Any) -> None:
    large = ir.VectorType(I64, LANES)
    scale = _splat(b, factor, LANES)
    loop = _Loop(b, columns, LANES, [])
    weights = b.sext(_load(b, b.add(row, loop.index), ir.VectorType(I8, LANES)), large)
    target = b.add(wide, b.mul(loop.index, _int(8)))
    _store(b, b.add(_load(b, target, large, 8), b.mul(weights, scale)), target, 8)
    loop.close([])


# add_scaled(int8 row, factor, columns, int64 wide): wide += factor * row, for factors of any size
add_scaled = _primitive(_add_scaled, 4)


def _centre(b: Any, wide: Any, sums: Any, norm: Any, columns: Any, out: Any) -> None:
    real = ir.DoubleType()
    vector = ir.VectorType(real, LANES)
    unit, mu, inverse = (_splat(b, _load(b, b.add(norm, _int(8 * k)), real, 8), LANES) for k in range(3))
    loop = _Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, _int(8))
    total = b.sitofp(_load(b, b.add(wide, offset), ir.VectorType(I64, LANES), 8), vector)
    shifted = b.fsub(b.fdiv(total, unit), b.fmul(mu, _load(b, b.add(sums, offset), vector, 8)))
    _store(b, b.fmul(shifted, inverse), b.add(out, offset), 8)
    loop.close([])


# centre(int64 wide, float64 sums, float64 (unit, mu, inverse), columns, float64 out):
# out = (wide / unit - mu * sums) * inverse, rounded after every operation as numpy does
centre = _primitive(_centre, 5)


def _affine(b: Any, values: Any, scales: Any, offsets: Any, columns: Any, out: Any) -> None:
    vector = ir.VectorType(ir.DoubleType(), LANES)
    loop = _Loop(b, columns, LANES, [])
    place = b.mul(loop.index, _int(8))
    value, scale, offset = (_load(b, b.add(address, place), vector, 8) for address in (values, scales, offsets))
    _store(b, b.fadd(b.fmul(scale, value), offset), b.add(out, place), 8)
    loop.close([])


# affine(float64 values, float64 scales, float64 offsets, columns, float64 out): out = scales * values + offsets
affine = _primitive(_affine, 5)


def _to_float(b: Any, wide: Any, columns: Any) -> None:
    loop = _Loop(b, columns, LANES, [])
    address = b.add(wide, b.mul(loop.index, _int(8)))
    value = _load(b, address, ir.VectorType(I64, LANES), 8)
    _store(b, b.sitofp(value, ir.VectorType(ir.DoubleType(), LANES)), address, 8)
    loop.close([])


# to_float(int64 wide, columns): the numbers become float64 in place
to_float = _primitive(_to_float, 2)


# --- neurons --------------------------------------------------------------------------------------------------------


def _decayed(b: Any, membrane: Any, decay: Any, lanes: int) -> Any:
    """sign(v) * ((|v| * decay) >> 12) in 32 bits: |v| = hi * 4096 + lo, and hi * decay + (lo * decay >> 12) is exact.

    The masks tell LLVM that both factors fit 13 bits, so it can multiply 16-bit halves.
    """
    zero = ir.Constant(membrane.type, None)
    negative = b.icmp_signed("<", membrane, zero)
    magnitude = b.select(negative, b.sub(zero, membrane), membrane)
    fraction, mask = _constants(DECAY_BITS, lanes), _constants((1 << DECAY_BITS) - 1, lanes)
    high = b.mul(b.and_(b.lshr(magnitude, fraction), mask), decay)
    low = b.lshr(b.mul(b.and_(magnitude, mask), decay), fraction)
    result = b.add(high, low)
    return b.select(negative, b.sub(zero, result), result)


def _decay_factor(b: Any, decay: Any, lanes: int) -> Any:
    return b.and_(_splat(b, b.trunc(decay, I32), lanes), _constants((2 << DECAY_BITS) - 1, lanes))


def _clipped(b: Any, wide: Any, lanes: int) -> tuple[Any, Any]:
    """Clip to the membrane's 24 bits: (value, which lanes saturated)."""
    top, bottom = _constants(MEMBRANE_MAX, lanes), _constants(MEMBRANE_MIN, lanes)
    value = b.select(b.icmp_signed(">", wide, top), top, wide)
    value = b.select(b.icmp_signed("<", value, bottom), bottom, value)
    return value, b.icmp_signed("!=", value, wide)


def _count_bits(b: Any, flags: Any, address: Any) -> None:
    """Add the number of set lanes to an int64 in memory."""
    bits = b.zext(b.bitcast(flags, ir.IntType(flags.type.count)), I64)
    _store(b, b.add(_load(b, address, I64, 8), _popcount(b, bits)), address, 8)


def _fire(
    b: Any, currents: Any, step_stride: Any, thresholds: Any, biases: Any, shift: Any, decay: Any,
    columns: Any, num_steps: Any, masks: Any, spikes: Any, saturations: Any,
) -> Any:  # fmt: skip
    vector = ir.VectorType(I32, LANES)
    iota = ir.Constant(vector, list(range(LANES)))
    factor = _decay_factor(b, decay, LANES)
    shifts = _splat(b, b.trunc(shift, I32), LANES)
    zero = ir.Constant(vector, None)
    loop = _Loop(b, columns, LANES, [_int(0)])
    offset = b.mul(loop.index, _int(4))
    threshold, bias = _load(b, b.add(thresholds, offset), vector, 4), _load(b, b.add(biases, offset), vector, 4)
    left = b.trunc(b.sub(columns, loop.index), I32)
    valid = b.icmp_signed("<", iota, _splat(b, left, LANES))
    steps = _Loop(b, num_steps, 1, [zero, zero, zero])
    membrane, reset, mask = steps.carried
    current = _load(b, b.add(b.add(currents, offset), b.mul(steps.index, step_stride)), vector, 4)
    wide = b.sub(b.add(b.add(_decayed(b, membrane, factor, LANES), b.shl(current, shifts)), bias), reset)
    membrane, saturated = _clipped(b, wide, LANES)
    fired = b.and_(b.icmp_signed(">=", membrane, threshold), valid)
    bit = _splat(b, b.trunc(b.shl(_int(1), steps.index), I32), LANES)
    counter = b.mul(steps.index, _int(8))
    _count_bits(b, fired, b.add(spikes, counter))
    _count_bits(b, b.and_(saturated, valid), b.add(saturations, counter))
    spiked = b.or_(mask, b.select(fired, bit, zero))
    steps.close([membrane, b.select(fired, threshold, zero), spiked])
    _store(b, spiked, b.add(masks, offset), 4)
    active = b.zext(b.bitcast(b.icmp_signed("!=", spiked, zero), ir.IntType(LANES)), I64)
    return loop.close([b.add(loop.carried[0], _popcount(b, active))])[0]


# fire(int32 currents [T_s, .], bytes between steps, int32 thresholds, int32 biases, shift, decay, columns, T_s,
#      uint32 masks out, int64 spikes [T_s], int64 saturations [T_s]) -> neurons that spiked at all:
# the integer neuron for `columns` (any number) neurons; bit t of a mask is the spike of step t. Whole vectors of
# LANES are read and written: lanes beyond `columns` get mask 0 and count nothing.
fire = _primitive(_fire, 11, types.int64)


def _add_gains(b: Any, residual: Any, step_stride: Any, masks: Any, gains: Any, columns: Any, num_steps: Any) -> None:
    vector = ir.VectorType(I32, LANES)
    zero = ir.Constant(vector, None)
    loop = _Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, _int(4))
    mask, gain = _load(b, b.add(masks, offset), vector, 4), _load(b, b.add(gains, offset), vector, 4)
    steps = _Loop(b, num_steps, 1, [])
    bit = _splat(b, b.trunc(b.shl(_int(1), steps.index), I32), LANES)
    fired = b.icmp_signed("!=", b.and_(mask, bit), zero)
    address = b.add(b.add(residual, offset), b.mul(steps.index, step_stride))
    _store(b, b.add(_load(b, address, vector, 4), b.select(fired, gain, zero)), address, 4)
    steps.close([])
    loop.close([])


# add_gains(int32 residual [T_s, .], bytes between steps, uint32 masks, int32 gains, columns, T_s)
add_gains = _primitive(_add_gains, 6)


def _add_currents(
    b: Any, residual: Any, residual_stride: Any, currents: Any, current_stride: Any, shifts: Any, biases: Any,
    columns: Any, num_steps: Any,
) -> None:  # fmt: skip
    vector = ir.VectorType(I32, LANES)
    loop = _Loop(b, columns, LANES, [])
    offset = b.mul(loop.index, _int(4))
    shift, bias = _load(b, b.add(shifts, offset), vector, 4), _load(b, b.add(biases, offset), vector, 4)
    steps = _Loop(b, num_steps, 1, [])
    current = _load(b, b.add(b.add(currents, offset), b.mul(steps.index, current_stride)), vector, 4)
    address = b.add(b.add(residual, offset), b.mul(steps.index, residual_stride))
    written = b.add(b.shl(current, shift), bias)
    _store(b, b.add(_load(b, address, vector, 4), written), address, 4)
    steps.close([])
    loop.close([])


# add_currents(int32 residual [T_s, .], bytes between steps, int32 currents [T_s, .], bytes between steps, int32 shifts,
#              int32 biases, columns, T_s): residual += (currents << shifts) + biases
add_currents = _primitive(_add_currents, 8)


# --- attention on packed spikes -------------------------------------------------------------------------------------


def _pack_word(b: Any, masks: Any, step: Any) -> Any:
    vector = ir.VectorType(I32, WORD)
    bit = _splat(b, b.trunc(b.shl(_int(1), step), I32), WORD)
    set_ = b.icmp_signed("!=", b.and_(_load(b, masks, vector, 4), bit), ir.Constant(vector, None))
    return b.bitcast(set_, I64)


# pack_word(uint32 masks [64], step) -> the spikes of 64 neurons at one step
pack_word = _primitive(_pack_word, 2, types.int64)


def _active_word(b: Any, masks: Any) -> Any:
    vector = ir.VectorType(I32, WORD)
    return b.bitcast(b.icmp_signed("!=", _load(b, masks, vector, 4), ir.Constant(vector, None)), I64)


# active_word(uint32 masks [64]) -> which of 64 neurons spiked at all; lowest_bit(word) -> the place of its lowest bit
active_word = _primitive(_active_word, 1, types.int64)
lowest_bit = _primitive(lambda b, word: _call(b, "llvm.cttz", [I64], I64, [word, ir.Constant(I1, 1)]), 1, types.int64)


def _make_attend(biased: bool) -> Any:
    def build(
        b: Any, keys: Any, step_bytes: Any, word_bytes: Any, num_words: Any, queries: Any, num_steps: Any,
        threshold: Any, shift: Any, decay: Any, context: Any, chosen: Any, chosen_bytes: Any, coincidences: Any,
        spikes: Any, saturations: Any, ahead: Any, ahead_bytes: Any, biases: Any, distances: Any,
    ) -> None:  # fmt: skip
        vector, words, bits = ir.VectorType(I32, LANES), ir.VectorType(I64, LANES), ir.IntType(LANES)
        zero, iota = ir.Constant(vector, None), ir.Constant(vector, list(range(LANES)))
        factor = _decay_factor(b, decay, LANES)
        shifts, level = _splat(b, b.trunc(shift, I32), LANES), _splat(b, b.trunc(threshold, I32), LANES)
        whole = b.and_(b.add(context, _int(WORD - 1)), _int(-WORD))  # the last word is written to its end
        nearest = b.sub(b.add(distances, _int(LANES)), context)  # place in `biases` of position 0
        loop = _Loop(b, whole, LANES, [])
        if biased:
            place = b.add(nearest, loop.index)
            place = b.select(b.icmp_signed("<", place, _int(0)), _int(0), place)
            bias = _load(b, b.add(biases, b.mul(place, _int(4))), vector, 4)
        real = b.icmp_signed("<", iota, _splat(b, b.trunc(b.sub(context, loop.index), I32), LANES))
        first = b.add(keys, b.mul(loop.index, _int(8)))
        out = b.add(chosen, b.udiv(loop.index, _int(8)))
        steps = _Loop(b, num_steps, 1, [zero, zero])
        membrane, reset = steps.carried
        start = b.add(first, b.mul(steps.index, step_bytes))
        _prefetch_words(b, b.add(b.add(ahead, b.mul(loop.index, _int(8))), b.mul(steps.index, ahead_bytes)))
        query = b.add(queries, b.mul(b.mul(steps.index, num_words), _int(8)))
        inner = _Loop(b, num_words, 1, [zero])
        mask = _splat(b, _load(b, b.add(query, b.mul(inner.index, _int(8))), I64, 8), LANES)
        both = b.and_(_load(b, b.add(start, b.mul(inner.index, word_bytes)), words, 8), mask)
        (counts,) = inner.close([b.add(inner.carried[0], b.trunc(_popcount(b, both), vector))])
        wide = b.sub(b.add(_decayed(b, membrane, factor, LANES), b.shl(counts, shifts)), reset)
        if biased:
            wide = b.add(wide, bias)
        membrane, saturated = _clipped(b, wide, LANES)
        fired = b.and_(b.icmp_signed(">=", membrane, level), real)
        found = b.add(coincidences, b.mul(steps.index, _int(4 * LANES)))
        _store(b, b.add(_load(b, found, vector, 4), b.select(real, counts, zero)), found, 4)
        _count_bits(b, fired, b.add(spikes, b.mul(steps.index, _int(8))))
        _count_bits(b, b.and_(saturated, real), b.add(saturations, b.mul(steps.index, _int(8))))
        _store(b, b.bitcast(fired, bits), b.add(out, b.mul(steps.index, chosen_bytes)), 2)
        steps.close([membrane, b.select(fired, level, zero)])
        loop.close([])

    return _primitive(build, 19)


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
    loop = _Loop(b, b.sdiv(row_bytes, _int(8)), LANES, [])
    start = b.add(values, b.mul(loop.index, _int(8)))
    inner = _Loop(b, num_words, 1, [ir.Constant(words, None)])
    spike = _splat(b, _load(b, b.add(spikes, b.mul(inner.index, _int(8))), I64, 8), LANES)
    place = b.mul(inner.index, row_bytes)
    both = b.and_(_load(b, b.add(start, place), words, 8), spike)
    _prefetch_words(b, b.add(b.add(ahead, place), b.mul(loop.index, _int(8))))
    (total,) = inner.close([b.add(inner.carried[0], _popcount(b, both))])
    _store(b, b.trunc(total, vector), b.add(sums, b.mul(loop.index, _int(4))), 4)
    loop.close([])


# sum_values(value words [num_words, n], bytes of a row (8 n), num_words, spike words [num_words], int32 sums [n],
#            what to prefetch): sums[i] = number of positions whose attention spike meets value bit i. n is a multiple of
# LANES. As many words as it reads it prefetches.
sum_values = _primitive(_sum_values, 6)


def _put_bits(b: Any, words: Any, masks: Any, step: Any, position: Any, count: Any) -> None:
    vector, small = ir.VectorType(I64, LANES), ir.VectorType(I32, LANES)
    place = _splat(b, b.and_(position, _int(WORD - 1)), LANES)
    clear = _splat(b, b.not_(b.shl(_int(1), b.and_(position, _int(WORD - 1)))), LANES)
    loop = _Loop(b, count, LANES, [])
    mask = b.zext(_load(b, b.add(masks, b.mul(loop.index, _int(4))), small, 4), vector)
    bits = b.shl(b.and_(b.lshr(mask, _splat(b, step, LANES)), _constants(1, LANES, I64)), place)
    address = b.add(words, b.mul(loop.index, _int(8)))
    _store(b, b.or_(b.and_(_load(b, address, vector, 8), clear), bits), address, 8)
    loop.close([])


# put_bits(words [n], uint32 masks [n], step, position, n): set bit `position % 64` of every word to the step's spike
put_bits = _primitive(_put_bits, 5)


# --- threads --------------------------------------------------------------------------------------------------------


def _atomic_add(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


def _atomic_load(b: Any, address: Any) -> Any:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _atomic_store(b: Any, address: Any, value: Any) -> None:
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


atomic_add = _primitive(_atomic_add, 2, types.int64)
atomic_load = _primitive(_atomic_load, 1, types.int64)
atomic_store = _primitive(_atomic_store, 2)
