"""The fixed-point arithmetic of `arithmetic` as compiled loops: what the fused layer runs.

Same results, one pass over the data instead of a dozen, and only the weight rows of inputs that spiked are read.
`warm_up` compiles everything once, before Lava forks its processes, so that they inherit the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN
from spikeopd.jit import can_cache

Array = NDArray[Any]
_compile: Callable[[Any], Any] = njit(cache=can_cache(__file__), nogil=True)


@_compile
def _next_membrane(v: int, s: bool, drive: int, threshold: int, decay: int) -> int:
    kept = (abs(v) * decay) >> DECAY_BITS
    return (kept if v >= 0 else -kept) + drive - (threshold if s else 0)


@_compile
def fire(v: Array, s: Array, current: Array, threshold: Array, bias: Array, shift: int, decay: int) -> int:
    """`arithmetic.step_fixed` for a flat group of neurons."""
    hits = 0
    for i in range(v.size):
        wide = _next_membrane(v[i], s[i], (np.int64(current[i]) << shift) + bias[i], threshold[i], decay)
        new = min(max(wide, MEMBRANE_MIN), MEMBRANE_MAX)
        hits += new != wide
        v[i] = new
        s[i] = new >= threshold[i]
    return hits


@_compile
def project(spikes: Array, weights: Array, sums: Array) -> None:
    """sums (int32) becomes the sum of the rows of `weights` (int8 [in, out]) whose input spiked."""
    sums[:] = 0
    for i in range(spikes.size):
        if spikes[i]:
            for j in range(sums.size):
                sums[j] += weights[i, j]


@_compile
def write(h: Array, sums: Array, shift: Array, bias: Array) -> None:
    """A current write: h (int64) grows by (sums << shift) + bias, per neuron."""
    for i in range(h.size):
        h[i] += (np.int64(sums[i]) << shift[i]) + bias[i]


@_compile
def _popcount(word: Any) -> Any:
    """Bits set in a uint64 (LLVM turns this into one instruction where there is one)."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@_compile
def pack(spikes: Array, words: Array) -> None:
    """Spikes bool [d] into uint64 [heads, words per head], 64 to a word."""
    width = spikes.size // words.shape[0]
    words[:] = 0
    for h in range(words.shape[0]):
        for i in range(width):
            if spikes[h * width + i]:
                words[h, i >> 6] |= np.uint64(1) << np.uint64(i & 63)


@_compile
def attend(
    q: Array,
    keys: Array,
    values: Array,
    v: Array,
    s: Array,
    threshold: Array,
    bias: Array,
    shift: int,
    decay: int,
    z: Array,
) -> int:
    """Coincidences, S_A and the sum of values over all positions in `keys`, in one pass. Returns saturations of S_A.

    q uint64 [heads, words] and keys [context, heads, words] as `pack` makes them, values uint8 [context, d],
    v and s [heads, capacity], threshold [heads], bias [heads, distances], the last for all larger distances; z int32
    [d] is filled.
    """
    heads, words = q.shape
    newest, farthest = keys.shape[0] - 1, bias.shape[1] - 1
    width = z.size // heads
    hits = 0
    z[:] = 0
    for j in range(keys.shape[0]):
        away = min(newest - j, farthest)
        for h in range(heads):
            count = 0
            for i in range(words):
                count += _popcount(q[h, i] & keys[j, h, i])
            wide = _next_membrane(v[h, j], s[h, j], (count << shift) + bias[h, away], threshold[h], decay)
            new = min(max(wide, MEMBRANE_MIN), MEMBRANE_MAX)
            hits += new != wide
            v[h, j] = new
            fired = new >= threshold[h]
            s[h, j] = fired
            if fired:
                sums, bits = z[h * width : (h + 1) * width], values[j, h * width : (h + 1) * width]
                for i in range(width):
                    sums[i] += np.int32(bits[i])
    return hits


def warm_up() -> None:
    """Compile for the types the fused layer uses."""
    flags, sums = np.zeros(2, bool), np.zeros(2, np.int32)
    wide, words = np.zeros(2, np.int64), np.zeros((1, 1), np.uint64)
    for current in (sums, wide):
        fire(wide, flags, current, wide, wide, 0, 0)
    weights = np.zeros((2, 2), np.int8)
    project(flags, weights, sums)
    weights.flags.writeable = False  # weights mapped from a bundle are read-only, which is another type to numba
    project(flags, weights, sums)
    write(wide, sums, wide, wide)
    pack(flags, words)
    bits, state = np.zeros((1, 2), np.uint8), np.zeros((1, 2), np.int64)
    attend(words, words[None], bits, state, np.zeros((1, 2), bool), wide[:1], state, 0, 0, sums)
