"""The event engine computes what the dense oracle computes: every spike, every bit of the logits, every count."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import random_model, random_shape

from neuro_sim.dense import DenseDecoder
from neuro_sim.event.engine import EventDecoder
from spikeopd.contracts import Activity, ModelShape, SpikeModel, SpikeTrace, first_difference

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    return random_shape(
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([1, 5, 8, 16, 33, 64, 70, 130])),
        layers=draw(st.integers(1, 3)),
        ffn=draw(st.sampled_from([7, 24, 64, 100, 300])),
        vocab=draw(st.sampled_from([3, 40, 64, 130])),
        positions=draw(st.sampled_from([4, 32, 70])),
        num_steps=draw(st.integers(1, 9)),
        width=draw(st.sampled_from([None, 5, 24])),
        write=draw(st.sampled_from(["spike", "current"])),
        readout=draw(st.sampled_from(["rate", "residual"])),
        distances=draw(st.sampled_from([0, 1, 5, 40, 100])),
    )


@st.composite
def models(draw: st.DrawFn) -> SpikeModel:
    drive = draw(st.sampled_from([0.05, 0.5, 1.0, 2.0, 10.0, 1000.0]))
    precision = draw(st.sampled_from(["int8", "int4"]))
    return random_model(draw(shapes()), seed=draw(st.integers(0, 1000)), drive=drive, precision=precision)


def tokens_for(model: SpikeModel, data: st.DataObject, most: int = 12) -> list[int]:
    length = data.draw(st.integers(1, min(most, model.shape.max_position_embeddings)))
    return data.draw(st.lists(st.integers(0, model.shape.vocab_size - 1), min_size=length, max_size=length))


def run_oracle(model: SpikeModel, tokens: list[int]) -> tuple[list[np.ndarray], list[Activity], SpikeTrace]:
    trace = SpikeTrace()
    decoder = DenseDecoder(model, trace)
    results = [decoder.step(token) for token in tokens]
    return [logits for logits, _ in results], [activity for _, activity in results], trace


@QUICK
@given(models(), st.integers(1, 3), st.data())
def test_step_by_step(model: SpikeModel, threads: int, data: st.DataObject) -> None:
    tokens = tokens_for(model, data)
    logits, activities, trace = run_oracle(model, tokens)
    mine = SpikeTrace()
    decoder = EventDecoder(model, mine, threads=threads)
    for token, expected, activity in zip(tokens, logits, activities, strict=True):
        got, counted = decoder.step(token)
        assert np.array_equal(got, expected)
        assert counted.to_dict() == activity.to_dict()
    decoder.close()
    assert first_difference(mine, trace) is None
    assert set(mine.sites) == set(trace.sites) and mine.tokens == trace.tokens


@QUICK
@given(models(), st.integers(1, 2), st.integers(1, 13), st.booleans(), st.data())
def test_prefill_in_blocks(model: SpikeModel, threads: int, block: int, traced: bool, data: st.DataObject) -> None:
    tokens = tokens_for(model, data)
    logits, activities, trace = run_oracle(model, tokens)
    mine = SpikeTrace() if traced else None
    decoder = EventDecoder(model, mine, threads=threads, block=block)
    split = data.draw(st.integers(0, len(tokens) - 1))
    rows, counted = (np.empty((0, model.shape.vocab_size)), [])
    if split:
        rows, counted = decoder.prefill(tokens[:split], last_only=False)
    last, more = decoder.prefill(tokens[split:])
    decoder.close()
    assert np.array_equal(np.concatenate([rows, last[None]]), np.array(logits[:split] + logits[-1:]))
    assert [a.to_dict() for a in counted + more] == [a.to_dict() for a in activities]
    assert mine is None or first_difference(mine, trace) is None


@QUICK
@given(models(), st.integers(1, 2), st.integers(1, 4), st.data())
def test_batch_side_by_side(model: SpikeModel, threads: int, size: int, data: st.DataObject) -> None:
    """Sequences of different lengths, decoded together, are what each would be alone."""
    sequences = [tokens_for(model, data, most=6) for _ in range(size)]
    expected = [run_oracle(model, tokens) for tokens in sequences]
    decoder = EventDecoder(model, threads=threads, block=3)
    batch = decoder.batch([SpikeTrace() for _ in sequences])
    for turn in range(max(map(len, sequences))):
        members = [index for index, tokens in enumerate(sequences) if turn < len(tokens)]
        logits, counted = batch.step(members, [sequences[index][turn] for index in members])
        for row, index in enumerate(members):
            assert np.array_equal(logits[row], expected[index][0][turn])
            assert counted[row].to_dict() == expected[index][1][turn].to_dict()
    decoder.close()
    for trace, (_, _, due) in zip(batch.traces, expected, strict=True):
        assert trace is not None and first_difference(trace, due) is None


@QUICK
@given(models(), st.data())
def test_events_follow_the_rate_formula(model: SpikeModel, data: st.DataObject) -> None:
    """Sum of spikes times fan-out = f_r * T_s * FLOPs of the driven projection, exactly (integers on both sides)."""
    tokens = tokens_for(model, data)
    decoder = EventDecoder(model, threads=1)
    _, activities = decoder.prefill(tokens)
    decoder.close()
    d, f = model.shape.hidden_size, model.shape.ffn_dim
    for component, site, flops, size in (
        ("output", "r", d * d, d),
        ("ffn_in", "x", d * f, d),
        ("ffn_out", "f", f * d, f),
    ):
        sops = sum(int(a.sops[component].sum()) for a in activities)
        spikes = sum(int(a.spikes[site].sum()) for a in activities)
        # rate = spikes / (tokens * layers * T_s * size), so rate * T_s * FLOPs over tokens and layers is:
        assert sops * size == spikes * flops
