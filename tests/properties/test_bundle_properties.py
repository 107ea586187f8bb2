"""Bundles of any shape survive the way through a file, and no JSON makes the reader raise anything but InputError."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import INHIBITING, PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle
from spikeopd.contracts import SpikeModel
from spikeopd.contracts.bundle import load_bundle, model_arrays
from spikeopd.errors import InputError

OPTIONS = [
    BundleOptions(),
    BundleOptions(neuron="lif"),
    BundleOptions(profile="unrolled", context=2),
    BundleOptions(target="lava"),
]
slow = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    layers=st.integers(1, 2),
    ffn=st.integers(1, 9),
    vocab=st.integers(1, 9),
    positions=st.integers(2, 5),
    num_steps=st.integers(1, 5),
    seed=st.integers(0, 99),
    width=st.one_of(st.none(), st.integers(1, 9)),
    options=st.sampled_from(OPTIONS),
    write=st.sampled_from(["spike", "current"]),
    readout=st.sampled_from(["rate", "residual"]),
    distances=st.integers(0, 3),
)
def test_any_shape_survives_the_file(seed, options, **sizes):
    model = random_model(random_shape(**sizes), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        read = load_bundle(write_bundle(model, Path(folder) / "b", options))
    assert read.shape == model.shape and read.decay == model.decay
    for name, values in model_arrays(model).items():
        assert np.array_equal(values, model_arrays(read)[name]), name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module", params=[{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def template(tmp_path_factory, request):
    model = random_model(random_shape(layers=1, ffn=4, vocab=5, head_dim=2, positions=3, **request.param))
    return write_bundle(model, tmp_path_factory.mktemp("template") / "b")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_field_value_surprises_the_reader(template, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "b"
        shutil.copytree(template, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        while True:  # walk down and replace something
            key = data.draw(st.sampled_from(sorted(place)))
            if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(json_values)
            break
        (folder / "manifest.json").write_text(json.dumps(manifest))
        try:
            assert isinstance(load_bundle(folder), SpikeModel)
        except InputError as error:
            assert "\n" not in str(error)
