"""Sampling, stopping, streams and interruption of the decoding loop."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from random_models import random_model, random_shape

from neuro_sim import decode
from neuro_sim.decode import Sampling, choose, generate, generators
from neuro_sim.dense import DenseDecoder, unmasked_coincidences
from neuro_sim.event.engine import EventDecoder
from neuro_sim.runfile import build_run
from spikeopd.contracts import Activity, parse_run
from spikeopd.errors import ConfigError, InputError

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3]]


def test_greedy_takes_the_first_of_equals() -> None:
    assert choose(np.array([0.0, 2.0, 2.0]), Sampling(), np.random.default_rng(0)) == 1


def test_top_k_and_top_p_cut_where_they_should() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1]))
    rng = np.random.default_rng(0)

    def seen(**options: float) -> set[int]:
        return {choose(logits, Sampling(temperature=1.0, **options), rng) for _ in range(300)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=1) == {0}
    assert seen(top_k=2) == {0, 1}  # a tie at the border goes to the lower token
    assert seen(top_p=0.5) == {0}
    assert seen(top_p=0.69) == {0, 1}
    assert seen(top_p=0.71) == {0, 1, 2}
    assert seen(top_k=3, top_p=0.99) == {0, 1, 2}


def test_sampling_follows_the_softmax() -> None:
    logits = np.array([1.0, 0.0, -1.0])
    rng = np.random.default_rng(1)
    counts = np.bincount([choose(logits, Sampling(temperature=2.0), rng) for _ in range(20000)], minlength=3)
    expected = np.exp(logits / 2) / np.exp(logits / 2).sum()
    assert np.abs(counts / 20000 - expected).max() < 0.015


@pytest.mark.filterwarnings("error")
def test_the_smallest_temperature_is_nearly_greedy() -> None:
    rng = np.random.default_rng(0)
    for sampling in (Sampling(temperature=1e-320), Sampling(temperature=1e-320, top_k=2, top_p=0.5)):
        assert {choose(np.array([1.0, 3.0, -2.0]), sampling, rng) for _ in range(20)} == {1}
        assert {choose(np.array([3.0, 3.0, -2.0]), sampling, rng) for _ in range(50)} <= {0, 1}


def test_sampled_tokens_stay_as_they_are() -> None:
    """Drawn once and for all: a seed must give the same text in later versions."""
    rng = np.random.default_rng(3)
    logits = np.sin(np.arange(50) * 1.7) * 4
    drawn = [choose(logits, Sampling(temperature=t), rng) for t in (0.3, 0.7, 0.8, 1.0, 1.3, 2.5) for _ in range(3)]
    assert drawn == [1, 12, 42, 30, 1, 23, 23, 8, 38, 5, 19, 27, 23, 30, 38, 49, 13, 33]


@pytest.mark.parametrize("wrong", [{"temperature": float("nan")}, {"temperature": float("inf")}, {"seed": 2**63}])
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_wrong_settings_are_all_named() -> None:
    with pytest.raises(ConfigError, match="temperature .*; top-k .*; top-p .*; seed .*; max-new-tokens"):
        Sampling(-1.0, -1, 0.0, -1, -1)


def test_streams_do_not_depend_on_the_other_prompts() -> None:
    alone = generators([[7, 8]], 3)[0].random(4)
    later = generators([[1], [7, 8], [7, 8]], 3)
    assert np.array_equal(later[1].random(4), alone)
    assert not np.array_equal(later[2].random(4), alone)  # the same prompt twice gives two samples


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=40), Sampling(1.0, 10, 0.9, 5, 12)])
def test_batch_equals_oracle_one_by_one(sampling: Sampling) -> None:
    model = random_model(seed=3)
    decoder = EventDecoder(model, threads=2)
    mine, theirs = generate(decoder, PROMPTS, sampling), generate(DenseDecoder(model), PROMPTS, sampling)
    decoder.close()
    assert mine.sequences == theirs.sequences and mine.complete
    assert {k: v.to_dict() for k, v in mine.phases.items()} == {k: v.to_dict() for k, v in theirs.phases.items()}
    alone = generate(DenseDecoder(model), [PROMPTS[1]], sampling)
    assert alone.sequences[0] == mine.sequences[1]


def test_stops_and_phases() -> None:
    model = random_model(random_shape(positions=6), seed=3)
    result = generate(DenseDecoder(model), [[1, 2], [1, 2, 3, 4, 5, 6]], Sampling(max_new_tokens=10))
    first, second = result.sequences
    assert first.stopped == "context" and first.fed == 6 and len(first.generated_tokens) == 5
    assert second.stopped == "context" and second.fed == 6 and len(second.generated_tokens) == 1
    assert result.phases["prompt"].tokens == 8 and result.phases["generation"].tokens == 4
    length = generate(DenseDecoder(model), [[1, 2]], Sampling(max_new_tokens=2))
    assert length.sequences[0].stopped == "length" and length.sequences[0].fed == 3
    nothing = generate(DenseDecoder(model), [[1, 2]], Sampling(max_new_tokens=0))
    assert nothing.sequences[0].stopped == "length" and not nothing.sequences[0].generated_tokens
    eos = first.generated_tokens[1]
    stopped = generate(DenseDecoder(model), [[1, 2]], Sampling(max_new_tokens=10), eos_token_id=eos)
    assert stopped.sequences[0].stopped == "eos" and stopped.sequences[0].generated_tokens[-1] == eos


def test_unmasked_attention_uses_the_tokens_fed() -> None:
    model = random_model(seed=3)
    result = generate(DenseDecoder(model), [[1, 2, 3]], Sampling(max_new_tokens=4))
    for activity in result.phases.values():
        assert np.array_equal(activity.sops_unmasked, unmasked_coincidences(activity, 6))


def test_per_token_series_add_up() -> None:
    result = generate(DenseDecoder(random_model(seed=3)), PROMPTS, Sampling(max_new_tokens=3))
    rows = result.per_token
    assert sum(rows["spikes"]) == sum(int(v.sum()) for v in result.activity.spikes.values())
    assert sum(rows["bytes"]) == sum(result.activity.bytes.values())
    assert rows["phase"].count("generation") == 6 and len(rows["sops"]) == 3 + 2 + 3 + 6


class Interrupted(DenseDecoder):
    """Ctrl-C arrives while the fifth token is computed."""

    def step(self, token: int) -> tuple[np.ndarray, Activity]:
        if self.position == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(token)


def test_interruption_leaves_a_valid_run() -> None:
    model = random_model(seed=3)
    before = signal.getsignal(signal.SIGINT)
    result = generate(Interrupted(model), [[1, 2, 3], [4]], Sampling(max_new_tokens=10))
    assert signal.getsignal(signal.SIGINT) is before
    assert not result.complete
    assert [s.stopped for s in result.sequences] == ["interrupted", "interrupted"]
    assert result.sequences[0].fed == 5 and len(result.sequences[0].generated_tokens) == 3
    whole = generate(DenseDecoder(model), [[1, 2, 3]], Sampling(max_new_tokens=10))
    assert whole.sequences[0].generated_tokens[:3] == result.sequences[0].generated_tokens
    run = build_run(
        result,
        model,
        backend="dense",
        bundle={"name": "x", "sha256": "0"},
        sampling=Sampling(),
        load_seconds=0,
        threads=1,
    )
    parse_run(run, "run.json")


def test_second_interrupt_stops_at_once() -> None:
    interruption = decode.Interruption()
    interruption.handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        interruption.handle(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "at least one prompt"), ([[1], []], "prompt 1 has no tokens"), ([[99]], "prompt 0: token 99 is outside"),
     ([[1] * 33], "prompt 0 has 33 tokens; this model's context holds 32")],
)  # fmt: skip
def test_impossible_prompts_are_refused_before_anything_runs(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(DenseDecoder(random_model()), prompts)
