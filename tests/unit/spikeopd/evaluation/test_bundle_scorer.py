"""Log-likelihoods of an exported bundle: the event engine's own numbers, with rewinding instead of feeding again."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import random_model, random_shape

from neuro_sim.dense import DenseDecoder
from spikeopd.errors import InputError
from spikeopd.evaluation.bundle_model import BundleScorer, open_bundle
from spikeopd.evaluation.generation import generate
from spikeopd.evaluation.scoring import make_item, plan, score


@pytest.fixture(scope="module")
def model():
    return random_model(random_shape(positions=100, vocab=50), seed=5, drive=1.5)


@pytest.fixture(scope="module")
def scorer(model):
    return BundleScorer(model)


def by_hand(model, item) -> list[float]:
    """The oracle, one token at a time, without any sharing."""
    decoder = DenseDecoder(model)
    rows = [decoder.step(token)[0] for token in item.inputs][-len(item.targets) :]
    return [
        row[t] - row.max() - np.log(np.exp(row - row.max()).sum()) for row, t in zip(rows, item.targets, strict=True)
    ]


def test_shared_beginnings_give_the_oracles_log_likelihoods(model, scorer):
    """One group crosses a word of 64 cached positions and one lies behind it, so a rewind leaves stale bits behind."""
    generator = np.random.default_rng(0)
    items = []
    for length in (61, 70):
        context = generator.integers(0, 50, length)
        items += [make_item(context.tolist(), generator.integers(0, 50, n).tolist(), 100) for n in (1, 9, 5)]
    assert sorted(group.shared for group in plan(items)) == [61, 70]
    for item, result in zip(items, score(scorer, items), strict=True):
        np.testing.assert_allclose(result.logprobs, by_hand(model, item), rtol=0, atol=1e-9)


def test_one_item_alone_is_the_same(model, scorer):
    item = make_item([2, 7, 11], [3, 4], 100)
    (result,) = score(scorer, [item])
    np.testing.assert_allclose(result.logprobs, by_hand(model, item), rtol=0, atol=1e-9)


def test_generation_continues_with_the_most_likely_token(model, scorer):
    prompts = [[2, 5, 9], [2, 5, 9, 13, 17]]
    made = generate(scorer, prompts, 5)
    for prompt, tokens in zip(prompts, made, strict=True):
        decoder = DenseDecoder(model)
        logits = [decoder.step(token)[0] for token in [*prompt, *tokens[:-1]]][len(prompt) - 1 :]
        assert tokens == [int(row.argmax()) for row in logits]


def test_a_student_and_its_bundle_agree(checkpoint, student, tmp_path):
    """The bundle is the student rounded to 8 bits: near, not equal, and its tokenizer begins texts alike."""
    from export.bundle_writer import BundleOptions, write_bundle
    from export.quantize import lower
    from spikeopd.evaluation.torch_model import TorchScorer
    from spikeopd.text.tokenizer import load_tokenizer

    options = BundleOptions(tokenizer=checkpoint / "tokenizer.json", tokens={"bos": 2, "eos": 2, "pad": 1})
    write_bundle(lower(student, "int8").model, tmp_path / "bundle", options)
    scorer, tokenizer, about = open_bundle(tmp_path / "bundle")
    assert about["engine"] == "event" and about["precision"] == "int8" and scorer.max_length == 128
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 2)
    text = "A kettle is a pot for boiling water."
    assert tokenizer.encode(text) == load_tokenizer("tiny").encode(text)
    tokens = tokenizer.encode(text)
    item = make_item(tokens[:5], tokens[5:], 128)
    deployed, trained = score(scorer, [item])[0].total, score(TorchScorer(student), [item])[0].total
    assert deployed == pytest.approx(trained, rel=0.05)


def test_a_bundle_without_tokenizer_says_so(tmp_path, model):
    from export.bundle_writer import write_bundle

    write_bundle(model, tmp_path / "bundle")
    with pytest.raises(InputError, match=r"no tokenizer\.json; name one with --tokenizer"):
        open_bundle(tmp_path / "bundle")
