"""The head's arithmetic where float64 alone would round twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from neuro_sim.event.kernel_head import divide as compiled_divide


@njit
def divide(number: int, by: int) -> float:
    return compiled_divide(number, by)  # has no wrapper for Python of its own


@settings(max_examples=500, deadline=None)
@given(st.integers(-(2**62), 2**63 - 1) | st.integers(2**53, 2**63 - 1), st.integers(1, 2**12), st.integers(1, 32))
def test_integers_are_divided_as_python_divides_them(squares: int, hidden: int, steps: int) -> None:
    by = hidden * (steps << 12) ** 2
    assert divide(squares, by) == squares / by or squares < 0  # a variance below zero counts as zero
