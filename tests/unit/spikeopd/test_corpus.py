"""Sampling a corpus from a teacher: the distribution, the cache, resuming, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from teacher_families import CONFIGS, save_teacher

import spikeopd
from spikeopd.cli import main
from spikeopd.corpus import CorpusOptions, Preallocated, _read_part, _write_part, draw, sample_batch
from spikeopd.errors import ConfigError, InputError
from spikeopd.models.teacher import load_teacher
from spikeopd.sampling import row_generators, row_generators_from
from spikeopd.text.tokenizer import load_tokenizer


def test_a_draw_is_the_inverse_of_the_distribution():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()[None]
    for uniform, token in ((0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.6001, 3), (0.99999999, 3)):
        assert draw(logits, torch.tensor([uniform])).item() == token


def test_draws_follow_the_distribution_over_many_blocks():
    torch.manual_seed(0)
    logits = torch.randn(300) * 2
    logits[128:192] = -torch.inf  # a block that must never be hit
    grid = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    found = torch.bincount(draw(logits.expand(20000, -1), grid), minlength=300) / 20000
    assert (found - logits.softmax(0)).abs().max() < 2e-4 and found[128:192].sum() == 0


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_cache_gives_what_a_whole_pass_gives(family, tmp_path):
    """Each document is what drawing from the logits of its whole beginning gives, with rows leaving the batch."""
    save_teacher(family, tmp_path)
    tokenizer, model = load_tokenizer(tmp_path), load_teacher(str(tmp_path), attentions=False)
    # An end that comes often, so that rows leave at different places.
    tokenizer.eos_token_id = 7
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)).index_fill(0, torch.tensor([7]), 4.0))
    options, limit, rows = CorpusOptions(seed=5, temperature=1.3), 24, 9
    found = list(sample_batch(model, tokenizer, 3, rows, limit, options))
    assert len({line["tokens"] for line in found}) > 2 and any(line["complete"] for line in found)
    for line, stream in zip(found, row_generators_from(5, 3, rows), strict=True):
        uniform, ids = stream.random(limit), [tokenizer.bos_token_id]
        for place in range(1, limit):
            logits = model(torch.tensor([ids])).logits[:, -1, : tokenizer.vocab_size] / 1.3
            token = draw(logits, torch.tensor([uniform[place]])).item()
            if token == 7:
                break
            ids.append(token)
        assert line["tokens"] == len(ids) and line["complete"] == (len(ids) < limit)
        assert line["text"] == tokenizer.decode(ids[1:]).strip()


def test_rows_that_stay_keep_their_past():
    layer, seen = Preallocated(6), torch.randn(5, 2, 4, 3)
    layer.update(seen[:, :, :3], -seen[:, :, :3])
    layer.keep(torch.tensor([1, 2, 4]))
    keys, values = layer.update(seen[[1, 2, 4], :, 3:], -seen[[1, 2, 4], :, 3:])
    assert torch.equal(keys, seen[[1, 2, 4]]) and torch.equal(values, -keys) and layer.get_seq_length() == 4
    assert keys.data_ptr() == layer.keys.data_ptr()


def test_streams_belong_to_documents():
    whole, part = row_generators(3, 6), row_generators_from(3, 4, 2)
    assert np.array_equal([s.random(4) for s in whole[4:]], [s.random(4) for s in part])


def test_a_corpus_is_continued_and_repeatable(tmp_path, capsys):
    save_teacher("llama", tmp_path / "teacher")
    command = ["corpus", "--teacher", str(tmp_path / "teacher"), "--batch-size", "4", "--max-tokens", "12", "--quiet"]
    assert main([*command, "--output", str(tmp_path / "whole"), "--documents", "10", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    lines = (tmp_path / "whole" / "corpus.jsonl").read_text("utf-8").splitlines()
    assert summary["documents"] == len(lines) == 10
    assert summary["tokens"] == sum(json.loads(line)["tokens"] for line in lines)
    # Stopped after its first batch, then asked for six, then for all.
    for documents in ("4", "6", "10"):
        assert main([*command, "--output", str(tmp_path / "parts"), "--documents", documents]) == 0
    assert (tmp_path / "parts" / "corpus.jsonl").read_text("utf-8").splitlines() == lines
    done = spikeopd.sample_corpus(
        str(tmp_path / "teacher"), tmp_path / "parts", documents=10, batch_size=4, max_tokens=12, quiet=True
    )
    assert done["sampled_now"] == 0 and done["documents"] == 10
    assert main([*command, "--output", str(tmp_path / "parts"), "--seed", "1"]) == 2
    assert "was begun with another seed; give another --output" in capsys.readouterr().err
    # It is a source of training text.
    from spikeopd.text.sources import open_source

    source = open_source(f"jsonl:{tmp_path / 'whole' / 'corpus.jsonl'}")
    assert sum(1 for split in ("train", "validation") for _ in source.documents(split)) <= 10


def test_a_teacher_in_bf16_tells_nearly_the_same_and_is_not_mixed_with_the_other(tmp_path):
    save_teacher("llama", tmp_path / "teacher")
    texts = {}
    for precision in ("fp32", "bf16"):
        options = dict(documents=64, max_tokens=40, precision=precision, quiet=True)
        spikeopd.sample_corpus(str(tmp_path / "teacher"), tmp_path / precision, **options)
        texts[precision] = (tmp_path / precision / "corpus.jsonl").read_text("utf-8").splitlines()
    same = [a == b for a, b in zip(texts["fp32"], texts["bf16"], strict=True)]
    assert 16 <= sum(same) < 64  # the same random numbers meet a distribution rounded to eight bits
    with pytest.raises(InputError, match="was begun with another teacher and precision"):
        spikeopd.sample_corpus(str(tmp_path / "teacher"), tmp_path / "bf16", documents=64, max_tokens=40, quiet=True)
    settings = tmp_path / "fp32" / "settings.json"  # as an older version wrote them
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "precision"}))
    options = dict(documents=64, max_tokens=40, quiet=True)
    assert spikeopd.sample_corpus(str(tmp_path / "teacher"), tmp_path / "fp32", **options)["sampled_now"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "precision is fp16; fp32 or bf16"),
        ({"documents": 0}, "documents is 0; at least 1"),
        ({"temperature": 0.0}, "temperature is 0.0; above 0"),
        ({"max_tokens": 1}, "max_tokens is 1; at least 2"),
        ({"seed": -1}, "seed is -1; from 0"),
        ({"max_tokens": 49}, "max_tokens is 49, the teacher reads 48"),
    ],
)
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, options, message):
    save_teacher("llama", tmp_path / "teacher")
    with pytest.raises((ConfigError, InputError), match=message):
        spikeopd.sample_corpus(str(tmp_path / "teacher"), tmp_path / "out", quiet=True, **options)
    assert not (tmp_path / "out").exists()


PART = "parts/000000.jsonl"
DAMAGE = {
    "a letter": lambda file: file.write_text(file.read_text().replace('"tokens": ', '"tokens": 1', 1)),
    "emptied": lambda file: os.truncate(file, 0),
    "cut": lambda file: os.truncate(file, 30),
    "not utf-8": lambda file: file.write_bytes(b"\xff"),
    "other kinds": lambda file: file.write_text('{"text": 1, "complete": "x", "tokens": null}\n' * 2),
    "endless digits": lambda file: file.write_text('{"tokens": ' + "9" * 5000 + "}\n"),
    "holes": lambda file: os.truncate(file, 1 << 40),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    save_teacher("llama", folder / "teacher")
    return folder


def sample(folder, name, documents=4):
    """Half of a corpus is done already: (summary, its lines)."""
    done = spikeopd.sample_corpus(
        str(folder / "teacher"), folder / name, documents=documents, batch_size=2, max_tokens=8, quiet=True
    )
    return done, (folder / name / "corpus.jsonl").read_text("utf-8")


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_batch_is_sampled_again_and_said(sampled, kind, capsys):
    whole = sample(sampled, "whole")[1]
    sample(sampled, kind, documents=2)
    DAMAGE[kind](sampled / kind / PART)
    done, lines = sample(sampled, kind)
    assert lines == whole and done["sampled_now"] == done["tokens"] and done["documents"] == 4
    assert "000000.jsonl is damaged" in capsys.readouterr().err


def test_fewer_documents_than_a_batch_has_are_not_more(sampled):
    whole = sample(sampled, "fewer")[1].splitlines()
    assert sample(sampled, "fewer", documents=3)[1].splitlines() == whole[:3]


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"[" * 200_000, b"9" * 5000])
def test_settings_that_cannot_be_read_are_one_line(sampled, content):
    sample(sampled, "settings")
    kept = (sampled / "settings" / "settings.json").read_bytes()
    (sampled / "settings" / "settings.json").write_bytes(content)
    with pytest.raises(InputError, match=r"settings.json: damaged|was begun with another"):
        sample(sampled, "settings")
    (sampled / "settings" / "settings.json").write_bytes(kept)


def test_a_document_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path):
    lines = [{"text": "a\x85b\u2028c", "complete": True, "tokens": 3}]
    _write_part(tmp_path / "p.jsonl", lines)
    assert _read_part(tmp_path / "p.jsonl", 1, pytest.fail) == lines
