"""The resource map: a placement counted by hand, limits that bind, rules that all run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import INHIBITING, PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle
from export.loihi.map import resource_map
from export.loihi.placement import SOURCES, Limits, cache_bytes, groups_of, place
from export.loihi.rules import RULES, Design, check_all, residual_reach

SHAPE = random_shape(heads=2, head_dim=8, layers=1, ffn=24, positions=32)


def test_a_placement_by_hand():
    cores = {core.group: core for core in place(SHAPE, 32)}
    assert len(cores) == 11  # embed and ten sites, each small enough for one core
    q, a, r, x = (cores[f"layer0.{site}"] for site in "qarx")
    assert (q.neurons, q.synapses, q.synapse_bits, q.in_axons) == (16, 256, 2048, 16)
    assert q.used_bytes == 256 + 16 * 12  # one byte per weight; membrane, threshold and bias of 16 neurons
    assert (a.neurons, a.synapses, a.synapse_bits) == (64, 512, 2048)  # 2 heads x 32 keys of 8 bits x 4 steps
    assert (r.neurons, r.synapses, r.synapse_bits) == (16, 512, 2048)
    assert x.out_axons == 16 * 2  # to f's core and to its own h
    assert cores["embed"].out_axons == 16 * 4  # q, k, v and x
    assert cores["layer0.h"].out_axons == 0


def test_weights_of_four_bits_take_half_the_room_and_break_no_rule(tmp_path):
    shape = random_shape(heads=2, head_dim=64, layers=1, ffn=2048)
    models = {precision: random_model(shape, precision=precision) for precision in ("int8", "int4")}
    write_bundle(models["int4"], tmp_path / "b", BundleOptions(target="lava"))
    wide, narrow = resource_map(models["int8"], 16), resource_map(tmp_path / "b", 16)
    assert narrow.violations == []
    for site, row in wide.report["sites"].items():
        half = 2 if site in "qkvofy" else 1  # what a projection drives; the rest holds no weights
        assert row["synapse_bits"] == half * narrow.report["sites"][site]["synapse_bits"], site
    assert narrow.report["sites"]["f"]["cores"] < wide.report["sites"]["f"]["cores"]


def test_keys_and_values_take_one_bit_per_channel_and_step():
    assert cache_bytes(SHAPE, 32) == 2 * 32 * 16 * 4 // 8
    # The OPT-125M shape at its full context: 12 layers x 2 x 2048 x 768 x 4 bits = 18 MiB.
    big = random_shape(heads=12, head_dim=64, layers=12, ffn=3072, positions=2048)
    assert cache_bytes(big, 2048) == 18 * 2**20


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8), st.sampled_from([8, 16, 64]), st.integers(1, 3), st.integers(1, 3000), st.integers(1, 1024),
    st.integers(1000, 200_000),
)  # fmt: skip
def test_every_neuron_and_synapse_is_placed_once(heads, head_dim, layers, ffn, context, memory):
    shape = random_shape(heads=heads, head_dim=head_dim, layers=layers, ffn=ffn, positions=1024)
    limits = Limits(core_bytes=memory)
    cores = place(shape, context, limits)
    for group in groups_of(shape, context):
        mine = [core for core in cores if core.group == group.name]
        assert sum(core.neurons for core in mine) == group.neurons
        assert sum(core.synapses for core in mine) == group.neurons * group.fan_in
        # A core is overfull only when a single neuron does not fit.
        assert all(core.used_bytes <= memory or core.neurons == 1 for core in mine)
        assert max(core.neurons for core in mine) - min(core.neurons for core in mine) <= 1
    assert [core.number for core in cores] == list(range(len(cores)))
    assert all(core.chip == core.number // limits.chip_cores for core in cores)


def test_less_memory_never_needs_fewer_cores():
    shape = random_shape(heads=4, head_dim=16, layers=2, ffn=256)
    counts = [len(place(shape, 32, Limits(core_bytes=size))) for size in (200_000, 20_000, 5_000, 1_000)]
    assert counts == sorted(counts) and counts[-1] > counts[0]


@pytest.mark.parametrize(
    ("limits", "rule"),
    [
        (Limits(core_bytes=20), "core_memory"),
        (Limits(core_in_axons=8), "input_axons"),
        (Limits(core_out_axons=2), "output_axons"),
        (Limits(payload_bits=4), "residual_fits_payload"),
    ],
)
def test_a_limit_that_binds_is_reported_with_its_source(limits, rule):
    model = random_model(SHAPE)
    found = resource_map(model, 32, limits)
    rules = found.report["rules"]
    assert rules[rule] and found.violations
    assert rules[rule][0]["source"] in SOURCES.values()
    assert set(rules) == {rule.__name__ for rule in RULES}  # the others ran all the same


def test_all_is_well_by_default():
    for form in ({}, PLUS, INHIBITING):
        shape = random_shape(heads=2, head_dim=8, layers=1, ffn=24, positions=32, **form)
        found = resource_map(random_model(shape), 32)
        assert found.violations == []
        found.check()


def test_the_second_form_by_hand():
    shape = random_shape(heads=2, head_dim=8, layers=2, ffn=24, positions=32, **PLUS)
    cores = {core.group: core for core in place(shape, 32)}
    assert not {"layer0.o", "layer0.y"} & set(cores) and len(cores) == 1 + 2 * 8
    x, h, r = (cores[f"layer0.{site}"] for site in "xhr")
    assert (x.synapses, x.synapse_bits) == (16 * 16, 16 * 16 * 8)  # W_o enters x, W_2 enters h
    assert (h.synapses, h.synapse_bits) == (16 * 24, 16 * 24 * 8)
    assert x.used_bytes == 256 + 16 * 20  # words: membrane, threshold, bias, stream, bias and shift of the write
    assert (x.in_axons, h.in_axons) == (16 + 16, 24 + 16)  # spikes, and the stream one to one
    assert (r.out_axons, x.out_axons, h.out_axons) == (16, 16 * 2, 16 * 4)


def test_the_worst_residual_stream_by_hand():
    """Two channels: an embedding of 100 * 2 + 7, then every input of a write spikes, shifted, with its bias."""
    shape = random_shape(heads=1, head_dim=2, layers=1, ffn=3, positions=2, vocab=2, **PLUS)
    model = random_model(shape)
    embedding = dataclasses.replace(
        model.embedding,
        table=np.array([[100, -3], [1, 2]], np.int8),
        row_scale=np.array([2, 1], np.int32),
        channel_gain=np.array([4, -4], np.int32),
        shift=2,
        position=np.array([[7, 0], [0, -9]], np.int16),
    )
    layer = dataclasses.replace(
        model.layers[0],
        w_o=np.array([[3, -5], [4, -6]], np.int8),
        shift_o=np.array([1, 0], np.uint8),
        bias_o=np.array([10, 20], np.int32),
        w_2=np.array([[1, 1], [1, 1], [-9, 1]], np.int8),
        shift_y=np.array([0, 16], np.uint8),
        bias_y=np.array([0, 0], np.int32),
    )
    model = dataclasses.replace(model, embedding=embedding, layers=(layer,))
    reach = {site: values.tolist() for _, site, values in residual_reach(model)}
    assert reach["embed"] == [207, 209]  # the largest entry of the table stands for every channel
    assert reach["x"] == [207 + 24, 209 + 20]  # (3 + 4) << 1 + 10 up; channel 1: up 0 + 20, down 11 - 20
    assert reach["h"] == [231 + 9, 229 + (3 << 16)]
    loud = dataclasses.replace(layer.sites["h"], bias=np.full(2, 2**23 - 5, np.int32))
    broken = dataclasses.replace(model, layers=(dataclasses.replace(layer, sites={**layer.sites, "h": loud}),))
    found = check_all(Design(broken, place(shape, 2), Limits()))["residual_cannot_saturate"]
    assert found[0].where == "layer 0 site h" and found[0].worst == 229 + (3 << 16) + 2**23 - 5


def test_thresholds_and_sums_beyond_the_membrane_are_found():
    model = random_model(SHAPE)
    layer = model.layers[0]
    huge = dataclasses.replace(layer.sites["o"], threshold=np.full(16, 2**23, np.int32))
    loud = dataclasses.replace(layer.sites["q"], bias=np.full(16, 2**23 - 1, np.int32))
    broken = dataclasses.replace(
        model, layers=(dataclasses.replace(layer, sites={**layer.sites, "o": huge, "q": loud}),)
    )
    found = check_all(Design(broken, place(SHAPE, 32), Limits()))
    assert found["membranes_hold_thresholds"][0].where == "layer 0 site o"
    assert found["sums_cannot_saturate"][0].where == "layer 0 weight w_q"


def test_every_limit_has_a_source():
    assert set(SOURCES) == {field.name for field in dataclasses.fields(Limits)}
