r"""Spikes times weights on the CPU: int8 products for the forward pass, if asked for cheaper ones for the gradients.

Spikes are 0 or 1 and weights lie on a grid, so X W^T is a sum of integers: int32 adds it exactly, as float32 does, and
the CPU multiplies int8 several times faster. A weight of more than eight bits is two int8 planes, k = 256 hi + lo.
Spikes are kept for the backward pass as bytes.

"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikeopd.models.gradients import Gradients, kind, over_steps

_ROWS = 64  # fewer are not worth the conversions
_AT_ONCE = 4096  # rows whose integer sums exist at once
FAN_IN = 16  # likewise; and with a single column torch's product is wrong


class Planes(NamedTuple):
    """W = (256 hi + lo) * unit; integers [planes * out, in] with the high plane first; unit a scalar or [out]."""

    integers: Tensor
    unit: Tensor | float


@cache
def fast() -> bool:
    return bool(torch.cpu._is_vnni_supported())


def serves(x: Tensor) -> bool:
    """Whether int8 products serve at all for tensors of this kind, where they are."""
    kind = x.device.type == "cpu" and x.dtype == torch.float32
    return kind and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling() and fast()


def usable(x: Tensor) -> bool:
    """Whether the int8 products serve here: they give what `F.linear` gives, bit for bit, and faster."""
    return x.shape[-1] >= FAN_IN and x.numel() // x.shape[-1] >= _ROWS and serves(x)


def planes(weight: Tensor, unit: Tensor | float) -> Planes | None:
    """The integers of a weight that lies on multiples of `unit`; None if they need more than sixteen bits."""
    whole = weight.detach() / (unit[:, None] if isinstance(unit, Tensor) else unit)
    largest = float(whole.abs().max())
    if largest <= 127:
        return Planes(whole.to(torch.int8), unit)
    if not largest < 2**15 - 128:
        return None
    high = torch.floor(whole / 256 + 0.5)
    return Planes(torch.cat((high, whole - 256 * high)).to(torch.int8), unit)


def spike_linear(x: Tensor, weight: Tensor, bias: Tensor, integers: Planes, gradients: Gradients = "fp32") -> Tensor:
    """x W^T + b for binary x; with gradients "rates" [time, ...]."""
    out: Tensor = _SpikeLinear.apply(x, weight, bias, integers, gradients)
    return out


def _currents(spikes: Tensor, integers: Planes, bias: Tensor, result: Tensor) -> None:
    found = torch._int_mm(spikes, integers.integers.t())
    out, unit = len(bias), integers.unit
    if found.shape[1] > out:
        found = torch.add(found[:, out:], found[:, :out], alpha=256)
    if isinstance(unit, Tensor):
        torch.addcmul(bias, found, unit.to(bias.dtype), out=result)
    else:
        torch.mul(found, unit, out=result).add_(bias)


class _SpikeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, integers: Planes, gradients: Gradients) -> Tensor:
        spikes = x.flatten(0, -2).to(torch.int8)
        out = weight.shape[0]
        result = torch.empty((len(spikes), out), dtype=bias.dtype)
        for first in range(0, len(spikes), _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            _currents(spikes[rows], integers, bias, result[rows])
        if any(ctx.needs_input_grad):
            # Counts go up to T_s <= 127; the sum over an axis is several times slower than adding its parts.
            kept = sum(spikes.view(len(x), -1, spikes.shape[1])) if gradients == "rates" else spikes
            ctx.save_for_backward(kept, weight)
            ctx.gradients = gradients
        return result.view(*x.shape[:-1], out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spikes, weight = ctx.saved_tensors
        need, shape, times = ctx.needs_input_grad, (*grad.shape[:-1], weight.shape[1]), 1
        factor = grad.dtype if ctx.gradients == "fp32" else kind(ctx.gradients)
        if ctx.gradients == "rates":
            times, grad = len(grad), over_steps(grad)  # and spikes are counts
        flat = grad.reshape(-1, grad.shape[-1])
        slope = flat.to(factor)
        into = (slope @ weight.to(factor)).to(grad.dtype).view(*grad.shape[:-1], -1).expand(shape) if need[0] else None
        by_weight = (slope.t() @ spikes.to(factor)).to(grad.dtype) if need[1] else None
        return into, by_weight, times * flat.sum(0) if need[2] else None, None, None
