"""EventCounter counts from spikes what the dense oracle counts while it computes. Needs no Lava."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import INHIBITING, PLUS, random_model, random_shape

from neuro_sim.counting import EventCounter
from neuro_sim.dense import DenseDecoder
from neuro_sim.lava.precision import float_twin
from spikeopd.contracts import SpikeModel, SpikeTrace


def assert_counts_agree(model: SpikeModel, sequences: int = 2, tokens: int = 4) -> None:
    dense, counter = DenseDecoder(model), EventCounter(model)
    for _ in range(sequences):
        dense.trace = SpikeTrace()
        for i in range(tokens):
            _, expected = dense.step((7 * i) % model.shape.vocab_size)
            spikes = {key: lists[i] for key, lists in dense.trace.sites.items()}
            saturations = {key: expected.saturations[key[1]][max(key[0], 0)] for key in spikes}
            assert counter.count(spikes, saturations).to_dict() == expected.to_dict()
        dense.reset()
        counter.reset()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 6),
    layers=st.integers(1, 3),
    num_steps=st.integers(1, 5),
    width=st.sampled_from([None, 5]),
    drive=st.floats(0.2, 4),
    form=st.sampled_from([{}, PLUS, INHIBITING, {"write": "current"}, {"readout": "residual"}, {"distances": 3}]),
)
def test_counts_equal_the_oracles(seed, heads, head_dim, layers, num_steps, width, drive, form) -> None:
    sizes = {"heads": heads, "head_dim": head_dim, "layers": layers, "ffn": 9, "num_steps": num_steps, "width": width}
    shape = random_shape(**sizes, **form)
    assert_counts_agree(random_model(shape, seed=seed, drive=drive))


def test_counts_of_a_float_model() -> None:
    assert_counts_agree(float_twin(random_model(seed=3)))
