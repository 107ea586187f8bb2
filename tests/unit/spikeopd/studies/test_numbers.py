"""Studies: rows aggregated by hand, tables in three notations, figures."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from spikeopd.studies import figures, values, worker
from spikeopd.studies.definitions import STUDIES, Column, Row


def result(onset, perplexity, adj, trace=None, before=None):
    return {"onset": onset, "evaluation": {"perplexity": perplexity, "adj": adj, "dist4": 0.9, "self_kl": 1.0},
            "start": {"perplexity": 99.0}, "trace": {"adj": trace or [], "dist4": []}, "pre_onset": before}  # fmt: skip


def test_a_row_by_hand():
    row = values.of_row([
        result(30, 10.0, 0.4, [0.0] * 5 + [0.2] * 20, {"update": 24, "perplexity": 8.0}),
        result(None, 12.0, 0.2),
        result(50, 14.0, 0.0, before={"update": 48, "perplexity": 9.0}),
    ])  # fmt: skip
    assert row["collapsed"] == [2, 3]
    assert row["onset"] == {"mean": 40.0, "sd": pytest.approx(200**0.5), "n": 2}, "over the collapsed runs only"
    assert row["adj"]["mean"] == pytest.approx(20.0) and row["adj"]["sd"] == pytest.approx(20.0), "percent, sample sd"
    assert row["pre_onset_perplexity"]["mean"] == pytest.approx((8 + 12 + 9) / 3)
    assert row["trace_adj"] == {"mean": pytest.approx(20.0), "sd": None, "n": 1}, "last 20 updates"
    assert values.cell(row, Column("collapsed", "C/T")) == "2/3"
    assert values.cell(row, Column("perplexity", "PPL", 1)) == "12.0 ± 2.0"
    assert values.cell(row, Column("average", "Avg.")) == "-"


def test_last_evaluation_before_the_onset():
    trace = {"update": [1, 2, 3, 4], "perplexity": [None, 7.0, None, 9.0]}
    assert worker.pre_onset({"onset": None}) is None
    assert worker.pre_onset({"onset": 4, "trace": trace}) == {"update": 2, "perplexity": 7.0}
    start = {"onset": 2, "trace": trace, "start": {"perplexity": 6.5}}
    assert worker.pre_onset(start) == {"update": 0, "perplexity": 6.5}


def test_running_mean():
    assert figures.running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]


def example_table():
    study = STUDIES["layers"]
    rows = [Row("dL = 1 & 2_x", paper={"average": 35.0, "rate": "0.17 ± 0.006"}), Row("none")]
    measured = [values.of_row([result(None, 5.0, 0.01)]), values.of_row([result(None, 6.0, 0.02)])]
    return study, rows, measured, values.make_table(study, rows, measured, ["small"])


def test_tables_in_three_notations():
    _, _, _, table = example_table()
    assert table.head == ("", "PPL", "KL self", "Adj. %", "Dist.-4 %", "paper Avg. %", "paper Rate")
    read = list(csv.reader(io.StringIO(table.csv)))
    assert read[1] == ["dL = 1 & 2_x", "5.00", "1.000", "1.00", "90.00", "35.0", "0.17 ± 0.006"]
    assert read[2][-2:] == ["-", "-"]
    written = table.latex
    assert r"dL = 1 \& 2\_x & 5.00" in written and r"0.17 $\pm$ 0.006" in written and r"Adj. \%" in written
    assert written.count(r"\\") == 3 and "lrrrr|rr" in written
    shown = table.text.splitlines()
    assert len({len(line) for line in shown[2:3] + shown[4:6]}) == 1 and shown[-1] == "note: small"


def test_figures_are_drawn_twice_alike(tmp_path):
    study, rows, measured, _ = example_table()
    files = [figures.points(study, rows, measured, tmp_path / name) for name in ("a", "b")]
    assert [path.suffix for path in files[0]] == [".png", ".svg"]
    assert files[0][1].read_bytes() == files[1][1].read_bytes()
    runs_of_rows = [[{"trace": {"update": [1, 2], "adj": [0.1, 0.2], "dist4": [1.0, 0.9]}}], [{"trace": None}]]
    assert all(path.stat().st_size > 1000 for path in figures.collapse(rows, runs_of_rows, tmp_path / "c"))


def drawn(monkeypatch, draw):
    """The figure that a function of `figures` would save."""
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, folder, name: kept.append(figure) or [])
    draw()
    return kept[0]


def words(figure):
    return [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]


def test_the_figure_of_points_fits_a_page_and_shows_its_noise(tmp_path, monkeypatch):
    columns = tuple(Column(f"c{index}", f"column {index}", 1) for index in range(7))
    study = replace(STUDIES["controlled"], columns=columns)
    rows = [Row("first", paper={"c0": 34.7}), Row("second", paper={"c0": "35 ± 1"})]
    measured = [{c.key: {"mean": 100 + m, "sd": sd, "n": 3} for c in columns} for m, sd in ((0.0, 3.0), (0.1, 4.0))]
    figure = drawn(monkeypatch, lambda: figures.draw(study, rows, measured, [[], []], tmp_path, "tiny-rule"))
    assert figure.get_figwidth() <= 10.5 and len(figure.axes) == 8, "rows of four panels, none with a second axis"
    said = words(figure)
    assert {"34.7", "35 ± 1", "paper"} <= set(said), "the paper's values are numbers, not points"
    assert any("constructed teacher tiny-rule" in text and "noise over seeds" in text for text in said)
    noise = figures.pooled([row["c0"] for row in measured])
    assert noise == pytest.approx(12.5**0.5)
    low, high = figure.axes[0].get_xlim()
    assert high - low > 6 * noise, "a difference far below the noise does not fill the panel"
    alone = [{c.key: {"mean": 5.0, "sd": None, "n": 1} for c in columns}] * 2
    figure = drawn(monkeypatch, lambda: figures.points(study, rows, alone, tmp_path))
    assert any("one seed: differences may be noise" in text for text in words(figure))


def test_onsets_lie_on_the_limits(tmp_path, monkeypatch):
    trace = {"update": [1, 2, 3], "adj": [0.0, 0.4, 0.4], "dist4": [1.0, 0.6, 0.6]}
    figure = drawn(
        monkeypatch, lambda: figures.collapse([Row("one")], [[{"trace": trace, "onset": 2}]], tmp_path, "teacher x")
    )
    marks = [line.get_xydata().tolist() for axis in figure.axes for line in axis.lines if line.get_marker() == "v"]
    assert marks == [[[2.0, 0.10]], [[2.0, 0.05]]]
