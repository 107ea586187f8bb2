"""tokenizer.json of strangers: bounded, normalised, and in a process of its own where its cost is not known."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from neuro_sim.text import read_text
from spikeopd.errors import InputError
from spikeopd.text import backend
from spikeopd.text.backend import Guarded, is_plain, read_backend
from spikeopd.text.tokenizer import load_tokenizer

TINY = json.loads((resources.files("spikeopd") / "assets" / "tiny" / "tokenizer.json").read_text())
TEXT = "def f(x):\n    return x  # é"


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | changes))
        return tmp_path / "tokenizer.json"

    return write


def test_padding_and_truncation_do_not_change_a_prompt(file):
    plain = read_backend(file()).encode(TEXT).ids
    padding = {"strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
               "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert read_backend(file(padding=padding, truncation=truncation)).encode(TEXT).ids == plain
    assert len(plain) > 2


def test_known_parts_run_here_and_unknown_ones_in_a_worker(file):
    assert is_plain(TINY)
    for pattern in backend.PATTERNS:
        parts = [
            split(pattern),
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]
        assert is_plain(TINY | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}})
    assert not is_plain(TINY | {"pre_tokenizer": split("(a+)+$")})
    assert not is_plain(TINY | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    assert not is_plain(TINY | {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}})
    assert not is_plain(TINY | {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}})


def test_a_worker_answers_as_the_library_does(file):
    """A harmless pattern that nobody knows: same ids, same text, same table as in this process."""
    from tokenizers import Tokenizer

    changes = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\d"), TINY["pre_tokenizer"]]}}
    guarded = read_backend(file(**changes))
    assert isinstance(guarded, Guarded)
    here = Tokenizer.from_str(json.dumps(TINY | changes))
    assert guarded.encode(TEXT).ids == here.encode(TEXT).ids
    assert [e.ids for e in guarded.encode_batch_fast(["a 1", ""], add_special_tokens=False)] == [
        e.ids for e in here.encode_batch(["a 1", ""], add_special_tokens=False)
    ]
    assert guarded.decode([5, 300], skip_special_tokens=True) == here.decode([5, 300], skip_special_tokens=True)
    assert guarded.get_vocab(with_added_tokens=True) == here.get_vocab(with_added_tokens=True)
    assert (guarded.token_to_id("</s>"), guarded.id_to_token(2), guarded.token_to_id("no such")) == (2, "</s>", None)
    (file(**changes).parent / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "</s>"}')
    whole = load_tokenizer(file(**changes).parent)
    assert whole.encode(TEXT) == here.encode(TEXT).ids and len(whole.fingerprint) == 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": split("(((")}, "end pattern"),
        ({"pre_tokenizer": split("(x+x+)+y")}, "cannot be used"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "cannot be used"),
        ({"normalizer": {"type": "NoSuch"}}, "cannot be used"),
        ({"model": {"type": "NoSuch"}}, "cannot be used"),
        ({"model": []}, "no object with a `model`"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "not a tokenizer file"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a zz"]}}, "not a tokenizer file"),
        ({"added_tokens": [{"content": "x" * 5000}]}, "an added token is 'xxx"),
        ({"added_tokens": {"a": 1}}, "`added_tokens` is no list"),
    ],
)
def test_a_hostile_file_is_one_line(file, capfd, changes, reason):
    with pytest.raises(InputError, match=reason) as caught:
        read_backend(file(**changes)).encode("x" * 60)
    assert "\n" not in str(caught.value) and "tokenizer.json: " in str(caught.value)
    assert capfd.readouterr() == ("", "")  # no stack of the Rust side


def test_a_call_that_takes_for_ever_is_ended(file, monkeypatch):
    """Each of these normalisers makes a text ten times longer, so a worker soon meets one of its two limits."""
    monkeypatch.setattr(backend, "CPU_SECONDS", 1.0)
    grow = [{"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10} for _ in range(12)]
    guarded = read_backend(file(normalizer={"type": "Sequence", "normalizers": grow}))
    with pytest.raises(InputError, match=r"cannot be used \((it took more than|it needs too much memory)"):
        guarded.encode("some text")
    with pytest.raises(InputError, match="cannot be used"):  # and stays so
        guarded.encode("x")


def test_a_prompt_that_cannot_fit_is_not_even_tokenised(file):
    text = read_text(file().parent, {"shape": {"max_position_embeddings": 16}, "tokens": {"bos": 2}})
    assert text.encode("hello")[0] == 2
    with pytest.raises(InputError, match="the prompt has 50000000 characters; the model takes 16 tokens"):
        text.encode("a" * 50_000_000)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 99_999, b'{"model": "\\ud800"}', b"\xff", b"{}"])
def test_what_is_no_tokenizer_is_said(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"not a tokenizer file \(.*\); export the bundle again"):
        read_text(tmp_path, {"shape": {"max_position_embeddings": 16}})
