r"""The arctangent surrogate (paper Eq. app_arctan_surrogate): what stands in for the derivative of a spike.

forward   s = 1[v >= 0]
backward  psi(v) = (xi / 2) / (1 + (pi xi v / 2)^2)  <=  xi / 2
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def psi(v: Tensor, xi: float) -> Tensor:
    """Derivative of the smooth step at distance v from the threshold."""
    return (xi / 2) / (1 + (math.pi * xi / 2 * v) ** 2)


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, xi: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.xi = xi
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = ctx.saved_tensors
        return grad * psi(v, ctx.xi), None


def spike(v: Tensor, xi: float = 2.0) -> Tensor:
    """1 where v >= 0, with the arctangent surrogate as gradient."""
    return _Spike.apply(v, xi)
