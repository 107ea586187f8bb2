r"""Spiking attention of whole sequences compiled for the CPU: what `attention.py` and S_A compute, in tiles.

Spikes are bits here: a coincidence count is `popcount(q & k)`, a current of S_AV `popcount(a & v)` over the keys of one
query. Only pairs that causality allows are computed, and no map [time, batch, head, query, key] ever exists: the
backward pass makes the maps again, `TILE` queries at a time, and keeps Q, K and V alone, a byte a spike.

    forward    C = Q K^T + b[distance]     A = S_A(C)      Z = A (V - m)
    backward   dA = dZ (V - m)^T (+ dM / T_s)    dC: adjoint of S_A    dQ = dC K    dK = dC^T Q    dV = A^T dZ
               dm = - sum over queries of dZ times the spikes of A

The neuron itself is `lif_cpu`'s. Currents and spikes are those of the plain path bit for bit; gradients are the same
sums in another order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from spikeopd.jit import can_cache
from spikeopd.models import lif_cpu
from spikeopd.models.gradients import Gradients, kind, over_steps

_CACHE = can_cache(__file__)
WORD = 64
SHORTEST = 128  # tokens
TILE = 64  # queries whose maps exist at once in the backward pass
_ROWS = 16  # and in the forward pass: their membranes stay in the cache
_BUFFER = 1 << 23  # elements of such a tile; more sequences than fit go one group after another


class Synapse(NamedTuple):
    """What S_A is made of besides its parameters. unit as in `neurons.lif`."""

    alpha: float
    xi: float
    scaled: bool
    unit: float | None
    gradients: Gradients = "fp32"


def usable(x: Tensor) -> bool:
    """Whether the tiles serve for spikes [time, batch, token, d]: of short sequences the plain path is faster."""
    kind = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return lif_cpu.ENABLED and kind and x.shape[2] >= SHORTEST and not torch.compiler.is_compiling()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: Tensor,
    bias: Tensor | None,
    how: Synapse,
    wants_map: bool = False,
    withheld: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(Z, M) of binary q, k, v [time, batch, token, d]: Z [time, batch, token, d] is the current of S_AV, M [batch,
    head, query, key] the map averaged over the steps if it is wanted. threshold [head]; bias [head, distance];
    withheld, m [d] or none.
    """
    found = _Attention.apply(q, k, v, threshold, bias, withheld, how, wants_map)
    return found if wants_map else (found, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        threshold: Tensor,
        bias: Tensor | None,
        withheld: Tensor | None,
        how: Synapse,
        wants_map: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        spikes = [x.to(torch.int8, memory_format=torch.contiguous_format) for x in (q, k, v)]
        heads = threshold.numel()
        steps, batch, length, width = q.shape
        z = torch.empty((steps, batch, length, width))
        m = torch.empty(0) if withheld is None else withheld.detach().contiguous()
        seen = torch.empty((steps, batch, length, heads) if withheld is not None else (0, 0, 0, 0))  # spikes of A
        rates = torch.empty((batch, heads, length, length)) if wants_map else torch.empty((0, 0, 0, 0))
        lif_cpu.share(
            _forward_rows, batch * heads, q.numel() * length // 64,
            *(x.numpy() for x in spikes), *_site(threshold, bias, how), m.numpy(), seen.numpy(), z.numpy(),
            rates.numpy(),
        )  # fmt: skip
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*spikes, threshold, bias, m, seen)
            ctx.how, ctx.wants_map = how, wants_map
        return (z, rates) if wants_map else z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_map: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, threshold, bias, m, seen = ctx.saved_tensors
        how, heads = ctx.how, threshold.numel()
        steps, batch, length, width = q.shape
        outer = torch.empty((0, 0, 0, 0)) if grad_map is None else (grad_map / steps).contiguous()
        whole_shape = grad.shape
        if how.gradients == "rates":
            grad, seen = over_steps(grad), seen.sum(0, keepdim=True)
        found = [torch.empty((len(grad), batch, length, heads, width // heads)) for _ in range(3)]
        by_threshold = torch.zeros((batch * heads, length))
        by_bias = torch.zeros((batch * heads, length, 0 if bias is None else bias.shape[1]))
        group = max(1, _BUFFER // (steps * heads * min(TILE, length) * length))
        for first in range(0, batch, group):
            rows = slice(first, min(first + group, batch))
            units = slice(rows.start * heads, rows.stop * heads)
            parts = _backward_group(
                [x[:, rows] for x in (q, k, v)], grad[:, rows], outer[rows], _site(threshold, bias, how),
                (by_threshold[units], by_bias[units]), how, heads, m,
            )  # fmt: skip
            for whole, part in zip(found, parts, strict=True):
                whole[:, rows] = part.view(-1, heads, len(grad), length, width // heads).permute(2, 0, 3, 1, 4)
        by_heads = by_threshold.view(batch, heads, length).sum((0, 2)).view(threshold.shape)
        distances = None if bias is None else by_bias.view(batch, heads, length, -1).sum((0, 2)) * (steps // len(grad))
        by_inhibition = None
        if m.numel():
            by_inhibition = -(grad.unflatten(-1, (heads, -1)) * seen[..., None]).sum((0, 1, 2)).flatten()
        into = (x.flatten(-2).expand(whole_shape) for x in found)
        return *into, by_heads, distances, by_inhibition, None, None


def _backward_group(
    spikes: list[Tensor],
    grad: Tensor,
    outer: Tensor,
    site: tuple[Any, ...],
    partial: tuple[Tensor, Tensor],
    how: Synapse,
    heads: int,
    m: Tensor,
) -> list[Tensor]:
    """dQ, dK, dV [batch * head * time, token, d_h] of some sequences; threshold's and bias's go to `partial`. time is
    that of `grad`: all steps, or with gradients "rates" one for all.
    """
    steps, batch, length, width = grad.shape
    factor = kind(how.gradients)
    bytes_of = [x.contiguous().numpy() for x in spikes[:2]]
    if how.gradients == "rates":
        spikes = [x.sum(0, keepdim=True, dtype=torch.float32) / len(x) for x in spikes]
    q, k, v, slope = (_by_head(x, heads).to(factor) for x in (*spikes, grad))
    # One more column is enough: dA = dZ V^T - dZ m, the same for every key of a query.
    taken = _by_head((grad * m).unflatten(-1, (heads, -1)).sum(-1), heads) if m.numel() else None
    into = [torch.zeros((batch * heads * steps, length, width // heads)) for _ in range(3)]
    for lo in range(0, length, TILE):
        hi = min(lo + TILE, length)
        before = torch.bmm(slope[:, lo:hi], v[:, :hi].mT).float()  # dA
        if taken is not None:
            before -= taken[:, lo:hi]
        through, maps = torch.empty_like(before), torch.empty_like(before)  # dC, A
        lif_cpu.share(
            _backward_rows, batch * heads, before.numel(),
            lo, *bytes_of, *site, how.scaled, np.float32(how.xi / 2), np.float32(math.pi * how.xi / 2),
            outer.numpy(),
            *(x.view(batch * heads, steps, hi - lo, hi).numpy() for x in (before, through, maps)),
            partial[0].numpy(), partial[1].numpy(),
        )  # fmt: skip
        through, maps = through.to(factor), maps.to(factor)
        into[0][:, lo:hi] = torch.bmm(through, k[:, :hi])
        into[1][:, :hi] += torch.bmm(through.mT, q[:, lo:hi])
        into[2][:, :hi] += torch.bmm(maps.mT, slope[:, lo:hi])
    return into


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[time, batch, token, d] -> [batch * head * time, token, d_h]"""
    return x.unflatten(-1, (heads, -1)).permute(1, 3, 0, 2, 4).flatten(0, 2)


def _site(threshold: Tensor, bias: Tensor | None, how: Synapse) -> tuple[Any, ...]:
    """threshold, unit, bias, alpha and decay as the kernels read them; unit empty: membranes on no grid."""
    distances = np.zeros((threshold.numel(), 0), np.float32) if bias is None else bias.detach().contiguous().numpy()
    unit = np.full(1 if how.unit else 0, how.unit or 0.0)
    return (
        threshold.detach().reshape(-1).contiguous().numpy(), unit, distances, np.float32(how.alpha),
        lif_cpu.integer_decay(how.alpha),
    )  # fmt: skip


# --- kernels; a row is one head of one sequence ----------------------------------------------------------------------


def _bits(typing, word):  # type: ignore[no-untyped-def]
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


popcount: Any = intrinsic(_bits)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def pack(spikes, words):  # type: ignore[no-untyped-def]
    """Bits of spikes, feature c in bit c % 64 of word c // 64; returns how many there are."""
    total = np.uint64(0)
    for w in range(words.size):
        word = np.uint64(0)
        for c in range(min(WORD, spikes.size - w * WORD)):
            word |= np.uint64(spikes[w * WORD + c]) << np.uint64(c)
        words[w] = word
        total += popcount(word)
    return np.int64(total)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _pack_tokens(spikes, words):  # type: ignore[no-untyped-def]
    """spikes [time, token, feature] -> words [time, word, token]: neighbouring tokens lie side by side."""
    found = np.empty(words.shape[1], np.uint64)
    for t in range(spikes.shape[0]):
        for i in range(spikes.shape[1]):
            pack(spikes[t, i], found)
            words[t, :, i] = found


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _currents(query, keys, start, distances, current):  # type: ignore[no-untyped-def]
    """What queries `start` to `start + queries` give S_A: current [time, query, key], 0 where causality forbids."""
    words = query.shape[1]
    steps, queries, end = current.shape
    last = distances.size - 1
    shifts = np.zeros(end, np.float32)  # bias by key, of the last query; of an earlier one the same further right
    for j in range(end if last >= 0 else 0):
        shifts[j] = distances[min(end - 1 - j, last)]
    for t in range(steps):
        for r in range(queries):
            i = start + r
            target, bias = current[t, r], shifts[end - 1 - i :]
            if words == 1:
                word, row = query[t, 0, i], keys[t, 0]
                for j in range(i + 1):
                    target[j] = np.float32(np.int32(popcount(word & row[j]))) + bias[j]
            else:
                for j in range(i + 1):
                    total = np.uint64(0)
                    for w in range(words):
                        total += popcount(query[t, w, i] & keys[t, w, j])
                    target[j] = np.float32(np.int32(total)) + bias[j]
            for j in range(i + 1, end):
                target[j] = 0


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _forward_rows(first, last, q, k, v, threshold, unit, distances, alpha, decay, m, seen, z, rates):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    steps, _, length, width = q.shape
    heads = threshold.size
    size = width // heads
    words, blocks = (size + WORD - 1) // WORD, (length + WORD - 1) // WORD
    query, keys = np.empty((steps, words, length), np.uint64), np.empty((steps, words, length), np.uint64)
    values, chosen = np.empty((steps, size, blocks), np.uint64), np.empty(blocks, np.uint64)
    buffers = np.empty((2, steps * min(_ROWS, length) * length), np.float32)
    for row in range(first, last):
        b, head = row // heads, row % heads
        lo = head * size
        _pack_tokens(q[:, b, :, lo : lo + size], query)
        _pack_tokens(k[:, b, :, lo : lo + size], keys)
        for t in range(steps):
            for c in range(size):
                pack(v[t, b, :, lo + c], values[t, c])
        for start in range(0, length, _ROWS):
            end = min(start + _ROWS, length)
            shape, used = (steps, end - start, end), (end - 1) // WORD + 1
            current = buffers[0, : steps * (end - start) * end].reshape(shape)
            spikes = buffers[1, : steps * (end - start) * end].reshape(shape)
            _currents(query, keys, start, distances[head], current)
            limit = threshold[head : head + 1]
            lif_cpu.fire_rows(0, end - start, current, limit, unit, 1, alpha, decay, spikes)
            for t in range(steps):
                for i in range(start, end):
                    pack(spikes[t, i - start], chosen[:used])
                    target, bits = z[t, b, i, lo : lo + size], values[t]
                    for c in range(size):
                        total = np.uint64(0)
                        for w in range(used):
                            total += popcount(chosen[w] & bits[c, w])
                        target[c] = np.float32(np.int32(total))
                    if m.size:
                        among = np.float32(0)
                        for w in range(used):
                            among += np.float32(np.int32(popcount(chosen[w])))
                        seen[t, b, i, head] = among
                        for c in range(size):
                            target[c] -= m[lo + c] * among
            if rates.size:
                rates[b, head, start:end, end:] = 0
                for i in range(start, end):
                    for j in range(end):
                        total_rate = np.float32(0)
                        for t in range(steps):
                            total_rate += spikes[t, i - start, j]
                        rates[b, head, i, j] = total_rate / np.float32(steps)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _mean(x, target):  # type: ignore[no-untyped-def]
    """Over the steps of x [time, row, column]."""
    share = np.float32(1 / x.shape[0])
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            total = np.float32(0)
            for t in range(x.shape[0]):
                total += x[t, i, j]
            target[i, j] = total * share


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _backward_rows(first, last, start, q, k, threshold, unit, distances, alpha, decay, scaled, half_xi, slope, outer, before, through, maps, by_threshold, by_bias):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    """The maps of some queries from `start` on again, and the adjoint of S_A: before [row, time, query, key] is dA, of
    which what causality forbids becomes 0; through is dC, maps A. Where time is 1 they are means over the steps.
    """
    steps, _, _, width = q.shape
    each = before.shape[1] == steps
    heads = threshold.size
    size = width // heads
    words = (size + WORD - 1) // WORD
    queries, end = before.shape[2], before.shape[3]
    query, keys = np.empty((steps, words, end), np.uint64), np.empty((steps, words, end), np.uint64)
    current, partial = np.empty((steps, queries, end), np.float32), np.empty((queries, 1), np.float32)
    fired = np.empty((0 if each else steps, queries, end), np.float32)
    for row in range(first, last):
        b, head = row // heads, row % heads
        lo = head * size
        _pack_tokens(q[:, b, start:end, lo : lo + size], query[:, :, start:])
        _pack_tokens(k[:, b, :end, lo : lo + size], keys)
        limit = threshold[head : head + 1]
        grad, adjoint = before[row], through[row]
        _currents(query, keys, start, distances[head], current)
        if each:
            lif_cpu.fire_rows(0, queries, current, limit, unit, 1, alpha, decay, maps[row])
        else:
            lif_cpu.fire_rows(0, queries, current, limit, unit, 1, alpha, decay, fired)
            _mean(fired, maps[row, 0])
        for t in range(before.shape[1]):
            for i in range(start, end):
                given = grad[t, i - start]
                if outer.size:
                    share = outer[b, head, i]
                    for j in range(i + 1):
                        given[j] += share[j]
                for j in range(i + 1, end):
                    given[j] = 0
        lif_cpu.adjoint_rows(0, queries, grad, current, limit, unit, scaled, 1, alpha, decay, half_xi, slope, adjoint,
                             partial)  # fmt: skip
        for i in range(start, end):
            by_threshold[row, i] = partial[i - start, 0]
        if distances.shape[1]:
            for t in range(before.shape[1]):
                for i in range(start, end):
                    _by_distance(adjoint[t, i - start, : i + 1], i, by_bias[row, i])


@njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _by_distance(found, i, target):  # type: ignore[no-untyped-def]
    """Adds dC of query i and each key to its distance's sum; the last distance stands for all beyond."""
    near = max(0, found.size - target.size + 1)
    for j in range(near, found.size):
        target[i - j] += found[j]
    rest = np.float32(0)
    for j in range(near):
        rest += found[j]
    target[target.size - 1] += rest
