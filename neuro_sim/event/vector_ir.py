"""How the event engine's primitives are written: small functions that put lines of LLVM IR together.

numba cannot express three things the engine lives on: int8 rows summed in int16 registers, 32-bit lanes that stay
32-bit (numba promotes to 64), and spikes packed into words. LLVM's generic vectors can, on any CPU, so `intrinsics` and
`row_intrinsics` build a few lines of IR for each primitive. All take plain addresses (int64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def primitive(build: Callable[..., Any], num_args: int, result: Any = types.void) -> Any:
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


def integer(value: int, kind: Any = I64) -> Any:
    return ir.Constant(kind, value)


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector with `value` in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, integer(0, I32))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), None))


def repeated(value: int, lanes: int, kind: Any = I32) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def call(builder: Any, name: str, kinds: list[Any], result: Any, args: list[Any]) -> Any:
    function = builder.module.declare_intrinsic(name, kinds, ir.FunctionType(result, [a.type for a in args]))
    return builder.call(function, args)


def prefetch(builder: Any, address: Any) -> None:
    """Into the second-level cache: it has more lines on their way at a time than the first."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    read, keep, data = integer(0, I32), integer(2, I32), integer(1, I32)
    call(builder, "llvm.prefetch", [I8.as_pointer()], ir.VoidType(), [pointer, read, keep, data])


def popcount(builder: Any, value: Any) -> Any:
    kind = value.type
    # llvmlite does not know how LLVM names the variant for a vector
    name = f"v{kind.count}i{kind.element.width}" if isinstance(kind, ir.VectorType) else f"i{kind.width}"
    return call(builder, f"llvm.ctpop.{name}", [], kind, [value])


class Loop:
    """`for i in range(0, stop, step)` in IR with carried values; at least one turn. Use as a context manager."""

    def __init__(self, builder: Any, stop: Any, step: int, carried: list[Any]) -> None:
        self.builder, self.stop, self.step = builder, stop, step
        before = builder.block
        self.body, self.after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.index = builder.phi(I64)
        self.index.add_incoming(integer(0), before)
        self.carried = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)

    def close(self, updated: list[Any]) -> list[Any]:
        builder = self.builder
        following = builder.add(self.index, integer(self.step))
        self.index.add_incoming(following, builder.block)
        for phi, value in zip(self.carried, updated, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, self.stop), self.body, self.after)
        builder.position_at_end(self.after)
        return updated


def changed(b: Any, condition: Any, values: list[Any], change: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """values, or what `change` makes of them if the condition holds."""
    before = b.block
    with b.if_then(condition):
        results = change(values)
        inside = b.block
    phis = []
    for old, new in zip(values, results, strict=True):
        phi = b.phi(old.type)
        phi.add_incoming(old, before)
        phi.add_incoming(new, inside)
        phis.append(phi)
    return phis
