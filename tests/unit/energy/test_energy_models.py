"""Energies worked out by hand, and counted against estimated."""

from __future__ import annotations

import numpy as np
import pytest
from energy_runs import make_run, small_shape
from random_models import random_shape

from energy.costs import cost_tables
from energy.flops import layer_macs
from energy.models import (
    Hops,
    break_even_rate,
    compare_counts,
    count,
    driver_counts,
    estimated_lines,
    group,
    mean_rate,
    measured_lines,
    measured_rates,
    measured_site_rates,
    token_energies,
    total,
    uniform_rates,
)
from spikeopd.contracts import LAYER_COMPONENTS, Activity, ModelShape
from spikeopd.contracts.run import parse_run

TABLES = cost_tables()
PAPER, LOIHI = TABLES["horowitz45"], TABLES["loihi"]
RUN = parse_run(make_run(prompts=(5,), generated=(4,), drive=2.0), "x")
MANY = parse_run(make_run(random_shape(width=8), prompts=(5, 2, 3), generated=(4, 3, 0), drive=2.0), "x")


def test_by_hand_in_the_papers_prices() -> None:
    """Linear(4, 3) driven by two spikes is 6 accumulations; with 10 MACs: 6 x 0.9 + 10 x 4.6 = 51.4 pJ."""
    activity = Activity.zeros(small_shape(1, 2))
    activity.sops["output"][0, 1] = 2 * 3
    activity.macs["head"] = 10
    lines = measured_lines(activity, PAPER)
    assert total(lines) == pytest.approx(51.4)
    assert group(lines, lambda line: line.component)["output"] == pytest.approx(5.4)
    assert count(lines, "ac") == 6 and count(lines, "mac") == 10


def test_by_hand_on_loihi() -> None:
    """Five neurons, two of which fire once: 2 x 81 + 3 x 52 updates, 2 x 1.7 deliveries, 2 x (2 x 3 + 1 x 4) hops."""
    activity = Activity.zeros(small_shape(1, 1))
    activity.cells["q"][0, 0], activity.spikes["q"][0, 0] = 5, 2
    assert total(measured_lines(activity, LOIHI)) == pytest.approx(2 * 81 + 3 * 52 + 2 * 1.7)
    hopped = total(measured_lines(activity, LOIHI, Hops(2, 1)))
    assert hopped == pytest.approx(2 * 81 + 3 * 52 + 2 * 1.7 + 2 * 10)
    assert total(measured_lines(activity, PAPER, Hops(2, 1))) == 0


def test_equation_by_hand() -> None:
    """One layer, d = 4, f = 6, T_s = 4, rate 0.25 everywhere, one token: 0.25 x 4 x FLOPs + head 4 x 10 MACs."""
    shape = ModelShape(4, 1, 2, 6, 10, 8, 4, 4)
    lines = estimated_lines(shape, uniform_rates(shape, 0.25), 1, 1, PAPER)
    flops = 48 + 4 + 4 + 16 + 8 + 24 + 24
    assert count(lines, "ac") == pytest.approx(flops)
    assert total(lines) == pytest.approx(0.9 * flops + 4.6 * 40)


@pytest.mark.parametrize("run", [RUN, MANY], ids=["one sequence", "three lengths, factorised"])
@pytest.mark.parametrize("phase", ["prompt", "generation", None])
def test_counted_equals_estimated_where_it_must(run, phase) -> None:
    rows = compare_counts(run, phase)
    owed = [row for row in rows if row.must_equal]
    assert {row.component for row in owed} >= set(LAYER_COMPONENTS) - {"coincidence"}
    assert all(row.equal and row.measured == row.analytical for row in owed)
    assert any(row.measured for row in owed)


def test_a_wrong_count_is_seen() -> None:
    run = parse_run(make_run(drive=2.0), "x")
    run.phases["prompt"].sops["ffn_in"][1, 0] += 1
    assert [(r.component, r.layer) for r in compare_counts(run, "prompt") if r.must_equal and not r.equal] == [
        ("ffn_in", 1)
    ]


def test_masked_coincidences_differ_only_by_position() -> None:
    """With one token there is one position, so even the masked coincidences agree."""
    run = parse_run(make_run(prompts=(1,), generated=(0,), drive=2.0), "x")
    assert all(row.equal for row in compare_counts(run))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("run", [RUN, MANY], ids=["one", "three"])
def test_tokens_add_up(run, table: str) -> None:
    hops = Hops(1.5, 0.5)
    tokens = token_energies(run.shape, run.per_token, TABLES[table], hops)
    assert tokens.sum() == pytest.approx(total(measured_lines(run.activity(), TABLES[table], hops)), rel=1e-12)
    for phase in ("prompt", "generation"):
        part = total(measured_lines(run.activity(phase), TABLES[table], hops))
        assert tokens[run.per_token.mask(phase)].sum() == pytest.approx(part, rel=1e-12)


def test_neurons_by_site_rates_are_exact() -> None:
    activity = RUN.activity()
    site_rates = measured_site_rates(activity)
    lines = estimated_lines(
        RUN.shape, measured_rates(activity), activity.tokens, RUN.keys(), LOIHI, site_rates=site_rates
    )
    for event in ("neuron_active", "neuron_inactive", "spike", "mac"):
        assert count(lines, event) == pytest.approx(count(measured_lines(activity, LOIHI), event), rel=1e-12)


def test_rates_are_of_the_drivers() -> None:
    activity = RUN.activity()
    rates = measured_rates(activity)
    assert rates["qkv"][0] == activity.spikes["embed"].sum() / activity.cells["embed"].sum()
    assert rates["qkv"][1] == activity.spikes["h"][0].sum() / activity.cells["h"][0].sum()
    assert driver_counts(activity, "residual", 0)[0] == int((activity.spikes["o"] + activity.spikes["y"])[0].sum())
    sites = [site for site in activity.spikes if site != "a"]
    expected = sum(activity.spikes[s].sum() for s in sites) / sum(activity.cells[s].sum() for s in sites)
    assert mean_rate(activity) == pytest.approx(expected)
    assert mean_rate(activity, attention=True) != mean_rate(activity)
    assert mean_rate(Activity.zeros(small_shape(1, 1))) == 0


@pytest.mark.parametrize("table", TABLES)
def test_break_even_rate_really_breaks_even(table: str) -> None:
    shape, costs = ModelShape(64, 2, 4, 256, 300, 128, 4, 64), TABLES[table]
    teacher = 1.3 * total(estimated_lines(shape, uniform_rates(shape, 0.2), 20, 210, costs))
    rate = break_even_rate(shape, 20, 210, costs, teacher)
    assert rate is not None
    assert total(estimated_lines(shape, uniform_rates(shape, rate), 20, 210, costs)) == pytest.approx(teacher)
    assert break_even_rate(shape, 20, 210, costs, 0.0) is None


def test_uniform_rate_needs_no_site_rates() -> None:
    """At one rate everywhere every neuron group fires at it, so the spikes are rate x slots."""
    shape = random_shape()
    lines = estimated_lines(shape, uniform_rates(shape, 0.5), 3, 6, LOIHI)
    assert count(lines, "neuron_active") == pytest.approx(count(lines, "neuron_inactive"))
    flops = layer_macs(shape, 3, 6)
    assert count(lines, "ac") == pytest.approx(0.5 * shape.num_steps * shape.num_hidden_layers * sum(flops.values()))


def test_energies_are_finite_floats() -> None:
    assert np.isfinite(token_energies(RUN.shape, RUN.per_token, LOIHI)).all()
