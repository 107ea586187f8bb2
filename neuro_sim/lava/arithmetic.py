"""What the process models compute, as plain numpy functions without Lava. State is updated in place, so Vars stay Vars.

Fixed point is the integer neuron of `spikeopd.contracts`, written anew here (the tests compare it with the oracle's).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN

Array = NDArray[Any]

# float32 holds every integer below 2**24, so a sum of int8 weights over that many inputs is exact in any order.
EXACT_FLOAT32_FAN_IN = (1 << 24) // 128


def step_fixed(v: Array, s: Array, current: Array, threshold: Array, bias: Array | int, shift: int, decay: int) -> int:
    """One step of the 24-bit neuron: v (int64) and s (bool) become the new ones. Returns the number of saturations."""
    wide = np.abs(v)
    wide *= decay
    wide >>= DECAY_BITS
    wide *= np.sign(v)
    wide += np.left_shift(current, shift, dtype=np.int64)
    wide += bias
    wide -= threshold * s
    np.clip(wide, MEMBRANE_MIN, MEMBRANE_MAX, out=v)
    np.greater_equal(v, threshold, out=s)
    return int(np.count_nonzero(v != wide))


def step_float(
    v: Array, s: Array, current: Array, threshold: Array, bias: Array | int, shift: int, decay: float
) -> int:
    """The same neuron in float32; nothing saturates, and `shift` must be 0 (the scale is in the weights)."""
    new = np.float32(decay) * v + (current.astype(np.float32) + bias) - threshold * s
    v[...] = new
    np.greater_equal(v, threshold, out=s)
    return 0


def synapse_matrix(weights: Array) -> Array:
    """Weights [in, out] as they are multiplied: float32, which BLAS is fast on and which is exact for int8."""
    if weights.dtype.kind == "i" and weights.shape[0] > EXACT_FLOAT32_FAN_IN:
        return weights.astype(np.int64)
    return np.ascontiguousarray(weights, dtype=np.float32)


def synapse_sums(spikes: Array, matrix: Array) -> Array:
    """Sum of the rows of the inputs that spiked. Exact if `matrix` came from integers; then cast it to an integer."""
    return np.asarray(spikes.astype(matrix.dtype) @ matrix)


def current_written(sums: Array, shift: Array, bias: Array) -> Array:
    """What a sublayer adds to the residual stream directly: (sums << shift) + bias in int64, sums + bias in float32."""
    if bias.dtype.kind == "f":
        return np.asarray(sums + bias)
    return np.asarray((sums.astype(np.int64) << shift) + bias)


def distance_bias(bias: Array, context: int) -> Array:
    """The map's biases for the newest of `context` positions: [heads, distances] -> [heads, context].

    Key j is context - 1 - j tokens away; the last entry serves every larger distance.
    """
    away = np.arange(context - 1, -1, -1)
    return np.asarray(bias[:, np.minimum(away, bias.shape[1] - 1)])


def coincidences(q: Array, keys: Array, heads: int) -> Array:
    """C[h, j]: how many query bits meet a key bit. q bool [d], keys bool [context, d] -> int64 [heads, context]."""
    context = keys.shape[0]
    return np.asarray((keys & q).reshape(context, heads, -1).sum(-1).T)


def inhibited(z: Array, a: Array, inhibition: Array, shift: int) -> Array:
    """Z in membrane units with what each spike of a head's map adds besides. a bool [heads, .], inhibition [d]."""
    seen = np.repeat(a.sum(1), z.size // len(a))
    if inhibition.dtype.kind == "f":
        return np.asarray(z.astype(np.float32) + inhibition * seen.astype(np.float32))
    return np.asarray((z.astype(np.int64) << shift) + inhibition * seen)


def weighted_values(a: Array, values: Array) -> Array:
    """Z: value bits summed over the positions the map selects. a bool [heads, context], values bool [context, d]."""
    heads, context = a.shape
    bits = values.reshape(context, heads, -1)
    return np.asarray((bits & a.T[:, :, None]).sum(0).reshape(-1))
