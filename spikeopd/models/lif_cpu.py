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


def integer_decay(alpha: float) -> float:
    """alpha as the integer neuron has it."""
    return round(alpha * 2**DECAY_BITS) / 2**DECAY_BITS


def spikes(current: Tensor, threshold: Tensor, alpha: float, unit: Tensor | None = None) -> Tensor:
    """Spikes of all steps; with `unit`, of the integer neuron. Membranes live for one step only."""
    rows, length, repeat = _shape(current, threshold)
    fired = torch.empty_like(current, memory_format=torch.contiguous_format)
    share(
        fire_rows, rows, current.numel(),
        current.detach().contiguous().view(-1, rows, length).numpy(), threshold.detach().reshape(-1).numpy(),
        _units(unit), repeat, np.float32(alpha), integer_decay(alpha), fired.view(-1, rows, length).numpy(),
    )  # fmt: skip
    return fired


def _units(unit: Tensor | None) -> Any:
    """As the kernels read them: empty for membranes on no grid."""
    return np.zeros(0) if unit is None else unit.detach().reshape(-1).double().numpy()


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
    grad: Tensor,
    current: Tensor,
    threshold: Tensor,
    alpha: float,
    xi: float,
    learned: bool,
    scaled: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dL/dI, dL/dV); dL/dV only where the threshold is learned. The membranes are made again, a chunk at a time: so
    the forward pass need not write them.

    A grad of one step stands for the same one at every step, and dL/dI is then the mean over the steps, [1, ...].
    """
    rows, length, repeat = _shape(current, threshold)
    steps = current.shape[0]
    adjoint = torch.empty_like(grad, memory_format=torch.contiguous_format)
    # One partial sum per row, summed by torch in a fixed order: the result does not depend on the thread count.
    partial = torch.empty((rows if learned else 0, length if repeat == 0 else 1))
    share(
        adjoint_rows, rows, current.numel(),
        grad.contiguous().view(-1, rows, length).numpy(),
        current.detach().contiguous().view(steps, rows, length).numpy(), threshold.detach().reshape(-1).numpy(),
        _units(unit), scaled, repeat, np.float32(alpha), integer_decay(alpha), np.float32(xi / 2),
        np.float32(math.pi * xi / 2), adjoint.view(-1, rows, length).numpy(), partial.numpy(),
    )  # fmt: skip
    if not learned:
        return adjoint, None
    threshold_grad = partial.sum(0) if repeat == 0 else partial.view(-1, repeat).sum(0)
    return adjoint, threshold_grad.view(threshold.shape)


# Every kernel works on a range of rows, `_CHUNK` elements at a time, and holds no lock of Python's. The arithmetic of a
# step is in `_step` and `_integer_step` alone; their arrays never overlap, which is when LLVM vectorises.


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _step(x, before, fired, v, alpha, u):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        u[i] = alpha * before[i] + x[i] - v[i] * fired[i]


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _integer_step(x, before, fired, v, unit, decay, u):  # type: ignore[no-untyped-def]
    """Exact in float32: the decay is k / 2**12 and a membrane m = 2**12 a + b with a and b of one sign, so that
    trunc(m k / 2**12) = a k + trunc(b k / 2**12), each part below 2**24. A sum beyond that saturates, however it is
    rounded. unit: [2, n], the unit and its inverse, powers of two."""
    low, high = np.float32(MEMBRANE_MIN), np.float32(MEMBRANE_MAX)
    one, part = np.float32(1 << DECAY_BITS), np.float32(2.0**-DECAY_BITS)
    k = np.float32(decay) * one
    wide, finer = unit[0], unit[1]
    for i in range(x.size):
        m = before[i] * finer[i]
        a = np.trunc(m * part)
        b = m - a * one
        value = a * k + np.trunc(b * k * part) + (x[i] - v[i] * fired[i]) * finer[i]
        u[i] = min(max(value, low), high) * wide[i]


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _compare(u, v, s):  # type: ignore[no-untyped-def]
    zero, one = np.float32(0), np.float32(1)
    for i in range(u.size):
        s[i] = one if u[i] >= v[i] else zero


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _neurons(threshold, unit, repeat, row, lo, v, units):  # type: ignore[no-untyped-def]
    """Thresholds (and units with their inverses) of the chunk that begins at lo of a row, one for each element."""
    for i in range(v.size):
        v[i] = threshold[lo + i] if repeat == 0 else threshold[row % repeat]
    if unit.size:
        for i in range(v.size):
            wide = unit[0] if unit.size == 1 else unit[lo + i] if repeat == 0 else unit[row % repeat]
            units[0, i] = wide
            units[1, i] = 1 / wide


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def fire_rows(first, last, current, threshold, unit, repeat, alpha, decay, spikes):  # type: ignore[no-untyped-def]
    """unit empty: membranes on no grid. repeat 0: a threshold for each element of a row; otherwise for so many rows in
    turn."""
    steps, _, length = current.shape
    size = min(_CHUNK, length)
    membranes, rest = np.empty((2, size), np.float32), np.zeros(size, np.float32)
    limits, units = np.empty(size, np.float32), np.empty((2, size if unit.size else 0), np.float32)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            v, fired, before = limits[: hi - lo], rest[: hi - lo], rest[: hi - lo]
            _neurons(threshold, unit, repeat, row, lo, v, units)
            for t in range(steps):
                x, u, s = current[t, row, lo:hi], membranes[t % 2, : hi - lo], spikes[t, row, lo:hi]
                if unit.size:
                    _integer_step(x, before, fired, v, units, decay, u)
                else:
                    _step(x, before, fired, v, alpha, u)
                _compare(u, v, s)
                before, fired = u, s


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _rates_rows(first, last, x, threshold, repeat, steps, alpha, found):  # type: ignore[no-untyped-def]
    length = x.shape[1]
    size = min(_CHUNK, length)
    membranes, fired = np.empty((2, size), np.float32), np.empty((2, size), np.float32)
    rest, limits, units = np.zeros(size, np.float32), np.empty(size, np.float32), np.empty((2, 0), np.float32)
    for row in range(first, last):
        for lo in range(0, length, _CHUNK):
            n = min(length, lo + _CHUNK) - lo
            v, total = limits[:n], found[row, lo : lo + n]
            _neurons(threshold, units[0], repeat, row, lo, v, units)
            total[:] = 0
            before, last_fired = rest[:n], rest[:n]
            for t in range(steps):
                u, s = membranes[t % 2, :n], fired[t % 2, :n]
                _step(x[row, lo : lo + n], before, last_fired, v, alpha, u)
                _compare(u, v, s)
                for i in range(n):
                    total[i] += s[i]
                before, last_fired = u, s
            for i in range(n):
                total[i] /= np.float32(steps)


@njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _adjoint_step(grad, u, v, c, following, alpha, half_xi, slope, a):  # type: ignore[no-untyped-def]
    one = np.float32(1)
    for i in range(a.size):
        x = slope * c[i] * (u[i] - v[i])
        a[i] = half_xi * c[i] / (one + x * x) * (grad[i] - v[i] * following[i]) + alpha * following[i]


@njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _threshold_part(a, following, u, before, v, c, scaled, alpha, repeat, out):  # type: ignore[no-untyped-def]
    """What one step adds to dL/dV; before: the membranes that reset this step, below every threshold in the first."""
    zero, one, total = np.float32(0), np.float32(1), np.float32(0)
    if repeat == 0:
        for i in range(a.size):
            through = (a[i] - alpha * following[i]) * (one + scaled * (u[i] - v[i]) * c[i])
            out[i] -= through + (a[i] if before[i] >= v[i] else zero)
    else:
        for i in range(a.size):
            through = (a[i] - alpha * following[i]) * (one + scaled * (u[i] - v[i]) * c[i])
            total += through + (a[i] if before[i] >= v[i] else zero)
        out[0] -= total


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _add_share(x, share, first, target):  # type: ignore[no-untyped-def]
    if first:
        for i in range(x.size):
            target[i] = share * x[i]
    else:
        for i in range(x.size):
            target[i] += share * x[i]


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def adjoint_rows(first, last, grad, current, threshold, unit, scaled, repeat, alpha, decay, half_xi, slope, adjoint, partial):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    """grad and adjoint [steps or 1, row, length]; 1: see `backward`."""
    steps, _, length = current.shape
    wanted, each = partial.shape[0] > 0, grad.shape[0] == steps
    size = min(_CHUNK, length)
    traces = np.empty((2, 0 if each else size), np.float32)
    membranes, fired = np.empty((steps, size), np.float32), np.empty((2, size), np.float32)
    rest, never = np.zeros(size, np.float32), np.full(size, -np.inf, np.float32)
    limits, slopes = np.empty(size, np.float32), np.ones(size, np.float32)
    units = np.empty((2, size if unit.size else 0), np.float32)
    for row in range(first, last):
        if wanted:
            partial[row, :] = 0
        for lo in range(0, length, _CHUNK):
            hi = min(length, lo + _CHUNK)
            n = hi - lo
            v, c, before, s = limits[:n], slopes[:n], rest[:n], rest[:n]
            _neurons(threshold, unit, repeat, row, lo, v, units)
            if scaled:
                for i in range(n):
                    c[i] = np.float32(1) / v[i]
            for t in range(steps):
                u = membranes[t, :n]
                if unit.size:
                    _integer_step(current[t, row, lo:hi], before, s, v, units, decay, u)
                else:
                    _step(current[t, row, lo:hi], before, s, v, alpha, u)
                s = fired[t % 2, :n]
                _compare(u, v, s)
                before = u
            for t in range(steps - 1, -1, -1):
                u = membranes[t, :n]
                if each:
                    a = adjoint[t, row, lo:hi]
                    following = adjoint[t + 1, row, lo:hi] if t < steps - 1 else rest[:n]
                    _adjoint_step(grad[t, row, lo:hi], u, v, c, following, alpha, half_xi, slope, a)
                else:
                    a = traces[t % 2, :n]
                    following = traces[1 - t % 2, :n] if t < steps - 1 else rest[:n]
                    _adjoint_step(grad[0, row, lo:hi], u, v, c, following, alpha, half_xi, slope, a)
                    _add_share(a, np.float32(1 / steps), t == steps - 1, adjoint[0, row, lo:hi])
                if wanted:
                    reset = membranes[t - 1, :n] if t else never[:n]
                    target = partial[row, lo:hi] if repeat == 0 else partial[row]
                    _threshold_part(a, following, u, reset, v, c, np.float32(scaled), alpha, repeat, target)
