"""Energies worked out by hand, and counted against estimated."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import PLUS, random_shape
from random_runs import make_run, small_shape

from energy.costs import COSTS
from energy.models import (
    Hops,
    break_even_rate,
    compare_counts,
    count,
    driven_rates,
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
from spikeopd.contracts import Activity, ModelShape
from spikeopd.contracts.run import parse_run
from spikeopd.contracts.topology import layer_macs

PAPER, LOIHI = COSTS["horowitz45"], COSTS["loihi"]
RUN = parse_run(make_run(prompts=(5,), generated=(4,), drive=2.0), "x")
PLUS_RUN = parse_run(make_run(random_shape(**PLUS), prompts=(5, 2), generated=(4, 3), drive=2.0), "x")
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


def two_neurons() -> tuple[ModelShape, Activity]:
    """d = 2, one head, f = 2, V = 3, T_s = 2, one layer, current write: one token in which these neurons fire.

    step 1: embed both, q one, k one, a fires (one key), r one, x both, f one, h none
    step 2: embed one, q none, a silent, r none, x none, f none, h both
    """
    shape = ModelShape(2, 1, 1, 2, 3, 4, 2, 2, "current", "residual", 2)
    activity = Activity.zeros(shape)
    activity.tokens = 1
    fired = {"embed": (2, 1), "q": (1, 0), "k": (1, 0), "v": (0, 0), "a": (1, 0), "r": (1, 0), "x": (2, 0), "f": (1, 0),
             "h": (0, 2)}  # fmt: skip
    for site, counts in fired.items():
        activity.spikes[site][0] = counts
        activity.cells[site][0] = 1 if site == "a" else 2
    # spikes x fan-out: 3 matrices of width 2; one key; head_dim 2; w_o, w_1 and w_2 of width 2
    sops = {"qkv": (12, 6), "coincidence": (1, 0), "av": (2, 0), "output": (2, 0), "ffn_in": (4, 0), "ffn_out": (2, 0)}
    assert set(sops) == set(activity.sops)
    for name, counts in sops.items():
        activity.sops[name][0] = counts
    activity.macs["head"] = 2 * 3
    return shape, activity


def test_the_second_form_by_hand() -> None:
    """29 operations and 6 MACs: 29 x 0.9 + 6 x 4.6 = 53.7 pJ. On Loihi also 12 firings and 22 silences of 34 slots."""
    shape, activity = two_neurons()
    lines = measured_lines(activity, PAPER)
    assert count(lines, "ac") == 29 and total(lines) == pytest.approx(29 * 0.9 + 6 * 4.6)
    assert {line.component for line in lines} == {*shape.layer_components, "embed", "head", "neurons", "routing"}
    assert "residual" not in shape.layer_components
    on_chip = total(measured_lines(activity, LOIHI))
    assert on_chip == pytest.approx(29 * 23.6 + 6 * 4.6 + 12 * 81 + 22 * 52 + 12 * 1.7)


def test_the_second_form_by_rates_by_hand() -> None:
    """f_r T_s FLOPs from the same firings: 3/4, 1/4, 1/2, 1/4, 2/4, 1/4 of 24, 4, 4, 8, 8, 8 operations."""
    shape, activity = two_neurons()
    rates = measured_rates(shape, activity)
    assert rates == {"qkv": [0.75], "coincidence": [0.25], "av": [0.5], "output": [0.25], "ffn_in": [0.5],
                     "ffn_out": [0.25]}  # fmt: skip
    lines = estimated_lines(shape, rates, 1, 1, PAPER)
    assert {line.component: line.count for line in lines if line.event == "ac"} == {
        "qkv": 18, "coincidence": 1, "av": 2, "output": 2, "ffn_in": 4, "ffn_out": 2,
    }  # fmt: skip
    # Groups fire like what they drive: embed 3/4, q k v 1/4, a 1/2 of its one slot, r 1/4, x 1/2, f 1/4, h like embed.
    driven = driven_rates(shape, rates)
    assert driven == {"embed": [0.75], "q": [0.25], "k": [0.25], "v": [0.25], "a": [0.5], "r": [0.25], "x": [0.5],
                      "f": [0.25], "h": [0.75]}  # fmt: skip
    assert count(lines, "neuron_active") == 4 * (0.75 + 3 * 0.25 + 0.25 + 0.5 + 0.25 + 0.75) + 2 * 0.5


@pytest.mark.parametrize("run", [RUN, MANY, PLUS_RUN], ids=["one sequence", "three lengths, factorised", "plus"])
@pytest.mark.parametrize("phase", ["prompt", "generation", None])
def test_counted_equals_estimated_where_it_must(run, phase) -> None:
    rows = compare_counts(run, phase)
    owed = [row for row in rows if row.must_equal]
    assert {row.component for row in owed} >= set(run.shape.layer_components) - {"coincidence"}
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


@pytest.mark.parametrize("table", COSTS)
@pytest.mark.parametrize("run", [RUN, MANY, PLUS_RUN], ids=["one", "three", "plus"])
def test_tokens_add_up(run, table: str) -> None:
    hops = Hops(1.5, 0.5)
    tokens = token_energies(run.shape, run.per_token, COSTS[table], hops)
    assert tokens.sum() == pytest.approx(total(measured_lines(run.activity(), COSTS[table], hops)), rel=1e-12)
    for phase in ("prompt", "generation"):
        part = total(measured_lines(run.activity(phase), COSTS[table], hops))
        assert tokens[run.per_token.mask(phase)].sum() == pytest.approx(part, rel=1e-12)


@pytest.mark.parametrize("run", [RUN, PLUS_RUN], ids=["paper", "plus"])
def test_neurons_by_site_rates_are_exact(run) -> None:
    activity = run.activity()
    rates, site_rates = measured_rates(run.shape, activity), measured_site_rates(activity)
    lines = estimated_lines(run.shape, rates, activity.tokens, run.keys(), LOIHI, site_rates=site_rates)
    for event in ("neuron_active", "neuron_inactive", "spike", "mac"):
        assert count(lines, event) == pytest.approx(count(measured_lines(activity, LOIHI), event), rel=1e-12)


def test_rates_are_of_the_drivers() -> None:
    activity = RUN.activity()
    rates = measured_rates(RUN.shape, activity)
    assert rates["qkv"][0] == activity.spikes["embed"].sum() / activity.cells["embed"].sum()
    assert rates["qkv"][1] == activity.spikes["h"][0].sum() / activity.cells["h"][0].sum()
    assert driver_counts(RUN.shape, activity, "residual", 0)[0] == int(
        (activity.spikes["o"] + activity.spikes["y"])[0].sum()
    )
    sites = [site for site in activity.spikes if site != "a"]
    expected = sum(activity.spikes[s].sum() for s in sites) / sum(activity.cells[s].sum() for s in sites)
    assert mean_rate(activity) == pytest.approx(expected)
    assert mean_rate(Activity.zeros(small_shape(1, 1))) == 0


@pytest.mark.parametrize("table", COSTS)
def test_break_even_rate_really_breaks_even(table: str) -> None:
    shape, costs = ModelShape(64, 2, 4, 256, 300, 128, 4, 64), COSTS[table]
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
