"""Rows of the comparison, by hand and against the report."""

from __future__ import annotations

import pytest
from random_runs import make_run

import energy
from energy.comparison import compare_rows, spikegpt_row
from energy.costs import COSTS
from energy.flops import SPIKEGPT, dense_shape
from spikeopd.contracts.run import parse_run

RUN = parse_run(make_run(prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a run")
REPORT = energy.report(RUN).data


def test_compare_rows() -> None:
    costs = COSTS["horowitz45"]
    rows = compare_rows([REPORT, REPORT], costs, ("opt", dense_shape(RUN.shape)), RUN.keys(), spikegpt=True)
    assert [row["name"] for row in rows] == ["opt", "a run", "a run", "spikegpt-46m", "spikegpt-216m"]
    assert rows[0]["relative"] == 1
    assert rows[1]["relative"] == pytest.approx(1 / REPORT["summary"][-1]["teacher_over_student"])
    assert rows[3]["rate"] == REPORT["summary"][-1]["rate"]


def test_spikegpt_by_hand() -> None:
    """216M: 18 x 13 x 768^2 at rate 0.17 as accumulations, the head 768 x 50277 as MACs, per token."""
    costs, blocks, head = COSTS["horowitz45"], 18 * 13 * 768**2, 768 * 50277
    row = spikegpt_row(SPIKEGPT["spikegpt-216m"], 10, 0.17, costs)
    assert row["energy_per_token_pj"] == pytest.approx(0.9 * 0.17 * blocks + 4.6 * head)
