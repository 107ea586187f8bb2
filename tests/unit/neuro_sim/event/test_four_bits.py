"""Weights of 4 bits in the event engine: their layout there and back, and the bundle that holds them in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import INHIBITING, PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle
from neuro_sim.dense import DenseDecoder
from neuro_sim.event.constants import LINE
from neuro_sim.event.engine import EventDecoder
from neuro_sim.event.plan import event_layout, pack_pairs, padded, place_weights, plain_layout, unpack_pairs
from spikeopd.contracts import load_bundle
from spikeopd.contracts.bundle import model_arrays, pack_nibbles, unpack_nibbles
from spikeopd.errors import InputError


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 99))
def test_both_packings_come_back(rows: int, columns: int, seed: int) -> None:
    weights = np.random.default_rng(seed).integers(-8, 8, (rows, columns), dtype=np.int8)
    assert np.array_equal(unpack_nibbles(pack_nibbles(weights), columns), weights)
    packed = pack_pairs(weights, padded(columns, 2 * LINE))
    assert packed.dtype == np.uint8 and packed.shape == (rows, padded(columns, 2 * LINE) // 2)
    assert np.array_equal(unpack_pairs(packed, columns), weights)


def test_pairs_by_hand() -> None:
    assert pack_nibbles(np.array([[1, -1, 7]], np.int8)).tolist() == [[0xF1, 0x07]]


@pytest.mark.parametrize("target", ["nir", "lava"])
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING])
def test_a_bundle_of_four_bits(target: str, form: dict, tmp_path: Path) -> None:
    model = random_model(random_shape(heads=2, head_dim=9, ffn=37, **form), seed=5, precision="int4")
    write_bundle(model, tmp_path / "b", BundleOptions(target=target))
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["schema"] == f"spikeopd.bundle/{5 if form is INHIBITING else 3}" and manifest["precision"] == "int4"
    assert manifest["arrays"]["layers.0.w_1"]["dtype"] == ("int4" if target == "lava" else "int8")
    read = load_bundle(tmp_path / "b")
    for name, values in model_arrays(model).items():
        assert np.array_equal(model_arrays(read)[name], values), name
    placed = load_bundle(tmp_path / "b", place=place_weights)
    assert placed.layers[0].w_1.dtype == np.uint8
    oracle, engine = DenseDecoder(read), EventDecoder(placed)
    again = DenseDecoder(engine.plain_model)
    for token in (3, 1, 4):
        logits, activity = oracle.step(token)
        got, counted = engine.step(token)
        assert np.array_equal(got, logits) and counted.to_dict() == activity.to_dict()
        assert np.array_equal(again.step(token)[0], logits)


def test_half_the_bytes_of_every_row() -> None:
    shape = random_shape(heads=4, head_dim=64, ffn=256)
    wide, narrow = (random_model(shape, seed=1, precision=precision) for precision in ("int8", "int4"))
    assert 2 * event_layout(narrow).layers[0].w_2.nbytes == event_layout(wide).layers[0].w_2.nbytes
    assert plain_layout(wide) is wide
    _, activity = EventDecoder(narrow).step(1)
    rows = activity.bytes["ffn_in"] / (256 // 2)
    assert rows == int(rows) > 0


def test_what_four_bits_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = random_model(precision="int4")
    model.layers[0].w_q[0, 0] = 8
    write_bundle(model, tmp_path / "b")
    with pytest.raises(InputError, match=r"layers\.0\.w_q.*more than 4 bits"):
        load_bundle(tmp_path / "b")
    file = tmp_path / "b" / "manifest.json"
    file.write_text(file.read_text().replace("spikeopd.bundle/3", "spikeopd.bundle/2"))
    with pytest.raises(InputError, match="precision"):
        load_bundle(tmp_path / "b")
