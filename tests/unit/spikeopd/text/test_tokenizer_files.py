"""The shipped tokenizer, training one, and directories other tools read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from spikeopd.errors import InputError
from spikeopd.text.sources import open_source
from spikeopd.text.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer

SENTENCES = ["Return the number of items in a list.", "   indented\n\ttext", "déjà vu — 😀 \x00\x7f", "", " "]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. Then the dog sleeps on.\n" * 50)
    return f"text:{path}"


@pytest.fixture
def opt_directory(tmp_path) -> Path:
    """A directory in OPT's own format with OPT's ids for the words of one sentence."""
    pieces = {"A": 250, "Ġphoto": 1345, "Ġof": 9, "Ġa": 10, "Ġcat": 4758, "Ġ": 20}
    letters = {letter: 100 + n for n, letter in enumerate("photfca")}
    vocabulary = {token: n for n, token in enumerate(SPECIAL_TOKENS)} | letters | pieces
    merges = ["Ġ p", "Ġp h", "Ġph o", "Ġpho t", "Ġphot o", "Ġ o", "Ġo f", "Ġ a", "Ġ c", "Ġc a", "Ġca t"]
    vocabulary |= {
        merge.replace(" ", ""): 200 + n for n, merge in enumerate(merges) if merge.replace(" ", "") not in pieces
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return tmp_path


def test_shipped_tokenizer_is_laid_out_like_opt():
    tokenizer = load_tokenizer("tiny")
    assert tokenizer.vocab_size == len(tokenizer) == 1024
    assert [tokenizer.backend.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert tokenizer.encode("the")[0] == 2
    assert tokenizer.encode("the", add_special_tokens=False) == tokenizer.encode("the")[1:]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_any_text_survives_encoding(sentence):
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence
    assert tokenizer.encode_batch([sentence]) == [tokenizer.encode(sentence)]
    assert tokenizer.encode_batch([sentence], add_special_tokens=False) == [tokenizer.encode(sentence)[1:]]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the shipped tokenizer was trained on Python 3.11's texts")
def test_shipped_tokenizer_can_be_made_again(tmp_path):
    """The same vocabulary as shipped, up to what docstrings of another 3.11.x changed."""
    train_tokenizer("python-docs", 1024, tmp_path)
    shipped, made = (t.backend.get_vocab() for t in (load_tokenizer(), load_tokenizer(tmp_path)))
    assert len(shipped.keys() & made.keys()) >= 1000


def test_training_is_deterministic_and_reads_the_training_part_only(corpus, tmp_path):
    for name in ("one", "two"):
        train_tokenizer(corpus, 300, tmp_path / name)
    files = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    asked = []

    class Spy:
        name, unbounded = "spy", False

        def documents(self, split):
            asked.append(split)
            return open_source(corpus).documents(split)

        def fingerprint(self):
            return ""

    train_tokenizer(Spy(), 300, tmp_path / "spy")
    assert asked == ["train"]


def test_fingerprint_follows_the_mapping_not_the_files(corpus, opt_directory, tmp_path):
    one = train_tokenizer(corpus, 300, tmp_path / "one")
    other = train_tokenizer(corpus, 290, tmp_path / "other")
    assert load_tokenizer(tmp_path / "one").fingerprint == one.fingerprint != other.fingerprint
    assert load_tokenizer(tmp_path / "one" / "tokenizer.json").fingerprint == one.fingerprint
    opt = load_tokenizer(opt_directory)
    opt.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == opt.fingerprint


def test_a_named_file_is_loaded_itself_with_the_roles_of_its_folder(corpus, tmp_path):
    beside = train_tokenizer(corpus, 300, tmp_path)
    named = train_tokenizer(corpus, 290, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(tmp_path / "mine.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    tokenizer = load_tokenizer(tmp_path / "mine.json")
    assert tokenizer.backend.get_vocab() == named.backend.get_vocab() != beside.backend.get_vocab()
    assert tokenizer.eos_token_id == 0 and tokenizer.origin == str(tmp_path / "mine.json")
    for name, content in (("config.json", '{"model_type": "opt"}'), ("notes.txt", "no tokenizer")):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=rf"{name}: not a tokenizer file \(.*\); save it again"):
            load_tokenizer(tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config.json: not a JSON object"):
        load_tokenizer(tmp_path / "mine.json")


def test_transformers_reads_what_is_saved(corpus, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the train extra brings transformers")
    ours = train_tokenizer(corpus, 300, tmp_path)
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(tmp_path)
        assert len(theirs) == ours.vocab_size
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 2, 1)
        for sentence in SENTENCES:
            assert theirs(sentence).input_ids == ours.encode(sentence)
        assert theirs(["the", "the quick dog"], padding=True).input_ids[0][0] == 1  # padded on the left


def test_tokenizers_library_reads_the_file_directly():
    from tokenizers import Tokenizer as Backend

    path = Path(sys.modules["spikeopd"].__file__).parent / "assets/tiny/tokenizer.json"
    assert Backend.from_file(str(path)).encode(SENTENCES[0]).ids == load_tokenizer().encode(SENTENCES[0])


def test_opt_vocabulary_and_merges(opt_directory):
    tokenizer = load_tokenizer(opt_directory)
    assert tokenizer.encode("A photo of a cat") == [2, 250, 1345, 9, 10, 4758]
    assert tokenizer.decode([2, 250, 1345, 9, 10, 4758]) == "A photo of a cat"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)


def test_roles_may_be_objects_and_missing_padding_is_the_end_token(corpus, tmp_path):
    train_tokenizer(corpus, 300, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)


def test_errors_say_what_where_and_what_to_do(corpus, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"vocab_size 200 is too small; byte-level BPE needs at least 260 entries"):
        train_tokenizer(corpus, 200, tmp_path / "small")
    with pytest.raises(
        InputError, match=r"the text gives only \d+ entries, 5000 were asked for; use more text or a smaller"
    ):
        train_tokenizer(corpus, 5000, tmp_path / "large")
    assert not (tmp_path / "large").exists()
    with pytest.raises(InputError, match=r"tokenizer '/nowhere/x': no such directory; give 'tiny', a local directory"):
        load_tokenizer("/nowhere/x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=r"empty: no tokenizer here; expected tokenizer.json, or vocab.json and merges.txt"
    ):
        load_tokenizer(tmp_path / "empty")

    broken = tmp_path / "broken"
    train_tokenizer(corpus, 300, broken)
    (broken / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(
        InputError, match=r"the tokenizer has no eos_token \('<end>'\); name it in tokenizer_config.json"
    ):
        load_tokenizer(broken)
    (broken / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json: not valid JSON"):
        load_tokenizer(broken)
    (broken / "tokenizer_config.json").write_text("{}")
    (broken / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer file \(.*\); save it again"):
        load_tokenizer(broken)

    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("x")
    with pytest.raises(InputError, match=r"vocab.json and merges.txt cannot be read \(.*\); fetch them again"):
        load_tokenizer(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"'owner/model': no such directory, and the Hugging Face hub did not give it"):
        load_tokenizer("owner/model")
