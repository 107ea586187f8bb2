"""A bundle becomes a student again, and lowering that one gives the bundle: training can go on from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_students import PLUS, small_student, tokens
from training_setup import small_setup

from export.bundle_writer import BundleOptions, write_bundle
from export.quantize import lower
from spikeopd.contracts.bundle import load_bundle, model_arrays, shipped_bundles
from spikeopd.errors import InputError
from spikeopd.methods import spad
from spikeopd.models.bundled import shortest_fraction, student_of_bundle
from spikeopd.students import load_student


def assert_same_integers(a, b):
    assert (a.shape, a.precision, a.decay) == (b.shape, b.precision, b.decay)
    assert (a.embedding.shift, a.head.epsilon) == (b.embedding.shift, b.head.epsilon)
    left, right = model_arrays(a), model_arrays(b)
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert np.array_equal(values, right[name]), name


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.05, 1.0, 6.0]),
    alpha=st.sampled_from([0.9, 0.875, 0.5]),
    distances=st.sampled_from([0, 3]),
    attention=st.sampled_from(["sum", "inhibiting"]),
)
def test_lowering_the_student_of_a_bundle_gives_the_bundle(tmp_path_factory, seed, scale, alpha, **form):
    student = small_student(seed=seed, alpha=alpha, deploy_precision="int8", **{**PLUS, **form})
    with torch.no_grad():
        student.model.logit_scale.fill_(scale - 1.3)
        student.model.final_layer_norm.weight.mul_(scale)
        student.model.embed_tokens.weight[5] = 0  # a row that no text ever used
    model = lower(student).model
    folder = tmp_path_factory.mktemp("bundle") / "b"
    write_bundle(model, folder, BundleOptions())
    again = load_student(folder)
    assert_same_integers(lower(again).model, load_bundle(folder))
    ids = torch.tensor([tokens(12, seed=seed)])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, student(ids).logits)


def test_the_shipped_students_can_be_trained_further():
    for name, folder in shipped_bundles().items():
        assert_same_integers(lower(load_student(name)).model, load_bundle(folder))


def test_stage_1_goes_on_from_a_bundle(tmp_path):
    setup = small_setup("model.block=plus", "stage1.deploy_updates=1")
    student = spad.initial_student(setup)
    student.config.deploy_precision = "int8"
    model = lower(student).model
    write_bundle(model, tmp_path / "b", BundleOptions())
    setup = small_setup("model.block=plus", f"stage1.model_name_or_path={tmp_path / 'b'}")
    found, said = spad.start_student(setup)
    assert_same_integers(lower(found).model, model)
    assert said == {"nothing": f"it goes on from {tmp_path / 'b'}"}


def test_stage_1_widens_a_bundle_that_has_fewer_neurons_than_it_is_asked_for(tmp_path):
    setup = small_setup("model.block=plus", "stage1.deploy_updates=1")
    student = spad.initial_student(setup)
    student.config.deploy_precision = "int8"
    write_bundle(lower(student).model, tmp_path / "b", BundleOptions())
    neurons = student.config.ffn_dim + 8
    setup = small_setup(
        "model.block=plus",
        "model.init=random",
        f"model.ffn_dim={neurons}",
        "model.distances=24",
        f"stage1.model_name_or_path={tmp_path / 'b'}",
    )
    found, said = spad.start_student(setup)
    assert (found.config.ffn_dim, found.config.distances) == (neurons, 24)
    assert said["nothing"].endswith(f"with ffn_dim {neurons} instead of {neurons - 8} and distances 24 instead of 16")
    ids = torch.arange(24)[None] % student.config.vocab_size
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, student.eval()(ids).logits)
    assert_same_integers(lower(spad.initial_student(setup)).model, lower(found).model)


def test_stage_1_goes_on_with_more_distances_and_no_fewer_neurons(tmp_path):
    setup = small_setup("model.block=plus", "stage1.deploy_updates=1")
    student = spad.initial_student(setup)
    student.config.deploy_precision = "int8"
    write_bundle(lower(student).model, tmp_path / "b", BundleOptions())
    fewer = ("model.init=random", f"model.ffn_dim={student.config.ffn_dim - 8}", "model.distances=24")
    setup = small_setup("model.block=plus", *fewer, f"stage1.model_name_or_path={tmp_path / 'b'}")
    found, said = spad.start_student(setup)
    assert (found.config.ffn_dim, found.config.distances) == (student.config.ffn_dim, 24)
    assert said["nothing"].endswith("with distances 24 instead of 16")
    ids = torch.arange(40)[None] % student.config.vocab_size
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, student.eval()(ids).logits)


def test_stage_1_gives_a_bundle_attention_that_inhibits(tmp_path):
    """It begins with nothing withheld: the same function, with a synapse more to learn."""
    setup = small_setup("model.block=plus", "stage1.deploy_updates=1")
    student = spad.initial_student(setup)
    student.config.deploy_precision = "int8"
    write_bundle(lower(student).model, tmp_path / "b", BundleOptions())
    start = f"stage1.model_name_or_path={tmp_path / 'b'}"
    found, said = spad.start_student(small_setup("model.block=plus", "model.attention=inhibiting", start))
    assert found.config.attention == "inhibiting"
    assert said["nothing"].endswith("with attention inhibiting instead of sum")
    ids = torch.arange(40)[None] % student.config.vocab_size
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, student.eval()(ids).logits)


def test_other_bundles_are_refused_in_a_line(tmp_path):
    write_bundle(lower(small_student()).model, tmp_path / "paper", BundleOptions())
    with pytest.raises(InputError, match="only the int8 bundle of a student trained in integers"):
        student_of_bundle(tmp_path / "paper")
    write_bundle(lower(small_student(**PLUS)).model, tmp_path / "rounded", BundleOptions())
    with pytest.raises(InputError, match="its scales are not powers of two with a threshold of 0.7"):
        student_of_bundle(tmp_path / "rounded")


def test_the_shortest_decay():
    assert [shortest_fraction(a) for a in (3686, 4096, 2048, 0, 3584)] == [0.9, 1.0, 0.5, 0.0, 0.875]
