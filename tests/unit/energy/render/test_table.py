"""One table, every notation: units, rounding, escapes."""

from __future__ import annotations

import csv
import io

import pytest

from energy.render.table import Column, Table, significant, unit_of, write_tables

TABLE = Table(
    "t",
    "A title",
    (Column("name", "Name"), Column("e", "Energy", "energy"), Column("n", "Number", "count")),
    [{"name": "a|b_&", "e": 2.0, "n": 1500}, {"name": "c", "e": 3e6, "n": None}],
    "A note.",
)


def test_markdown_and_latex_have_a_row_per_row() -> None:
    markdown, latex = write_tables([TABLE], "markdown"), write_tables([TABLE], "latex")
    assert markdown.count("\n| ") == 2 + len(TABLE.rows) and r"a\|b_&" in markdown
    assert latex.count(r"\\") == 1 + len(TABLE.rows) and r"\toprule" in latex and "µ" not in latex
    assert r"a|b\_\& &" in latex and r"\label{tab:energy-t}" in latex and r"\caption{A title. A note.}" in latex


def test_csv_holds_raw_values_in_base_units() -> None:
    rows = list(csv.DictReader(io.StringIO(write_tables([TABLE], "csv"))))
    assert rows == [{"name": "a|b_&", "e [pJ]": "2.0", "n": "1500"}, {"name": "c", "e [pJ]": "3000000.0", "n": ""}]


def test_text_is_aligned() -> None:
    assert write_tables([TABLE], "text", ["Head"]).splitlines() == [
        "Head", "", "A title", "Name        Energy  Number", "              [µJ]     [k]", "-----  -----------  ------",
        "a|b_&  0.000002000   1.500", "c                3       –", "A note.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (1234.5678, "1,235"), (0.000123456, "0.0001235"), (99.996, "100.00"), (-2.5, "-2.500"),
     (123456789.123, "123,500,000"), (1e-12, "1.000e-12"), (9.99996, "10.000")],
)  # fmt: skip
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-3)


def test_a_column_keeps_one_unit() -> None:
    column = Column("e", "Energy", "energy")
    table = Table("t", "T", (column,), [{"e": 2.0}, {"e": 3e6}, {"e": None}])
    assert table.header(column) == "Energy [µJ]"
    assert [table.cell(row, column) for row in table.rows] == ["0.000002000", "3", "–"]


def test_energies_of_a_table_share_one_unit() -> None:
    columns = (Column("a", "A", "energy"), Column("b", "B", "energy"), Column("n", "N", "bytes"))
    table = Table("t", "T", columns, [{"a": 5.0, "b": 2e6, "n": 2048}])
    assert [table.header(column) for column in columns] == ["A [µJ]", "B [µJ]", "N [kB]"]
    given = Table("t", "T", columns, table.rows, energy_unit=unit_of("energy", 4e3))
    assert [given.header(column) for column in columns[:2]] == ["A [nJ]", "B [nJ]"]
    assert given.cell(given.rows[0], columns[1]) == "2,000"


@pytest.mark.parametrize(("value", "unit"), [(None, "pJ"), (0, "pJ"), (999.0, "pJ"), (1e3, "nJ"), (-2e9, "mJ")])
def test_unit_of(value: float | None, unit: str) -> None:
    assert unit_of("energy", value)[1] == unit
