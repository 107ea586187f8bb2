"""The table writer: by hand, and the stored tables of docs/results come out byte for byte."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeopd import tables
from spikeopd.studies.tables import Table

RESULTS = sorted(Path(__file__).parents[3].glob("docs/results/**/table.csv"))


def test_by_hand():
    lines = [["", "a", "unit"], ["long name", "1.5", "pJ"]]
    assert tables.aligned(lines) == ["             a  unit", "long name  1.5    pJ"]
    assert tables.aligned(lines, [True, False, True], bar=2)[0] == "             a  |  unit"
    assert tables.aligned([["x", ""]], [True, True]) == ["x"], "no spaces at the end of a line"
    assert tables.markdown(["a|b", "n"], [["x", "1"]], [True, False]) == [
        r"| a\|b | n |",
        "| --- | ---: |",
        "| x | 1 |",
    ]
    assert tables.tabular(["a", "n"], [["5 % ± 1_0", "{x}"]], "lr")[4] == r"5 \% $\pm$ 1\_0 & \{x\} \\"
    assert tables.comma_separated(["a", "b"], [[None, 1.5], ["x,y", 2]]) == 'a,b\n,1.5\n"x,y",2\n'


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"])), min_size=2, max_size=2), min_size=1))
def test_csv_reads_back(rows):
    assert list(csv.reader(tables.comma_separated(["a", "b"], rows).splitlines(keepends=True)))[1:] == rows


def test_there_are_stored_tables():
    assert len(RESULTS) > 5


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_stored_tables_are_written_alike(path):
    stored = {kind: path.with_suffix(kind).read_text("utf-8") for kind in (".txt", ".csv", ".tex", ".md")}
    title, *lines = stored[".txt"].splitlines()
    notes = tuple(line.removeprefix("note: ") for line in lines if line.startswith("note: "))
    head, *rows = (tuple(row) for row in csv.reader(stored[".csv"].splitlines()))
    ours = sum(not label.startswith("paper ") for label in head)
    table = Table(title, head, tuple(rows), ours, notes)
    assert table.text + "\n" == stored[".txt"] and table.markdown + "\n" == stored[".md"]
    assert table.latex == stored[".tex"] and table.csv == stored[".csv"]
