"""Spikes times weights: int8 products equal the float ones bit for bit, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.config import load_config
from spikeopd.models import grid, products
from spikeopd.models.initialise import build_student


def spikes(seed, *shape, rate=0.3):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < rate).float()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(16, 40), st.integers(1, 40), st.integers(1, 6), st.sampled_from([0.1, 1.0, 1.9])
)
def test_planes_hold_the_weight_and_their_product_is_exact(seed, fan_in, fan_out, rows, size):
    generator = torch.Generator().manual_seed(seed)
    weight = grid.snap((torch.rand(fan_out, fan_in, generator=generator) * 2 - 1) * size, 14).requires_grad_()
    bias = grid.snap(torch.randn(fan_out, generator=generator), 14).requires_grad_()
    found = products.planes(weight, 2.0**-14)
    high, low = (torch.zeros_like(weight), found.integers) if len(found.integers) == fan_out else (
        found.integers[:fan_out], found.integers[fan_out:])  # fmt: skip
    assert torch.equal((256 * high.double() + low.double()) * 2.0**-14, weight.double())
    x = spikes(seed, 4, rows, fan_in).requires_grad_()
    slope = torch.randn(4, rows, fan_out, generator=generator)
    results = []
    for y in (torch.nn.functional.linear(x, weight, bias), products.spike_linear(x, weight, bias, found, False)):
        results.append((y, *torch.autograd.grad(y, (x, weight, bias), slope)))
    assert torch.equal(results[0][0], results[1][0])
    for mine, plain in zip(results[1][1:], results[0][1:], strict=True):
        assert torch.allclose(mine, plain, rtol=1e-5, atol=1e-5)


def test_a_weight_beyond_sixteen_bits_has_no_planes():
    assert products.planes(torch.tensor([[2.5]]), 2.0**-14) is None
    assert products.planes(torch.tensor([[float("nan")]]), 2.0**-14) is None


def test_coarse_gradients_are_near_and_the_current_is_the_same():
    weight, bias = grid.snap(torch.randn(48, 64) * 0.2, 14).requires_grad_(), torch.zeros(48)
    x, slope = spikes(0, 4, 32, 64).requires_grad_(), torch.randn(4, 32, 48)
    found = products.planes(weight, 2.0**-14)
    fine, coarse = (products.spike_linear(x, weight, bias, found, flag) for flag in (False, True))
    assert torch.equal(fine, coarse)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), slope) for y in (fine, coarse)), strict=True):
        assert 0 < (a - b).norm() < 0.01 * a.norm()


@pytest.mark.parametrize("precision", ["none", "int8"])
@pytest.mark.parametrize("recipe", ["tiny", "tiny-paper"])
def test_a_student_computes_the_same_with_and_without(monkeypatch, recipe, precision):
    if precision == "int8" and recipe == "tiny-paper":
        pytest.skip("the paper's readout has no integer form")
    sizes = {
        "model.hidden_size": 32,
        "model.ffn_dim": 64,
        "model.word_embed_proj_dim": 32,
        "model.num_hidden_layers": 2,
    }
    torch.manual_seed(0)
    student = build_student(load_config(recipe, sizes | {"stage2.spike_layers": [1, 2]}).model).train()
    student.config.deploy_precision = precision
    ids = torch.randint(4, 1024, (2, 24))
    results = []
    for use in (True, False):
        monkeypatch.setattr(products, "fast", lambda use=use: use)
        student.zero_grad()
        logits = student(ids).logits
        logits.square().mean().backward()
        results.append((logits, {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[1][1].items():
        assert torch.allclose(results[0][1][name], gradient, rtol=1e-5, atol=1e-7), name
