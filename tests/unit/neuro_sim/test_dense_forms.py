"""The oracle's second form of the block on a network small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from neuro_sim.dense import DenseDecoder, spread_map
from spikeopd.contracts import Embedding, Head, Layer, ModelShape, Site, SpikeModel, SpikeTrace

ONE = np.ones(1, np.int32)


def one_neuron(distances: int = 2) -> SpikeModel:
    """One channel, two steps, no decay: currents are what the test says they are."""
    shape = ModelShape(1, 1, 1, 1, 2, 8, 2, 1, "current", "residual", distances)

    def site(threshold: int, bias: int = 0, shift: int = 0) -> Site:
        return Site(threshold * ONE, bias * ONE, shift)

    weight = np.array([[3]], np.int8)
    sites = {
        "q": site(6 << 6, shift=6), "k": site(3 << 6, shift=6), "v": site(3 << 6, shift=6),
        "a": Site(ONE << 10, np.array([[0, 1 << 10]], np.int32), 10),
        "r": site(1 << 10, shift=10), "x": site(20, 5), "f": site(3 << 6, shift=6), "h": site(10_000),
    }  # fmt: skip
    layer = Layer(
        weight, weight, weight, weight, weight, weight, sites,
        shift_o=np.array([2], np.uint8), shift_y=np.array([1], np.uint8), bias_o=7 * ONE, bias_y=-2 * ONE,
    )  # fmt: skip
    embedding = Embedding(np.array([[0], [1]], np.int8), np.ones(2, np.int32), 8 * ONE, 0, np.zeros((8, 1), np.int16))
    head = Head(np.ones(2), np.zeros(2), 1e-5, out_scale=np.ones(1), out_bias=np.full(1, 3.0))
    return SpikeModel(shape, "int8", 0, embedding, site(8), (layer,), head)


def test_a_current_write_shifts_sums_and_adds_its_bias() -> None:
    """e = 8 = V fires at step 1; the reset takes 8 away at step 2. Q needs 6, gets 3: never; V and K fire at step 1.

    Position 0: no coincidence, distance bias 0: A, R silent. h = 8 + 7 = 15; x: 15 + 5 >= 20 fires (then the reset
    takes 20 away: 0), F fires once: h = 15 + (3 << 1) - 2 = 19 at step 1, 15 - 2 = 13 at step 2.
    Position 1: the pair at distance 1 fires by its bias alone: R fires, h = 8 + (3 << 2) + 7 = 27.
    """
    trace = SpikeTrace()
    decoder = DenseDecoder(one_neuron(), trace)
    decoder.step(1)
    decoder.step(1)
    spikes = {site: [rows[:, 0].tolist() for rows in trace.sites[0, site]] for site in ("q", "k", "r", "x", "f")}
    assert spikes["q"] == [[False, False]] * 2 and spikes["k"] == [[True, False]] * 2
    assert trace.sites[0, "a"][0].tolist() == [[False], [False]]
    assert trace.sites[0, "a"][1][:, 0].tolist() == [True, False]  # bias 1, reset 1: 0 at the second step
    assert spikes["r"] == [[False, False], [True, False]]
    assert spikes["x"] == [[True, False], [True, False]]


def test_the_readout_sums_the_residual_stream() -> None:
    """One channel: LayerNorm gives 0, so the logits are the rounded bias times the table: 3 x (0, 1)."""
    logits, activity = DenseDecoder(one_neuron()).step(1)
    assert logits.tolist() == [0.0, 3.0]
    assert activity.macs == {"embed": 0, "head": 2, "head_active": 2}
    assert set(activity.sops) == {"qkv", "coincidence", "av", "output", "ffn_in", "ffn_out"}


@pytest.mark.parametrize("context", [1, 2, 5])
def test_distances_count_back_from_the_query(context: int) -> None:
    site = Site(np.array([1, 2], np.int32), np.array([[10, 20, 30], [40, 50, 60]], np.int32), 10)
    spread = spread_map(site, context)
    due = [[10, 20, 30, 30, 30][:context][::-1], [40, 50, 60, 60, 60][:context][::-1]]
    assert spread.bias.reshape(2, -1).tolist() == due
    assert spread.threshold.tolist() == [1] * context + [2] * context
