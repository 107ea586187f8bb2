"""The neuron of `neurons.py` compiled for the CPU (numba, float32): the same numbers, several times faster.

A threshold that broadcasts as [features] or [heads, 1, 1] is brought to one form: current [T, rows, groups, inner]
with one threshold per group. `usable` says when; everything else takes the torch path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN
from spikeopd.jit import can_cache

_CACHE = can_cache(__file__)
ENABLED = os.environ.get("SPIKEOPD_LIF", "auto") != "torch"
_WORTH_A_THREAD = 1 << 16  # elements: less is done before another thread has woken
_CHUNK = 2048  # elements a thread works on at a time: five float32 streams of it stay in the first-level cache


def usable(current: Tensor, threshold: Tensor) -> bool:
    return (
        ENABLED
        and current.device.type == "cpu"
        and current.dtype == torch.float32
        and current.dim() >= 2
        and not torch.compiler.is_compiling()
        and groups_of(current, threshold) is not None
    )


def groups_of(current: Tensor, threshold: Tensor) -> tuple[int, int, int] | None:
    """(rows, groups, inner) such that threshold group g applies to current[:, :, g, :]."""
    size = current[0].numel()
    if threshold.numel() == 1:
        rows = current.shape[1]  # the batch, to share out to threads
        return rows, 1, size // max(rows, 1)
    shape = list(threshold.shape)
    inner = 1
    while shape and shape[-1] == 1:
        inner *= current.shape[current.dim() - 1 - (threshold.dim() - len(shape))]
        shape.pop()
    axis = current.dim() - 1 - (threshold.dim() - len(shape))
    if any(n != 1 for n in shape[:-1]) or axis < 1 or current.shape[axis] != shape[-1]:
        return None
    groups = shape[-1]
    return size // (groups * inner), groups, inner


def _shape(current: Tensor, threshold: Tensor) -> tuple[int, int, int]:
    """rows x length, and how many neighbouring elements share a threshold (0: one per element of the row)."""
    groups = groups_of(current, threshold)
    assert groups is not None
    rows, count, inner = groups
    return (rows, count, 0) if inner == 1 else (rows * count, inner, count)


def share(kernel: Callable[..., None], rows: int, elements: int, *arguments: Any) -> None:
    """Run a kernel over rows 0 to `rows`, shared out to as many threads as torch uses, so that one setting governs.

    Plain threads that sleep while they wait. numba's own pool spins beside torch's: with another busy process on two
    cores both wait for threads that have no core.
    """
    threads = min(torch.get_num_threads(), rows, elements // _WORTH_A_THREAD)
    if threads < 2:
        kernel(0, rows, *arguments)
        return
    cuts = [rows * part // threads for part in range(threads + 1)]
    others = [_pool(threads).submit(kernel, *part, *arguments) for part in pairwise(cuts[1:])]
    kernel(0, cuts[1], *arguments)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="spikeopd-lif")


def forward(current: Tensor, threshold: Tensor, alpha: float, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(membranes, spikes); with `unit`, of the integer neuron."""
    rows, length, repeat = _shape(current, threshold)
    flat = current.contiguous().view(current.shape[0], rows, length)
    membrane, spikes = torch.empty_like(flat), torch.empty_like(flat)
    if unit is not None:
        share(
            _integer_rows, rows, current.numel(),
            flat.detach().numpy(), threshold.detach().reshape(-1).numpy(), unit.reshape(-1).double().numpy(),
            repeat, integer_decay(alpha), membrane.numpy(), spikes.numpy(),
        )  # fmt: skip
        return membrane.view(current.shape), spikes.view(current.shape)
    share(
        _forward_rows, rows, current.numel(),
        flat.detach().numpy(), threshold.detach().reshape(-1).numpy(), repeat, np.float32(alpha),
        membrane.numpy(), spikes.numpy(),
    )  # fmt: skip
    return membrane.view(current.shape), spikes.view(current.shape)


def integer_decay(alpha: float) -> float:
    """alpha as the integer neuron has it."""
    return round(alpha * 2**DECAY_BITS) / 2**DECAY_BITS


def spikes(current: Tensor, threshold: Tensor, alpha: float) -> Tensor:
    """Spikes alone, where nothing will go backward: the membranes are not stored."""
    rows, length, repeat = _shape(current, threshold)
    fired = torch.empty_like(current, memory_format=torch.contiguous_format)
    share(
        _spikes_rows, rows, current.numel(),
        current.detach().contiguous().view(-1, rows, length).numpy(), threshold.detach().reshape(-1).numpy(), repeat,
        np.float32(alpha), fired.view(-1, rows, length).numpy(),
    )  # fmt: skip
    return fired


def rates(x: Tensor, threshold: Tensor, steps: int, alpha: float) -> Tensor:
    """Firing rates under the constant current x [row, ...]: nothing but them is stored."""
    rows, length, repeat = _shape(x[None], threshold)
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    share(
        _rates_rows, rows, x.numel() * steps,
        x.detach().contiguous().view(rows, length).numpy(), threshold.detach().reshape(-1).numpy(), repeat, steps,
        np.float32(alpha), found.view(rows, length).numpy(),
    )  # fmt: skip
    return found


def backward(
    grad: Tensor, membrane: Tensor, threshold: Tensor, alpha: float, xi: float, learned: bool, scaled: bool
) -> tuple[Tensor, Tensor | None]:
    """(dL/dI, dL/dV); dL/dV only where the threshold is learned."""
    rows, length, repeat = _shape(membrane, threshold)
    steps = membrane.shape[0]
    adjoint = torch.empty_like(membrane)
    # One partial sum per row, summed by torch in a fixed order: the result does not depend on the thread count.
    partial = torch.empty((rows if learned else 0, length if repeat == 0 else 1))
    flat = threshold.detach().reshape(-1).numpy()
    scale = 1 / flat if scaled else np.ones_like(flat)
    share(
        _backward_rows, rows, membrane.numel(),
        grad.contiguous().view(steps, rows, length).numpy(), membrane.view(steps, rows, length).numpy(),
        flat, scale, np.float32(scaled), repeat, np.float32(alpha), np.float32(xi / 2),
        np.float32(math.pi * xi / 2), adjoint.view(steps, rows, length).numpy(), partial.numpy(),
    )  # fmt: skip
    if not learned:
        return adjoint, None
    threshold_grad = partial.sum(0) if repeat == 0 else partial.view(-1, repeat).sum(0)
    return adjoint, threshold_grad.view(threshold.shape)


# Every kernel works on a range of rows and holds no lock of Python's.


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _forward_rows(first, last, current, threshold, repeat, alpha, membrane, spikes):  # type: ignore[no-untyped-def]
    steps, _, length = current.shape
    rest = np.zeros(min(_CHUNK, length), np.float32)
    zero, one = np.float32(0), np.float32(1)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            before, fired = rest[: hi - lo], rest[: hi - lo]
            for t in range(steps):
                x, u, s = current[t, row, lo:hi], membrane[t, row, lo:hi], spikes[t, row, lo:hi]
                if repeat == 0:
                    v = threshold[lo:hi]
                    for i in range(hi - lo):
                        u[i] = alpha * before[i] + x[i] - v[i] * fired[i]
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= v[i] else zero
                else:
                    w = threshold[row % repeat]
                    for i in range(hi - lo):
                        u[i] = alpha * before[i] + x[i] - w * fired[i]
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= w else zero
                before, fired = u, s


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _integer_rows(first, last, current, threshold, unit, repeat, decay, membrane, spikes):  # type: ignore[no-untyped-def]
    """float64 inside: integers below 2**53 and their products with decay (12 bits of fraction) are exact in it."""
    steps, _, length = current.shape
    finer = 1 / unit  # a power of two: exact
    rest = np.zeros(min(_CHUNK, length), np.float32)
    zero, one = np.float32(0), np.float32(1)
    low, high = np.float64(MEMBRANE_MIN), np.float64(MEMBRANE_MAX)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            before, fired = rest[: hi - lo], rest[: hi - lo]
            for t in range(steps):
                x, u, s = current[t, row, lo:hi], membrane[t, row, lo:hi], spikes[t, row, lo:hi]
                if repeat == 0:
                    v, g, inverse = threshold[lo:hi], unit[lo:hi], finer[lo:hi]
                    for i in range(hi - lo):
                        drive = (np.float64(x[i]) - np.float64(v[i]) * fired[i]) * inverse[i]
                        value = np.trunc(np.float64(before[i]) * inverse[i] * decay) + drive
                        u[i] = np.float32(min(max(value, low), high) * g[i])
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= v[i] else zero
                else:
                    w, wide, narrow = threshold[row % repeat], unit[row % repeat], finer[row % repeat]
                    for i in range(hi - lo):
                        drive = (np.float64(x[i]) - np.float64(w) * fired[i]) * narrow
                        value = np.trunc(np.float64(before[i]) * narrow * decay) + drive
                        u[i] = np.float32(min(max(value, low), high) * wide)
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= w else zero
                before, fired = u, s


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _spikes_rows(first, last, current, threshold, repeat, alpha, spikes):  # type: ignore[no-untyped-def]
    steps, _, length = current.shape
    rest, membrane = np.zeros(min(_CHUNK, length), np.float32), np.empty(min(_CHUNK, length), np.float32)
    zero, one = np.float32(0), np.float32(1)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            u, fired = membrane[: hi - lo], rest[: hi - lo]
            u[:] = zero
            for t in range(steps):
                x, s = current[t, row, lo:hi], spikes[t, row, lo:hi]
                if repeat == 0:
                    v = threshold[lo:hi]
                    for i in range(hi - lo):
                        u[i] = alpha * u[i] + x[i] - v[i] * fired[i]
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= v[i] else zero
                else:
                    w = threshold[row % repeat]
                    for i in range(hi - lo):
                        u[i] = alpha * u[i] + x[i] - w * fired[i]
                    for i in range(hi - lo):
                        s[i] = one if u[i] >= w else zero
                fired = s


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _rates_rows(first, last, x, threshold, repeat, steps, alpha, found):  # type: ignore[no-untyped-def]
    length = x.shape[1]
    size = min(_CHUNK, length)
    membrane, fired, limit = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    zero, one = np.float32(0), np.float32(1)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            n = min(length, lo + _CHUNK) - lo
            drive, total = x[row, lo : lo + n], found[row, lo : lo + n]
            u, s, v = membrane[:n], fired[:n], limit[:n]
            for i in range(n):
                u[i] = s[i] = total[i] = zero
                v[i] = threshold[lo + i] if repeat == 0 else threshold[row % repeat]
            for _ in range(steps):
                for i in range(n):
                    u[i] = alpha * u[i] + drive[i] - v[i] * s[i]
                for i in range(n):
                    s[i] = one if u[i] >= v[i] else zero
                    total[i] += s[i]
            for i in range(n):
                total[i] /= np.float32(steps)


@njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _threshold_part(t, a, following, now, before, threshold, scale, scaled, repeat, row, alpha, out, lo):  # type: ignore[no-untyped-def]
    zero, one = np.float32(0), np.float32(1)
    reset = np.float32(1 if t > 0 else 0)
    if repeat == 0:
        v, c, target = threshold[lo : lo + a.size], scale[lo : lo + a.size], out[lo : lo + a.size]
        for i in range(a.size):
            through = (a[i] - alpha * following[i]) * (one + scaled * (now[i] - v[i]) * c[i])
            target[i] -= through + (reset * a[i] if before[i] >= v[i] else zero)
    else:
        w, k, total = threshold[row % repeat], scale[row % repeat], zero
        for i in range(a.size):
            through = (a[i] - alpha * following[i]) * (one + scaled * (now[i] - w) * k)
            total += through + (reset * a[i] if before[i] >= w else zero)
        out[0] -= total


# The two loops are apart because LLVM vectorises a loop only while it can check its arrays for overlap.
@njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _backward_rows(first, last, grad, membrane, threshold, scale, scaled, repeat, alpha, half_xi, slope, adjoint, partial):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    steps, _, length = membrane.shape
    wanted = partial.shape[0] > 0
    one = np.float32(1)
    nothing = np.zeros(min(_CHUNK, length), np.float32)
    for row in range(first, last):
        if wanted:
            partial[row, :] = 0
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            for t in range(steps - 1, -1, -1):
                g, u, a = grad[t, row, lo:hi], membrane[t, row, lo:hi], adjoint[t, row, lo:hi]
                following = adjoint[t + 1, row, lo:hi] if t < steps - 1 else nothing[: hi - lo]
                if repeat == 0:
                    v, c = threshold[lo:hi], scale[lo:hi]
                    for i in range(hi - lo):
                        x = slope * c[i] * (u[i] - v[i])
                        a[i] = half_xi * c[i] / (one + x * x) * (g[i] - v[i] * following[i]) + alpha * following[i]
                else:
                    w, k = threshold[row % repeat], scale[row % repeat]
                    near, peak = slope * k, half_xi * k
                    for i in range(hi - lo):
                        x = near * (u[i] - w)
                        a[i] = peak / (one + x * x) * (g[i] - w * following[i]) + alpha * following[i]
                if wanted:
                    _threshold_part(t, a, following, u, membrane[max(t - 1, 0), row, lo:hi], threshold, scale, scaled,
                                    repeat, row, alpha, partial[row], lo)  # fmt: skip
