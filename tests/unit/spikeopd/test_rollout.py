"""Rollouts, their statistics and the collapse detector."""

import numpy as np
import pytest
import torch

from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.quality import (
    RATE_SITES,
    CollapseDetector,
    adjacent_repetition,
    distinct_4,
    layer_neurons,
    layer_spikes,
    maximum_run,
    repeated_4,
    rollout_statistics,
)
from spikeopd.rollout import rollout, sample, uniforms

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97,
             max_position_embeddings=64)  # fmt: skip


@pytest.fixture(scope="module")
def student():
    torch.manual_seed(0)
    return BiSpikCLMForCausalLM(BiSpikCLMConfig(**SMALL)).eval()


def test_statistics_by_hand():
    y = np.array([5, 5, 5, 1, 2, 3, 4, 1, 2, 3, 4])
    assert adjacent_repetition(y) == pytest.approx(2 / 10)
    assert maximum_run(y) == 3
    # 8 four-grams, (1,2,3,4) twice
    assert distinct_4(y) == pytest.approx(7 / 8) and repeated_4(y) == pytest.approx(1 / 8)
    assert rollout_statistics(np.stack([y, np.arange(11)]))["run"] == 2.0
    loop = np.full(32, 7)
    assert (adjacent_repetition(loop), maximum_run(loop), distinct_4(loop)) == (1.0, 32, 1 / 29)


def test_detector_needs_both_means_over_a_full_window():
    detector = CollapseDetector(window=4)
    for step in range(1, 5):
        assert not detector.update(step, adj=0.5, dist4=1.0)  # repetition alone is not collapse
    for step in range(5, 20):
        if detector.update(step, adj=0.5, dist4=0.9):
            break
    # 1 - Dist-4 is 0 three times and 0.1 once at step 5; the mean passes 0.05 with the third 0.1, at step 7
    assert detector.onset == 7
    assert detector.update(8, 0.0, 1.0) and detector.onset == 7
    other = CollapseDetector(window=4)
    other.restore(detector.state())
    assert other.state() == detector.state()


def test_detector_is_silent_until_the_window_is_full():
    detector = CollapseDetector()
    assert not any(detector.update(step, 1.0, 0.0) for step in range(1, 20))
    assert detector.update(20, 1.0, 0.0) and detector.onset == 20


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(4000, 4)
    ids = sample(logits, (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000, 1.0)
    assert torch.bincount(ids).tolist() == [2000, 1000, 500, 500]
    cold = sample(logits, uniforms(0, 0, 4000, 1)[:, 0], 0.01)
    assert (cold == 0).all()
    assert sample(logits[:1], torch.tensor([1.0 - 1e-17], dtype=torch.float64), 1.0).item() == 3


def test_rows_do_not_depend_on_the_batch_they_are_sampled_in(student):
    prompts = torch.randint(4, 97, (4, 10), generator=torch.Generator().manual_seed(0))
    u = uniforms(3, 5, 4, 6)
    whole = rollout(student, prompts, u, 1.0, (0, 1))
    parts = [rollout(student, prompts[i : i + 1], u[i : i + 1], 1.0, (0, 1)) for i in range(4)]
    assert torch.equal(whole.sequences, torch.cat([part.sequences for part in parts]))
    assert torch.equal(whole.spikes, sum(part.spikes for part in parts))
    assert whole.sequences.shape == (4, 16) and torch.equal(whole.sequences[:, :10], prompts)
    assert not torch.equal(uniforms(3, 6, 4, 6), u)


@pytest.mark.parametrize("scope", sorted(RATE_SITES))
def test_rollout_counts_the_spikes_of_the_visited_prefixes(student, scope):
    """The rates that Stage 2 uses before its backward pass are those of a full forward over the same prefixes."""
    prompts = torch.randint(4, 97, (2, 10), generator=torch.Generator().manual_seed(1))
    result = rollout(student, prompts, uniforms(0, 0, 2, 6), 1.0, (0, 1), scope)
    recorder = Recorder(RATE_SITES[scope], (0, 1), tokens=slice(-6, None))
    with torch.no_grad():
        student(result.sequences[:, :-1], use_cache=False, recorder=recorder)
    assert torch.equal(layer_spikes(recorder, (0, 1), scope), result.spikes)
    neurons = {"all": 8 * 32 + 64, "output": 32}[scope]
    assert layer_neurons(student.config, scope) == neurons
    assert 0 < result.spikes.max() <= 2 * 6 * 4 * neurons
