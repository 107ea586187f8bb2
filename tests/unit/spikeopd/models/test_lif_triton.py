"""The Triton kernels against the torch path, in Triton's interpreter: no GPU is needed, and none is used."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed (it comes with a torch built for CUDA)")
from spikeopd.models import lif_triton, neurons


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    lif_triton._kernels.cache_clear()
    yield
    lif_triton._kernels.cache_clear()
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.sampled_from([((3, 7), (7,)), ((2, 3, 5, 5), (3, 1, 1)), ((2, 600, 2), (1,)), ((1, 1), (1,))]),
    st.booleans(),
    st.booleans(),
)
def test_both_kernels_equal_the_torch_path(seed, steps, shapes, scaled, learned):
    size, kind = shapes
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(steps, *size, generator=generator)
    threshold = torch.rand(kind, generator=generator) + 0.3
    grad = torch.randn(steps, *size, generator=generator)
    membrane, spikes = lif_triton.forward(current, threshold, 0.9)
    expected = neurons._forward(current, threshold, 0.9)
    assert torch.equal(membrane, expected[0]) and torch.equal(spikes, expected[1])
    adjoint, slope = lif_triton.backward(grad, membrane, threshold, 0.9, 2.0, learned, scaled)
    plain, wide = neurons._backward(grad, membrane, threshold, 0.9, 2.0, scaled)
    assert torch.allclose(adjoint, plain, rtol=1e-5, atol=1e-5)
    assert (slope is not None) == learned
    if slope is not None:
        assert torch.allclose(slope, wide.sum_to_size(threshold.shape), rtol=1e-4, atol=1e-4)


def test_spikes_of_bfloat16_currents_are_those_of_the_stored_membranes():
    current, threshold = torch.randn(4, 3, 50).bfloat16(), torch.tensor([0.7]).bfloat16()
    membrane, spikes = lif_triton.forward(current, threshold, 0.9)
    assert membrane.dtype == spikes.dtype == torch.bfloat16
    assert torch.equal(spikes.bool(), membrane >= threshold)


def test_a_cpu_never_takes_it():
    assert not lif_triton.usable(torch.zeros(4, 2, 3), torch.tensor([0.7]))
