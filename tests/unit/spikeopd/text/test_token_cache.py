"""Token cache and batches: made once, equal for everyone, and reproducible from (seed, step)."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from spikeopd.errors import ConfigError, InputError
from spikeopd.sampling import LARGEST_SEED
from spikeopd.text import tokens as data_module
from spikeopd.text.tokenizer import load_tokenizer
from spikeopd.text.tokens import TokenData, batch, default_cache_dir, prepare, sequential_windows


class Documents:
    """A source made of given documents; counts how often it is read."""

    unbounded = False

    def __init__(self, texts, key="k", pause=0.0):
        self.name, self.texts, self.key, self.pause, self.reads = "documents", texts, key, pause, 0

    def documents(self, split):
        self.reads += 1
        for text in self.texts:
            time.sleep(self.pause)
            yield text

    def fingerprint(self):
        return self.key


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def stream(tokens, **changes) -> TokenData:
    return TokenData(np.asarray(tokens), "f", "source", "train", 1, 1, **changes)


def test_documents_are_joined_by_the_end_token(tokenizer, tmp_path):
    data = prepare(Documents(["one two", "three"]), tokenizer, "train", tmp_path)
    one, three = (tokenizer.encode(t, add_special_tokens=False) for t in ("one two", "three"))
    assert data.tokens.tolist() == [2, *one, 2, *three, 2]
    assert (data.documents, data.text_bytes, data.split, data.source) == (2, 12, "train", "documents")
    assert data.tokens.dtype == np.uint16 and isinstance(data.tokens, np.memmap)


def test_many_documents_cross_the_group_boundary(tokenizer, tmp_path):
    texts = [f"document number {n}" for n in range(2 * data_module.DOCUMENTS_PER_CALL + 3)]
    data = prepare(Documents(texts), tokenizer, "train", tmp_path)
    assert tokenizer.decode(data.tokens) == "".join(texts)
    assert data.documents == len(texts)


def test_second_use_reads_the_cache(tokenizer, tmp_path):
    source = Documents(["some text"])
    first = prepare(source, tokenizer, "train", tmp_path)
    again = prepare(source, tokenizer, "train", tmp_path)
    assert source.reads == 1
    assert again.fingerprint == first.fingerprint and again.tokens.tolist() == first.tokens.tolist()


def test_other_text_tokenizer_split_or_limit_is_another_cache(tokenizer, tmp_path):
    class Other:
        fingerprint, vocab_size, bos_token_id, eos_token_id = "other", 70_000, 2, 2

        def encode_batch(self, texts, add_special_tokens):
            return [[69_999] for _ in texts]

    keys = {
        prepare(Documents(["text"]), tokenizer, "train", tmp_path).fingerprint,
        prepare(Documents(["text"], key="changed"), tokenizer, "train", tmp_path).fingerprint,
        prepare(Documents(["text"]), tokenizer, "validation", tmp_path).fingerprint,
        prepare(Documents(["text"]), tokenizer, "train", tmp_path, max_tokens=3).fingerprint,
        (wide := prepare(Documents(["text"]), Other(), "train", tmp_path)).fingerprint,
    }
    assert len(keys) == 5
    assert wide.tokens.dtype == np.uint32 and wide.tokens.tolist() == [2, 69_999, 2]


def test_a_damaged_cache_is_made_again_and_said(tokenizer, tmp_path, capsys):
    source = Documents(["some text to be damaged"])

    def content():
        data = prepare(source, tokenizer, "train", tmp_path)
        return data.tokens.tolist(), data.text_bytes, data.documents

    first = content()
    (path,) = tmp_path.glob("*.npy")
    good, meta = path.read_bytes(), path.with_suffix(".json")
    said = json.loads(meta.read_text())
    flipped = good[:-2] + bytes([good[-2] ^ 1]) + good[-1:]
    damages = [
        *((path, damage) for damage in (b"", b"junk", good[:-3], flipped, good + b"x")),
        *((meta, damage) for damage in (b"{}", b"null", b"[" * 100_000, b"", b"\xff", b"1" * 5000)),
        *((meta, json.dumps(said | {key: 7}).encode()) for key in ("documents", "text_bytes", "fingerprint", "sha256")),
    ]
    for file, damage in damages:
        file.write_bytes(damage)
        assert content() == first, damage[:50]
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "is damaged" in err and "tokenised again" in err
    assert source.reads == 1 + len(damages)


def test_a_failure_leaves_nothing_half_written(tokenizer, tmp_path):
    class Breaks(Documents):
        def documents(self, split):
            yield "first"
            raise InputError("the disk went away")

    with pytest.raises(InputError, match="the disk went away"):
        prepare(Breaks([]), tokenizer, "train", tmp_path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def _prepare_slowly(folder, texts, counter):
    source = Documents(texts, pause=0.002)
    data = prepare(source, load_tokenizer(), "train", folder)
    with counter.get_lock():
        counter.value += source.reads
    assert data.documents == len(texts)


def test_two_processes_tokenise_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    texts = [f"text {n}" for n in range(100)]
    workers = [context.Process(target=_prepare_slowly, args=(tmp_path, texts, counter)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert counter.value == 1


def test_a_killed_process_blocks_nobody_and_its_leftovers_go(tokenizer, tmp_path):
    context = multiprocessing.get_context("fork")
    texts = [f"text {n}" for n in range(400)]
    worker = context.Process(target=_prepare_slowly, args=(tmp_path, texts * 20, context.Value("i", 0)))
    worker.start()
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob(".*.npy.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert list(tmp_path.glob(".*.npy.*"))  # what the killed process left
    prepare(Documents(texts), tokenizer, "train", tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".lock", ".npy"]


@pytest.mark.parametrize("limit", [None, 900])
def test_work_that_was_cut_short_goes_on_where_its_last_note_was_made(tokenizer, tmp_path, monkeypatch, limit):
    texts = [f"document number {n}" for n in range(3 * data_module.DOCUMENTS_PER_CALL)]
    whole = prepare(Documents(texts), tokenizer, "train", tmp_path / "whole", limit)
    monkeypatch.setattr(data_module, "SECONDS_BETWEEN_LINES", 0.0)  # a note after each group

    class Cut(Documents):
        def documents(self, split):
            for number, text in enumerate(self.texts):
                if number == 2 * data_module.DOCUMENTS_PER_CALL - 1:
                    raise KeyboardInterrupt
                yield text

    if limit is None:
        with pytest.raises(KeyboardInterrupt):
            prepare(Cut(texts), tokenizer, "train", tmp_path / "cut")
        calls, encode = [], tokenizer.encode_batch
        monkeypatch.setattr(
            type(tokenizer), "encode_batch", lambda self, texts, **k: calls.append(texts) or encode(texts, **k)
        )
        again = prepare(Documents(texts), tokenizer, "train", tmp_path / "cut")
        assert calls[0][0] == texts[data_module.DOCUMENTS_PER_CALL]  # nothing is tokenised twice
    else:
        again = prepare(Documents(texts), tokenizer, "train", tmp_path / "cut", limit)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert (again.documents, again.text_bytes) == (whole.documents, whole.text_bytes)
    assert sorted(p.suffix for p in (tmp_path / "cut").iterdir()) == [".json", ".lock", ".npy"]


def test_streams_stop_at_the_token_limit(tokenizer, tmp_path):
    class Endless(Documents):
        unbounded = True

        def documents(self, split):
            while True:
                yield "word"

    with pytest.raises(
        InputError, match=r"documents: a streamed dataset needs a limit; set data.max_tokens, e.g. 100000000"
    ):
        prepare(Endless([]), tokenizer, "train", tmp_path)
    assert 100 <= len(prepare(Endless([]), tokenizer, "train", tmp_path, max_tokens=100)) < 110


def test_long_work_says_how_far_it_is(tokenizer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(data_module, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO, logger="spikeopd"):
        prepare(Documents(["text"]), tokenizer, "train", tmp_path)
    assert caplog.messages[0].startswith("tokenising documents (train) into ")
    assert caplog.messages[1].startswith("tokenising documents (train): ") and "M tokens" in caplog.messages[1]


def test_no_text_and_no_room_are_clear(tokenizer, tmp_path):
    with pytest.raises(
        InputError, match=r"documents: no text in its validation part; give more documents, or another source"
    ):
        prepare(Documents([]), tokenizer, "validation", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"token cache .*file/cache: Not a directory; set SPIKEOPD_CACHE to a folder"):
        prepare(Documents(["x"]), tokenizer, "train", tmp_path / "file" / "cache")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path, tokenizer):
    monkeypatch.setenv("SPIKEOPD_CACHE", str(tmp_path / "here"))
    prepare(Documents(["text"]), tokenizer, "train")
    (meta,) = (tmp_path / "here").glob("*.json")
    assert json.loads(meta.read_text())["source"] == "documents"
    monkeypatch.delenv("SPIKEOPD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "spikeopd"


def test_batches_follow_from_seed_and_step_alone():
    data = stream(np.arange(1000, dtype=np.uint16))
    later = batch(data, batch_size=4, length=8, seed=3, step=7)
    for step in range(7):
        batch(data, batch_size=4, length=8, seed=3, step=step)
    assert np.array_equal(batch(data, batch_size=4, length=8, seed=3, step=7), later)
    assert later.shape == (4, 8) and later.dtype == np.int64
    assert (np.diff(later) == 1).all()  # windows are contiguous
    # Written down once: the same on every machine, or a resumed run would see other data.
    assert later[:, 0].tolist() == EXPECTED_STARTS


def test_seeds_and_steps_give_different_batches():
    data = stream(np.arange(60_000, dtype=np.uint16))
    starts = {
        tuple(batch(data, batch_size=2, length=2, seed=seed, step=step)[:, 0])
        for seed in range(10)
        for step in range(10)
    }
    assert len(starts) == 100


@pytest.mark.parametrize("seed", [-1, 2**64, 10**23])
def test_a_seed_beyond_the_generator_is_refused(seed):
    data = TokenData(np.arange(20, dtype=np.uint16), "", "numbers", "train", 1, 20)
    with pytest.raises(ConfigError, match="seed must lie between 0 and"):
        batch(data, batch_size=2, length=2, seed=seed, step=0)
    # Methods add to the user's seed: the largest one must leave room for that.
    assert batch(data, batch_size=2, length=2, seed=LARGEST_SEED + 1, step=0).shape == (2, 2)


def test_every_window_is_drawn_equally_often():
    data = stream(np.arange(12, dtype=np.uint16))
    starts = batch(data, batch_size=9000, length=4, seed=0, step=0)[:, 0]
    counts = np.bincount(starts, minlength=9)
    assert counts.shape == (9,) and counts.min() > 850 and counts.max() < 1150  # 1000 each, sd 30


def test_sequential_windows():
    data = stream(np.arange(10, dtype=np.uint16))
    assert sequential_windows(data, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sequential_windows(data, 4, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert sequential_windows(data, 10).shape == (1, 10)
    assert np.shares_memory(sequential_windows(data, 4), data.tokens)
    with pytest.raises(InputError, match="stride 5 must lie between 1 and the window length 4"):
        sequential_windows(data, 4, 5)


@pytest.mark.parametrize("take", [lambda d, n: batch(d, batch_size=1, length=n, seed=0, step=0), sequential_windows])
def test_too_short_text(take):
    data = stream(np.arange(10, dtype=np.uint16))
    assert take(data, 10).shape == (1, 10)
    with pytest.raises(
        InputError, match=r"source \(train\): 10 tokens are too short for one window of 11; give more text"
    ):
        take(data, 11)
    with pytest.raises(InputError, match="window length 0 must be at least 1"):
        take(data, 0)


EXPECTED_STARTS = [56, 159, 899, 817]
