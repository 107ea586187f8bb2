"""The audit: shipped cases, the paper's nine rows, rounding, refusals."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from energy.audit import CONVENTIONS, audit_document, audit_row, case_names, load_case, parse_case, printed
from energy.paper import formula_rows
from spikeopd.errors import InputError


def case(**row) -> dict:
    raw = json.dumps({"title": "t", "citation": "c", "rows": [{"model": "m"} | row]})
    return audit_row(parse_case(raw, "x").rows[0])


def test_nine_of_the_papers_eleven_rows_follow_from_nothing() -> None:
    """The same rows that `energy.paper` finds, by another way."""
    rows = [audit_row(row) for row in load_case("paper").rows]
    assert [bool(row["reproduced_by"]) for row in rows] == [
        row["verdict"].startswith("follows") for row in formula_rows()
    ]
    assert sum(not row["reproduced_by"] for row in rows) == 9
    assert [row["reproduced_by"] for row in rows if row["reproduced_by"]] == [["all_ac"], ["all_ac"]]


def test_spikingformer_energies_are_of_accumulations_with_macs_on_top() -> None:
    """4.6 × 0.347329512 + 0.9 × 6.51754094076244 = 7.4635026...; the README's 6.52 G are the accumulations alone."""
    *_, readme, _, counter = rows = [audit_row(row) for row in load_case("spikingformer").rows]
    assert [row["verdict"][:8] for row in rows] == ["by none,"] * 3 + ["possible"] * 3 + ["reproduc"]
    assert counter["reproduced_by"] == ["split"]
    assert "0.346 G MACs come on top" in readme["verdict"]


def test_fwformer_prints_less_than_accumulations_cost() -> None:
    rows = [audit_row(row) for row in load_case("fwformer").rows]
    assert len(rows) == 24 and all("below operations × 0.9 pJ" in row["verdict"] for row in rows)


@pytest.mark.parametrize(
    ("row", "matches"),
    [
        ({"ops_g": 10.0, "energy_mj": 46.0, "dense": True}, ["all_mac"]),
        ({"ops_g": 20.0, "energy_mj": 46.0, "dense": True}, ["two_per_mac"]),
        ({"ops_g": 10.0, "energy_mj": 3.0, "dense": True}, ["int8"]),
        ({"ops_g": 10.0, "energy_mj": 9.0}, ["all_ac"]),
        ({"ops_g": 10.0, "energy_mj": 1.0}, ["int_ac"]),
        ({"flops_g": 10.0, "rate": 0.20, "num_steps": 4, "energy_mj": 7.2}, ["rate_steps"]),
        ({"flops_g": 10.0, "rate": 0.20, "num_steps": 4, "energy_mj": 1.8}, ["rate_no_steps"]),
        ({"ops_g": 10.0, "rate": 0.20, "num_steps": 4, "energy_mj": 1.8}, ["rate_twice"]),
        ({"ops_g": 10.0, "num_steps": 4, "energy_mj": 2.25}, ["per_step"]),
        ({"macs_g": 1.0, "acs_g": 10.0, "energy_mj": 13.6}, ["split"]),
    ],
)
def test_each_convention_by_hand(row: dict, matches: list[str]) -> None:
    assert case(**row)["reproduced_by"] == matches


def test_every_convention_is_tried_above() -> None:
    told = {name for mark in test_each_convention_by_hand.pytestmark for _, names in mark.args[1] for name in names}
    assert told == set(CONVENTIONS)


def test_the_last_digit_says_how_a_figure_was_rounded() -> None:
    assert printed(Decimal("126.0")) == (Decimal("125.95"), Decimal("126.05"))
    assert printed(Decimal("126")) == (Decimal("125.5"), Decimal("126.5"))
    rows = (
        '{{"title": "t", "citation": "c", "rows": [{{"model": "m", "dense": true, "ops_g": 27.44, "energy_mj": {}}}]}}'
    )
    exact, rounded = (audit_row(parse_case(rows.format(text), "x").rows[0]) for text in ("126.0", "126"))
    assert exact["reproduced_by"] == [] and rounded["reproduced_by"] == ["all_mac"]  # 27.44 x 4.6 = 126.2


def test_the_document_tells_all_cases() -> None:
    document = audit_document()
    assert [table.name for table in document.tables] == [*(f"audit_{name}" for name in case_names()), "conventions"]
    assert "paper: 2 of 11" in document.head[1]
    assert all(load_case(name).citation for name in case_names())
    for form in ("text", "json", "csv", "markdown", "latex", "html"):
        assert "7.46" in document.render(form)


ROW = {"model": "m", "energy_mj": 1, "ops_g": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "not readable JSON"),
        ('{"title": NaN}', "not readable JSON"),
        ("[]", "expected a JSON object"),
        ('{"title": "t", "rows": []}', "'citation'"),
        ('{"title": "t", "citation": "c", "rows": []}', "'rows'"),
        (1, "rows[0]: expected an object"),
        ({"model": "m"}, "'energy_mj' is missing"),
        ({"model": "m", "energy_mj": 1}, "at least one of ops_g"),
        ({"model": "m", "energy": 1}, "unknown field 'energy'"),
        ({"energy_mj": 1}, "'model'"),
        (ROW | {"energy_mj": -1}, "'energy_mj' must be"),
        (ROW | {"energy_mj": "1"}, "'energy_mj' must be"),
        (ROW | {"num_steps": 1.5}, "'num_steps'"),
        (ROW | {"dense": 1}, "'dense'"),
    ],
)
def test_mistakes_name_their_field(text: object, message: str) -> None:
    if not isinstance(text, str):
        text = json.dumps({"title": "t", "citation": "c", "rows": [text]})
    with pytest.raises(InputError) as caught:
        parse_case(text, "case.json")
    assert message in str(caught.value) and str(caught.value).startswith("case.json") and "\n" not in str(caught.value)
