"""The whole network in Lava against the dense oracle: spikes of every site, logits, tokens and event counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.lava.decoder import LavaDecoder  # noqa: E402
from neuro_sim.lava.precision import float_twin  # noqa: E402
from neuro_sim.lava.runtime import LavaRunError  # noqa: E402
from spikeopd.contracts import (  # noqa: E402
    EMBED_SITE,
    SpikeModel,
    SpikeTrace,
    equal_share,
    first_difference,
)
from spikeopd.errors import InputError  # noqa: E402

PROMPT = (3, 1, 4, 1, 5)


def decode(decoder, new_tokens: int = 16) -> list[int]:
    """Feed the prompt, then follow the greedy choice. Returns the tokens fed."""
    fed = []
    token = PROMPT[0]
    for i in range(len(PROMPT) + new_tokens):
        logits, activity = decoder.step(token)
        fed.append(token)
        decoder.log.append((logits, activity))
        token = PROMPT[i + 1] if i + 1 < len(PROMPT) else int(logits.argmax())
    return fed


def assert_equal_decoding(model: SpikeModel, granularity: str, new_tokens: int = 16) -> SpikeTrace:
    expected, got = SpikeTrace(), SpikeTrace()
    dense = DenseDecoder(model, expected)
    dense.log = []
    tokens = decode(dense, new_tokens)
    with LavaDecoder(model, "fixed", granularity, trace=got) as lava:
        lava.log = []
        assert decode(lava, new_tokens) == tokens
    assert set(got.sites) == {(-1, EMBED_SITE)} | {
        (layer, site) for layer in range(model.shape.num_hidden_layers) for site in model.shape.layer_sites
    }
    assert first_difference(expected, got) is None
    assert got.tokens == expected.tokens
    for (logits, activity), (lava_logits, lava_activity) in zip(dense.log, lava.log, strict=True):
        assert np.array_equal(logits, lava_logits)
        assert activity.to_dict() == lava_activity.to_dict()
    return got


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fused_equals_the_oracle(seed: int) -> None:
    trace = assert_equal_decoding(random_model(seed=seed), "fused")
    assert any(spikes.any() for spikes in trace.sites[1, "a"])  # attention takes part


def test_fused_equals_the_oracle_with_a_factorised_embedding_and_three_steps() -> None:
    shape = random_shape(heads=3, head_dim=4, layers=3, ffn=20, num_steps=3, width=7)
    assert_equal_decoding(random_model(shape, seed=4, drive=2.0), "fused")


FORMS = [
    {},
    PLUS,
    INHIBITING,
    *({option: value} for option, value in PLUS.items()),
]  # the paper's, all options, each alone


@pytest.mark.parametrize("form", FORMS[1:], ids="+".join)
def test_fused_equals_the_oracle_in_every_form(form: dict) -> None:
    trace = assert_equal_decoding(random_model(random_shape(positions=24, **form), seed=12, drive=1.5), "fused", 8)
    assert any(spikes.any() for spikes in trace.sites[1, "a"])


@pytest.mark.parametrize("granularity", ["fused", "graph"])
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids="+".join)
def test_four_bits_equal_the_oracle(granularity: str, form: dict) -> None:
    model = random_model(random_shape(layers=1, **form), seed=8, drive=1.5, precision="int4")
    assert {abs(int(w)) for w in model.layers[0].w_1.flat} == set(range(8))
    trace = assert_equal_decoding(model, granularity, 4)
    assert any(spikes.any() for spikes in trace.sites[0, "a"])


@pytest.mark.parametrize("form", FORMS, ids="+".join)
def test_graph_equals_the_oracle(form: dict) -> None:
    assert_equal_decoding(random_model(random_shape(layers=1, **form), seed=5, drive=1.5), "graph", 4)


def test_a_factorised_head_reads_the_residual_stream() -> None:
    shape = random_shape(heads=3, head_dim=4, layers=2, ffn=20, num_steps=3, width=7, **PLUS)
    assert_equal_decoding(random_model(shape, seed=4, drive=2.0), "fused", 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("granularity", ["fused", "graph"])
@pytest.mark.parametrize("form", FORMS, ids="+".join)
def test_two_layers_equal_the_oracle(seed: int, granularity: str, form: dict) -> None:
    assert_equal_decoding(random_model(random_shape(**form), seed=seed, drive=1.5), granularity, new_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["fused", "graph"])
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids="+".join)
def test_the_tiny_shape_equals_the_oracle(granularity: str, form: dict) -> None:
    shape = random_shape(heads=4, head_dim=32, layers=4, ffn=512, vocab=1024, positions=64, **form)
    assert_equal_decoding(random_model(shape, seed=7), granularity)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "loud"), [({}, ("gain_o", "gain_y")), (PLUS, ("bias_o", "bias_y"))])
def test_saturating_membranes_are_counted_alike(form: dict, loud: tuple[str, str]) -> None:
    model = random_model(random_shape(**form), seed=6)
    layers = tuple(replace(layer, **{name: getattr(layer, name) * 4000 for name in loud}) for layer in model.layers)
    model = replace(model, layers=layers)
    dense = DenseDecoder(model)
    assert sum(int(hits.sum()) for hits in dense.step(1)[1].saturations.values()) > 0
    assert_equal_decoding(model, "fused")


def share_of_equal_spikes(granularity: str, seed: int, form: dict) -> tuple[float, SpikeTrace]:
    model = random_model(random_shape(**form), seed=seed)
    expected, got = SpikeTrace(), SpikeTrace()
    dense = DenseDecoder(float_twin(model), expected)
    with LavaDecoder(model, "float", granularity, trace=got) as lava:
        for token in (*PROMPT, *range(6, 22)):
            expected_logits, logits = dense.step(token)[0], lava.step(token)[0]
            if first_difference(expected, got) is None:
                assert np.allclose(expected_logits, logits, atol=1e-5, rtol=1e-5)
    return min(equal_share(expected, got).values()), got


@pytest.mark.parametrize("form", FORMS, ids="+".join)
def test_float_is_nearly_equal_to_the_float_oracle(form: dict) -> None:
    """Sums in another order may flip a spike at the threshold; the share of equal spikes is what can be promised."""
    share, _ = share_of_equal_spikes("fused", 0, form)
    assert share > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids="+".join)
def test_float_fused_and_graph_are_equal(form: dict) -> None:
    """The same functions on the same numbers: here nothing may differ."""
    fused, graph = share_of_equal_spikes("fused", 1, form), share_of_equal_spikes("graph", 1, form)
    assert first_difference(fused[1], graph[1]) is None


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_epsilon_means_the_same_in_the_float_twin(epsilon: float) -> None:
    """The residual readout's unit changes with the precision: without decay nothing is truncated, and logits agree."""
    model = random_model(random_shape(**PLUS), seed=2)
    model = replace(model, decay=4096, head=replace(model.head, epsilon=epsilon))
    integer, twin = DenseDecoder(model), DenseDecoder(float_twin(model))
    logits, expected = twin.step(3)[0], integer.step(3)[0]
    assert np.abs(logits - expected).max() < 0.02 * np.ptp(expected)
    other = DenseDecoder(replace(model, head=replace(model.head, epsilon=0.5 if epsilon < 0.5 else 1e-5)))
    assert np.abs(other.step(3)[0] - expected).max() > 0.1 * np.ptp(expected)  # here epsilon does matter


def test_reset_begins_a_new_sequence() -> None:
    model = random_model(random_shape(layers=2, positions=3), seed=8)
    dense = DenseDecoder(model)
    with LavaDecoder(model) as lava:
        lava.reset()  # before the first token there is nothing to forget
        for _ in range(2):
            for token in (5, 6, 7):
                expected, got = dense.step(token), lava.step(token)
                assert np.array_equal(expected[0], got[0])
                assert expected[1].to_dict() == got[1].to_dict()
            with pytest.raises(InputError, match="the context is full: 3 tokens is this model's limit"):
                lava.step(1)
            dense.reset()
            lava.reset()
            assert lava.position == 0
        with pytest.raises(InputError, match="token 40 is outside the vocabulary of 40"):
            lava.step(40)
    with pytest.raises(LavaRunError, match="has been stopped"):
        lava.step(1)


def test_wrong_choices_are_named() -> None:
    model = random_model()
    with pytest.raises(InputError, match="precision 'double' is not known"):
        LavaDecoder(model, "double")
    with pytest.raises(InputError, match="granularity 'coarse' is not known"):
        LavaDecoder(model, granularity="coarse")
    with pytest.raises(InputError, match="this model is float32"):
        LavaDecoder(float_twin(model), "fixed")


def test_two_decoders_live_side_by_side() -> None:
    one, two = random_model(random_shape(layers=1), seed=9), random_model(random_shape(layers=1), seed=10)
    with LavaDecoder(one) as first, LavaDecoder(two) as second:
        for token in (1, 2):
            first.step(token)
            second.step(token)
        logits = first.step(3)[0], second.step(3)[0]
    for model, got in zip((one, two), logits, strict=True):
        dense = DenseDecoder(model)
        for token in (1, 2):
            dense.step(token)
        assert np.array_equal(dense.step(3)[0], got)
