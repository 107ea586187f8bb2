"""Documents and prompts are framed as the teacher's were: one rule for training, evaluation, export and decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from neuro_sim.text import read_text
from spikeopd.errors import InputError
from spikeopd.text.tokenizer import load_tokenizer, train_tokenizer
from spikeopd.text.tokens import prepare

BOS, EOS = 0, 2  # <s> and </s> in the layout of the trained tokenizer
LLAMA = {"bos_token": "<s>", "eos_token": "</s>"}


class Documents:
    name, unbounded = "documents", False

    def documents(self, split):
        yield from ("one two", "three")

    def fingerprint(self):
        return "k"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "corpus.txt").write_text("one two three four five, said the quick brown fox to the lazy dog.\n" * 50)
    train_tokenizer(f"text:{folder / 'corpus.txt'}", 300, folder / "tokenizer")
    return folder / "tokenizer" / "tokenizer.json"


@pytest.fixture
def make(base, tmp_path):
    """A tokenizer directory with this template and these settings."""

    def made(template: list[str] | None, **settings: object) -> Path:
        backend = Backend.from_file(str(base))
        if template is None:
            backend.post_processor = processors.ByteLevel(trim_offsets=False)
        else:
            ids = [(token, backend.token_to_id(token)) for token in template if token != "$A"]
            backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
        folder = tmp_path / "teacher"
        folder.mkdir(exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return made


def stream(tokenizer, folder) -> list:
    """The token stream of two documents, with the documents as words."""
    tokens = prepare(Documents(), tokenizer, "train", folder / "cache").tokens.tolist()
    for word in ("one two", "three"):
        ids = tokenizer.encode(word, add_special_tokens=False)
        start = next(i for i in range(len(tokens)) if tokens[i : i + len(ids)] == ids)
        tokens[start : start + len(ids)] = [word]
    return tokens


CASES = {
    # name: template, settings, begin, end
    "opt": (["</s>", "$A"], {"bos_token": "</s>", "eos_token": "</s>"}, EOS, EOS),
    "llama": (["<s>", "$A"], LLAMA, BOS, BOS),
    "both in the template": (["<s>", "$A", "</s>"], LLAMA, BOS, EOS),
    "settings before the template": (["<s>", "$A"], {**LLAMA, "add_bos_token": True, "add_eos_token": True}, BOS, EOS),
    "bos switched off": (["<s>", "$A"], {**LLAMA, "add_bos_token": False}, EOS, EOS),
    "eos behind": (["$A", "</s>"], LLAMA, EOS, EOS),
    "gpt-neox": (None, {"bos_token": "</s>", "eos_token": "</s>"}, EOS, EOS),
    "nothing around a text": (None, LLAMA, EOS, EOS),
    "no bos": (None, {"bos_token": None, "eos_token": {"content": "</s>"}}, EOS, EOS),
    "no eos": (["<s>", "$A"], {"bos_token": "<s>"}, BOS, BOS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tokenizers_own_settings_decide(name, make, tmp_path):
    template, settings, begin, end = CASES[name]
    tokenizer = load_tokenizer(make(template, **settings))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, end)
    both = [begin, "one two", end, begin, "three", end]
    assert stream(tokenizer, tmp_path) == (both if begin != end else [end, "one two", end, "three", end])


@pytest.mark.parametrize(("framing", "begin", "end"), [("bos", BOS, BOS), ("eos", EOS, EOS), ("both", BOS, EOS)])
def test_the_option_overrides_them(make, framing, begin, end):
    tokenizer = load_tokenizer(make(["<s>", "$A"], **LLAMA), framing)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, end)


def test_an_option_the_tokenizer_cannot_follow_is_refused(make):
    with pytest.raises(InputError, match=r"data.framing=bos needs a bos_token, which this tokenizer does not name"):
        load_tokenizer(make(None, eos_token="</s>"), "bos")
    with pytest.raises(InputError, match="has no eos_token"):
        load_tokenizer(make(None))


def test_gpt2_names_its_tokens_in_the_models_config(make):
    folder = make(None, model_max_length=1024)
    (folder / "config.json").write_text(json.dumps({"bos_token_id": EOS, "eos_token_id": [EOS, 1]}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (EOS, EOS)


@pytest.mark.parametrize("name", CASES)
def test_a_students_files_keep_the_framing_for_every_reader(name, make, tmp_path):
    """The student's folder, transformers, the bundle's reader and the evaluation begin a prompt with the same token."""
    template, settings, begin, end = CASES[name]
    tokenizer = load_tokenizer(make(template, **settings))
    student = load_tokenizer(tokenizer.save(tmp_path / "student"))
    assert (student.bos_token_id, student.eos_token_id) == (begin, end)
    assert student.fingerprint == tokenizer.fingerprint
    assert stream(student, tmp_path) == stream(tokenizer, tmp_path)
    want = [begin, *tokenizer.encode("the fox", add_special_tokens=False)]
    assert student.encode("the fox") == want == tokenizer.framed().encode("the fox")
    text = read_text(
        tmp_path / "student", {"tokens": {"bos": begin, "eos": end}, "shape": {"max_position_embeddings": 64}}
    )
    assert text.encode("the fox") == want and text.eos == end
    transformers = pytest.importorskip("transformers", reason="the train extra brings transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "student")
    assert theirs("the fox").input_ids == want and (theirs.bos_token_id, theirs.eos_token_id) == (begin, end)


def test_a_prompt_never_ends_with_the_end_token(make, tmp_path):
    folder = make(["<s>", "$A", "</s>"], **LLAMA)
    text = read_text(folder, {"tokens": {"bos": BOS, "eos": EOS}, "shape": {"max_position_embeddings": 64}})
    assert text.encode("one")[0] == BOS and text.encode("one")[-1] != EOS


def test_two_framings_of_one_text_are_two_caches(make, tmp_path):
    folder = make(["<s>", "$A"], **LLAMA)
    keys = {
        framing: prepare(Documents(), load_tokenizer(folder, framing), "train", tmp_path).fingerprint
        for framing in ("bos", "eos", "both")
    }
    assert len(set(keys.values())) == 3


def test_caches_written_before_framings_existed_stay_valid(tmp_path):
    """Keys of the shipped tokenizer, and of OPT's layout in general, are those of the first version."""
    tokenizer = load_tokenizer("tiny")
    assert tokenizer.fingerprint == "2e9e55bf2de07dc835337bd71251658c70317e1891d60755455f194ce9087d3e"
    assert tokenizer.framed() is tokenizer
    data = prepare(Documents(), tokenizer, "train", tmp_path)
    assert data.fingerprint == "161ee02c3eec539d9574cca17b7d75bd2de10fb0937a5d69cce3e243c700186c"
    assert data.tokens.tolist() == [2, 475, 907, 2, 420, 901, 2]
