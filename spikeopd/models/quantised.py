r"""The neuron of the quantised twin: one step, and a count from 0 to T_s as its value.

    n = clip(floor(T_s I / V + 1/2), 0, T_s)         activation n / T_s

T_s steps of a spiking neuron give a rate on {0 .. T_s} / T_s; this neuron gives the same values at once, from the mean
current. V is the learned scale where the student's thresholds are learned; behind a projection the weights hold it, as
they do there. A twin therefore has the student's parameters, one for one, and its block, maps and losses.

Products of activations are products of counts: Q K^T sums n_q n_k / T_s^2, what trains of spikes at these rates would
share by chance, where the student counts the steps in which both fired.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spikeopd.models.grid import straight


def quantised(
    current: Tensor,
    threshold: Tensor,
    alpha: float = 0.9,
    xi: float = 2.0,
    scaled: bool = False,
    unit: Tensor | None = None,
    levels: int = 4,
) -> Tensor:
    """Activations [1, ...] of currents [1, ...]. Gradients pass straight through rounding, and not where it clips.

    alpha, xi and scaled belong to neurons with membranes. unit: the values are multiples of it, and the count is exact.
    """
    threshold = threshold.to(current.dtype)
    smooth = (current / threshold).clamp(0, 1)
    return straight(counts(current.detach(), threshold.detach(), levels, exact=unit is not None) / levels, smooth)


def counts(current: Tensor, threshold: Tensor, levels: int, exact: bool = False) -> Tensor:
    """n of each neuron. Exact: in float64, which holds (2 T_s I + V) / 2 V of the deployable integers at every edge."""
    if exact:
        wide = threshold.double()
        return torch.floor((2 * levels * current.double() + wide) / (2 * wide)).clamp(0, levels)
    return torch.floor(current / threshold * levels + 0.5).clamp(0, levels)


def pack_counts(x: Tensor, levels: int) -> Tensor:
    """Activations [1, batch, head, token, d_h] -> uint8 counts [batch, head, token, d_h], for a cache."""
    return (x[0] * levels).round().to(torch.uint8)


def unpack_counts(packed: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_counts`."""
    return (packed.to(dtype) / levels)[None]
