"""Cutting a vocabulary: the text is split as before, any text stays readable, the teacher says what it said."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_families import CONFIGS, save_teacher
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spikeopd.cli import main
from spikeopd.errors import InputError
from spikeopd.models.teacher import load_teacher, resolve
from spikeopd.text.backend import Guarded, make_backend
from spikeopd.text.tokenizer import load_tokenizer
from spikeopd.text.vocabulary import BYTES, cut, derivation

TEXT = "the cat sat on a mat and then the other cats came along with their mother to the park"
WORDS = TEXT.split()
TINY = json.loads(Path(resolve("tiny"), "tokenizer.json").read_text("utf-8"))
SHARED = Path(__file__).parents[4] / "shared" / "data"


def spelled(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """As Llama 2's: words begin with ▁, what has no token is spelled in bytes."""
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>"])
    return made


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", *BYTES, *sorted(model["vocab"], key=model["vocab"].get)]
    return spelled({name: number for number, name in enumerate(names)}, [tuple(pair) for pair in model["merges"]])


def check(backend: Tokenizer, text: str, other: str) -> None:
    ids = backend.encode(text, add_special_tokens=False).ids
    content, kept = cut(json.loads(backend.to_str()), ids)
    small = Tokenizer.from_str(json.dumps(content))
    assert small.get_vocab_size() == len(kept)
    assert [kept[number] for number in small.encode(text, add_special_tokens=False).ids] == ids
    assert all(small.id_to_token(new) == backend.id_to_token(old) for new, old in enumerate(kept))
    assert small.decode(small.encode(other, add_special_tokens=False).ids) == (
        backend.decode(backend.encode(other, add_special_tokens=False).ids)
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join), st.text(max_size=12))
def test_byte_fallback_splits_the_text_as_before(fallback, text, other):
    check(fallback, text, other)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join), st.text(max_size=12))
def test_byte_level_splits_the_text_as_before(text, other):
    check(Tokenizer.from_str(json.dumps(TINY)), text, other)


def test_unigram_splits_the_text_as_before():
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), ("▁", -3.0), ("▁the", -2.0), ("▁cat", -4.0),
              ("c", -6.0), ("a", -6.0), ("t", -6.0), ("at", -5.0), ("▁c", -5.0)]  # fmt: skip
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    ids = made.encode("the cat", add_special_tokens=False).ids
    content, kept = cut(json.loads(made.to_str()), ids)
    small = Tokenizer.from_str(json.dumps(content))
    assert [kept[number] for number in small.encode("the cat", add_special_tokens=False).ids] == ids
    assert len(kept) == 1 + 256 + len(set(ids)) and content["model"]["unk_id"] == 0


def test_parts_of_a_token_are_kept_by_hand():
    ranks = {("a", "b"): 0, ("c", "d"): 1, ("ab", "c"): 2, ("ab", "cd"): 3}
    assert derivation("abcd", ranks) == {"a", "b", "c", "d", "ab", "cd", "abcd"}  # (c, d) comes before (ab, c)
    assert derivation("xy", ranks) == {"x", "y"}


def test_rows_are_filled_up_to_a_multiple(fallback):
    ids = fallback.encode("the cat").ids
    plain, filled = (cut(json.loads(fallback.to_str()), ids, multiple=n)[1] for n in (1, 16))
    assert set(plain) < set(filled) and len(filled) % 16 == 0 and len(filled) - len(plain) < 16


def test_what_cannot_be_cut_is_refused(fallback):
    plain = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(InputError, match="neither byte fallback nor a byte-level alphabet"):
        cut(json.loads(plain.to_str()), [0])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(InputError, match="a WordPiece vocabulary cannot be cut; BPE and Unigram can"):
        cut(json.loads(words.to_str()), [1])
    with pytest.raises(InputError, match="has no token 9999"):
        cut(json.loads(fallback.to_str()), [9999])


def test_a_template_with_a_token_that_is_not_there_is_one_line():
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}], "pair": [],
                "special_tokens": {"q": {"id": "q", "ids": [99999], "tokens": ["q"]}}}  # fmt: skip
    with pytest.raises(InputError, match="its template names token 99999, which it lacks"):
        cut(TINY | {"post_processor": template}, [5])


def test_a_cut_tokenizer_with_a_pattern_of_its_own_still_runs_apart(tmp_path):
    """A pattern may take for ever, whoever cut the vocabulary."""
    pattern = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
    parts = {"type": "Sequence", "pretokenizers": [pattern, TINY["pre_tokenizer"]]}
    content, _ = cut(TINY | {"pre_tokenizer": parts}, [5, 6])
    assert isinstance(make_backend(content, tmp_path), Guarded)
    assert not isinstance(make_backend(cut(TINY, [5, 6])[0], tmp_path), Guarded)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_cut_teacher_says_what_the_old_one_says(family, tmp_path, capsys):
    save_teacher(family, tmp_path / "teacher")
    text = " ".join(WORDS)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(40)))
    command = ["vocabulary", "--teacher", str(tmp_path / "teacher"), "--source", f"jsonl:{tmp_path / 'corpus.jsonl'}"]
    assert main([*command, "--output", str(tmp_path / "cut"), "--multiple", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["entries"]["after"]
    assert rows % 8 == 0 and 256 < rows < report["entries"]["before"] == 1024
    assert report["held_out"]["after"]["perplexity"] < report["held_out"]["before"]["perplexity"]
    old, new = (load_teacher(str(tmp_path / name), attentions=False) for name in ("teacher", "cut"))
    before, after = (load_tokenizer(tmp_path / name) for name in ("teacher", "cut"))
    assert (after.framing, after.roles) == (before.framing, before.roles) and new.config.vocab_size == rows
    ids, small = before.encode(text), after.encode(text)
    kept = [before.backend.token_to_id(after.backend.id_to_token(number)) for number in range(rows)]
    assert [kept[number] for number in small] == ids
    logits = old(torch.tensor([ids])).logits[..., kept]
    assert torch.equal(new(torch.tensor([small])).logits, logits)
    # Another text, the same tokens: what a student that goes on from the cut one's bundle needs.
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"text": f"An entirely different thing, number {n}."}) + "\n" for n in range(40))
    )
    like = ["vocabulary", "--teacher", str(tmp_path / "teacher"), "--source", f"jsonl:{other}"]
    assert main([*like, "--output", str(tmp_path / "again"), "--like", str(tmp_path / "cut"), "--json"]) == 0
    again = load_teacher(str(tmp_path / "again"), attentions=False)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), new.state_dict().values(), strict=True))
    assert load_tokenizer(tmp_path / "again").fingerprint == after.fingerprint
    capsys.readouterr()
    assert main([*like, "--output", str(tmp_path / "wrong"), "--like", "stories"]) == 2
    assert "stories was not cut from the tokenizer of" in capsys.readouterr().err


@pytest.mark.skipif(not (SHARED / "teachers" / "stories15M").is_dir(), reason="no stories15M beside the checkout")
def test_stories15m_keeps_every_token_of_its_stories():
    import gzip

    backend = Tokenizer.from_file(str(SHARED / "teachers" / "stories15M" / "tokenizer.json"))
    with gzip.open(SHARED / "corpora" / "stories_sampled.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(60)]
    check(backend, " ".join(texts), "Zwölf Boxkämpfer — 1234")
