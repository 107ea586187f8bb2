"""The neuron: traces by hand, the adjoint against plain autograd, and the paper's bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.models import lif_cpu
from spikeopd.models.neurons import lif, lif_membrane, lif_step, rate_proxy
from spikeopd.models.surrogate import psi

V, ALPHA, XI = 0.7, 0.9, 2.0


def plain(current, threshold, alpha=ALPHA, xi=XI, scaled=False):
    """The equation step by step with ordinary autograd."""
    u = s = torch.zeros_like(current[0])
    spikes, membranes = [], []
    for t in range(current.shape[0]):
        u, s = lif_step(current[t], u, s, threshold, alpha, xi, scaled)
        spikes.append(s)
        membranes.append(u)
    return torch.stack(spikes), torch.stack(membranes)


def test_two_neurons_five_steps_by_hand():
    # alpha 0.5, V 1. Neuron A: constant 0.75; neuron B: one pulse of 4.
    current = torch.tensor([[0.75, 4.0], [0.75, 0.0], [0.75, 0.0], [0.75, 0.0], [0.75, 0.0]]).view(5, 1, 1, 2)
    threshold = torch.ones(2)
    # A: 0.75 | 0.375+0.75=1.125 fire | 0.5625+0.75-1=0.3125 | 0.15625+0.75=0.90625 | 0.453125+0.75=1.203125 fire
    # B: 4 fire | 2-1=1 fire (exactly V) | 0.5-1=-0.5 | -0.25 | -0.125
    spikes = lif(current, threshold, 0.5)
    assert spikes[:, 0, 0, 0].tolist() == [0, 1, 0, 0, 1]
    assert spikes[:, 0, 0, 1].tolist() == [1, 1, 0, 0, 0]
    membrane = lif_membrane(current, threshold, 0.5)
    assert membrane[:, 0, 0, 0].tolist() == [0.75, 1.125, 0.3125, 0.90625, 1.203125]
    assert membrane[:, 0, 0, 1].tolist() == [4.0, 1.0, -0.5, -0.25, -0.125]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fires_exactly_at_the_threshold(dtype):
    below = torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)).item() if dtype == torch.float32 else 0.498
    current = torch.tensor([[0.5, below]], dtype=dtype).view(1, 1, 1, 2)
    assert lif(current, torch.tensor([0.5], dtype=dtype)).flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(1,), (6,), (3, 1, 1)])
def test_gradient_equals_plain_autograd(shape, scaled):
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(4, 2, 3, 5, 6, generator=generator, dtype=torch.float64) * 0.8 + 0.2
    threshold = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.4
    weight = torch.randn(current.shape, generator=generator, dtype=torch.float64)
    gradients = []
    for function in (lambda c, v: lif(c, v, scaled=scaled), lambda c, v: plain(c, v, scaled=scaled)[0]):
        c, v = current.clone().requires_grad_(), threshold.clone().requires_grad_()
        spikes = function(c, v)
        (spikes * weight).sum().backward()
        gradients.append((spikes.detach(), c.grad, v.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    for mine, theirs in zip(gradients[0][1:], gradients[1][1:], strict=True):
        assert (mine - theirs).abs().max() <= 1e-10


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(1,), (37,), (3, 1, 1)])
def test_compiled_path_gives_the_same_spikes_and_gradients(shape, scaled, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    current = torch.randn(4, 2, 3, 29, 37, generator=generator) * 0.8 + 0.2
    threshold = torch.rand(shape, generator=generator) + 0.4
    assert lif_cpu.usable(current, threshold)
    results = []
    for enabled in (True, False):
        monkeypatch.setattr(lif_cpu, "ENABLED", enabled)
        c, v = current.clone().requires_grad_(), threshold.clone().requires_grad_()
        spikes = lif(c, v, scaled=scaled)
        (spikes * current.cos()).sum().backward()
        with torch.no_grad():
            assert torch.equal(lif(c, v), spikes), "without gradients the membranes are not stored"
            strided = c.transpose(-1, -2).contiguous().transpose(-1, -2)
            assert torch.equal(lif(strided, v), spikes)
        results.append((spikes.detach(), c.grad, v.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)
    assert torch.allclose(results[0][2], results[1][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["torch", "compiled", "integer"])
@pytest.mark.parametrize("shape", [(1,), (37,), (3, 1, 1)])
def test_through_rates_the_gradient_is_the_mean_over_the_steps(shape, kind, monkeypatch):
    monkeypatch.setattr(lif_cpu, "ENABLED", kind != "torch")
    generator = torch.Generator().manual_seed(1)
    current = torch.randn(4, 2, 3, 29, 37, generator=generator) * 0.8 + 0.2
    threshold, unit = torch.rand(shape, generator=generator) + 0.4, None
    if kind == "integer":
        unit = torch.tensor([2.0**-12], dtype=torch.float64)
        current, threshold = ((x * 4096).round() / 4096 for x in (current, threshold))
    weight, found = torch.randn(2, 3, 29, 37, generator=generator), []
    for rates in (False, True):
        c, v = current.clone().requires_grad_(), threshold.clone().requires_grad_()
        spikes = lif(c, v, scaled=True, unit=unit, rates=rates)
        found.append((spikes, *torch.autograd.grad(spikes, (c, v), weight.expand(4, -1, -1, -1, -1))))
    (fired, exact, by_threshold), (same, mine, also) = found
    assert torch.equal(fired, same) and torch.allclose(by_threshold, also, rtol=1e-5, atol=1e-4)
    assert torch.allclose(mine, exact.mean(0).expand_as(mine), rtol=1e-5, atol=1e-6)
    assert mine.stride(0) == 0


def test_scaled_surrogate_is_the_neuron_of_scaled_current():
    """u/V - 1 is the membrane of I/V against a threshold of 1: same spikes, gradient by the chain rule."""
    generator = torch.Generator().manual_seed(2)
    current = torch.randn(4, 3, 16, generator=generator, dtype=torch.float64) * 5 + 2
    c, d = current.clone().requires_grad_(), current.clone().requires_grad_()
    v, w = (torch.full((16,), 4.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one, two = lif(c, v, scaled=True), lif(d / w, torch.ones(16, dtype=torch.float64))
    assert torch.equal(one, two) and 0 < one.mean() < 1
    for spikes in (one, two):
        (spikes * current.cos()).sum().backward()
    assert torch.allclose(c.grad, d.grad, atol=1e-12) and torch.allclose(v.grad, w.grad, atol=1e-12)


def test_compiled_path_does_not_depend_on_threads():
    current = torch.randn(4, 16, 64, 33) + 0.2  # enough to be shared out
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            v = torch.full((33,), 0.7, requires_grad=True)
            c = current.clone().requires_grad_()
            lif(c, v).sin().sum().backward()
            with torch.no_grad():
                results.append((c.grad, v.grad, lif(c, v)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_surrogate_is_bounded_by_half_its_sharpness():
    v = torch.linspace(-5, 5, 10001, dtype=torch.float64)
    for xi in (0.5, 2.0, 7.0):
        slope = psi(v, xi)
        assert slope.max() == pytest.approx(xi / 2) and (slope > 0).all()
    # and it is the derivative of the smooth step of Eq. app_arctan_surrogate
    step = torch.arctan(math.pi * XI * v / 2) / math.pi + 0.5
    numeric = (step[2:] - step[:-2]) / (v[2:] - v[:-2])
    assert torch.allclose(numeric, psi(v[1:-1], XI), atol=1e-5)


def jacobians(membrane, threshold, alpha, xi):
    """J_tau = alpha - V psi(u[tau-1] - V), tau = 2 .. T, for scalar neurons. [T-1, n]"""
    return alpha - threshold * psi(membrane[:-1] - threshold, xi)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.floats(0.1, 3.0), st.floats(0.2, 4.0), st.integers(2, 6))
def test_temporal_jacobian_eligibility_and_adjoint_bounds(seed, alpha, threshold, xi, steps):
    """Propositions app_temporal_bound, app_eligibility and Eq. app_parameter_gradient_bound, per neuron."""
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(steps, 16, generator=generator, dtype=torch.float64) * threshold * 1.5
    _, membrane = plain(current, threshold, alpha, xi)
    jacobian = jacobians(membrane, threshold, alpha, xi)
    kappa = jacobian.abs().max()
    m_psi = xi / 2
    assert kappa <= max(alpha, abs(alpha - threshold * m_psi)) + 1e-12
    # du[T]/du[1] is the product of the Jacobians, bounded by kappa^(T-1)
    product = jacobian.prod(0)
    assert (product.abs() <= kappa ** (steps - 1) + 1e-12).all()
    # eligibility e = X + J e with |X| <= 1
    eligibility = torch.zeros(16, dtype=torch.float64)
    x = torch.rand(steps, 16, generator=generator, dtype=torch.float64)
    for t in range(steps):
        eligibility = x[t] + (jacobian[t - 1] if t else 0.0) * eligibility
        assert (eligibility.abs() <= sum(kappa**j for j in range(t + 1)) + 1e-9).all()
    # adjoint: |c| <= 1
    c = torch.rand(steps, 16, generator=generator, dtype=torch.float64) * 2 - 1
    variable = current.clone().requires_grad_()
    (lif(variable, torch.tensor([threshold], dtype=torch.float64), alpha, xi) * c).sum().backward()
    for t in range(steps):
        bound = m_psi * sum(kappa**j for j in range(steps - t))
        assert (variable.grad[t].abs() <= bound + 1e-9).all()


def test_eligibility_trace_is_the_derivative_of_the_membrane():
    """e[tau] = x[tau] + J e[tau-1] equals du[tau]/dw through the surrogate graph (Eq. app_eligibility)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(4, generator=generator, dtype=torch.float64)
    w = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    u = s = torch.zeros((), dtype=torch.float64)
    trace, previous = torch.zeros((), dtype=torch.float64), None
    for t in range(4):
        u, s = lif_step(w * x[t], u, s, V, ALPHA, XI)
        j = 0.0 if previous is None else ALPHA - V * psi(previous - V, XI)
        trace = x[t] + j * trace
        previous = u.detach()
        (gradient,) = torch.autograd.grad(u, w, retain_graph=True)
        assert gradient.item() == pytest.approx(trace.item(), abs=1e-12)


def test_rate_proxy_is_the_neuron_under_constant_current():
    x = torch.linspace(-1, 3, 41)
    expected = lif(x.expand(4, 1, 41).contiguous(), torch.tensor([V])).mean(0)[0]
    assert torch.equal(rate_proxy(x, 4, V), expected)
    # 0.7: u = 0.7 fire, 0.63, 1.267 fire, 1.14 fire
    assert rate_proxy(torch.tensor([0.0, 0.7, 5.0]), 4, V).tolist() == [0.0, 0.75, 1.0]


@pytest.mark.parametrize("shape", [(40,), (), (3, 1, 1)], ids=["neuron", "one", "head"])
def test_compiled_rates_are_the_proxy(shape, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 50, 40, generator=generator)
    threshold = torch.rand(shape, generator=generator) + 0.2
    found = rate_proxy(x, 4, threshold)
    monkeypatch.setattr(lif_cpu, "ENABLED", False)
    assert torch.equal(found, rate_proxy(x, 4, threshold))
