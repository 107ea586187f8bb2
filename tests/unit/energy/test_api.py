"""`import energy` as a notebook uses it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
from random_models import PLUS, random_shape
from random_runs import make_run, write_run

import energy
from energy.costs import COSTS, CostTable
from energy.models import Hops
from spikeopd.contracts import Run, load_run, parse_run
from spikeopd.errors import InputError

RAW = make_run(drive=2.0)


class Result:
    """What a generation returns, as far as energy is concerned."""

    def to_run(self) -> dict:
        return RAW


def test_every_source_gives_the_same_report(tmp_path) -> None:
    path = write_run(tmp_path / "run.json", RAW)
    reports = [energy.report(source, name="it") for source in (path, str(path), RAW, load_run(path), Result())]
    assert all(report.data == reports[0].data for report in reports)
    assert [energy.report(source).data["source"]["name"] for source in (path, RAW, Result())] == [
        "run",
        "random",
        "random",
    ]
    for report in reports:
        assert isinstance(report.run, Run)


def test_the_numbers_of_a_report() -> None:
    report = energy.report(RAW)
    whole = report.data["summary"][-1]
    assert report.total_pj == whole["energy_pj"] == pytest.approx(sum(report.components_pj.values()))
    assert report.per_token_pj == report.total_pj / report.tokens and report.tokens == 8
    assert report.teacher_over_student == pytest.approx(report.teacher_pj / report.total_pj)
    assert report.firing_rate == whole["rate"]
    assert "Energy of random" in str(report) and repr(report) == f"<Report: {report.head[0]}>"
    assert report.to_dict() is report.data


def test_options_may_be_names_or_things(tmp_path) -> None:
    table = CostTable("mine", "t", 7.0, "b", "c", "v", {"mac": 1.0, "ac": 0.5})
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"title": "t", "node_nm": 7, "citation": "c", "prices_pj": {"mac": 1, "ac": 0.5}}))
    mine = energy.report(RAW, costs=table)
    assert mine.total_pj == energy.report(RAW, costs=str(path)).total_pj < energy.report(RAW).total_pj
    assert [row["table"] for row in mine.data["prices"]] == [*COSTS, "mine"] and "under mine" in mine.head[-3]
    hopped = energy.report(RAW, costs="loihi", hops=(2, 1))
    assert hopped.total_pj == energy.report(RAW, costs="loihi", hops=Hops(2, 1)).total_pj
    shape = parse_run(RAW, "x").shape
    assert energy.report(RAW, teacher=shape).teacher_pj == energy.report(RAW).teacher_pj
    with pytest.raises(InputError, match="--hops"):
        energy.report(RAW, hops=(-1, 0))


@pytest.mark.parametrize("source", [3, None, [RAW], object()], ids=["number", "none", "list", "object"])
def test_what_is_no_run_is_refused(source) -> None:
    with pytest.raises(InputError, match="no run in a"):
        energy.report(source)
    with pytest.raises(InputError, match="run data: field 'schema'"):
        energy.report({})


@pytest.mark.parametrize("suffix", ["txt", "json", "csv", "md", "tex", "html", "htm", "HTML"])
def test_saving_follows_the_ending(suffix: str, tmp_path) -> None:
    report = energy.report(RAW)
    form = {"txt": "text", "md": "markdown", "tex": "latex", "htm": "html", "HTML": "html"}.get(suffix, suffix)
    path = report.save(tmp_path / "deep" / f"energy.{suffix}")
    assert path.read_text(encoding="utf-8") == report.render(form)


def test_saving_refuses_other_endings_and_its_own_inputs(tmp_path) -> None:
    path = write_run(tmp_path / "run.json", RAW)
    before = path.read_bytes()
    report = energy.report(path)
    for name in ("rep.pdf", "rep.jsonl", "run.json.bak"):
        with pytest.raises(InputError, match="choose one of .txt, .json"):
            report.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(InputError, match="unknown format 'pdf'"):
        report.render("pdf")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    for target in (path, tmp_path / "x" / ".." / "run.json", link):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(InputError, match="made from it"):
            report.save(target)
    with pytest.raises(InputError, match="made from it"):
        energy.compare([path, path]).save(path)
    assert path.read_bytes() == before


def test_an_estimate_does_not_replace_its_config(tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(random_shape().to_dict()))
    rates = tmp_path / "rates.json"
    rates.write_text("0.2")
    report = energy.estimate(config, str(rates), 8)
    for path in (config, rates):
        with pytest.raises(InputError, match="made from it"):
            report.save(path)


def test_a_students_config_says_its_form(tmp_path) -> None:
    """config.json of a student with the fields of the second form: no gains, the same dense teacher."""
    shape = random_shape(**PLUS)
    for place in (tmp_path / "final", tmp_path / "other"):
        place.mkdir()
    config = {"model_type": "bispikclm", "normalise": True} | shape.to_dict()
    (tmp_path / "final" / "config.json").write_text(json.dumps(config))
    (tmp_path / "other" / "config.json").write_text(json.dumps(random_shape().to_dict()))
    plus, paper = energy.estimate(tmp_path, 0.25, 8, prompt=3), energy.estimate(tmp_path / "other", 0.25, 8, prompt=3)
    assert plus.data == energy.estimate(shape, 0.25, 8, prompt=3, name=f"{tmp_path.name} at given rates").data
    gains = 0.25 * 4 * 2 * 16 * 2 * 8  # f_r T_s 2 d layers tokens
    assert paper.components_pj["residual"] == pytest.approx(0.9 * gains) and "residual" not in plus.components_pj
    assert paper.total_pj - plus.total_pj == pytest.approx(0.9 * gains)
    assert paper.teacher_pj == plus.teacher_pj
    again = energy.estimate(shape, plus.data, 8)  # a report's rates
    assert again.total_pj == pytest.approx(plus.total_pj)
    with pytest.raises(InputError, match="unknown component 'residual'; this model's block has qkv"):
        energy.estimate(shape, paper.data, 8)


@pytest.mark.parametrize(("context", "prompt"), [(0, None), (33, None), (8, 9), (8, -1)])
def test_lengths_that_cannot_be(context: int, prompt: int | None) -> None:
    with pytest.raises(InputError, match="must lie between"):
        energy.estimate(random_shape(), 0.2, context, prompt=prompt)


def test_compare_names_its_rows() -> None:
    plus = make_run(random_shape(**PLUS), drive=2.0)
    comparison = energy.compare({"paper": RAW, "plus": plus}, teacher="matched", spikegpt=True)
    names = [row["name"] for row in comparison.rows]
    assert names == ["OPT of the same shape", "paper", "plus", "spikegpt-46m", "spikegpt-216m"]
    assert comparison.rows[2]["energy_pj"] == energy.report(plus).total_pj
    assert [row["name"] for row in energy.compare([RAW, RAW]).rows] == ["random", "random"]
    with pytest.raises(InputError, match="nothing to compare"):
        energy.compare([])


def test_a_trace_that_cannot_be_drawn_is_a_warning(tmp_path) -> None:
    np.savez(tmp_path / "t.npz", **{"0/0.h": np.ones((3, 4, 16), bool)})
    path = write_run(tmp_path / "run.json", RAW | {"trace": "t.npz"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 'id="raster-choice"' in energy.report(path).render("html")
    (tmp_path / "t.npz").unlink()
    with pytest.warns(UserWarning, match="no spike raster: .*t.npz"):
        assert 'id="raster-choice"' not in energy.report(path).render("html")


def test_names_come_when_they_are_used() -> None:
    code = """
import sys, energy
assert sorted(energy.__all__) == energy.__all__ and set(energy.__all__) <= set(dir(energy))
assert "numpy" not in sys.modules
from energy import costs, report
import energy.assembly, energy.render.tables  # a submodule must not hide a function
assert energy.report is report and callable(report) and costs.COSTS["horowitz45"].price("ac") == 0.9
assert all(hasattr(energy, name) for name in energy.__all__) and not hasattr(energy, "nothing")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
