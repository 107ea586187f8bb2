"""Reports, their renderings, comparisons and the paper's table."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from energy_runs import make_run
from random_models import random_shape

from energy.comparison import compare, spikegpt_row, teacher_row
from energy.costs import cost_tables, load_costs, load_memory
from energy.flops import SPIKEGPT, keys_of_sequence, opt_macs, opt_shape
from energy.models import NO_HOPS, Hops, measured_lines, total, uniform_rates
from energy.paper import PRINTED, context_for, context_rows, formula_rows, paper_page, paper_tables, recomputed_rows
from energy.raster import load_groups, mask_png, raster_html
from energy.render import render_report, render_tables
from energy.report import Options, report_rates, report_run
from energy.tables import Column, Table, compare_table, cost_tables_tables, report_tables, significant
from spikeopd.contracts import ModelShape, SpikeTrace, ordered_sites, save_trace
from spikeopd.contracts.run import parse_run
from spikeopd.errors import CheckFailed, InputError

RUN = parse_run(make_run(prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a run")


def options(shape: ModelShape = RUN.shape, costs: str = "horowitz45", hops: Hops = NO_HOPS) -> Options:
    return Options(load_costs(costs), load_memory("sram-1mb"), replace(shape, num_steps=1), "its teacher", hops)


REPORT = report_run(RUN, options())


def by(rows: list[dict], key: str) -> dict:
    return {row[key]: row for row in rows}


def test_summary_adds_up() -> None:
    scopes = by(REPORT["summary"], "scope")
    for key in ("tokens", "spikes", "sops", "macs", "ops", "energy_pj", "teacher_energy_pj", "teacher_macs"):
        assert scopes["prompt"][key] + scopes["generation"][key] == pytest.approx(scopes["all"][key], rel=1e-12)
    whole = scopes["all"]
    assert whole["energy_pj"] == pytest.approx(0.9 * whole["sops"] + 4.6 * whole["macs"])
    assert whole["energy_pj"] == pytest.approx(total(measured_lines(RUN.activity(), load_costs("horowitz45"))))
    assert whole["energy_per_token_pj"] * 13 == pytest.approx(whole["energy_pj"])
    assert whole["energy_per_sequence_pj"] * 2 == pytest.approx(whole["energy_pj"])
    assert whole["teacher_energy_pj"] == pytest.approx(4.6 * sum(opt_macs(RUN.shape, 13, RUN.keys()).values()))


@pytest.mark.parametrize("table", cost_tables())
def test_every_breakdown_sums_to_the_whole(table: str) -> None:
    report = report_run(RUN, options(costs=table, hops=Hops(1, 2)))
    whole = report["summary"][-1]["energy_pj"]
    components = [row["energy_pj"] for row in report["components"] if row["scope"] == "all"]
    assert sum(components) == pytest.approx(whole)
    assert sum(row["share"] for row in report["components"] if row["scope"] == "all") == pytest.approx(1)
    assert sum(token["energy_pj"] for token in report["tokens"]) == pytest.approx(whole)
    outside = sum(line["energy_pj"] for line in report["lines"] if line["scope"] == "all" and line["layer"] is None)
    assert sum(row["energy_pj"] for row in report["layers"]) + outside == pytest.approx(whole)
    for row in report["layers"]:
        assert sum(row["components_pj"].values()) == pytest.approx(row["energy_pj"])


def test_checks_say_what_must_agree() -> None:
    checks = by(REPORT["checks"], "component")
    assert checks["qkv"]["must_equal"] and checks["qkv"]["equal"]
    assert not checks["coincidence"]["must_equal"]
    assert not checks["coincidence_unmasked"]["must_equal"]  # two sequences of different length
    one = report_run(parse_run(make_run(drive=2.0), "x"), options())
    unmasked = by(one["checks"], "component")["coincidence_unmasked"]
    assert unmasked["must_equal"] and unmasked["measured_sops"] == unmasked["analytical_sops"]


def test_a_run_whose_counts_do_not_belong_together_fails() -> None:
    run = parse_run(make_run(drive=2.0), "x", "broken")
    run.phases["generation"].sops["ffn_out"][0, 0] += 1
    with pytest.raises(CheckFailed, match="broken: generation, ffn_out, layer 0"):
        report_run(run, options())


def test_memory_is_its_own_line() -> None:
    memory = REPORT["memory"]
    assert memory["included_in_energy"] is False
    assert memory["total_bytes"] == sum(RUN.activity().bytes.values())
    levels = by(memory["levels"], "level")
    assert levels["dram"]["energy_pj"] == memory["total_bytes"] * 162.5
    assert [name for name, row in levels.items() if row["chosen"]] == ["sram-1mb"]


def test_what_is_not_costed_is_listed() -> None:
    paper = {row["what"]: row["count"] for row in REPORT["not_costed"]}
    updates = [count for what, count in paper.items() if "membrane update" in what]
    assert sum(updates) == sum(int(cells.sum()) for cells in RUN.activity().cells.values())
    assert any("static power" in what for what in paper) and any("memory traffic" in what for what in paper)
    loihi = [row["what"] for row in report_run(RUN, options(costs="loihi"))["not_costed"]]
    assert not any("membrane update" in what for what in loihi) and any("--hops" in what for what in loihi)
    hopped = [row["what"] for row in report_run(RUN, options(costs="loihi", hops=Hops(1, 1)))["not_costed"]]
    assert not any("--hops" in what for what in hopped)


def test_alternatives_by_hand() -> None:
    rows, activity = by(REPORT["alternatives"], "name"), RUN.activity()
    assert rows["active_head"]["change_pj"] == pytest.approx(
        -4.6 * (activity.macs["head"] - activity.macs["head_active"])
    )
    extra = int(activity.sops_unmasked.sum() - activity.sops["coincidence"].sum())
    assert rows["unmasked"]["change_pj"] == pytest.approx(0.9 * extra) and extra > 0
    assert rows["additions"]["change_pj"] < 0


@pytest.mark.parametrize("table", ["horowitz45", "loihi"])
def test_sensitivity_passes_through_the_report(table: str) -> None:
    one = report_run(parse_run(make_run(prompts=(6,), generated=(3,), drive=2.0), "x"), options(costs=table))
    here = by(one["sensitivity"]["rate"], "factor")[1.0]
    analytical = one["summary"][-1]["analytical_energy_pj"] / one["summary"][-1]["tokens"]
    assert here["energy_per_token_pj"] == pytest.approx(analytical)
    assert by(one["sensitivity"]["num_steps"], "num_steps")[4]["energy_per_token_pj"] == pytest.approx(analytical)
    steps = [row["energy_per_token_pj"] for row in one["sensitivity"]["num_steps"]]
    contexts = [row["energy_per_token_pj"] for row in one["sensitivity"]["context"]]
    assert steps == sorted(steps) and contexts == sorted(contexts)
    assert all(row["rate"] <= 1 for row in one["sensitivity"]["rate"])


def test_rates_alone_follow_the_equation() -> None:
    shape = replace(opt_shape("opt-125m"), num_steps=4)
    report = report_rates(shape, uniform_rates(shape, 0.17), 480, 32, options(shape), "given")
    whole = report["summary"][-1]
    flops = opt_macs(shape, 512, keys_of_sequence(512))
    blocks = sum(flops.values()) - flops["head"] - flops["embed"] + 2 * 768 * 12 * 512
    assert whole["sops"] == pytest.approx(0.17 * 4 * blocks)
    assert whole["energy_pj"] == pytest.approx(0.9 * 0.68 * blocks + 4.6 * flops["head"])
    assert whole["rate"] == pytest.approx(0.17) and whole["tokens"] == 512
    assert report["tokens"] == [] and report["memory"]["total_bytes"] is None
    for form in ("text", "json", "csv", "markdown", "latex", "html"):
        assert len(render_report(report, form)) > 500


def test_a_reports_rates_can_be_fed_back() -> None:
    one = report_run(parse_run(make_run(prompts=(6,), generated=(3,), drive=2.0), "x"), options())
    again = report_rates(RUN.shape, one["rates"], 6, 2, options(), "again")
    assert again["summary"][-1]["energy_pj"] == pytest.approx(one["summary"][-1]["analytical_energy_pj"])


def test_break_even_in_words() -> None:
    assert REPORT["break_even"]["rate"] > 1 and "above 1" in REPORT["break_even"]["meaning"]
    loihi = report_run(RUN, options(costs="loihi"))["break_even"]
    assert loihi["rate"] is None and "silent" in loihi["meaning"]


def test_units_stand_in_every_numeric_header() -> None:
    for report in (REPORT, report_run(RUN, options(costs="loihi"))):
        for table in [
            *report_tables(report),
            *cost_tables_tables(),
            compare_table(compare([report], load_costs("loihi"))),
        ]:
            for column in table.columns:
                if column.kind != "text":
                    assert re.search(r"\[[^\]]+\]$", table.header(column)), table.header(column)


def test_json_is_the_report() -> None:
    assert json.loads(render_report(REPORT, "json")) == json.loads(json.dumps(REPORT))


def test_csv_is_tidy_and_complete() -> None:
    rows = list(csv.DictReader(io.StringIO(render_report(REPORT, "csv"))))
    assert sum(float(row["energy [pJ]"]) for row in rows if row["phase"] == "all") == pytest.approx(
        REPORT["summary"][-1]["energy_pj"]
    )
    qkv = next(row for row in rows if row["component"] == "qkv" and row["phase"] == "prompt")
    assert float(qkv["count [1]"]) == float(qkv["analytical_count [1]"])


def test_markdown_and_latex_have_a_row_per_row() -> None:
    table = report_tables(REPORT)[0]
    markdown, latex = render_tables([table], "markdown"), render_tables([table], "latex")
    assert markdown.count("\n| ") == 2 + len(table.rows)
    assert latex.count(r"\\") == 1 + len(table.rows) and r"\toprule" in latex and "µ" not in latex
    columns = len(table.columns)
    assert all(line.count("|") == columns + 1 for line in markdown.splitlines() if line.startswith("|"))
    assert all(line.count("&") == columns - 1 for line in latex.splitlines() if line.endswith(r"\\"))


def test_latex_is_plain_ascii() -> None:
    """Every sign that TeX does not know is spelled out."""
    tables = [*report_tables(REPORT), *report_tables(report_run(RUN, options(costs="loihi"))), *cost_tables_tables(),
              *paper_tables(), compare_table(compare([REPORT], load_costs("loihi"), spikegpt=True))]  # fmt: skip
    text = render_tables(tables, "latex")
    assert text.isascii(), set(text) - set(map(chr, range(128)))
    assert text.count("{") == text.count("}")


def test_wide_texts_become_paragraphs() -> None:
    text = render_tables(cost_tables_tables(), "text")
    assert "Table: loihi" in text and max(map(len, text.splitlines())) < 260


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


def test_compare_rows() -> None:
    costs = load_costs("horowitz45")
    rows = compare([REPORT, REPORT], costs, ("opt", replace(RUN.shape, num_steps=1)), RUN.keys(), spikegpt=True)
    assert [row["name"] for row in rows] == ["opt", "a run", "a run", "spikegpt-46m", "spikegpt-216m"]
    assert rows[0]["relative"] == 1
    assert rows[1]["relative"] == pytest.approx(1 / REPORT["summary"][-1]["teacher_over_student"])
    assert rows[3]["rate"] == REPORT["summary"][-1]["rate"]


def test_spikegpt_by_hand() -> None:
    """216M: 18 x 13 x 768^2 at rate 0.17 as accumulations, the head 768 x 50277 as MACs, per token."""
    costs, blocks, head = load_costs("horowitz45"), 18 * 13 * 768**2, 768 * 50277
    row = spikegpt_row(SPIKEGPT["spikegpt-216m"], 10, 0.17, costs)
    assert row["energy_per_token_pj"] == pytest.approx(0.9 * 0.17 * blocks + 4.6 * head)
    sparse = spikegpt_row(SPIKEGPT["spikegpt-216m"], 10, 0.17, costs, dense_head=False)
    assert sparse["energy_per_token_pj"] == pytest.approx(0.9 * 0.17 * (blocks + head))


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
    made = teacher_row("opt-125m", opt_shape("opt-125m"), 512, keys_of_sequence(512), load_costs("horowitz45"))
    assert rows[0]["energy_mj"] == pytest.approx(made["energy_pj"] / 1e9)
    assert rows[0]["energy_mj"] == pytest.approx(rows[0]["ops_g"] * 4.6)


def test_the_papers_page_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "paper_energy_table.md"
    assert page.read_text(encoding="utf-8") == paper_page(render_tables), "run: spikeopd-energy paper --output " + str(
        page
    )


def test_raster_of_a_trace(tmp_path) -> None:
    """The file neuro_sim writes, read back and drawn."""
    traces = [SpikeTrace(), SpikeTrace()]
    for seed, trace in enumerate(traces):
        make_run(random_shape(heads=2, head_dim=4), prompts=(3,), generated=(3,), seed=seed, trace=trace, drive=2.0)
    save_trace(tmp_path / "t.npz", traces, 2)
    trace = load_groups(tmp_path / "t.npz")
    assert list(trace) == [key for key in ordered_sites(random_shape()) if key[1] != "a"]
    for key, rows in trace.items():
        assert np.array_equal(rows, np.concatenate([np.concatenate(t.sites[key]) for t in traces]))
    page = raster_html(tmp_path / "t.npz", random_shape())
    assert page.count("data:image/png;base64,") == 2 * len(trace)
    assert f"rate {trace[1, 'h'].mean():.4f}" in page and page.count(" selected") == 1


def test_mask_png_round_trip() -> None:
    """The picture holds exactly the bits: read back without an image library."""
    import zlib

    bits = np.random.default_rng(1).random((5, 13)) < 0.5
    data = mask_png(bits)
    start = data.index(b"IDAT") + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = np.frombuffer(zlib.decompress(data[start : start + length]), np.uint8).reshape(5, -1)
    assert (rows[:, 0] == 0).all()
    assert np.array_equal(np.unpackbits(rows[:, 1:], axis=1)[:, :13].astype(bool), bits)


def test_bad_traces_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match="gone.npz"):
        load_groups(tmp_path / "gone.npz")
    (tmp_path / "junk.npz").write_bytes(b"junk")
    with pytest.raises(InputError, match="junk.npz"):
        load_groups(tmp_path / "junk.npz")
    np.savez(tmp_path / "flat.npz", **{"0/0.h": np.zeros(4, bool)})
    with pytest.raises(InputError, match="'0/0.h'"):
        load_groups(tmp_path / "flat.npz")
    np.savez(tmp_path / "objects.npz", **{"0/0.h": np.array([{}], dtype=object)})
    with pytest.raises(InputError, match="objects.npz"):
        load_groups(tmp_path / "objects.npz")
