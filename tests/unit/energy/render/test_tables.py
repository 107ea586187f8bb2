"""What stands in a report: headers with units, one unit for all energies, plain LaTeX, tidy CSV; both forms."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from random_models import PLUS, random_shape
from random_runs import make_run

import energy
from energy.paper import paper_tables
from energy.render import FORMATS
from energy.render.table import write_tables
from energy.render.tables import costs_document
from spikeopd.contracts.run import parse_run

RUN = parse_run(make_run(prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a run")
PLUS_RUN = parse_run(make_run(random_shape(**PLUS), prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a plus run")
REPORTS = {
    "paper": energy.report(RUN),
    "plus": energy.report(PLUS_RUN),
    "loihi": energy.report(PLUS_RUN, costs="loihi", hops=(1, 1)),
    "rates": energy.estimate(PLUS_RUN.shape, 0.2, 20),
}
EACH = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)


@EACH
def test_units_stand_in_every_numeric_header(report: energy.Report) -> None:
    for table in [*report.tables, *costs_document().tables, *energy.compare([RUN, PLUS_RUN]).tables]:
        for column in table.columns:
            if column.kind != "text":
                assert re.search(r"\[[^\]]+\]$", table.header(column)), table.header(column)


@EACH
def test_one_unit_for_every_energy_a_person_sees(report: energy.Report) -> None:
    """Tables, tiles and charts: no second prefix, and per token at least 1 of it."""
    units = {t.scale(c) for t in report.tables for c in t.columns if c.kind == "energy"}
    ((scale, unit),) = units
    assert 1 <= report.per_token_pj / scale < 1000
    page = report.render("html")
    shown = set(re.findall(r"[\d>] ?([pnµm]?J)\b", page.split('<script type="application/json"')[0].split("<main>")[1]))
    assert shown - {"pJ"} <= {unit} | {"nJ"}  # prices of events and of memory are said in pJ and nJ
    assert f" {unit}</b>" in page and not set(re.findall(r"[\d,.]+ (.J)</b>", page)) - {unit}


@EACH
def test_no_format_names_what_the_block_does_not_have(report: energy.Report) -> None:
    gains = report.data["model"].get("residual_write", "spike") == "spike"
    marks = {"json": '"component": "residual"', "csv": ",residual,"}
    for form in FORMATS:
        text = report.render(form)
        assert (marks.get(form, "residual gains") in text) == gains, form
        if form not in marks:
            assert ("current write, residual readout, distance bias 5" in text) != gains, form
            assert ("head rows of neurons that never fired" in text) == gains, form


def test_the_head_says_both_answers() -> None:
    for report in REPORTS.values():
        line = next(line for line in report.head if line.startswith("teacher/student"))
        assert "× under horowitz45" in line and "× under loihi" in line
        assert line.startswith(f"teacher/student: {report.teacher_over_student:.3f}"[:20])
    assert "counted on the dense backend" in REPORTS["plus"].head[0]
    for report in REPORTS.values():
        assert "measured" not in report.render("text").replace("no power was measured", "").replace(
            "not power measured on hardware", ""
        )


def test_latex_is_plain_ascii() -> None:
    """Every sign that TeX does not know is spelled out."""
    tables = [table for report in REPORTS.values() for table in report.tables]
    tables += [*costs_document().tables, *paper_tables(), *energy.compare([RUN], costs="loihi", spikegpt=True).tables]
    text = write_tables(tables, "latex")
    assert text.isascii(), set(text) - set(map(chr, range(128)))
    assert text.count("{") == text.count("}")


@EACH
def test_markdown_and_latex_have_a_cell_per_column(report: energy.Report) -> None:
    for table in report.tables:
        markdown, latex = write_tables([table], "markdown"), write_tables([table], "latex")
        columns = len(table.columns)
        assert all(line.count("|") == columns + 1 for line in markdown.splitlines() if line.startswith("|"))
        assert all(line.count("&") == columns - 1 for line in latex.splitlines() if line.endswith(r"\\"))


@EACH
def test_json_is_the_report(report: energy.Report) -> None:
    assert json.loads(report.render("json")) == json.loads(json.dumps(report.data))


@EACH
def test_csv_is_tidy_and_complete(report: energy.Report) -> None:
    rows = list(csv.DictReader(io.StringIO(report.render("csv"))))
    assert sum(float(row["energy [pJ]"]) for row in rows if row["phase"] == "all") == pytest.approx(report.total_pj)
    qkv = next(row for row in rows if row["component"] == "qkv" and row["phase"] == "prompt")
    if report.run is not None:
        assert float(qkv["count [1]"]) == float(qkv["analytical_count [1]"])


def test_wide_texts_become_paragraphs() -> None:
    text = costs_document().render("text")
    assert "Table: loihi" in text and max(map(len, text.splitlines())) < 260
