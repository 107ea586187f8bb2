"""Energy of a run of a trained twin: by hand, in its report, and beside the student it is the twin of."""

from __future__ import annotations

import pytest
from random_models import PLUS, random_shape
from random_runs import make_run

import energy
from energy.costs import COSTS, PLACEMENTS
from energy.memory import counted_work, total, twin_tally
from energy.models import estimated_lines, measured_rates
from energy.models import total as priced
from spikeopd.contracts.run import Run, parse_run
from spikeopd.contracts.topology import layer_macs
from spikeopd.errors import InputError

CORES = PLACEMENTS["cores"]


def runs(form: dict) -> tuple[Run, Run]:
    """A student and a twin of its shape, not the same weights: only shapes and counts matter here."""
    return (
        parse_run(make_run(random_shape(**form), seed=1), "student.json", "student"),
        parse_run(make_run(random_shape(neuron="quantised", **form), seed=2, drive=1.5), "twin.json", "twin"),
    )


@pytest.mark.parametrize("form", [{}, PLUS], ids=["paper", "plus"])
def test_its_operations_are_multiply_accumulates(form: dict) -> None:
    _, twin = runs(form)
    report = energy.report(twin)
    activity = twin.activity()
    macs = sum(int(table.sum()) for table in activity.sops.values()) + activity.macs["embed"] + activity.macs["head"]
    whole = report.data["summary"][-1]
    assert (whole["sops"], whole["macs"]) == (0, macs) and report.total_pj == pytest.approx(4.6 * macs)
    assert sum(row["energy_pj"] for row in report.data["tokens"]) == pytest.approx(report.total_pj)
    # counted = analytical where a fan-out does not depend on when: the same checks as a student's
    assert all(row["equal"] for row in report.data["matrix"] if row["must_equal"])
    lines = estimated_lines(
        twin.shape, measured_rates(twin.shape, activity), activity.tokens, twin.keys(), COSTS["horowitz45"]
    )
    assert priced(lines) == pytest.approx(report.total_pj, rel=0.02)
    assert "a quantised twin: one step of counts" in report.head[1] and "this twin (int8 × 3 bit)" in str(report)
    assert "sensitivity_num_steps" not in {table.name for table in report.tables}
    assert report.render("html").count("<svg") > 3


def test_memory_by_hand() -> None:
    """Dense: every weight once per token, whatever is zero. Zeros skipped: those of inputs that are not."""
    _, twin = runs(PLUS)
    work, activity = counted_work(twin), twin.activity()
    dense, spike, token = (twin_tally(work, convention) for convention in (None, "spike", "token"))
    one = layer_macs(twin.shape, work.tokens, work.keys)
    layers, d = twin.shape.num_hidden_layers, twin.shape.hidden_size
    assert dense.blocks["mac"] == layers * sum(one.values())
    assert dense.blocks["weight_read"] == layers * (sum(one.values()) - one["coincidence"] - one["av"])
    rows = sum(activity.bytes[name] for name in ("qkv", "output", "ffn_in", "ffn_out"))
    assert spike.blocks["weight_read"] == token.blocks["weight_read"] == rows  # int8: a byte each
    assert rows == sum(int(activity.sops[name].sum()) for name in ("qkv", "output", "ffn_in", "ffn_out"))
    assert spike.blocks["cache_write"] == 2 * d * layers * work.tokens and spike.bits["cache_write"] == 3
    nonzero = sum(int(table.sum()) for site, table in activity.spikes.items() if site not in "kv")
    assert spike.blocks["spike_write"] == pytest.approx(nonzero) and spike.bits["spike_write"] == 16 + 3
    assert total(dense, CORES) > total(token, CORES) > 0


@pytest.mark.parametrize("form", [{}, PLUS], ids=["paper", "plus"])
def test_beside_the_computed_twin(form: dict) -> None:
    student, twin = runs(form)
    found = energy.compare_twins([student, twin])
    rows = [row for row in found.tables[1].rows if row["subject"] == "student"]
    trained = [row for row in rows if row["key"] == "trained_twin"]
    assert [row["convention"] for row in trained] == ["any", "spike", "token"]
    computed = next(row for row in rows if row["key"] == "twin")
    assert trained[0]["energy_per_token_pj"] == pytest.approx(computed["energy_per_token_pj"])  # dense: the shape alone
    work = counted_work(twin)
    for row, convention in zip(trained, (None, "spike", "token"), strict=True):
        due = total(twin_tally(work, convention), CORES) / work.tokens
        assert row["energy_per_token_pj"] == pytest.approx(due)
    bands = [row for row in found.tables[2].rows if row["rival_key"] == "trained_twin"]
    assert len(bands) == 12  # three placements, two conventions, dense and zeros skipped
    assert "trained twin: trained: counted in a run of its own" in str(found)
    assert found.render("html").startswith("<!")


def test_what_has_no_meaning_is_refused() -> None:
    student, twin = runs({})
    with pytest.raises(InputError, match="twin: a quantised twin, but no run here is of a student of its shape"):
        energy.compare_twins([twin])
    other = parse_run(make_run(random_shape(layers=1)), "other.json", "other")
    with pytest.raises(InputError, match="no run here is of a student of its shape"):
        energy.compare_twins([other, twin])
    with pytest.raises(InputError, match="a quantised twin fires no spikes; give a run of its student"):
        energy.break_even(twin)
