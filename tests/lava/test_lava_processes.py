"""Each Lava process alone against the oracle: models driven by Hypothesis, and real runs between stock processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from lava_harness import Dense, build_model, drive, run_in_lava  # noqa: E402
from random_models import random_model, random_shape  # noqa: E402

from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.fixed_point import run_site  # noqa: E402
from neuro_sim.lava.precision import float_twin  # noqa: E402
from neuro_sim.lava.processes.attention import SpikingAttention  # noqa: E402
from neuro_sim.lava.processes.block import SpikingBlock  # noqa: E402
from neuro_sim.lava.processes.host import EmbeddingInjector, RateReadout, ResidualReadout  # noqa: E402
from neuro_sim.lava.processes.neuron import SubtractiveLIF  # noqa: E402
from neuro_sim.lava.processes.synapse import CurrentWrite, OneToOneGain, Projection, Residual  # noqa: E402
from neuro_sim.lava.report import ReportLayout  # noqa: E402
from spikeopd.contracts import MEMBRANE_MAX, MEMBRANE_MIN, Activity, Site  # noqa: E402

FIXED, FLOAT = "fixed_pt", "floating_pt"
examples = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


def oracle(currents: np.ndarray, site: Site, decay: float, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """run_site token by token: spikes [steps, n], saturations [steps]."""
    tokens = currents.reshape(-1, num_steps, currents.shape[1])
    results = [run_site(token, site, decay) for token in tokens]
    return np.concatenate([spikes for spikes, _ in results]), np.concatenate([hits for _, hits in results])


def random_site(rng: np.random.Generator, n: int, spread: int, shift: int) -> Site:
    return Site(rng.integers(1, spread, n).astype(np.int32), rng.integers(-spread, spread, n).astype(np.int32), shift)


def random_spikes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.random(shape) < rng.uniform(0, 1)


# --- SubtractiveLIF ---


@examples
@given(
    seed=seeds,
    num_steps=st.integers(1, 6),
    tokens=st.integers(1, 3),
    bits=st.integers(2, 23),
    shift=st.integers(0, 10),
    decay=st.integers(0, 4096),
)
def test_lif_fixed_equals_the_oracle(seed, num_steps, tokens, bits, shift, decay) -> None:
    rng = np.random.default_rng(seed)
    site = random_site(rng, 6, 1 << bits, shift)
    # Half of the currents aim at the threshold exactly, the others go up to and beyond saturation.
    steps = num_steps * tokens
    aimed = np.broadcast_to((site.threshold.astype(np.int64) - site.bias) >> shift, (steps, 6))
    currents = np.where(rng.random((steps, 6)) < 0.5, aimed, rng.integers(-(1 << bits), 1 << bits, (steps, 6)))
    lif = SubtractiveLIF(threshold=site.threshold, bias=site.bias, shift=shift, decay=decay, num_steps=num_steps)
    _, sent = drive(lif, FIXED, {"a_in": currents}, steps)
    spikes, saturations = oracle(currents, site, decay, num_steps)
    assert np.array_equal(sent["s_out"], spikes)
    reported = [ReportLayout([6], num_steps).unpack(message)[0] for message in sent["report"]]
    assert np.array_equal(np.concatenate([bits for bits, _ in reported]), spikes)
    assert np.array_equal(np.concatenate([hits for _, hits in reported]), saturations)


@examples
@given(seed=seeds, num_steps=st.integers(1, 6), decay=st.floats(0, 1))
def test_lif_float_equals_the_oracle(seed, num_steps, decay) -> None:
    rng = np.random.default_rng(seed)
    site = Site(rng.uniform(0.1, 2, 5).astype(np.float32), rng.normal(0, 1, 5).astype(np.float32), 0)
    currents = rng.normal(0, 2, (2 * num_steps, 5)).astype(np.float32)
    lif = SubtractiveLIF(threshold=site.threshold, bias=site.bias, decay=decay, num_steps=num_steps)
    _, sent = drive(lif, FLOAT, {"a_in": currents}, 2 * num_steps)
    assert np.array_equal(sent["s_out"], oracle(currents, site, decay, num_steps)[0])


def test_lif_fires_when_the_membrane_is_exactly_the_threshold() -> None:
    """By hand: 10 << 6 is exactly V = 640 and one below V = 641. The reset acts one step later and is not decayed."""
    lif = SubtractiveLIF(threshold=np.array([640, 641]), decay=4096, shift=6, num_steps=0)
    model, sent = drive(lif, FIXED, {"a_in": np.array([[10, 10], [0, 0], [10, 0]])}, 3)
    #                                      v: 640, 640        0, 640       640, 640
    assert sent["s_out"].tolist() == [[True, False], [False, False], [True, False]]
    assert model.v.tolist() == [640, 640]


def test_lif_decay_truncates_the_magnitude() -> None:
    """By hand: |-5| * 2048 >> 12 = 2, so -5 becomes -2 and not -3."""
    lif = SubtractiveLIF(threshold=np.array([100]), decay=2048, num_steps=0)
    model, _ = drive(lif, FIXED, {"a_in": np.array([[-5], [0]])}, 2)
    assert model.v.tolist() == [-2]


@pytest.mark.parametrize("current, limit", [(1 << 23, MEMBRANE_MAX), (-(1 << 24), MEMBRANE_MIN)])
def test_lif_saturates_at_24_bit_and_says_so(current: int, limit: int) -> None:
    lif = SubtractiveLIF(threshold=np.array([MEMBRANE_MAX, 5]), decay=4096, num_steps=1)
    model, sent = drive(lif, FIXED, {"a_in": np.array([[current, 1]])}, 1)
    assert model.v.tolist() == [limit, 1]
    ((spikes, saturations),) = ReportLayout([2], 1).unpack(sent["report"][0])
    assert saturations.tolist() == [1]
    assert spikes.tolist() == [[current > 0, False]]


# --- Projection, OneToOneGain, Residual ---


@examples
@given(seed=seeds, inputs=st.integers(1, 60), outputs=st.integers(1, 20))
def test_projection_sums_rows_exactly_and_without_delay(seed, inputs, outputs) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(-128, 128, (inputs, outputs)).astype(np.int8)
    spikes = random_spikes(rng, 3, inputs)
    _, sent = drive(Projection(weights=weights), FIXED, {"s_in": spikes}, 3)
    assert np.array_equal(sent["a_out"], spikes.astype(np.int64) @ weights.astype(np.int64))
    _, sent = drive(Projection(weights=weights.astype(np.float32)), FLOAT, {"s_in": spikes}, 3)
    assert np.array_equal(sent["a_out"], spikes.astype(np.int64) @ weights.astype(np.int64))


def test_projection_is_exact_where_float32_is_not() -> None:
    """More inputs than float32 can sum exactly: the model must notice and use integers."""
    weights = np.full((200_000, 1), 127, np.int8)
    weights[0] = 126
    _, sent = drive(Projection(weights=weights), FIXED, {"s_in": np.ones((1, 200_000), bool)}, 1)
    assert sent["a_out"].tolist() == [[127 * 200_000 - 1]]


@examples
@given(seed=seeds)
def test_gain_and_residual(seed) -> None:
    rng = np.random.default_rng(seed)
    gain, spikes = rng.integers(-(1 << 31), 1 << 31, 7), random_spikes(rng, 4, 7)
    _, sent = drive(OneToOneGain(gain=gain), FIXED, {"s_in": spikes}, 4)
    assert np.array_equal(sent["a_out"], np.where(spikes, gain, 0))
    stream = rng.integers(-(1 << 40), 1 << 40, (4, 7))
    _, summed = drive(Residual(shape=(7,)), FIXED, {"h_in": stream, "a_in": sent["a_out"]}, 4)
    assert np.array_equal(summed["h_out"], stream + np.where(spikes, gain, 0))


def test_current_write_shifts_each_sum_and_adds_its_bias() -> None:
    """By hand: rows (3, -5) and (1, 7); shifts 0 and 4; biases 10 and -20, which come at every step."""
    process = CurrentWrite(weights=np.array([[3, -5], [1, 7]], np.int8), shift=np.array([0, 4]), bias=[10, -20])
    _, sent = drive(process, FIXED, {"s_in": np.array([[1, 1], [1, 0], [0, 0]], bool)}, 3)
    assert sent["a_out"].tolist() == [[4 + 10, (2 << 4) - 20], [3 + 10, -(5 << 4) - 20], [10, -20]]


@examples
@given(seed=seeds, inputs=st.integers(1, 40))
def test_current_write_equals_the_definition(seed, inputs) -> None:
    """Up to shift 16 and full 32-bit biases, beyond what 32 bits hold; in float the weights have the shift."""
    rng = np.random.default_rng(seed)
    weights, shift = rng.integers(-127, 128, (inputs, 5)).astype(np.int8), rng.integers(0, 17, 5).astype(np.uint8)
    bias, spikes = rng.integers(-(1 << 31), 1 << 31, 5).astype(np.int32), random_spikes(rng, 3, inputs)
    sums = spikes.astype(np.int64) @ weights.astype(np.int64) * 2 ** shift.astype(np.int64)
    _, sent = drive(CurrentWrite(weights=weights, shift=shift, bias=bias), FIXED, {"s_in": spikes}, 3)
    assert np.array_equal(sent["a_out"], sums + bias)
    shift = np.minimum(shift, 8)  # float32 holds such sums exactly
    sums = spikes.astype(np.int64) @ weights.astype(np.int64) * 2 ** shift.astype(np.int64)
    unit = np.float32(2.0**-12)
    process = CurrentWrite(weights=weights * 2.0**shift * unit, bias=(bias >> 16) * unit)
    _, sent = drive(process, FLOAT, {"s_in": spikes}, 3)
    assert np.array_equal(sent["a_out"], sums.astype(np.float32) * unit + (bias >> 16) * unit)


# --- SpikingAttention ---


def attention_oracle(q, k, v, a_site: Site, r_site: Site, heads: int, num_steps: int, decay: float):
    """The definition, with loops. q, k, v: bool [tokens, T_s, d]. Per token: maps [T_s, heads, context] and R."""
    tokens, _, d = q.shape
    width = d // heads
    results = []
    for i in range(tokens):
        counts = np.zeros((num_steps, heads, i + 1), np.int64)
        for tau in range(num_steps):
            for h in range(heads):
                part = slice(h * width, (h + 1) * width)
                for j in range(i + 1):
                    counts[tau, h, j] = int((q[i, tau, part] & k[j, tau, part]).sum())
        pairs = [(h, min(i - j, a_site.bias.shape[1] - 1)) for h in range(heads) for j in range(i + 1)]
        spread = Site(np.repeat(a_site.threshold, i + 1), np.array([a_site.bias[pair] for pair in pairs]), a_site.shift)
        a, a_hits = run_site(counts.reshape(num_steps, -1), spread, decay)
        a = a.reshape(num_steps, heads, i + 1)
        z = np.zeros((num_steps, d), np.int64)
        for tau in range(num_steps):
            for j in range(i + 1):
                z[tau] += np.repeat(a[tau, :, j], width) & v[j, tau]
        r, r_hits = run_site(z, r_site, decay)
        results.append((a, a_hits, r, r_hits))
    return results


@examples
@given(
    seed=seeds,
    heads=st.integers(1, 3),
    width=st.integers(1, 5),
    num_steps=st.integers(1, 4),
    capacity=st.integers(1, 5),
    tag=st.sampled_from([FIXED, FLOAT]),
    shift=st.sampled_from([0, 10, 22]),  # at 22 a count of two saturates
    decay=st.integers(0, 4096),
    distances=st.integers(0, 6),
)
def test_attention_equals_the_oracle_up_to_a_full_cache(
    seed, heads, width, num_steps, capacity, tag, shift, decay, distances
) -> None:
    rng = np.random.default_rng(seed)
    d = heads * width
    q, k, v = (random_spikes(rng, capacity, num_steps, d) for _ in range(3))
    biased = min(distances, 1)
    if tag == FIXED:
        # Thresholds and biases are whole counts, so that u = V happens all the time.
        a_bias = (rng.integers(-2, 3, (heads, max(1, distances))) * biased << shift).astype(np.int32)
        r_bias = (rng.integers(-1, 2, d) * biased << shift).astype(np.int32)
        a_site = Site((rng.integers(1, 3, heads) << shift).astype(np.int32), a_bias, shift)
        r_site = Site((rng.integers(1, 3, d) << shift).astype(np.int32), r_bias, shift)
    else:
        shift, decay = 0, decay / 4096
        a_bias = (rng.normal(0, 1, (heads, max(1, distances))) * biased).astype(np.float32)
        a_site = Site(rng.uniform(0.5, 2, heads).astype(np.float32), a_bias, 0)
        r_site = Site(rng.uniform(0.5, 2, d).astype(np.float32), (rng.normal(0, 1, d) * biased).astype(np.float32), 0)
    biases = {"map_bias": a_site.bias, "value_bias": r_site.bias} if biased else {}
    process = SpikingAttention(
        map_threshold=a_site.threshold, value_threshold=r_site.threshold, decay=decay, num_steps=num_steps,
        capacity=capacity, map_shift=shift, value_shift=shift, **biases,
    )  # fmt: skip
    steps = capacity * num_steps
    flat = {name: x.reshape(steps, d) for name, x in (("q_in", q), ("k_in", k), ("v_in", v))}
    model, sent = drive(process, tag, flat, steps)
    expected = attention_oracle(q, k, v, a_site, r_site, heads, num_steps, decay)
    assert np.array_equal(sent["s_out"], np.concatenate([r for _, _, r, _ in expected]))
    layout = ReportLayout([heads * capacity, d], num_steps)
    for i, (a, a_hits, r, r_hits) in enumerate(expected):
        (maps, map_hits), (out, out_hits) = layout.unpack(sent["report"][i])
        maps = maps.reshape(num_steps, heads, capacity)
        assert np.array_equal(maps[:, :, : i + 1], a)
        assert not maps[:, :, i + 1 :].any()
        assert np.array_equal(map_hits, a_hits) and np.array_equal(out_hits, r_hits)
        assert np.array_equal(out, r)
    assert model.position.tolist() == [capacity]


def small_attention(capacity: int) -> SpikingAttention:
    return SpikingAttention(
        map_threshold=np.array([1]), value_threshold=np.array([1, 1]), decay=0, num_steps=1, capacity=capacity
    )


def test_attention_with_an_empty_cache_sees_its_own_token_only() -> None:
    ones = np.ones((1, 2), bool)
    _, sent = drive(small_attention(3), FIXED, {"q_in": ones, "k_in": ones, "v_in": ~ones}, 1)
    assert not sent["s_out"].any()
    _, sent = drive(small_attention(3), FIXED, {"q_in": ones, "k_in": ones, "v_in": ones}, 1)
    assert sent["s_out"].all()


@pytest.mark.parametrize("tag", [FIXED, FLOAT])
def test_a_pair_may_fire_by_its_distance_alone(tag: str) -> None:
    """By hand: V_A = 2, biases 2, 1, -9 for distances 0, 1 and all larger; only the token at position 1 has a query.

    Position 0 fires on itself (2 >= 2) without a coincidence. Position 1: itself 2 + 1, and position 0, which is one
    away: 1 + 1 coincidence. Position 2: itself 2; one away 1 < 2; two away -9. Position 3 likewise: three away is -9.
    """
    process = SpikingAttention(
        map_threshold=np.array([2]), map_bias=np.array([[2, 1, -9]]), value_threshold=np.array([1]),
        value_bias=np.array([0]), decay=0, num_steps=1, capacity=4,
    )  # fmt: skip
    q, ones = np.array([[0], [1], [0], [0]], bool), np.ones((4, 1), bool)
    model, sent = drive(process, tag, {"q_in": q, "k_in": ones, "v_in": ones}, 4)
    maps = [ReportLayout([4, 1], 1).unpack(message)[0][0][0].astype(int).tolist() for message in sent["report"]]
    assert maps == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert model.map_v[0].tolist() == [-9, -9, 1, 2]


def test_attention_says_when_the_cache_is_full() -> None:
    ones = np.ones((3, 2), bool)
    with pytest.raises(OverflowError, match="cache is full: it holds 2 positions"):
        drive(small_attention(2), FIXED, {"q_in": ones, "k_in": ones, "v_in": ones}, 3)


def test_attention_forgets_when_the_position_is_set_to_zero() -> None:
    process = small_attention(2)
    ones, zeros = np.ones((2, 2), bool), np.zeros((2, 2), bool)
    model, _ = drive(process, FIXED, {"q_in": ones, "k_in": ones, "v_in": ones}, 2)
    model.position[...] = 0
    for name, rows in (("q_in", ones), ("k_in", zeros), ("v_in", zeros)):
        setattr(model, name, type(model.q_in)(rows))
    model.s_out.sent.clear()
    model.time_step += 1
    model.run_spk()
    assert not model.s_out.sent[0].any()


# --- EmbeddingInjector, RateReadout ---


def test_injector_repeats_a_token_for_its_steps() -> None:
    tokens = np.array([[3, -4], [5, 6]])
    injector = EmbeddingInjector(shape=(2,), num_steps=3)
    _, sent = drive(injector, FIXED, {"host_in": tokens}, 6)
    assert np.array_equal(sent["a_out"], np.repeat(tokens, 3, 0))


@examples
@given(seed=seeds, num_steps=st.integers(1, 5), tag=st.sampled_from([FIXED, FLOAT]))
def test_readout_counts_each_token(seed, num_steps, tag) -> None:
    spikes = random_spikes(np.random.default_rng(seed), 3, num_steps, 4)
    readout = RateReadout(shape=(4,), num_steps=num_steps)
    _, sent = drive(readout, tag, {"s_in": spikes.reshape(-1, 4)}, 3 * num_steps)
    assert np.array_equal(sent["host_out"], spikes.sum(1))


@pytest.mark.parametrize("tag", [FIXED, FLOAT])
def test_residual_readout_sums_each_token(tag: str) -> None:
    stream = np.array([[1, -(1 << 22)], [2, -3], [5, 7], [-5, 8]], np.int64 if tag == FIXED else np.float32)
    _, sent = drive(ResidualReadout(shape=(2,), num_steps=2), tag, {"h_in": stream}, 4)
    assert sent["host_out"].tolist() == [[3, -(1 << 22) - 3], [0, 15]]


# --- SpikingBlock, fused ---


@settings(max_examples=15, deadline=None)
@given(
    seed=seeds,
    head_dim=st.sampled_from([3, 64, 70]),  # the compiled model packs keys into words of 64 bits
    num_steps=st.integers(1, 4),
    tag=st.sampled_from([FIXED, FLOAT]),
    write=st.sampled_from(["spike", "current"]),
    distances=st.sampled_from([0, 1, 2, 5]),
)
def test_the_fused_block_equals_the_oracles_block(seed, head_dim, num_steps, tag, write, distances) -> None:
    shape = random_shape(
        heads=2, head_dim=head_dim, layers=1, ffn=7, positions=3, num_steps=num_steps, write=write, distances=distances
    )
    model = random_model(shape, seed=seed % 1000, drive=1.5)
    if tag == FLOAT:
        model = float_twin(model)
    rng = np.random.default_rng(seed)
    d = shape.hidden_size
    x = random_spikes(rng, 3, num_steps, d)
    h = rng.normal(0, 3000, (3, num_steps, d)).astype(np.int64)
    if tag == FLOAT:  # whole residual units, in which every order of summation is exact
        h = (h / 4096).astype(np.float32)
    dense = DenseDecoder(model)
    expected = []
    for i in range(3):
        expected.append(dense._block(Activity.zeros(model.shape), 0, model.layers[0], x[i], h[i]))
        dense.position += 1
    block = SpikingBlock(layer=model.layers[0], shape=shape, decay=model.decay)
    _, sent = drive(block, tag, {"x_in": x.reshape(-1, d), "h_in": h.reshape(-1, d)}, 3 * num_steps)
    assert np.array_equal(sent["x_out"], np.concatenate([spikes for spikes, _ in expected]))
    assert np.array_equal(sent["h_out"], np.concatenate([stream for _, stream in expected]))


# --- the same in a real runtime, between Lava's own source and sink ---


@pytest.mark.parametrize("tag", [FIXED, FLOAT])
def test_lif_in_lava(tag: str) -> None:
    rng = np.random.default_rng(3)
    site, decay = random_site(rng, 8, 200, 0), 3686.0
    if tag == FLOAT:
        site, decay = Site(site.threshold.astype(np.float32), site.bias.astype(np.float32), 0), 0.9
    currents = rng.integers(-100, 300, (12, 8)).astype(np.int64 if tag == FIXED else np.float32)
    lif = SubtractiveLIF(threshold=site.threshold, bias=site.bias, decay=decay, num_steps=4)
    spikes = run_in_lava(lif, tag, {"a_in": currents}, "s_out", 12)
    assert np.array_equal(spikes, oracle(currents, site, decay, 4)[0])
    assert 0 < spikes.sum() < spikes.size


@pytest.mark.parametrize("tag", [FIXED, FLOAT])
def test_projection_gain_and_residual_in_lava(tag: str) -> None:
    rng = np.random.default_rng(4)
    kind = np.int8 if tag == FIXED else np.float32
    weights, spikes = rng.integers(-127, 128, (6, 5)).astype(kind), random_spikes(rng, 5, 6)
    sums = run_in_lava(Projection(weights=weights), tag, {"s_in": spikes}, "a_out", 5)
    assert np.array_equal(sums, spikes.astype(int) @ weights.astype(int))
    gain = rng.integers(-999, 999, 6)
    added = run_in_lava(OneToOneGain(gain=gain.astype(float)), tag, {"s_in": spikes}, "a_out", 5)
    assert np.array_equal(added, spikes * gain)
    stream = rng.integers(-999, 999, (5, 6))
    write = CurrentWrite(weights=weights, shift=np.zeros(5, np.uint8), bias=np.arange(5))
    assert np.array_equal(run_in_lava(write, tag, {"s_in": spikes}, "a_out", 5), sums + np.arange(5))
    total = run_in_lava(Residual(shape=(6,)), tag, {"h_in": stream, "a_in": added}, "h_out", 5)
    assert np.array_equal(total, stream + added)


@pytest.mark.parametrize("tag", [FIXED, FLOAT])
def test_attention_in_lava(tag: str) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.random((3, 2, 6)) < 0.6 for _ in range(3))
    kind, decay = (np.int32, 3686) if tag == FIXED else (np.float32, 0.9)
    a_site = Site(np.array([1, 2], kind), np.array([[0, 1], [-1, 1]], kind), 0)
    r_site = Site(np.full(6, 2, kind), np.array([0, 1, -1, 0, 1, 0], kind), 0)
    process = SpikingAttention(
        map_threshold=a_site.threshold, map_bias=a_site.bias, value_threshold=r_site.threshold, value_bias=r_site.bias,
        decay=decay, num_steps=2, capacity=3,
    )  # fmt: skip
    flat = {"q_in": q.reshape(6, 6), "k_in": k.reshape(6, 6), "v_in": v.reshape(6, 6)}
    r = run_in_lava(process, tag, flat, "s_out", 6)
    assert np.array_equal(
        r, np.concatenate([r for _, _, r, _ in attention_oracle(q, k, v, a_site, r_site, 2, 2, decay)])
    )
    assert r.any()


def test_why_projection_is_not_lavas_dense() -> None:
    """Stock Dense answers one step late and clears the lowest bit of mixed-sign weights; doubled weights keep it."""
    weights = np.array([[3, -5], [1, 7]], np.int8)
    spikes = np.array([[1, 0], [1, 1], [0, 0]])
    exact = spikes @ weights
    stock = run_in_lava(Dense(weights=weights.T), FIXED, {"s_in": spikes}, "a_out", 3)
    assert stock[0].tolist() == [0, 0]
    assert stock[1].tolist() == [2, -6] != exact[0].tolist()
    doubled = Dense(weights=2 * weights.T.astype(int), weight_exp=-1)
    assert np.array_equal(run_in_lava(doubled, FIXED, {"s_in": spikes}, "a_out", 3)[1:], exact[:-1])
    assert np.array_equal(run_in_lava(Projection(weights=weights), FIXED, {"s_in": spikes}, "a_out", 3), exact)


def test_vars_can_be_read_while_the_runtime_lives() -> None:
    """The Vars of a process are Lava Vars: their initial values are what the model starts from."""
    lif = SubtractiveLIF(threshold=np.array([7, 9]), bias=3, decay=4096)
    model = build_model(lif, FIXED)
    assert model.threshold.tolist() == [7, 9] and model.bias.tolist() == [3, 3] and model.decay.tolist() == [4096]
    assert lif.vars.member_names == ["bias", "decay", "s", "shift", "threshold", "v"]
