"""What must hold of any activity: nothing costs nothing, more costs more, parts add up."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energy.costs import CostTable, cost_tables
from energy.flops import keys_of_sequence, layer_macs, opt_macs
from energy.models import (
    Hops,
    break_even_rate,
    compare_counts,
    estimated_lines,
    group,
    measured_lines,
    token_energies,
    total,
    uniform_rates,
)
from spikeopd.contracts import LAYER_COMPONENTS, LAYER_SITES, Activity, ModelShape
from spikeopd.contracts.run import parse_run
from spikeopd.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "energy"))
from energy_runs import make_run, small_shape  # noqa: E402

STEPS = 3
prices = st.floats(0, 1e4, allow_subnormal=False)


@st.composite
def tables(draw) -> CostTable:
    """A shipped table, or one with any prices."""
    if draw(st.booleans()):
        return draw(st.sampled_from(list(cost_tables().values())))
    inactive = draw(prices)
    figures = {"mac": draw(prices), "ac": draw(prices), "neuron_inactive": inactive,
               "neuron_active": inactive + draw(prices), "spike": draw(prices), "hop_ew": draw(prices),
               "hop_ns": draw(prices)}  # fmt: skip
    return CostTable("drawn", "drawn", 1, "drawn", "drawn", "drawn", figures)


@st.composite
def activities(draw, layers: int = 2) -> Activity:
    """Any counts with no more spikes than neuron slots."""
    activity = Activity.zeros(small_shape(layers, STEPS))
    activity.tokens = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.sampled_from([1, 50, 10**9]))
    for site, cells in activity.cells.items():
        cells += rng.integers(0, top + 1, cells.shape)
        activity.spikes[site] += rng.integers(0, cells + 1)
    for name in LAYER_COMPONENTS:
        activity.sops[name] += rng.integers(0, top + 1, activity.sops[name].shape)
    for name in ("embed", "head"):
        activity.macs[name] = int(rng.integers(0, top + 1))
    return activity


hops = st.builds(Hops, st.floats(0, 10), st.floats(0, 10))
shapes = st.builds(
    lambda heads, dim, layers, ffn, vocab, steps, width: ModelShape(
        heads * dim, layers, heads, ffn, vocab, 4096, steps, width or heads * dim
    ),
    st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(1, 40), st.integers(1, 60), st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 16)),
)  # fmt: skip


def close(left: float, right: float) -> bool:
    return left == pytest.approx(right, rel=1e-9, abs=1e-9)


@given(tables(), hops)
def test_no_activity_costs_nothing(costs: CostTable, per_spike: Hops) -> None:
    assert total(measured_lines(Activity.zeros(small_shape(3, STEPS)), costs, per_spike)) == 0


@given(activities(), tables(), hops)
def test_energy_is_never_negative(activity: Activity, costs: CostTable, per_spike: Hops) -> None:
    assert all(line.energy_pj >= 0 and line.count >= 0 for line in measured_lines(activity, costs, per_spike))


@given(
    activities(), tables(), hops, st.integers(0, 1), st.integers(0, STEPS - 1), st.integers(1, 10**6),
    st.one_of(
        st.tuples(st.just("sops"), st.sampled_from(LAYER_COMPONENTS)),
        st.tuples(st.just("cells"), st.sampled_from(LAYER_SITES)),
        st.tuples(st.just("spikes"), st.sampled_from(LAYER_SITES)),
        st.tuples(st.just("macs"), st.sampled_from(["embed", "head"])),
    ),
)  # fmt: skip
def test_more_of_any_count_never_costs_less(activity, costs, per_spike, layer, step, more, where) -> None:
    before = total(measured_lines(activity, costs, per_spike))
    table, name = where
    if table == "macs":
        activity.macs[name] += more
    else:
        place = getattr(activity, table)[name]
        if table == "spikes":  # a spike needs a neuron: as many more as there are silent slots
            more = min(more, int(activity.cells[name][layer, step] - place[layer, step]))
        place[layer, step] += more
    after = total(measured_lines(activity, costs, per_spike))
    assert after >= before or close(after, before)
    price = {"sops": costs.price("ac"), "cells": costs.price("neuron_inactive"), "macs": costs.price("mac")}
    if table in price:
        assert after - before == pytest.approx(more * price[table], rel=1e-6, abs=1e-6 * max(1.0, after))


@given(activities(), activities(), tables(), hops)
def test_tokens_add_up(first: Activity, second: Activity, costs: CostTable, per_spike: Hops) -> None:
    parts = total(measured_lines(first, costs, per_spike)) + total(measured_lines(second, costs, per_spike))
    first.add(second)
    assert close(total(measured_lines(first, costs, per_spike)), parts)


@given(activities(layers=3), tables(), hops)
def test_layers_and_components_add_up(activity: Activity, costs: CostTable, per_spike: Hops) -> None:
    lines = measured_lines(activity, costs, per_spike)
    for key in (lambda line: line.layer, lambda line: line.component, lambda line: (line.layer, line.event)):
        assert close(sum(group(lines, key).values()), total(lines))


@settings(deadline=None, max_examples=15)
@given(st.data(), tables(), hops)
def test_splitting_a_run_changes_nothing(data, costs: CostTable, per_spike: Hops) -> None:
    """Sequences in one run or in a run each, phase by phase or token by token: the same energy."""

    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3))
    texts = [data.draw(st.lists(st.integers(0, 39), min_size=n, max_size=n)) for n, _ in sizes]
    whole = parse_run(make_run(texts=texts, generated=tuple(g for _, g in sizes), drive=1.5), "whole")
    energy = total(measured_lines(whole.activity(), costs, per_spike))
    parts = [
        parse_run(make_run(texts=[text], generated=(new,), drive=1.5), "part")
        for text, (_, new) in zip(texts, sizes, strict=True)
    ]
    assert close(sum(total(measured_lines(run.activity(), costs, per_spike)) for run in parts), energy)
    assert close(sum(total(measured_lines(whole.phases[p], costs, per_spike)) for p in whole.phases), energy)
    assert close(float(token_energies(whole.shape, whole.per_token, costs, per_spike).sum()), energy)
    assert all(row.equal for row in compare_counts(whole) if row.must_equal)


@given(shapes, st.floats(0, 1), st.floats(0, 1), st.integers(0, 60), tables(), hops)
def test_estimates_are_linear_in_the_rate(shape, low, high, tokens, costs, per_spike) -> None:
    keys = keys_of_sequence(tokens)

    def energy(rate: float) -> float:
        return total(estimated_lines(shape, uniform_rates(shape, rate), tokens, keys, costs, per_spike))

    middle = energy((low + high) / 2)
    assert middle == pytest.approx((energy(low) + energy(high)) / 2, rel=1e-9, abs=1e-6)
    assert energy(min(low, high)) <= energy(max(low, high)) * (1 + 1e-12) + 1e-9
    if not tokens:
        assert middle == 0


@given(shapes, st.integers(0, 40), st.integers(0, 40))
def test_dense_counts_add_over_tokens(shape: ModelShape, first: int, second: int) -> None:
    """A sequence split anywhere executes the same MACs."""
    whole = opt_macs(shape, first + second, keys_of_sequence(first + second))
    left = opt_macs(shape, first, keys_of_sequence(first))
    right = opt_macs(shape, second, keys_of_sequence(second, first))
    assert whole == {name: left[name] + right[name] for name in whole}
    layer = layer_macs(shape, first, keys_of_sequence(first))
    assert all(left[name] == shape.num_hidden_layers * layer[name] for name in layer if name != "residual")


@given(shapes, st.integers(1, 60), tables(), hops, st.floats(1, 1e12))
def test_at_the_break_even_rate_both_cost_the_same(shape, tokens, costs, per_spike, teacher) -> None:
    keys = keys_of_sequence(tokens)
    rate = break_even_rate(shape, tokens, keys, costs, teacher, per_spike)
    silent = total(estimated_lines(shape, uniform_rates(shape, 0.0), tokens, keys, costs, per_spike))
    if rate is None:
        full = total(estimated_lines(shape, uniform_rates(shape, 1.0), tokens, keys, costs, per_spike))
        assert silent > teacher or full <= silent
    else:
        assert rate >= 0
        reached = total(estimated_lines(shape, uniform_rates(shape, rate), tokens, keys, costs, per_spike))
        assert reached == pytest.approx(teacher, rel=1e-6)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_run_is_refused_or_reported_but_never_crashes(data) -> None:
    """Any value anywhere in run.json replaced by anything: one line that begins with the file, or a report."""

    from energy.costs import load_costs, load_memory
    from energy.report import Options, report_run

    run = make_run(prompts=(2,), generated=(2,))
    place = run
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        place = inner
    place[key] = data.draw(junk)
    try:
        parsed = parse_run(run, "damaged.json")
    except InputError as error:
        assert str(error).startswith("damaged.json") and "\n" not in str(error)
        return
    options = Options(load_costs("loihi"), load_memory("dram"), parsed.shape, "teacher")
    assert report_run(parsed, options)["summary"][-1]["energy_pj"] >= 0
