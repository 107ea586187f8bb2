"""The fair comparison: rows against the bills, every format, the page with its drawing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from random_models import PLUS, random_shape
from random_runs import make_run

import energy
from energy.costs import PLACEMENTS
from energy.memory import CONVENTIONS, counted_work, student_tally, total, twin_tally
from energy.render.table import significant
from energy.twin import COMPUTED
from spikeopd.contracts.run import parse_run
from spikeopd.errors import InputError

RUN = parse_run(make_run(prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a run")
PLUS_RUN = parse_run(make_run(random_shape(**PLUS), prompts=(5,), generated=(4,), drive=2.0), "y", "plus")


def test_rows_are_the_bills_of_the_run() -> None:
    document = energy.compare_twins([RUN, PLUS_RUN], spikegpt=True, placement="dram")
    data, place, work = document.to_dict(), PLACEMENTS["dram"], counted_work(RUN)
    rows = {(row["subject"], row["key"], row["convention"]): row for row in data["fair"]}
    student = total(student_tally(work, "spike"), place) / work.tokens
    assert rows["a run", "student", "spike"]["energy_per_token_pj"] == pytest.approx(student)
    twin = rows["a run", "twin", "any"]
    assert twin["energy_per_token_pj"] == pytest.approx(total(twin_tally(work), place) / work.tokens)
    assert twin["over_student_spike"] == pytest.approx(twin["energy_per_token_pj"] / student)
    assert rows["a run", "twin_graded", "token"]["over_student_spike"] is None
    assert {key for subject, key, _ in rows if subject == "plus"} == {
        "student", "twin", "twin_graded", "teacher_int8", "teacher_fp32",
    }  # fmt: skip
    assert ("a run", "spikegpt-46m", "token") in rows
    for row in rows.values():
        parts = [row[f"{part}_per_token_pj"] for part in ("operations", "memory", "addressing")]
        assert sum(parts) == pytest.approx(row["energy_per_token_pj"])
    for subject in ("a run", "plus"):
        listed = sum(
            e["energy_per_token_pj"] for e in data["entries"]
            if (e["subject"], e["model"], e["convention"]) == (subject, rows[subject, "twin", "any"]["model"], "any")
        )  # fmt: skip
        assert listed == pytest.approx(rows[subject, "twin", "any"]["energy_per_token_pj"])


def test_paper_form_numbers_stay_what_they_were() -> None:
    """The comparison of `compare` stands in front, unchanged."""
    options = {"teacher": "matched", "spikegpt": True}
    assert energy.compare_twins([RUN], **options).to_dict()["compare"] == energy.compare([RUN], **options).rows


def test_break_even_says_where_the_student_stands() -> None:
    document = energy.break_even(RUN)
    rows = document.to_dict()["break_even"]
    assert len(rows) == len(PLACEMENTS) * 2 * 4
    for row in rows:
        assert row["rate"] == pytest.approx(counted_work(RUN).rate)
        assert row["verdict"] == ("student cheaper" if row["rival_over_student"] >= 1 else "student dearer")
        for low, high in row["bands"]:
            assert 0 <= low <= high <= 1
    assert any("5.7 %" in line for line in document.head) and any(COMPUTED in line for line in document.head)


def test_at_the_edge_of_a_band_both_cost_the_same() -> None:
    shape = random_shape(heads=8, head_dim=32, ffn=1024, positions=64)
    wanted = {"placement": "cores", "convention": "spike", "rival_key": "twin"}

    def row(rate: float) -> dict:
        rows = energy.break_even(config=shape, rates=rate, context=8).to_dict()["break_even"]
        return next(row for row in rows if wanted.items() <= row.items())

    edge = row(0.1)["cheaper_to"]
    assert row(edge)["rival_over_student"] == pytest.approx(1)
    assert row(edge * 0.9)["verdict"] == "student cheaper" and row(edge * 1.1)["verdict"] == "student dearer"


@pytest.mark.parametrize("form", ["text", "json", "csv", "markdown", "latex", "html"])
def test_every_format_says_that_the_twin_is_computed(form: str) -> None:
    document = energy.compare_twins(configs=["opt-125m", "opt-350m"], rates=0.17, context=64, num_steps=4)
    text = document.render(form)
    assert re.search(r"int8 (×|\S*times\S*) 3 bit", text)
    if form == "csv":  # tables alone
        assert "cheaper_to [spikes/neuron/step]" in text
    else:
        assert COMPUTED.replace("'", "&#x27;" if form == "html" else "'") in text
    if form == "json":
        assert json.loads(text)["schema"] == "spikeopd.energy-twin/1"


def test_the_page_draws_bars_and_curves() -> None:
    page = energy.break_even(RUN).render("html")
    assert page.count("<polyline") == 8 and page.count('class="bar stacked"') == 7
    assert "this student: " in page and 'fill="var(--band)"' in page
    for number in re.findall(r'points="([^"]+)"', page):
        assert "nan" not in number and "inf" not in number
    assert "http" not in re.sub(r"<script type=.application/json.*?</script>", "", page, flags=re.S).replace(
        "http-equiv", ""
    )


def test_a_run_without_tokens_has_a_page_too() -> None:
    raw = make_run(prompts=(1,), generated=(0,))
    empty = parse_run(raw, "one")
    assert energy.break_even(empty).render("html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a run, or a config"),
        ({"config": "opt-125m", "rates": 0.1, "num_steps": 4}, "give a run, or a config"),
        ({"config": "opt-125m", "rates": 0.1, "context": 8, "num_steps": 4, "placement": "moon"}, "unknown placement"),
        ({"config": "opt-125m", "rates": 0.1, "context": 9999, "num_steps": 4}, "the context must lie"),
    ],
)
def test_mistakes(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        energy.break_even(**arguments)
    with pytest.raises(InputError, match="at least one run or one config"):
        energy.compare_twins()
    with pytest.raises(InputError, match="needs rates"):
        energy.compare_twins(configs=["opt-125m"])


def test_the_figures_of_the_docs_are_those_of_the_commands() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "energy.md").read_text(encoding="utf-8")
    shapes = ("opt-125m", "opt-350m", "opt-1.3b")
    options = {"rates": 0.17, "context": 512, "num_steps": 4}
    rows = energy.compare_twins(configs=shapes, **options).to_dict()["break_even"]

    def found(shape: str, placement: str, convention: str, rival: str, key: str = "rival_over_student") -> str:
        wanted = {"subject": shape, "placement": placement, "convention": convention, "rival_key": rival}
        return significant(next(row for row in rows if wanted.items() <= row.items())[key], 3)

    for shape in shapes:
        ratio = significant(energy.estimate(shape, **options).teacher_over_student, 3)
        cells = [found(shape, "cores", c, rival) for c in CONVENTIONS for rival in ("twin", "twin_graded")]
        edge = found(shape, "cores", "spike", "twin", "cheaper_to")
        assert f"| {' | '.join([shape, ratio, *cells, edge])} |" in text
    for placement in PLACEMENTS:
        edges = [found(shape, placement, "spike", "twin", "cheaper_to") for shape in shapes]
        assert f"| {' | '.join([placement, *edges])} |" in text
