"""A report adds up, says what must agree and what was left out; both forms of the block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_models import PLUS, random_shape
from random_runs import make_run

from energy.api import make_options
from energy.assembly import Options, report_rates, report_run
from energy.costs import COSTS
from energy.flops import keys_of_sequence, opt_macs, opt_shape
from energy.models import Hops, measured_lines, total, uniform_rates
from spikeopd.contracts import ModelShape
from spikeopd.contracts.run import parse_run
from spikeopd.errors import CheckFailed

RUN = parse_run(make_run(prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a run")
PLUS_RUN = parse_run(make_run(random_shape(**PLUS), prompts=(5, 3), generated=(4, 3), drive=2.0), "x", "a plus run")
BOTH = pytest.mark.parametrize("run", [RUN, PLUS_RUN], ids=["paper", "plus"])


def options(shape: ModelShape | None = None, costs: str = "horowitz45", hops: Hops | None = None) -> Options:
    return make_options(shape or RUN.shape, costs, "sram-1mb", "matched", hops or Hops())


REPORT = report_run(RUN, options())


def by(rows: list[dict], key: str) -> dict:
    return {row[key]: row for row in rows}


def test_summary_adds_up() -> None:
    scopes = by(REPORT["summary"], "scope")
    for key in ("tokens", "spikes", "sops", "macs", "ops", "energy_pj", "teacher_energy_pj", "teacher_macs"):
        assert scopes["prompt"][key] + scopes["generation"][key] == pytest.approx(scopes["all"][key], rel=1e-12)
    whole = scopes["all"]
    assert whole["energy_pj"] == pytest.approx(0.9 * whole["sops"] + 4.6 * whole["macs"])
    assert whole["energy_pj"] == pytest.approx(total(measured_lines(RUN.activity(), COSTS["horowitz45"])))
    assert whole["energy_per_token_pj"] * 13 == pytest.approx(whole["energy_pj"])
    assert whole["energy_per_sequence_pj"] * 2 == pytest.approx(whole["energy_pj"])
    assert whole["teacher_energy_pj"] == pytest.approx(4.6 * sum(opt_macs(RUN.shape, 13, RUN.keys()).values()))


@BOTH
@pytest.mark.parametrize("table", COSTS)
def test_every_breakdown_sums_to_the_whole(table: str, run) -> None:
    report = report_run(run, options(run.shape, table, Hops(1, 2)))
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


def test_a_reports_rates_can_be_fed_back() -> None:
    one = report_run(parse_run(make_run(prompts=(6,), generated=(3,), drive=2.0), "x"), options())
    again = report_rates(RUN.shape, one["rates"], 6, 2, options(), "again")
    assert again["summary"][-1]["energy_pj"] == pytest.approx(one["summary"][-1]["analytical_energy_pj"])


def test_break_even_in_words() -> None:
    assert REPORT["break_even"]["rate"] > 1 and "above 1" in REPORT["break_even"]["meaning"]
    loihi = report_run(RUN, options(costs="loihi"))["break_even"]
    assert loihi["rate"] is None and "silent" in loihi["meaning"]


def test_the_second_form_names_only_what_it_has() -> None:
    """No gains, no sites o and y, no silent rows of the head; its own extra work is listed with its count."""
    report = report_run(PLUS_RUN, options(PLUS_RUN.shape))
    shape = PLUS_RUN.shape
    parts = ("qkv", "coincidence", "av", "output", "ffn_in", "ffn_out")
    assert {row["component"] for row in report["components"]} == {*parts, "head", "neurons", "routing"}
    assert tuple(report["rates"]) == parts and tuple(report["layers"][0]["components_pj"])[:6] == parts
    assert [row["component"] for row in report["checks"]] == [*parts, "coincidence_unmasked"]
    assert all(row["equal"] for row in report["checks"] if row["must_equal"])
    assert "residual" not in report["memory"]["bytes"]
    assert [row["name"] for row in report["alternatives"]] == ["unmasked", "additions"]
    listed = {row["what"]: row["count"] for row in report["not_costed"]}
    steps = shape.num_hidden_layers * shape.num_steps
    assert listed["shift of a sublayer's sum and its addition to the residual stream"] == 2 * 16 * steps * 13
    assert listed["addition of the distance bias to a pair's current"] == 2 * steps * PLUS_RUN.keys()
    assert report["model"]["residual_write"] == "current" and "residual_write" not in report["teacher"]["model"]
    paper = {row["what"] for row in REPORT["not_costed"]}
    assert not any("distance bias" in what or "shift of" in what for what in paper)


def test_rates_alone_in_the_second_form() -> None:
    """0.17 x 4 x FLOPs without the gains; sites o and y do not exist, so they fire nothing."""
    shape = replace(opt_shape("opt-125m"), num_steps=4, residual_write="current", readout="residual", distances=64)
    report = report_rates(shape, uniform_rates(shape, 0.17), 480, 32, options(shape, "loihi"), "given")
    whole = report["summary"][-1]
    flops = opt_macs(opt_shape("opt-125m"), 512, keys_of_sequence(512))
    blocks = sum(flops.values()) - flops["head"]
    assert whole["sops"] == pytest.approx(0.17 * 4 * blocks) and whole["rate"] == pytest.approx(0.17)
    slots = 4 * (512 * (768 + 12 * (6 * 768 + 3072)) + 12 * 12 * keys_of_sequence(512))
    assert whole["spikes"] == pytest.approx(0.17 * slots)
    assert report["teacher"]["name"] == "opt-125m"


@BOTH
def test_prices_reprice_the_same_events(run) -> None:
    """Every row of `prices` is what the report under that table says, so both answers stand side by side."""
    base = report_run(run, options(run.shape))
    for row in base["prices"]:
        other = report_run(run, options(run.shape, row["table"]))["summary"][-1]
        for key in ("energy_per_token_pj", "teacher_energy_per_token_pj", "teacher_over_student"):
            assert row[key] == pytest.approx(other[key], rel=1e-12), (row["table"], key)
    assert [row["table"] for row in base["prices"] if row["chosen"]] == ["horowitz45"]
    assert [row["table"] for row in base["prices"]] == list(COSTS)
