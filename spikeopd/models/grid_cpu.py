"""The table of the head on its grid, compiled for the CPU: the numbers of `grid.snapped_rows`.

A row is read and written once, where torch goes through the whole table in float64 for each operation.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from spikeopd.jit import can_cache

_CACHE = can_cache(__file__)


def usable(table: Tensor) -> bool:
    kind = table.device.type == "cpu" and table.dtype == torch.float32 and table.dim() == 2
    return kind and table.is_contiguous() and not torch.compiler.is_compiling()


def snapped_rows(table: Tensor, units: Tensor) -> Tensor:
    """Each row at the nearest multiples of its unit, float64 [rows]."""
    found = torch.empty_like(table, requires_grad=False)
    _snapped_rows(table.detach().numpy(), units.numpy(), found.numpy())
    return found


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _snapped_rows(table, units, found):  # type: ignore[no-untyped-def]
    for row in range(table.shape[0]):
        for i in range(table.shape[1]):
            found[row, i] = np.float32(np.rint(np.float64(table[row, i]) / units[row]) * units[row])
