"""Both ways of multiplying rows in the head, whatever this CPU would choose."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from neuro_sim.event.row_intrinsics import has_multiply_add, make_move_sums, make_scale_rows


@pytest.mark.parametrize("paired", [False, True])
def test_scaled_rows(paired: bool) -> None:
    if paired and not has_multiply_add():
        pytest.skip("this CPU has no 16-bit multiply-add")
    scale_rows, move_sums = make_scale_rows(4, paired), make_move_sums(paired)

    @njit
    def product(weights: int, stride: int, rows: int, factors: int, columns: int, sums: int, wide: int) -> None:
        scale_rows(weights, stride, rows, factors, columns, sums, weights, rows)
        move_sums(sums, wide, columns)

    rng = np.random.default_rng(0)
    weights = rng.integers(-128, 128, (10, 128), dtype=np.int8)
    rows = np.array([7, 0, 9, 3, 0, 0, 0, 0], np.int32)
    factors = np.array([32767, -32768, 5, -1], np.int32)
    sums, wide = np.zeros(128, np.int32), np.full(128, 1 << 40, np.int64)
    product(weights.ctypes.data, 128, rows.ctypes.data, factors.ctypes.data, 128, sums.ctypes.data, wide.ctypes.data)
    assert np.array_equal(wide - (1 << 40), factors.astype(np.int64) @ weights[rows[:4]].astype(np.int64))
    assert not sums.any()
