"""The head's arithmetic where float64 alone would round twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from neuro_sim.event.kernel_head import divide


@settings(max_examples=500, deadline=None)
@given(st.integers(-(2**62), 2**63 - 1) | st.integers(2**53, 2**63 - 1), st.integers(1, 2**12), st.integers(1, 32))
def test_integers_are_divided_as_python_divides_them(squares: int, hidden: int, steps: int) -> None:
    by = hidden * (steps << 12) ** 2
    assert divide(squares, by) == squares / by or squares < 0  # a variance below zero counts as zero
