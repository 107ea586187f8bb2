"""The compiled attention against the plain one: the same currents and maps bit for bit, the same gradients."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.models import attention_cpu, lif_cpu
from spikeopd.models.attention import causal_pairs, coincidences, merge_heads, split_heads, weighted_values
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.neurons import lif

UNIT = 2.0**-10


def plain(q, k, v, threshold, bias, withheld, how):
    heads, length = threshold.numel(), q.shape[2]
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    distances = 0 if bias is None else bias.shape[1]
    pairs = causal_pairs(None, q.shape[1], length, length, distances, q.device, q.dtype)
    current = coincidences(q, k)
    if bias is not None:
        current = current + bias[:, pairs.distance].movedim(0, -3)
    unit = None if how.unit is None else torch.tensor([how.unit], dtype=torch.float64)
    a = lif(current * pairs.mask, threshold.view(-1, 1, 1), how.alpha, how.xi, how.scaled, unit) * pairs.mask
    if withheld is not None:
        v = v - withheld.view(heads, 1, -1)
    return merge_heads(weighted_values(a, v)), a.mean(0)


def inputs(seed, steps, batch, length, heads, size, distances, integer, inhibiting=False):
    generator = torch.Generator().manual_seed(seed)

    def spikes():
        return (torch.rand(steps, batch, length, heads * size, generator=generator) < 0.3).float().requires_grad_()

    def on_grid(values):
        return (torch.round(values / UNIT) * UNIT if integer else values).requires_grad_()

    threshold = on_grid(torch.rand(heads, generator=generator) * 3 + 0.05 * size + 0.5)
    bias = on_grid(torch.randn(heads, distances, generator=generator)) if distances else None
    # Short fractions, so that the plain product is exact in any order.
    withheld = (torch.randint(-32, 33, (heads * size,), generator=generator) / 32).requires_grad_()
    return [spikes(), spikes(), spikes(), threshold, bias, withheld if inhibiting else None]


def gradients(found, given_to, values):
    loss = sum((x * g).sum() for x, g in zip(found, given_to, strict=True))
    return torch.autograd.grad(loss, [x for x in values if x is not None])


@settings(deadline=None)  # the first call compiles
@given(
    seed=st.integers(0, 1000),
    steps=st.integers(1, 4),
    batch=st.integers(1, 3),
    length=st.integers(1, 150),
    heads=st.integers(1, 3),
    size=st.sampled_from([1, 5, 16, 64, 70]),
    distances=st.sampled_from([0, 1, 4, 16]),
    integer=st.booleans(),
    scaled=st.booleans(),
    wants_map=st.booleans(),
    inhibiting=st.booleans(),
)
def test_equals_the_plain_attention(
    seed, steps, batch, length, heads, size, distances, integer, scaled, wants_map, inhibiting
):  # fmt: skip
    values = inputs(seed, steps, batch, length, heads, size, distances, integer, inhibiting)
    how = attention_cpu.Synapse(0.9, 2.0, scaled, UNIT if integer else None, gradients="fp32")
    z, rates = attention_cpu.attend(*values[:5], how, wants_map, values[5])
    expected = plain(*values, how)
    assert torch.equal(z, expected[0])
    assert (rates is None) != wants_map
    if wants_map:
        assert torch.equal(rates, expected[1])
    slopes = [torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) for x in expected]
    mine = gradients((z, rates) if wants_map else (z,), slopes if wants_map else slopes[:1], values)
    theirs = gradients(expected if wants_map else expected[:1], slopes if wants_map else slopes[:1], values)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        bound = 1e-5 if index < 3 else 1e-4  # a threshold's is a sum over all pairs, whose terms cancel
        assert torch.allclose(a, b, rtol=bound, atol=bound * max(1.0, float(b.abs().max())))


def test_a_case_by_hand():
    """Two tokens, one head, one step: C = [[1], [1, 2]], V = 2, so only the pair (1, 1) fires and reads V_1."""
    q = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    v = torch.tensor([[[[1.0, 1.0], [0.0, 1.0]]]])
    how = attention_cpu.Synapse(0.9, 2.0, False, None)
    z, rates = attention_cpu.attend(q, k, v, torch.tensor([2.0]), None, how, True)
    assert rates.tolist() == [[[[0.0, 0.0], [0.0, 1.0]]]]
    assert z.tolist() == [[[[0.0, 0.0], [0.0, 1.0]]]]
    z, _ = attention_cpu.attend(q, k, v, torch.tensor([2.0]), None, how, False, torch.tensor([0.25, 0.5]))
    assert z.tolist() == [[[[0.0, 0.0], [-0.25, 0.5]]]]  # the one pair gives 0 and 1, and takes a quarter and a half


def test_coarse_gradients_stay_near_and_groups_and_threads_change_nothing(monkeypatch):
    values = inputs(3, 4, 3, 100, 2, 24, 8, True, inhibiting=True)
    how = attention_cpu.Synapse(0.9, 2.0, True, UNIT, gradients="fp32")
    slope = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(0))

    def run(how):
        return gradients(attention_cpu.attend(*values[:5], how, False, values[5])[:1], [slope], values)

    exact = run(how)
    for a, b in zip(run(how._replace(gradients="bf16")), exact, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-2
    monkeypatch.setattr(attention_cpu, "_BUFFER", 1)  # one sequence at a time
    monkeypatch.setattr(lif_cpu, "_WORTH_A_THREAD", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for a, b in zip(run(how), exact, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(threads)


BETTER = {"residual_write": "current", "readout": "residual", "distances": 4, "neurons": "own",
          "scaled_surrogate": True, "deploy_precision": "int8"}  # fmt: skip


@pytest.mark.parametrize("form", [{}, BETTER, BETTER | {"attention": "inhibiting"}])
def test_a_student_trains_the_same_and_keeps_no_map(form, monkeypatch):
    torch.manual_seed(0)
    config = BiSpikCLMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=48,
                             max_position_embeddings=96, num_steps=3, **form)  # fmt: skip
    student = BiSpikCLMForCausalLM(config).train()
    ids = torch.randint(64, (2, 90))

    def run():
        sizes = []
        student.zero_grad()
        recorder = Recorder(sites=("q", "r", "h"), maps=True, observe=lambda _, seen: seen["map"].square().sum())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            features = student.model(ids, use_cache=False, recorder=recorder).last_hidden_state
        (features.float().sum() + torch.stack(recorder.observed).sum()).backward()
        found = [p.grad.clone() for p in student.parameters() if p.grad is not None]
        return features, recorder.spikes, found, max(sizes)

    monkeypatch.setattr(attention_cpu, "SHORTEST", 90)
    features, spikes, grads, largest = run()
    monkeypatch.setattr(attention_cpu, "SHORTEST", 91)
    expected, plain_spikes, plain_grads, plain_largest = run()
    assert torch.equal(features, expected)
    assert all(torch.equal(spikes[key], value) for key, value in plain_spikes.items())
    for a, b in zip(grads, plain_grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max().clamp(min=1e-6)))
    assert plain_largest == 3 * 2 * 2 * 90 * 90, "the plain path keeps maps of all steps"
    assert largest <= 2 * 2 * 90 * 90, "the averaged map, which the observer squares"


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_rates_are_the_plain_ones_averaged_at_each_neuron(scaled, monkeypatch):
    values = inputs(5, 4, 2, 140, 2, 24, 8, True, inhibiting=True)
    how = attention_cpu.Synapse(0.9, 2.0, scaled, UNIT, "rates")
    slope = torch.randn(1, 2, 140, 48, generator=torch.Generator().manual_seed(0)).expand(4, -1, -1, -1)
    outer = torch.randn(2, 2, 140, 140, generator=torch.Generator().manual_seed(1)).tril()
    mine = gradients(attention_cpu.attend(*values[:5], how, True, values[5]), [slope, outer], values)
    monkeypatch.setitem(plain.__globals__, "lif", partial(lif, rates=True))
    theirs = gradients(plain(*values, how), [slope, outer], values)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        b = b.mean(0, keepdim=True).expand_as(b) if index < 3 else b  # what the neurons of Q, K and V pass on
        assert float((a - b).norm() / b.norm()) < 1e-2
    assert all(x.stride(0) == 0 for x in mine[:3])  # one for all steps
