"""The paper's theory as tests: gradients, curvature, equivalences and bounds, against float64 autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian

from spikeopd.losses import (
    chunked,
    forward_kl,
    hard_token,
    head_map,
    jsd,
    layer_map,
    linear_sums,
    masked_square_error,
    reverse_kl,
    soft_token,
    spike_coefficients,
    spike_loss,
    square_errors,
)
from spikeopd.registry import DIVERGENCES, load

seeds = st.integers(0, 2**31)


def logits(seed, *shape, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def gradient(function, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


def test_forward_and_reverse_kl_by_hand():
    # q = (1/4, 3/4), p = (1/2, 1/2)
    q, p = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert forward_kl(q, p).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    assert reverse_kl(q, p).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_a_divergence_is_zero_for_equals_and_never_negative(name, seed):
    z, other = logits(seed, 3, 7), logits(seed + 1, 3, 7)
    divergence = load(DIVERGENCES[name].target)
    assert divergence(z, z + 3.0).item() == pytest.approx(0.0, abs=1e-10)
    assert divergence(z, other).item() > 0


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_forward_kl_gradient_is_q_minus_p(seed):
    z, target = logits(seed, 1, 9), logits(seed + 1, 1, 9)
    expected = z.softmax(-1) - target.softmax(-1)
    assert torch.allclose(gradient(lambda x: forward_kl(x, target), z), expected, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_reverse_kl_gradient_is_q_log_ratio_minus_kl(seed):
    z, reference = logits(seed, 1, 9), logits(seed + 1, 1, 9)
    q, r = z.softmax(-1), reference.softmax(-1)
    expected = q * ((q / r).log() - (q * (q / r).log()).sum())
    assert torch.allclose(gradient(lambda x: reverse_kl(x, reference), z), expected, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    z, target = logits(0, 1, 5), logits(1, 1, 5)
    for function in (forward_kl, reverse_kl, jsd):
        exact, step = gradient(lambda x, f=function: f(x, target), z), 1e-6
        for j in range(5):
            shift = torch.zeros_like(z)
            shift[0, j] = step
            numeric = (function(z + shift, target) - function(z - shift, target)) / (2 * step)
            assert exact[0, j].item() == pytest.approx(numeric.item(), abs=1e-8)


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_forward_kl_hessian_is_the_softmax_covariance_and_psd(seed):
    z, target = logits(seed, 6), logits(seed + 1, 6)
    curvature = hessian(lambda x: forward_kl(x[None], target[None]), z)
    q = z.softmax(-1)
    assert torch.allclose(curvature, torch.diag(q) - torch.outer(q, q), atol=1e-10)
    assert torch.linalg.eigvalsh(curvature).min() >= -1e-12


def test_full_kl_and_teacher_cross_entropy_have_the_same_gradient():
    z, target = logits(0, 4, 11), logits(1, 4, 11)
    p = target.softmax(-1)
    cross = gradient(lambda x: -(p * x.log_softmax(-1)).sum(), z)
    assert torch.allclose(cross, gradient(lambda x: forward_kl(x, target), z), atol=1e-12)
    entropy = -(p * p.log()).sum()
    value = -(p * z.log_softmax(-1)).sum() - entropy
    assert forward_kl(z, target).item() == pytest.approx(value.item(), abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.5, 8.0), st.floats(0.1, 30.0))
def test_sta_gradient_is_bounded_by_root_two_times_temperature(seed, temperature, scale):
    z, target = logits(seed, 1, 9, scale=scale), logits(seed + 1, 1, 9, scale=scale)
    g = gradient(lambda x: soft_token(x, target, temperature), z)
    q, p = (z / temperature).softmax(-1), (target / temperature).softmax(-1)
    assert torch.allclose(g, temperature * (q - p), atol=1e-10)
    assert g.norm() <= math.sqrt(2) * temperature + 1e-12
    label = torch.tensor([3])
    assert gradient(lambda x: hard_token(x, label), z).norm() <= math.sqrt(2) + 1e-12


def test_batch_mean_is_unbiased():
    """Prop. 2: over all pairs of a finite prompt set, the mean of batch means is the mean (value and gradient)."""
    z, target = logits(0, 5, 7), logits(1, 5, 7)
    pairs = [(i, j) for i in range(5) for j in range(5)]
    means = [gradient(lambda x, i=i, j=j: forward_kl(x[[i, j]], target[[i, j]]) / 2, z) for i, j in pairs]
    whole = gradient(lambda x: forward_kl(x, target) / 5, z)
    assert torch.allclose(torch.stack(means).mean(0), whole, atol=1e-12)


def test_spike_loss_by_hand():
    rates, reference = torch.tensor([0.005, 0.60, 0.2]), torch.tensor([0.01, 0.5, 0.2])
    expected = ((0.005**2 + 0.005**2) + (0.02**2 + 0.1**2) + 0.0) / 3
    assert spike_loss(rates, reference).item() == pytest.approx(expected, rel=1e-5)
    assert spike_loss(torch.tensor([0.01, 0.58]), torch.tensor([0.01, 0.58])).item() == 0.0


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 3.0), st.floats(0.1, 4.0))
def test_spike_loss_gradient_and_its_bound(seed, probability, reference, rho, m_psi):
    """Eq. app_spike_gradient for one layer, and the proposition's bound 2 (1 + rho) M_psi / N_r."""
    n = 60
    spikes = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < probability).double()
    r, low, high = spikes.mean(), 0.01, 0.58
    g = gradient(lambda s: spike_loss(s.mean()[None], torch.tensor([reference], dtype=torch.float64), low, high, rho),
                 spikes)  # fmt: skip
    expected = 2 / n * ((r - low) * (r < low) + (r - high) * (r > high) + rho * (r - reference))
    assert torch.allclose(g, expected.expand(n), atol=1e-12)
    assert (g.abs() * m_psi <= 2 * (1 + rho) * m_psi / n + 1e-12).all()


def test_spike_coefficients_cut_the_chain_rule_at_the_rates():
    rates, reference = torch.tensor([0.3, 0.7]), torch.tensor([0.25, 0.5])
    loss, slope = spike_coefficients(rates, reference, 0.01, 0.58, 1.0)
    variable = rates.clone().requires_grad_()
    spike_loss(variable, reference).backward()
    assert torch.equal(slope, variable.grad) and loss.item() == pytest.approx(spike_loss(rates, reference).item())


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_chunks_change_neither_value_nor_gradient(chunk):
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 23).double()
    features, target = logits(0, 8, 5), logits(1, 8, 23)

    def part(q, p):
        return forward_kl(head(q), p)

    def run(size):
        head.zero_grad()
        x = features.clone().requires_grad_()
        value = chunked(part, size, x, target)
        value.backward()
        return value.item(), x.grad, head.weight.grad.clone()

    whole, parts = run(8), run(chunk)
    assert whole[0] == pytest.approx(parts[0], rel=1e-12)
    assert torch.allclose(whole[1], parts[1], atol=1e-12) and torch.allclose(whole[2], parts[2], atol=1e-12)


def test_masked_square_error_counts_valid_coordinates_only():
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2)
    assert masked_square_error(x, y).item() == 30
    assert masked_square_error(x, y, torch.tensor([[1.0, 0.0], [1.0, 1.0]])).item() == 26


def test_maps_are_identities_for_equal_shapes_and_skip_uniformly_otherwise():
    assert layer_map(12, 12) == list(range(12)) and head_map(4, 4) == [0, 1, 2, 3]
    assert layer_map(4, 12) == [2, 5, 8, 11] and layer_map(2, 3) == [1, 2]
    assert layer_map(4, 2) == [0, 0, 1, 1], "a deeper student repeats layers"
    assert min(layer_map(12, 4)) == 0 and layer_map(12, 4)[-1] == 3
    assert head_map(2, 4) == [0, 2] and head_map(4, 2) == [0, 0, 1, 1]


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 12), st.floats(0.5, 3.0))
def test_linear_sums_have_the_gradient_of_plain_autograd(seed, rows, chunk, weight):
    """Values and gradients in features, table and bias, for sums whose weights are known beforehand."""
    features, table, bias = logits(seed, rows, 5), logits(seed + 1, 23, 5), logits(seed + 2, 23)
    target, labels = logits(seed + 3, rows, 23), torch.arange(rows) % 23

    def part(q, p, label):
        return torch.stack((soft_token(q, p, 2.0), hard_token(q, label), reverse_kl(q, p)))

    def run(function):
        leaves = [x.clone().requires_grad_() for x in (features, table, bias)]
        loss, sums = function(leaves)
        (3 * loss).backward()
        return loss, sums, *(x.grad for x in leaves)

    weights = [1.0, weight, 0.25]

    def plain(leaves):
        sums = part(torch.nn.functional.linear(*leaves), target, labels)
        return (sums * torch.tensor(weights, dtype=sums.dtype)).sum(), sums.detach()

    found = run(lambda leaves: linear_sums(part, weights, chunk, tuple(leaves), target, labels))
    for mine, theirs in zip(found, run(plain), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        without = linear_sums(part, weights, chunk, (features, table, bias), target, labels)
    assert torch.equal(without[1], found[1])


def test_linear_sums_that_no_logit_enters_have_gradients_of_zero():
    """Stage 1 without soft and without hard labels: the head is idle, and stays in the graph for data parallelism."""
    leaves = [x.requires_grad_() for x in (logits(0, 7, 5), logits(1, 23, 5), logits(2, 23))]
    loss, sums = linear_sums(lambda q: q.new_zeros(2), [0.0, 0.0], 3, tuple(leaves))
    loss.backward()
    assert not sums.any() and all(x.grad is not None and not x.grad.any() for x in leaves)


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 6), st.booleans(), st.sampled_from([(1.0, 0.5), (0.0, 2.0), (0.3, 0.0)]))
def test_square_errors_have_the_gradient_of_plain_autograd(seed, n, masked, weights):
    x, targets = logits(seed, 2, n, n), (logits(seed + 1, 2, n, n), logits(seed + 2, 2, n, n))
    mask = torch.ones(n, n, dtype=x.dtype).tril() if masked else None
    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, errors = square_errors(mine, targets, weights, mask)
    (2 * loss).backward()
    each = [masked_square_error(plain, target, mask) for target in targets]
    (2 * sum(weight * error for weight, error in zip(weights, each, strict=True))).backward()
    assert torch.allclose(mine.grad, plain.grad, atol=1e-12)
    for weight, error, expected in zip(weights, errors, each, strict=True):
        assert error.item() == pytest.approx(expected.item() if weight else 0.0, rel=1e-12)
