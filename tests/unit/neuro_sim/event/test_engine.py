"""The event engine at its edges: hand-computed traces, overflow, saturation, limits, threads, memory."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

from neuro_sim.dense import DenseDecoder
from neuro_sim.event.engine import EventDecoder, default_threads
from neuro_sim.event.plan import Cache, event_layout, place_weights
from spikeopd.contracts import (
    MEMBRANE_MAX,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Site,
    SpikeModel,
    SpikeTrace,
    first_difference,
)
from spikeopd.contracts.bundle import model_arrays
from spikeopd.errors import InputError


def assert_equal(model: SpikeModel, tokens: list[int], threads: int = 1, block: int = 8) -> tuple[SpikeTrace, list]:
    theirs, mine, blocked = SpikeTrace(), SpikeTrace(), SpikeTrace()
    oracle, engine = DenseDecoder(model, theirs), EventDecoder(model, mine, threads=threads)
    prefilled = EventDecoder(model, blocked, threads=threads, block=block)
    counts = []
    for token in tokens:
        (expected, activity), (got, counted) = oracle.step(token), engine.step(token)
        assert np.array_equal(got, expected)
        assert counted.to_dict() == activity.to_dict()
        counts.append(counted)
    last, activities = prefilled.prefill(tokens)
    assert np.array_equal(last, expected)
    assert [a.to_dict() for a in activities] == [a.to_dict() for a in counts]
    assert first_difference(mine, theirs) is None and first_difference(blocked, theirs) is None
    engine.close()
    prefilled.close()
    return mine, counts


def constant(n: int, threshold: int, bias: int = 0, shift: int = 0) -> Site:
    return Site(np.full(n, threshold, np.int32), np.full(n, bias, np.int32), shift)


def one_neuron_model(**changes: Site) -> SpikeModel:
    """d = 1, one head, T_s = 5: every current can be followed by hand. The embedding current is 10 at every step."""
    shape = ModelShape(1, 1, 1, 1, 2, 4, 5, 1)
    silent = constant(1, MEMBRANE_MAX + 1)
    sites = dict.fromkeys(("q", "k", "v", "a", "r", "o", "x", "f", "y", "h"), silent) | changes
    one = np.ones((1, 1), np.int8)
    layer = Layer(one, one, one, one, one, one, sites, gain_o=np.zeros(1, np.int32), gain_y=np.zeros(1, np.int32))
    embedding = Embedding(
        np.array([[10], [0]], np.int8), np.ones(2, np.int32), np.ones(1, np.int32), 0, np.zeros((4, 1), np.int16)
    )
    head = Head(np.ones(2), np.zeros(2), 1e-5, gamma=np.ones(1, np.int16))
    return SpikeModel(shape, "int8", 2048, embedding, constant(1, 15), (layer,), head)  # alpha = 0.5


def test_hand_computed_spikes() -> None:
    """alpha 0.5, current 10, threshold 15. u: 10, 15 fire, 7+10-15=2, 1+10=11, 5+10=15 fire (halves truncated)."""
    trace, counts = assert_equal(one_neuron_model(h=constant(1, 10)), [0])
    assert trace.sites[-1, "embed"][0][:, 0].tolist() == [False, True, False, False, True]
    # S_h sees the same current with threshold 10: 10 fire, 5+10-10=5, 2+10=12 fire, 6+10-10=6, 3+10=13 fire
    assert trace.sites[0, "h"][0][:, 0].tolist() == [True, False, True, False, True]
    assert counts[0].spikes["embed"].tolist() == [[0, 1, 0, 0, 1]]
    assert counts[0].sops["qkv"].tolist() == [[0, 3, 0, 0, 3]]
    assert counts[0].bytes["qkv"] == 3  # one active row in each of three 1 x 1 matrices


def test_fires_exactly_at_the_threshold() -> None:
    trace, _ = assert_equal(one_neuron_model(x=constant(1, 10), h=constant(1, 11)), [0])
    assert trace.sites[0, "x"][0][0, 0] and not trace.sites[0, "h"][0][0, 0]


def test_hand_computed_distance_bias() -> None:
    """No query ever spikes, so only the bias can fire a pair. alpha 0.5, threshold 4; biases by distance 4, 2, 3."""
    bias = np.array([[4, 2, 3]], np.int32)
    model = one_neuron_model(a=Site(np.array([4], np.int32), bias, 0), v=constant(1, 1, bias=5), r=constant(1, 1))
    model = replace(model, shape=replace(model.shape, distances=3))
    trace, counts = assert_equal(model, [1, 1, 1, 1])
    # 4 fire; 2+4-4 = 2; 1+4 = 5 fire; 2+4-4 = 2; 1+4 = 5 fire    2; 3; 3; ...    3; 1+3 = 4 fire; 2+3-4 = 1; 3; 4 fire
    near, never, far = [True, False, True, False, True], [False] * 5, [False, True, False, False, True]
    last = trace.sites[0, "a"][3]  # keys 0, 1, 2, 3 at distances 3, 2, 1, 0
    assert last.T.tolist() == [far, far, never, near]
    assert counts[3].additions["coincidence"].sum() == 0 and counts[3].additions["av"].sum() == 3 + 2 + 2


def test_hand_computed_current_write_and_readout() -> None:
    """Embedding 10; R fires always, its weight 1 is shifted by 3: h = 10 + 8 - 2 = 16, then 16 + (1 << 1) + 5 = 23."""
    always = constant(1, 1, bias=MEMBRANE_MAX)
    model = one_neuron_model(r=always, x=constant(1, 16), f=always, h=constant(1, 24))
    sites = {name: site for name, site in model.layers[0].sites.items() if name not in "oy"}
    one = np.ones(1, np.uint8)
    layer = replace(
        model.layers[0], sites=sites, gain_o=None, gain_y=None, shift_o=3 * one, shift_y=one,
        bias_o=np.array([-2], np.int32), bias_y=np.array([5], np.int32),
    )  # fmt: skip
    shape = replace(model.shape, residual_write="current", readout="residual")
    # LayerNorm of a single channel is its bias: y = 7, and the two rows of the table give 70 and 0.
    head = Head(np.ones(2), np.zeros(2), 1e-5, out_scale=np.ones(1), out_bias=np.full(1, 7.0))
    model = replace(model, shape=shape, layers=(layer,), head=head)
    trace, counts = assert_equal(model, [0])
    assert (0, "o") not in trace.sites and "residual" not in counts[0].sops
    assert trace.sites[0, "x"][0][0, 0]  # exactly at its threshold of 16
    assert trace.sites[0, "h"][0][:, 0].tolist() == [False, True, False, True, False]  # 23, 34, 16, 31, 14
    decoder = EventDecoder(model, threads=1)
    assert decoder.step(0)[0].tolist() == [70.0, 0.0]
    assert decoder.engine._buffers(1, False).counts.tolist() == [[5 * 23]]
    assert counts[0].macs == {"embed": 0, "head": 2, "head_active": 2}


@pytest.mark.parametrize("width", [None, 12])
def test_readout_sums_beyond_53_bits(width: int | None) -> None:
    """Squares of the residual stream that no float64 holds: divided as exactly as Python divides them."""
    model = random_model(random_shape(heads=8, head_dim=25, num_steps=3, **PLUS, width=width), seed=9)
    big = np.linspace(-(2**23), 2**23 - 1, 200).astype(np.int32)
    assert int(((3 * big.astype(np.int64)) ** 2).sum()) > 2**54
    layer = replace(model.layers[1], bias_y=big)
    assert_equal(replace(model, layers=(model.layers[0], layer)), list(range(20)))


@pytest.mark.parametrize("extreme", [-128, 127])
def test_sums_of_many_extreme_weights_do_not_overflow(extreme: int) -> None:
    """700 inputs that all spike, all weights at the int8 limit: far outside int16, in several segments."""
    shape = random_shape(heads=2, head_dim=20, layers=1, ffn=700, vocab=10, positions=4)
    model = random_model(shape, seed=1)
    full = np.full_like(model.layers[0].w_2, extreme)
    sites = dict(model.layers[0].sites)
    sites["f"] = constant(700, 1, bias=1 << 20)  # always fires
    sites["y"] = constant(40, 700 * 128 * 64 // 2 if extreme > 0 else -(700 * 128 * 64), 0, 6)
    layer = replace(model.layers[0], w_2=full, sites=sites)
    trace, counts = assert_equal(replace(model, layers=(layer,)), [1, 2, 3])
    assert counts[0].spikes["f"].sum() == 700 * 4 and counts[0].spikes["y"].sum() > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_saturations_are_counted(threads: int) -> None:
    shape = random_shape(heads=2, head_dim=20, layers=2, ffn=100, vocab=10, positions=8)
    model = random_model(shape, seed=2)
    layers = []
    for layer in model.layers:
        sites = dict(layer.sites)
        for name in ("q", "f", "y"):  # a shift that carries ordinary sums over the 24-bit limit
            sites[name] = replace(sites[name], shift=14)
        sites["a"] = replace(sites["a"], shift=22)
        sites["h"] = replace(sites["h"], bias=np.full(40, 3 << 22, np.int32))
        layers.append(replace(layer, sites=sites))
    _, counts = assert_equal(replace(model, layers=tuple(layers)), [1, 2, 3, 4, 5], threads)
    total = {site: sum(int(c.saturations[site].sum()) for c in counts) for site in ("q", "k", "a", "f", "y", "h")}
    assert total["k"] == 0 and all(total[site] > 0 for site in ("q", "a", "f", "y", "h"))


def test_thresholds_beyond_reach_and_below_zero() -> None:
    model = random_model(seed=3)
    sites = dict(model.layers[0].sites)
    sites["q"] = replace(sites["q"], threshold=np.full(16, 2**31 - 1, np.int32))
    sites["k"] = replace(sites["k"], threshold=np.full(16, -(2**27), np.int32))
    sites["a"] = replace(sites["a"], threshold=np.array([-3, 2**30], np.int32))
    model = replace(model, layers=(replace(model.layers[0], sites=sites), model.layers[1]))
    _, counts = assert_equal(model, [1, 2, 3])
    assert counts[-1].spikes["q"][0].sum() == 0
    assert counts[-1].spikes["k"][0].sum() == 16 * 4 and counts[-1].saturations["k"][0].sum() > 0
    assert counts[-1].spikes["a"][0].sum() >= 3 * 4  # the head with a negative threshold attends to every key


@pytest.mark.parametrize("distances", [0, 1, 16, 17, 100, 200])
def test_context_over_several_words(distances: int) -> None:
    """Positions 63, 64, 65 and 128: the packed cache crosses its word boundaries, the distance bias its vectors."""
    shape = random_shape(
        heads=1, head_dim=8, layers=1, ffn=8, vocab=12, positions=140, num_steps=2, distances=distances
    )
    assert_equal(random_model(shape, seed=4, drive=1.5), [i % 12 for i in range(140)], threads=2, block=50)


def test_head_sums_beyond_32_bits() -> None:
    model = random_model(random_shape(heads=8, head_dim=64, layers=1, ffn=8, vocab=20, num_steps=8), seed=5, drive=50)
    head = replace(model.head, gamma=np.full(512, 32767, np.int16))
    embedding = replace(model.embedding, table=np.full((20, 512), 127, np.int8))
    assert_equal(replace(model, head=head, embedding=embedding), [1, 2])


def test_reset_forgets() -> None:
    model = random_model(seed=6)
    decoder = EventDecoder(model, threads=1)
    first = [decoder.step(token)[0] for token in (1, 2, 3)]
    decoder.reset()
    assert decoder.position == 0
    for token in (9, 8, 7, 6):
        decoder.step(token)
    decoder.reset()
    assert np.array_equal([decoder.step(token)[0] for token in (1, 2, 3)], first)


def test_same_result_on_any_number_of_threads() -> None:
    model = random_model(random_shape(heads=3, head_dim=30, ffn=130), seed=7)
    results = []
    for threads in (1, 2, 3, 5):
        decoder = EventDecoder(model, threads=threads)
        logits, activities = decoder.prefill([1, 2, 3, 4, 5], last_only=False)
        results.append((logits.tobytes(), [a.to_dict() for a in activities]))
        decoder.close()
    assert all(result == results[0] for result in results)


def test_context_limit_and_vocabulary() -> None:
    decoder = EventDecoder(random_model(random_shape(positions=3)), threads=1)
    with pytest.raises(InputError, match="token 40 is outside the vocabulary of 40"):
        decoder.step(40)
    decoder.prefill([1, 2, 3])
    with pytest.raises(InputError, match="the context is full: 3 tokens is this model's limit"):
        decoder.step(1)
    decoder.reset()
    with pytest.raises(InputError, match="the context is full: 3 tokens"):
        decoder.prefill([1, 2, 3, 4])
    assert decoder.position == 0
    with pytest.raises(InputError, match="prefill needs at least one token"):
        decoder.prefill([])


def test_refuses_what_it_cannot_compute_exactly() -> None:
    model = random_model()
    with pytest.raises(InputError, match="integer models only; use --backend dense"):
        EventDecoder(replace(model, precision="float32"), threads=1)
    with pytest.raises(InputError, match="1 to 32 steps per token, this model has 33"):
        EventDecoder(random_model(random_shape(num_steps=33)), threads=1)
    for site, wrong, text in (
        ("q", {"shift": 25}, "layer 1 site q: currents up to"),
        ("y", {"bias": np.full(16, -(2**30), np.int32)}, "layer 1 site y: .* biases up to 1073741824"),
        ("x", {"threshold": np.full(16, -(2**30), np.int32)}, "layer 1 site x: .* thresholds down to -1073741824"),
        ("a", {"bias": np.full(2, 2**30, np.int32)}, "layer 1 site a: .* biases up to 1073741824"),
    ):
        sites = dict(model.layers[1].sites)
        sites[site] = replace(sites[site], **wrong)
        broken = replace(model, layers=(model.layers[0], replace(model.layers[1], sites=sites)))
        with pytest.raises(InputError, match=text):
            EventDecoder(broken, threads=1)
    plus = random_model(random_shape(**PLUS))
    loud = replace(plus.layers[1], w_2=np.full_like(plus.layers[1].w_2, -128), shift_y=np.full(16, 18, np.uint8))
    with pytest.raises(InputError, match="layer 1 site h: currents up to 80[0-9]{7}, .*32-bit sums"):
        EventDecoder(replace(plus, layers=(plus.layers[0], loud)), threads=1)
    with pytest.raises(InputError, match="at least one layer"):
        EventDecoder(replace(model, layers=()), threads=1)


def test_layout_keeps_values_and_leaves_the_given_model_alone() -> None:
    model = random_model(random_shape(heads=2, head_dim=9, ffn=70, vocab=50, width=11), seed=8)
    q, table = model.layers[0].w_q, model.embedding.table
    placed = event_layout(model)
    assert model.layers[0].w_q is q and q.strides == (18, 1)
    assert model.embedding.table is table and table.strides == (11, 1)
    q = placed.layers[0].w_q
    assert q.strides == (3 * 64, 1) and q.ctypes.data % 64 == 0
    assert placed.layers[0].w_v.ctypes.data == q.ctypes.data + 2 * 64
    assert placed.embedding.table.strides == (1, 64)
    for old, new in zip(model.layers, placed.layers, strict=True):
        for name in ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2"):
            assert np.array_equal(getattr(old, name), getattr(new, name))
    assert np.array_equal(placed.embedding.table, model.embedding.table)
    assert np.array_equal(placed.embedding.project_in, model.embedding.project_in)
    assert np.array_equal(placed.head.project_out, model.head.project_out)
    again = event_layout(placed)  # what is in place is shared
    assert again.layers[0].w_q is q and again.embedding.table is placed.embedding.table


def test_weights_that_are_handed_over_are_never_in_memory_twice() -> None:
    model = random_model(random_shape(heads=2, head_dim=9, ffn=70, vocab=50, width=11), seed=8)
    arrays = model_arrays(model)
    given = {name: weakref.ref(arrays[name]) for name in ("layers.0.w_q", "layers.1.w_2", "embedding.table")}
    del model
    place_weights(random_shape(heads=2, head_dim=9, ffn=70, vocab=50, width=11), "int8", arrays)
    assert all(reference() is None for reference in given.values())


def test_cache_is_one_bit_per_element_and_step() -> None:
    shape = random_shape(heads=4, head_dim=64, layers=2, positions=128)
    decoder = EventDecoder(random_model(shape), threads=1)
    cache = Cache.empty(decoder.engine.plan)
    bits = 2 * 128 * shape.hidden_size * shape.num_steps * shape.num_hidden_layers
    assert cache.keys.nbytes + cache.values.nbytes == bits // 8


def test_small_models_default_to_one_thread() -> None:
    assert default_threads(random_model()) == 1


def test_a_wide_head_does_not_wrap() -> None:
    """Beyond 2064 channels the second product of a head can leave 32 bits; no backend may wrap there."""
    shape = random_shape(heads=36, head_dim=64, layers=1, ffn=7, vocab=3, positions=2, readout="residual")
    model = random_model(shape, seed=1)
    table = np.full_like(model.embedding.table, 127)
    head = replace(model.head, out_bias=np.full(shape.hidden_size, 1e9))  # every y at its limit
    model = replace(model, embedding=replace(model.embedding, table=table), head=head)
    logits, _ = DenseDecoder(model).step(1)
    assert np.array_equal(logits, head.row_scale * float(shape.hidden_size * 8191 * 127) + head.bias)
    assert np.array_equal(EventDecoder(model).step(1)[0], logits)


def test_inhibition_beyond_32_bits_is_refused():
    """Positions times (1024 + 70,000,000): a stranger's bundle, for exported ones stop at 1024."""
    model = random_model(random_shape(**INHIBITING))
    layer = replace(model.layers[1], inhibition=np.full(model.shape.hidden_size, -70_000_000, np.int32))
    with pytest.raises(InputError, match="layer 1 site r: currents up to 2240032768, .*32-bit sums"):
        EventDecoder(replace(model, layers=(model.layers[0], layer)))
