"""The adapter answers the harness as the harness's own HFLM does, whatever the batch, the order or the sharing."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("lm_eval")
torch = pytest.importorskip("torch")

from evaluation_items import ITEMS  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from spikeopd.errors import InputError  # noqa: E402
from spikeopd.evaluation.adapter import HarnessLM  # noqa: E402
from spikeopd.evaluation.generation import generate  # noqa: E402
from spikeopd.evaluation.scoring import Limits  # noqa: E402
from spikeopd.evaluation.torch_model import TorchScorer  # noqa: E402
from spikeopd.models.teacher import load_teacher, resolve  # noqa: E402
from spikeopd.text.tokenizer import load_tokenizer  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="module", params=["student", "opt"])
def model(request, student):
    return student if request.param == "student" else load_teacher("tiny", attentions=False)


def hflm(model):
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(resolve("tiny")), batch_size=3)


def requests() -> list[Instance]:
    """Choices that share a context, contexts that share a beginning, and every special case of the harness."""
    pairs = []
    for record in ITEMS["hellaswag"]:
        pairs += [(f"{record['activity_label']}: {record['ctx_a']}", f" {ending}") for ending in record["endings"]]
    for record in ITEMS["winogrande"]:
        before, after = record["sentence"].split("_")
        pairs += [(before + record[option], after) for option in ("option1", "option2")]
    pairs += [("A kettle is a pot.\nAnswer:", answer) for answer in (" yes", " no")]
    pairs += [
        ("", " a text without context"),
        ("</s>It begins with the token itself", " and goes on"),
        ("Spaces belong to what follows  ", " them"),
        ("a very long context " * 60, " loses its beginning"),
        ("a very long context " * 60, " loses"),
        (pairs[0]),
    ]
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


def test_log_likelihoods_are_those_of_hflm(model, tokenizer):
    ours = HarnessLM(TorchScorer(model), tokenizer).loglikelihood(requests())
    theirs = hflm(model).loglikelihood(requests(), disable_tqdm=True)
    assert len({round(total, 3) for total, _ in ours}) > 10  # not all the same by accident
    for (one, one_greedy), (two, two_greedy) in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, abs=TOLERANCE)
        assert one_greedy == two_greedy


def test_a_greedy_continuation_is_recognised(model, tokenizer):
    lm = HarnessLM(TorchScorer(model), tokenizer)
    prompt = tokenizer.encode("A kettle is a pot for boiling")
    (greedy,) = generate(lm.scorer, [prompt], 4)
    answers = lm._loglikelihood_tokens([(("", ""), prompt, end) for end in (greedy, [5, 6, 7])])
    assert [answer[1] for answer in answers] == [True, False]


def test_rolling_log_likelihoods_are_those_of_hflm(model, tokenizer):
    texts = ["A short text.", "one two three four five six seven eight nine ten " * 30]
    asked = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]
    ours = HarnessLM(TorchScorer(model), tokenizer).loglikelihood_rolling(asked)
    theirs = hflm(model).loglikelihood_rolling(asked, disable_tqdm=True)
    # The second total is a float32 sum of hundreds of terms in the harness: compare relative to its size.
    assert ours == pytest.approx(theirs, abs=TOLERANCE, rel=1e-6)


def test_generations_are_those_of_hflm(model, tokenizer):
    options = {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False}
    prompts = ["A kettle is a pot for", "The module", "x" * 500]
    asked = [Instance("generate_until", {}, (prompt, options), number) for number, prompt in enumerate(prompts)]
    ours = HarnessLM(TorchScorer(model), tokenizer).generate_until(asked)
    assert ours == hflm(model).generate_until(asked, disable_tqdm=True)


def test_batch_size_order_and_sharing_change_nothing(model, tokenizer):
    asked = requests()
    reference = HarnessLM(TorchScorer(model), tokenizer).loglikelihood(asked)
    order = list(range(len(asked)))
    random.Random(1).shuffle(order)
    for size, share in ((1, True), (3, False), (7, True), (None, False)):
        lm = HarnessLM(TorchScorer(model, share), tokenizer, Limits(sequences=size))
        shuffled = lm.loglikelihood([asked[place] for place in order])
        for place, (total, greedy) in zip(order, shuffled, strict=True):
            assert total == pytest.approx(reference[place][0], abs=2e-5)
            assert greedy == reference[place][1]


def test_each_context_is_encoded_once(student, tokenizer):
    """Four choices of one question: the context's tokens enter the model once, an ending's last token never."""
    record = ITEMS["hellaswag"][0]
    context = f"{record['activity_label']}: {record['ctx_a']} He"
    asked = [Instance("loglikelihood", {}, (context, f" {ending}"), 0) for ending in record["endings"]]
    fed = []
    hook = student.model.embed_tokens.register_forward_hook(
        lambda module, tokens, output: fed.append(tokens[0].numel())
    )
    try:
        HarnessLM(TorchScorer(student), tokenizer).loglikelihood(asked)
    finally:
        hook.remove()
    before = len(tokenizer.encode(context))
    longest = max(len(tokenizer.encode(context + " " + ending)) for ending in record["endings"]) - before
    assert fed == [before, 4 * (longest - 1)]


def test_texts_begin_with_bos_once(student, tokenizer):
    lm = HarnessLM(TorchScorer(student), tokenizer)
    assert lm.tok_encode("word")[0] == tokenizer.bos_token_id == 2
    assert lm.tok_encode("</s>word") == lm.tok_encode("word")
    assert lm.tok_encode("word", add_special_tokens=False) == lm.tok_encode("word")[1:]
    assert lm.prefix_token_id == 2 and lm.max_length == 128


def test_generation_refuses_what_it_would_ignore(student, tokenizer):
    lm = HarnessLM(TorchScorer(student), tokenizer)
    with pytest.raises(InputError, match="generation option 'top_p' is not offered"):
        lm.generate_until([Instance("generate_until", {}, ("a", {"top_p": 0.5}), 0)])
    with pytest.raises(InputError, match="max_gen_toks 128 leaves no room"):
        lm.generate_until([Instance("generate_until", {}, ("a", {"max_gen_toks": 128}), 0)])


def test_sampled_generations_follow_from_the_seed(student, tokenizer):
    def made(size: int, seed: int) -> list[str]:
        options = {"max_gen_toks": 6, "do_sample": True, "temperature": 1.0, "seed": seed}
        asked = [Instance("generate_until", {}, (f"prompt {number}", options), number) for number in range(3)]
        return HarnessLM(TorchScorer(student), tokenizer, Limits(sequences=size)).generate_until(asked)

    assert made(3, 0) == made(3, 0) != made(3, 1)
