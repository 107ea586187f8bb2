"""The neuron of `neurons.py` as one Triton kernel each way: all steps in registers, membranes and spikes written once.

Without it a GPU reads and writes every step several times. The arithmetic is that of the torch path in the same order,
without fused multiply-adds; bfloat16 currents are added up in float32. The integer neuron takes the torch path.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spikeopd.models.lif_cpu import groups_of

_ENABLED = os.environ.get("SPIKEOPD_LIF", "auto") != "torch"
_BLOCK = 1024


@cache
def _available() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def usable(current: Tensor, threshold: Tensor) -> bool:
    return (
        _ENABLED
        and current.is_cuda
        and current.dtype in (torch.float32, torch.bfloat16)
        and current.dim() >= 2
        and not torch.compiler.is_compiling()
        and _available()
        and groups_of(current, threshold) is not None
    )


def forward(current: Tensor, threshold: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """(membranes, spikes)"""
    steps, size, groups, inner = _shape(current, threshold)
    current = current.contiguous()
    membrane, spikes = torch.empty_like(current), torch.empty_like(current)
    _kernels()[0][(-(-size // _BLOCK),)](
        current, threshold.contiguous(), membrane, spikes, size, groups, inner, alpha,
        STEPS=steps, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return membrane, spikes


def backward(
    grad: Tensor, membrane: Tensor, threshold: Tensor, alpha: float, xi: float, learned: bool, scaled: bool
) -> tuple[Tensor, Tensor | None]:
    """(dL/dI, dL/dV); dL/dV only where the threshold is learned."""
    steps, size, groups, inner = _shape(membrane, threshold)
    adjoint = torch.empty_like(membrane)
    wide = torch.empty(membrane.shape[1:] if learned else (1,), device=membrane.device)
    _kernels()[1][(-(-size // _BLOCK),)](
        grad.contiguous(), membrane, threshold.contiguous(), adjoint, wide, size, groups, inner, alpha,
        xi / 2, math.pi * xi / 2, STEPS=steps, LEARNED=learned, SCALED=scaled, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return adjoint, wide.sum_to_size(threshold.shape).to(threshold.dtype) if learned else None


def _shape(current: Tensor, threshold: Tensor) -> tuple[int, int, int, int]:
    """Steps, elements of one step, and how thresholds lie: element e has number e // inner % groups."""
    found = groups_of(current, threshold)
    assert found is not None
    rows, groups, inner = found
    return current.shape[0], rows * groups * inner, groups, inner


@cache
def _kernels() -> tuple[Any, Any]:
    """Compiled when first needed: importing Triton takes long, and most machines have none."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # kernels look their names up in this module

    @triton.jit  # type: ignore[untyped-decorator]
    def forward_kernel(current, threshold, membrane, spikes, size, groups, inner, alpha, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501,N803
        e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = e < size
        v = tl.load(threshold + (e // inner) % groups, mask=inside, other=1.0).to(tl.float32)
        u = tl.full((BLOCK,), 0.0, tl.float32)
        s = tl.full((BLOCK,), 0.0, tl.float32)
        for t in range(STEPS):
            x = tl.load(current + t * size + e, mask=inside, other=0.0).to(tl.float32)
            u = alpha * u + x - v * s
            # As it is stored: the backward pass reads the spikes off the membrane.
            u = u.to(membrane.dtype.element_ty).to(tl.float32)
            s = tl.where(u >= v, 1.0, 0.0)
            tl.store(membrane + t * size + e, u.to(membrane.dtype.element_ty), mask=inside)
            tl.store(spikes + t * size + e, s.to(spikes.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def backward_kernel(grad, membrane, threshold, adjoint, wide, size, groups, inner, alpha, half_xi, slope, STEPS: tl.constexpr, LEARNED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501,N803
        e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = e < size
        v = tl.load(threshold + (e // inner) % groups, mask=inside, other=1.0).to(tl.float32)
        scale = tl.full((BLOCK,), 1.0, tl.float32)
        if SCALED:
            scale = 1.0 / v
        following = tl.full((BLOCK,), 0.0, tl.float32)
        total = tl.full((BLOCK,), 0.0, tl.float32)
        for back in range(STEPS):
            t = STEPS - 1 - back
            u = tl.load(membrane + t * size + e, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad + t * size + e, mask=inside, other=0.0).to(tl.float32)
            distance = (u - v) * scale
            x = slope * distance
            through = half_xi / (1.0 + x * x) * scale * (g - v * following)
            following = through + alpha * following
            tl.store(adjoint + t * size + e, following.to(adjoint.dtype.element_ty), mask=inside)
            if LEARNED:
                if SCALED:
                    total -= through * (1.0 + distance)
                else:
                    total -= through
                if t > 0:
                    before = tl.load(membrane + (t - 1) * size + e, mask=inside, other=0.0).to(tl.float32)
                    total -= tl.where(before >= v, following, 0.0)
        if LEARNED:
            tl.store(wide + e, total, mask=inside)

    return forward_kernel, backward_kernel
