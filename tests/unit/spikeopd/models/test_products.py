"""Spikes times weights: int8 products equal the float ones bit for bit, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.config import load_config
from spikeopd.models import grid, lif_cpu, products
from spikeopd.models.bispikclm import use_gradients
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
    for y in (torch.nn.functional.linear(x, weight, bias), products.spike_linear(x, weight, bias, found)):
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
    fine, coarse = (products.spike_linear(x, weight, bias, found, how) for how in ("fp32", "bf16"))
    assert torch.equal(fine, coarse)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), slope) for y in (fine, coarse)), strict=True):
        assert 0 < (a - b).norm() < 0.01 * a.norm()


def test_gradients_of_rates_are_products_of_means():
    weight, bias = grid.snap(torch.randn(48, 64) * 0.2, 14).requires_grad_(), torch.zeros(48, requires_grad=True)
    x = spikes(0, 4, 32, 64).requires_grad_()
    slope = torch.randn(1, 32, 48).expand(4, -1, -1)
    found = products.planes(weight, 2.0**-14)
    exact, mine = (products.spike_linear(x, weight, bias, found, how) for how in ("fp32", "rates"))
    assert torch.equal(exact, mine)
    exact, mine = (torch.autograd.grad(y, (x, weight, bias), slope) for y in (exact, mine))
    for a, b in zip(mine, exact, strict=True):  # the slope is the same at each step: then nothing is lost but bits
        assert float((a - b).norm() / b.norm()) < 0.01
    assert mine[0].stride(0) == 0


@pytest.mark.parametrize("block", ["paper", "plus"])
def test_a_student_with_gradients_of_rates_fires_the_same_and_its_fast_paths_agree_with_the_plain_ones(
    monkeypatch, block
):
    """The rule is the neuron's alone: plain products, plain attention and the neurons in torch give the same."""
    config = load_config("tiny" if block == "plus" else "tiny-paper", ["model.attention=inhibiting"])
    student = build_student(config.model)
    ids = torch.randint(0, 1024, (2, 128), generator=torch.Generator().manual_seed(0))
    use = torch.randn(2, 128, 1024, generator=torch.Generator().manual_seed(1)) / 256
    found = []
    for fast, gradients in ((True, "rates"), (False, "rates"), (True, "fp32")):
        monkeypatch.setattr(products, "fast", lambda fast=fast: fast)
        monkeypatch.setattr(lif_cpu, "ENABLED", fast)
        use_gradients(student, gradients)
        student.zero_grad()
        logits = student(ids, use_cache=False).logits
        (logits * use).sum().backward()
        parameters = [p for p in student.parameters() if p.grad is not None]
        found.append((logits.detach(), torch.cat([p.grad.flatten() for p in parameters])))
    (logits, rates), (plain_logits, plain), (exact_logits, exact) = found
    assert torch.equal(logits, exact_logits) and torch.equal(logits, plain_logits)
    assert float((rates - plain).norm() / plain.norm()) < 0.03
    assert 0.03 < float((rates - exact).norm() / exact.norm()) < 1 and torch.dot(rates, exact) > 0


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
