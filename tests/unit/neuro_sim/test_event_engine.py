"""The event engine at its edges: hand-computed traces, overflow, saturation, limits, threads, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_models import random_model, random_shape

from neuro_sim.dense import DenseDecoder
from neuro_sim.engine import EventDecoder, default_threads
from neuro_sim.plan import Cache, event_layout
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


def test_context_over_several_words() -> None:
    """Positions 63, 64, 65 and 128: the packed cache crosses its word boundaries."""
    shape = random_shape(heads=1, head_dim=8, layers=1, ffn=8, vocab=12, positions=140, num_steps=2)
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
        ("a", {"bias": np.ones(2, np.int32)}, "layer 1 site a: the attention map has no bias"),
    ):
        sites = dict(model.layers[1].sites)
        sites[site] = replace(sites[site], **wrong)
        broken = replace(model, layers=(model.layers[0], replace(model.layers[1], sites=sites)))
        with pytest.raises(InputError, match=text):
            EventDecoder(broken, threads=1)
    with pytest.raises(InputError, match="at least one layer"):
        EventDecoder(replace(model, layers=()), threads=1)


def test_layout_moves_weights_once_and_keeps_their_values() -> None:
    model, same = (
        random_model(random_shape(heads=2, head_dim=9, ffn=70, vocab=50, width=11), seed=8) for _ in range(2)
    )
    event_layout(model)
    q = model.layers[0].w_q
    assert q.strides == (3 * 64, 1) and q.ctypes.data % 64 == 0
    assert model.layers[0].w_v.ctypes.data == q.ctypes.data + 2 * 64
    assert model.embedding.table.strides == (1, 64)
    for before, after in zip(same.layers, model.layers, strict=True):
        for name in ("w_q", "w_k", "w_v", "w_o", "w_1", "w_2"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
    assert np.array_equal(model.embedding.table, same.embedding.table)
    assert np.array_equal(model.head.project_out, same.head.project_out)
    table = model.embedding.table
    event_layout(model)
    assert model.layers[0].w_q is q and model.embedding.table is table


def test_cache_is_one_bit_per_element_and_step() -> None:
    shape = random_shape(heads=4, head_dim=64, layers=2, positions=128)
    decoder = EventDecoder(random_model(shape), threads=1)
    cache = Cache.empty(decoder.engine.plan)
    bits = 2 * 128 * shape.hidden_size * shape.num_steps * shape.num_hidden_layers
    assert cache.keys.nbytes + cache.values.nbytes == bits // 8


def test_small_models_default_to_one_thread() -> None:
    assert default_threads(random_model()) == 1
