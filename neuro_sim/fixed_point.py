"""The integer neuron of `spikeopd.contracts`, one step at a time, in numpy. Constants carry their source.

Widths follow Loihi as Lava's fixed-point LIF has them: membranes 24 bit and saturating, decay a 12-bit fraction
that truncates the magnitude, weights entering at 2**6 membrane units.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN, Site

Array = NDArray[Any]


def decay_integer(membrane: Array, decay: int) -> Array:
    """sign(v) * ((|v| * decay) >> 12), exactly."""
    wide = membrane.astype(np.int64)
    return np.asarray(np.sign(wide) * ((np.abs(wide) * decay) >> DECAY_BITS), dtype=np.int64)


def step_integer(
    membrane: Array, spikes: Array, current: Array, threshold: Array, bias: Array, shift: int, decay: int
) -> tuple[Array, Array, int]:
    """One step of the integer neuron: (membrane, spikes, number of saturations). current is not yet shifted."""
    wide = decay_integer(membrane, decay) + (current.astype(np.int64) << shift) + bias - threshold * spikes
    clipped = np.clip(wide, MEMBRANE_MIN, MEMBRANE_MAX)
    return clipped, clipped >= threshold, int((clipped != wide).sum())


def step_float(
    membrane: Array, spikes: Array, current: Array, threshold: Array, bias: Array, decay: float
) -> tuple[Array, Array, int]:
    """The same neuron in float32; nothing saturates."""
    membrane = np.float32(decay) * membrane + (current.astype(np.float32) + bias) - threshold * spikes
    return membrane, membrane >= threshold, 0


def run_site(currents: Array, site: Site, decay: float) -> tuple[Array, Array]:
    """All T_s steps of a group of neurons from rest. currents [T_s, n] -> spikes bool [T_s, n], saturations [T_s]."""
    threshold, bias = site.threshold, site.bias
    integer = threshold.dtype.kind == "i"
    membrane = np.zeros(currents.shape[1], np.int64 if integer else np.float32)
    spikes = np.zeros(currents.shape[1], bool)
    fired, saturated = [], []
    for current in currents:
        if integer:
            membrane, spikes, hits = step_integer(membrane, spikes, current, threshold, bias, site.shift, int(decay))
        else:
            membrane, spikes, hits = step_float(membrane, spikes, current, threshold, bias, decay)
        fired.append(spikes)
        saturated.append(hits)
    return np.stack(fired), np.array(saturated, np.int64)
