"""What must hold of any activity: nothing costs nothing, more costs more, parts add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import PLUS, random_shape
from random_runs import make_run, small_shape

import energy
from energy.costs import COSTS, PLACEMENTS, CostTable, Placement
from energy.flops import dense_shape, keys_of_sequence, opt_macs
from energy.memory import (
    CONVENTIONS,
    activity_work,
    cheaper_bands,
    estimated_work,
    student_tally,
    twin_tally,
    uniform_curve,
)
from energy.memory import total as billed
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
from spikeopd.contracts.topology import layer_macs
from spikeopd.errors import InputError

STEPS = 3
prices = st.floats(0, 1e4, allow_subnormal=False)


@st.composite
def tables(draw) -> CostTable:
    """A shipped table, or one with any prices."""
    if draw(st.booleans()):
        return draw(st.sampled_from(list(COSTS.values())))
    inactive = draw(prices)
    figures = {name: draw(prices) for name in ("mac", "ac", "spike", "hop_ew", "hop_ns")}
    figures |= {"neuron_inactive": inactive, "neuron_active": inactive + draw(prices)}
    return CostTable("drawn", "drawn", 1, "drawn", "drawn", "drawn", figures)


@st.composite
def forms(draw) -> dict:
    """Any form of the block, as arguments of `random_shape`."""
    return {
        "write": draw(st.sampled_from(["spike", "current"])),
        "readout": draw(st.sampled_from(["rate", "residual"])),
        "distances": draw(st.integers(0, 4)),
        "width": draw(st.sampled_from([None, 6])),
    }


@st.composite
def activities(draw, layers: int = 2) -> Activity:
    """Any counts with no more spikes than neuron slots, of the paper's block or of the second form."""
    shape = random_shape(layers=layers, num_steps=STEPS, **PLUS) if draw(st.booleans()) else small_shape(layers, STEPS)
    activity = Activity.zeros(shape)
    activity.tokens = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.sampled_from([1, 50, 10**9]))
    for site, cells in activity.cells.items():
        cells += rng.integers(0, top + 1, cells.shape)
        activity.spikes[site] += rng.integers(0, cells + 1)
    for name in activity.sops:
        activity.sops[name] += rng.integers(0, top + 1, activity.sops[name].shape)
    for name in ("embed", "head"):
        activity.macs[name] = int(rng.integers(0, top + 1))
    return activity


hops = st.builds(Hops, st.floats(0, 10), st.floats(0, 10))
shapes = st.builds(
    lambda form, **sizes: random_shape(positions=4096, **(form | sizes)),
    forms(),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
    layers=st.integers(1, 4),
    ffn=st.integers(1, 40),
    vocab=st.integers(1, 60),
    num_steps=st.integers(1, 6),
    width=st.one_of(st.none(), st.integers(1, 16)),
)


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
    if name not in getattr(activity, table):  # a site or component that this form of the block does not have
        return
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
    if set(first.sops) != set(second.sops):
        return
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

    shape = random_shape(**data.draw(forms()))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3))
    texts = [data.draw(st.lists(st.integers(0, 39), min_size=n, max_size=n)) for n, _ in sizes]
    whole = parse_run(make_run(shape, texts=texts, generated=tuple(g for _, g in sizes), drive=1.5), "whole")
    energy = total(measured_lines(whole.activity(), costs, per_spike))
    parts = [
        parse_run(make_run(shape, texts=[text], generated=(new,), drive=1.5), "part")
        for text, (_, new) in zip(texts, sizes, strict=True)
    ]
    assert close(sum(total(measured_lines(run.activity(), costs, per_spike)) for run in parts), energy)
    assert close(sum(total(measured_lines(whole.phases[p], costs, per_spike)) for p in whole.phases), energy)
    assert close(float(token_energies(whole.shape, whole.per_token, costs, per_spike).sum()), energy)
    owed = [row for row in compare_counts(whole) if row.must_equal]
    assert {row.component for row in owed} >= set(shape.layer_components) - {"coincidence"}
    assert all(row.equal for row in owed)


@settings(deadline=None, max_examples=15)
@given(forms(), st.integers(0, 2**16), st.floats(0.5, 3), st.integers(1, 5), st.integers(0, 4), tables(), hops)
def test_estimate_from_a_runs_own_rates(form, seed, drive, prompt, new, costs: CostTable, per_spike: Hops) -> None:
    """Any form: the estimate differs from the count by the masked coincidences alone."""
    shape = random_shape(**form)
    run = parse_run(make_run(shape, prompts=(prompt,), generated=(new,), seed=seed, drive=drive), "x")
    report = energy.report(run, costs=costs, hops=per_spike)
    parts = {row["component"]: row for row in report.data["components"] if row["scope"] == "all"}
    assert set(parts) >= set(shape.layer_components) and ("residual" in parts) == (shape.residual_write == "spike")
    for name, row in parts.items():
        if name != "coincidence":
            assert close(row["energy_pj"], row["analytical_energy_pj"]), name
    assert report.data["teacher"]["model"] == dense_shape(shape).to_dict()


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


placements = st.sampled_from(list(PLACEMENTS.values()))
conventions = st.sampled_from(list(CONVENTIONS))


@given(placements, conventions, forms())
def test_with_memory_no_activity_costs_nothing(placement: Placement, convention: str, form: dict) -> None:
    shape = random_shape(**form)
    work = activity_work(shape, Activity.zeros(shape), 0)
    for tally in (student_tally(work, convention), twin_tally(work), twin_tally(work, convention)):
        assert billed(tally, placement) == 0


@settings(deadline=None, max_examples=25)
@given(st.data(), placements, conventions)
def test_with_memory_more_of_any_count_never_costs_less(data, placement: Placement, convention: str) -> None:
    """A spike more somewhere: its synapses, its row if it is the neuron's first of the token, itself."""
    shape = random_shape(**data.draw(forms()))
    run = parse_run(make_run(shape, prompts=(data.draw(st.integers(1, 4)),), generated=(2,), drive=1.5), "x")
    activity = run.activity()
    before = billed(student_tally(activity_work(shape, activity, run.keys()), convention), placement)
    component = data.draw(st.sampled_from(shape.layer_components))
    more = data.draw(st.integers(1, 1000))
    activity.sops[component][0, 0] += more
    if data.draw(st.booleans()) and component in activity.bytes:
        activity.bytes[component] += more * 4
    site = data.draw(st.sampled_from(shape.layer_sites))
    activity.spikes[site][0, 0] += min(more, int(activity.cells[site][0, 0] - activity.spikes[site][0, 0]))
    after = billed(student_tally(activity_work(shape, activity, run.keys()), convention), placement)
    assert after > before or component == "residual"  # a gain's bytes may be all that grew
    assert after >= before


@given(shapes, st.floats(0, 1), st.floats(0, 1), st.integers(0, 60), placements, conventions)
def test_with_memory_estimates_grow_with_the_rate(shape, low, high, tokens, placement, convention) -> None:
    keys = keys_of_sequence(tokens)
    less, more = (
        estimated_work(shape, uniform_rates(shape, rate), tokens, keys) for rate in sorted((low, high))
    )  # fmt: skip
    for tally_of in (lambda w: student_tally(w, convention), lambda w: twin_tally(w, convention), twin_tally):
        cost = billed(tally_of(less), placement)
        assert 0 <= cost <= billed(tally_of(more), placement) * (1 + 1e-12)
        assert (cost == 0) == (tokens == 0)


@settings(deadline=None, max_examples=20)
@given(shapes, st.integers(1, 60), placements, conventions, st.booleans())
def test_at_the_edges_of_the_bands_both_cost_the_same(shape, tokens, placement, convention, dense) -> None:
    keys = keys_of_sequence(tokens)
    student = uniform_curve(shape, tokens, keys, placement, lambda w: student_tally(w, convention))
    rival = uniform_curve(shape, tokens, keys, placement, lambda w: twin_tally(w, None if dense else convention))
    for low, high in cheaper_bands(student, rival):
        assert student((low + high) / 2) <= rival((low + high) / 2) * (1 + 1e-9)
        for edge in {low, high} - {0.0, 1.0}:
            assert student(edge) == pytest.approx(rival(edge), rel=1e-6)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_run_is_refused_or_reported_but_never_crashes(data) -> None:
    """Any value anywhere in run.json replaced by anything: one line that begins with the file, or a report."""

    run = make_run(random_shape(**data.draw(st.sampled_from([{}, PLUS]))), prompts=(2,), generated=(2,))
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
    assert energy.report(parsed, costs="loihi", memory="dram").total_pj >= 0
