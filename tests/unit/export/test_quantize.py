"""Lowering: numbers worked out by hand, limits, and the float and integer forms of one student."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_students import PLUS, small_student, tokens

from export.quantize import RATIOS, SITE_LIMIT, best_ratios, lower, quantize_projection, quantize_write
from export.reference import TorchReference
from spikeopd.contracts import MEMBRANE_MAX
from spikeopd.errors import InputError
from spikeopd.models.bispikclm import Recorder


def test_a_projection_by_hand():
    # Neuron 0: largest weight 1.27 -> scale 0.01; neuron 1: largest 0.127 -> scale 0.001.
    weight = np.array([[1.27, -0.5, 0.004], [0.127, 0.0, -0.0635]])
    bias = np.array([0.1, -0.02])
    errors = []
    integer, site = quantize_projection(weight, bias, 0.7, "layers.0.w_q", "layers.0.q.bias", errors)
    assert integer.dtype == np.int8
    assert integer.T.tolist() == [[127, -50, 0], [127, 0, -64]]
    assert site.threshold.tolist() == [70 * 64, 700 * 64]  # 0.7 / scale * 2**6
    assert site.bias.tolist() == [10 * 64, -20 * 64]
    assert site.shift == 6
    assert [error.name for error in errors] == ["layers.0.w_q", "layers.0.q.bias"]
    assert errors[0].largest == pytest.approx(0.004)


def test_tiny_weights_and_huge_biases_get_a_coarser_scale_and_are_counted():
    weight = np.array([[1e-9, -1e-9], [1.0, 0.5], [0.0, 0.0]])
    bias = np.array([0.0, 1e6, 0.0])
    errors = []
    integer, site = quantize_projection(weight, bias, 0.7, "layers.0.w_q", "layers.0.q.bias", errors)
    assert np.abs(site.threshold).max() <= SITE_LIMIT <= MEMBRANE_MAX
    assert np.abs(site.bias).max() <= SITE_LIMIT
    assert errors[0].adapted == 3
    assert not integer[:, 0].any() and not integer[:, 2].any()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(1e-4, 10), st.integers(0, 10**6))
def test_rounding_is_within_half_a_unit(fan_in, fan_out, size, seed):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(0, size, (fan_out, fan_in)), rng.normal(0, size, fan_out)
    errors = []
    integer, site = quantize_projection(weight, bias, 0.7, "layers.0.w_q", "layers.0.q.bias", errors)
    unit = 0.7 * 64 / site.threshold  # the neuron's scale, as its threshold implies it
    assert (np.abs(integer.T * unit[:, None] - weight) <= unit[:, None] * 0.5 + np.abs(weight) * 0.01 + 1e-9).all()
    assert site.threshold.min() >= 1


def test_float_lowering_is_the_student():
    student = small_student(dyadic=True)
    ids = tokens(12)
    recorder = Recorder()
    with torch.no_grad():
        logits = student(torch.tensor([ids]), use_cache=False, recorder=recorder).logits[0].numpy()
    got, trace = TorchReference(lower(student, "float32").model).run(ids)
    assert np.allclose(got, logits, atol=1e-4)
    for key, spikes in recorder.spikes.items():
        for place in range(len(ids)):
            want = spikes[:, 0, :, place, : place + 1].flatten(1) if key[1] == "a" else spikes[:, 0, place]
            assert np.array_equal(trace.sites[key][place], want.numpy() > 0), (key, place)


@pytest.mark.parametrize("width", [None, 8])
def test_integer_lowering_stays_close(width):
    student = small_student(width=width)
    ids = tokens(20)
    with torch.no_grad():
        logits = student(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    lowered = lower(student)
    got, _ = TorchReference(lowered.model).run(ids)
    assert np.corrcoef(got.ravel(), logits.ravel())[0, 1] > 0.97
    assert all(error.relative < 0.02 for error in lowered.errors)
    assert {"embedding.table", "layers.0.w_q", "layers.1.gain_y"} <= {error.name for error in lowered.errors}


def test_dtypes_are_those_of_the_contract():
    model = lower(small_student(width=8)).model
    assert model.embedding.table.dtype == np.int8 and model.embedding.position.dtype == np.int16
    assert model.embedding.row_scale.dtype == np.int32 and model.embedding.channel_gain.dtype == np.int32
    assert model.embedding.project_in.dtype == np.int8 and model.head.project_out.dtype == np.int8
    assert model.layers[0].w_1.dtype == np.int8 and model.layers[0].gain_o.dtype == np.int32
    assert model.head.row_scale.dtype == np.float64
    assert model.decay == 3686


def test_a_plain_head_sums_within_32_bits():
    model = lower(small_student()).model
    widest = 4 * np.abs(model.head.gamma.astype(np.int64)) @ np.full(16, 127)
    assert model.head.gamma.dtype == np.int16 and widest < 2**31


def test_a_parameter_that_is_not_finite_is_named():
    student = small_student()
    with torch.no_grad():
        student.model.layers[1].fc1.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"model\.layers\.1\.fc1\.weight"):
        lower(student)


def test_clipping_is_chosen_only_where_it_pays():
    flat = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    outlier = torch.cat([torch.tensor([[1.0]]), torch.full((1, 400), 0.0039)], 1)
    assert best_ratios(flat, torch.eye(4)).item() == 1.0
    moment = torch.eye(401)
    moment[0, 0] = 0.0  # the outlier's input never fires, so its error costs nothing
    assert best_ratios(outlier, moment).item() < 1.0
    assert set(RATIOS) >= {1.0}


def test_a_write_by_hand():
    # Unit of the stream 2**-12. Neuron 0: 127 * 2**-12 still fits shift 0; neuron 1: 128 * 2**-12 does not; neuron 2:
    # 1.0 / 127 lies between 2**-7 and 2**-6, so sigma = 2**-6, shift 6.
    unit = 2.0**-12
    weight = np.array([[127 * unit, -unit], [128 * unit, 2.4 * unit], [1.0, -0.5]], np.float32)
    errors = []
    integer, shift, bias = quantize_write(weight, np.array([0.5, -unit, 0.0], np.float32), "layers.0.w_o", errors)
    assert integer.T.tolist() == [[127, -1], [64, 1], [64, -32]] and integer.dtype == np.int8
    assert shift.tolist() == [0, 1, 6] and shift.dtype == np.uint8
    assert bias.tolist() == [2048, -1, 0]
    assert [error.name for error in errors] == ["layers.0.w_o", "layers.0.bias_o"]
    assert errors[0].largest == pytest.approx(0.4 * unit, rel=1e-3) and errors[1].largest == 0
    with pytest.raises(InputError, match=r"layers\.0\.w_2 has weights up to 2\.1e\+03.* takes 2032 at most"):
        quantize_write(np.full((1, 1), 2100.0, np.float32), np.zeros(1), "layers.0.w_2", [])


def spikes_of(student, ids):
    recorder = Recorder()
    logits = student(torch.tensor([ids]), use_cache=False, recorder=recorder).logits[0]
    return logits, recorder.spikes


@pytest.mark.parametrize("changes", [{}, {"residual_write": "spike"}, {"readout": "rate"}, {"distances": 0}])
@torch.no_grad()
def test_the_float_form_of_every_block_is_the_student(changes):
    student = small_student(dyadic=True, **{**PLUS, **changes})
    ids = tokens(9)
    logits, spikes = spikes_of(student, ids)
    model = lower(student, "float32").model
    got, trace = TorchReference(model).run(ids)
    assert set(trace.sites) == set(spikes)
    for key, want in spikes.items():
        if key[1] != "a":
            assert np.array_equal(np.stack(trace.sites[key], 1), want[:, 0].numpy() > 0), key
    assert np.allclose(got, logits.double().numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"residual_write": "spike"}, {"neurons": "shared", "distances": 0}, {"attention": "inhibiting"}]
)
@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_a_student_trained_in_integers_is_its_bundle(changes, seed):
    """Spikes, tokens and log-likelihoods: nothing was rounded, nothing differs."""
    student = small_student(seed=seed, deploy_precision="int8", **{**PLUS, **changes})
    ids = tokens(12, seed=seed)
    logits, spikes = spikes_of(student, ids)
    lowered = lower(student)
    assert all(error.relative == error.largest == error.clipped == error.adapted == 0 for error in lowered.errors)
    got, trace = TorchReference(lowered.model).run(ids)
    for key, want in spikes.items():
        if key[1] != "a":
            assert np.array_equal(np.stack(trace.sites[key], 1), want[:, 0].numpy() > 0), key
    assert logits.dtype == torch.float64 and np.array_equal(got, logits.numpy())


def test_the_integers_of_a_second_form_stay_close_to_the_student():
    student = small_student(**PLUS)
    ids = tokens(20)
    with torch.no_grad():
        _, spikes = spikes_of(student, ids)
    lowered = lower(student)
    _, trace = TorchReference(lowered.model).run(ids)
    equal = [np.mean(np.stack(trace.sites[key], 1) == (want[:, 0].numpy() > 0)) for key, want in spikes.items()
             if key[1] != "a"]  # fmt: skip
    assert min(equal) > 0.9
    assert all(error.relative < 0.02 for error in lowered.errors)
    names = {error.name for error in lowered.errors}
    assert names >= {"embed.bias", "layers.1.a.bias", "layers.0.r.bias", "layers.0.bias_y", "layers.1.h.threshold"}


def test_biases_that_no_file_holds_are_refused():
    with pytest.raises(InputError, match="neurons 'own' in the paper's form"):
        lower(small_student(neurons="own"))
