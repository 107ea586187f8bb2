"""The paper's efficiency columns: the formula, the contexts they imply, the page that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from energy.comparison import teacher_row
from energy.costs import COSTS
from energy.flops import keys_of_sequence, opt_macs, opt_shape
from energy.paper import PRINTED, context_for, context_rows, formula_rows, paper_document, recomputed_rows


def test_the_papers_example() -> None:
    """125.6 G x 4.6 pJ = 577.8 mJ, printed 126.0."""
    first = formula_rows()[0]
    assert first["highest_mj"] == pytest.approx(577.76) and first["energy_mj"] == 126.0
    assert first["verdict"].startswith("does not follow")


def test_verdicts() -> None:
    verdicts = {(row["model"], row["scale"]): row["verdict"] for row in formula_rows()}
    follows = {key for key, verdict in verdicts.items() if verdict.startswith("follows")}
    assert follows == {("SpikeGPT", "spikegpt-46m"), ("SpikeGPT", "spikegpt-216m")}
    assert len(verdicts) == len(PRINTED) == 11


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("tokens", [1, 100, 2048])
def test_the_implied_context_inverts_the_closed_form(tokens: int, masked: bool) -> None:
    shape = opt_shape("opt-350m")
    keys = keys_of_sequence(tokens) if masked else tokens * tokens
    assert context_for(shape, sum(opt_macs(shape, tokens, keys).values()), masked) == pytest.approx(tokens)


def test_implied_rates_by_hand() -> None:
    row = context_rows()[0]
    assert row["head_g"] == pytest.approx(949 * 768 * 50272 / 1e9)
    assert row["left_g"] == pytest.approx(27.7 - row["head_g"]) and row["left_g"] < 0


def test_recomputed_teacher_is_the_closed_form() -> None:
    rows = recomputed_rows(512)
    made = teacher_row("opt-125m", opt_shape("opt-125m"), 512, keys_of_sequence(512), COSTS["horowitz45"])
    assert rows[0]["energy_mj"] == pytest.approx(made["energy_pj"] / 1e9)
    assert rows[0]["energy_mj"] == pytest.approx(rows[0]["ops_g"] * 4.6)


def test_the_papers_page_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "paper_energy_table.md"
    assert page.read_text(encoding="utf-8") == paper_document().render("markdown"), (
        f"run: spikeopd-energy paper --output {page}"
    )
