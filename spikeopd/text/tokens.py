"""Tokens on disk, tokenised once, and batches that follow from (seed, step) alone.

The cache is one memory-mapped `.npy` per (text, tokenizer, split), named by content: another text or another tokenizer
is another file, so a stale cache cannot be read. It is written beside its place and renamed, under a lock: of several
processes one tokenises and the others wait. A `.json` beside it holds a checksum over both; what fails it is made anew.
Work that was cut short goes on where its last note was made.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from spikeopd.errors import ConfigError, InputError, say
from spikeopd.files import read_json, sha256, write_json
from spikeopd.text.sources import Source, Split, open_source
from spikeopd.text.tokenizer import Tokenizer

log = logging.getLogger("spikeopd")
log.addHandler(logging.NullHandler())

DOCUMENTS_PER_CALL = 256
SECONDS_BETWEEN_LINES = 30.0
CACHE_VERSION = 1

Tokens = NDArray[Any]  # uint16 or uint32 on disk, int64 in batches


@dataclass(frozen=True, eq=False)
class TokenData:
    """The token stream of one split: `b document e b document e …`, or with one separator `e document e document e …`.

    b and e are the tokenizer's bos and eos; where they are the same token (OPT: `</s>`) it is the separator.

    fingerprint: key of text, tokenizer and split (a checkpoint stores it, so that a resume sees the same data).
    text_bytes: UTF-8 length of the text behind the tokens, for bits per byte.
    """

    tokens: Tokens
    fingerprint: str
    source: str
    split: str
    documents: int
    text_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


def default_cache_dir() -> Path:
    return Path(os.environ.get("SPIKEOPD_CACHE") or Path.home() / ".cache" / "spikeopd")


def prepare(
    source: Source | str,
    tokenizer: Tokenizer,
    split: Split,
    cache_dir: Path | str | None = None,
    max_tokens: int | None = None,
) -> TokenData:
    """Tokens of one split of a source, from the cache or tokenised now.

    max_tokens: stop after this many tokens (at the end of a document); streamed sources need it.
    """
    source = open_source(source) if isinstance(source, str) else source
    if source.unbounded and max_tokens is None:
        raise InputError(f"{source.name}: a streamed dataset needs a limit; set data.max_tokens, e.g. 100000000")
    folder = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    key = f"tokens {CACHE_VERSION} {source.fingerprint()} {tokenizer.fingerprint} {split} {max_tokens}"
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        key += " framed by both"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    path = folder / f"{split}-{fingerprint[:32]}.npy"
    found = _read(path, source.name, split, fingerprint, quiet=True)  # another process may be writing it
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                # Another process may have finished while this one waited.
                found = _read(path, source.name, split, fingerprint) or _write(
                    path, source, tokenizer, split, fingerprint, max_tokens
                )
        except OSError as error:
            raise InputError(
                f"token cache {folder}: {error.strerror or error}; set SPIKEOPD_CACHE to a folder with room"
            ) from error
    return found


def batch(data: TokenData, *, batch_size: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
    """Windows of `length` tokens drawn uniformly with replacement: int64 [batch_size, length].

    The generator is counter-based and keyed by (seed, step), so step 1000 needs no memory of the 999 before it.
    """
    if not 0 <= seed < 2**64:  # what the key holds; a seed derived from the user's may be beyond 2^63 - 1
        raise ConfigError(f"seed must lie between 0 and 2^63 - 1, got {seed}")
    starts_available = _windows_available(data, length)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    starts = generator.integers(0, starts_available, size=batch_size)
    return np.stack([data.tokens[start : start + length] for start in starts]).astype(np.int64)


def sequential_windows(data: TokenData, length: int, stride: int | None = None) -> Tokens:
    """Every window of `length` tokens, `stride` (default `length`) apart, in order: a view [windows, length].

    The last tokens that do not fill a window are left out. Convert a slice with `.astype(np.int64)` before use.
    """
    _windows_available(data, length)
    stride = stride or length
    if not 0 < stride <= length:
        raise InputError(f"stride {stride} must lie between 1 and the window length {length}, or tokens are left out")
    return np.lib.stride_tricks.sliding_window_view(data.tokens, length)[::stride]


def _windows_available(data: TokenData, length: int) -> int:
    if length < 1:
        raise InputError(f"window length {length} must be at least 1")
    if len(data) < length:
        raise InputError(
            f"{data.source} ({data.split}): {len(data)} tokens are too short for one window of {length}; "
            "give more text or a smaller data.sequence_length"
        )
    return len(data) - length + 1


# --- the cache -------------------------------------------------------------------------------------------------------


def _read(path: Path, name: str, split: str, fingerprint: str, *, quiet: bool = False) -> TokenData | None:
    """The cached tokens; None when there are none, or when the files are not what was written (which is said)."""
    if not path.is_file() or not path.with_suffix(".json").is_file():
        return None
    try:
        meta = read_json(path.with_suffix(".json"))
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if meta["fingerprint"] != fingerprint or path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError("it has another length")  # told before it is hashed
        if meta["sha256"] != _seal(meta, path):
            raise ValueError("its checksum differs")
        return TokenData(tokens, fingerprint, name, split, meta["documents"], meta["text_bytes"])
    except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, InputError):
        if not quiet:
            say(f"token cache {path} is damaged or of an older version; the text is tokenised again")
        return None


def _seal(meta: dict[str, Any], path: Path) -> str:
    """One checksum over the tokens and what is said of them."""
    said = json.dumps({name: value for name, value in meta.items() if name != "sha256"}, sort_keys=True)
    return hashlib.sha256(f"{sha256(path)} {said}".encode()).hexdigest()


def _write(
    path: Path, source: Source, tokenizer: Tokenizer, split: Split, fingerprint: str, max_tokens: int | None
) -> TokenData:
    temporary, note = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.partial.json")
    for leftover in path.parent.glob(f".{path.name}.*"):  # of a killed process; we hold the lock
        if leftover not in (temporary, note):
            leftover.unlink(missing_ok=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    log.info("tokenising %s (%s) into %s", source.name, split, path)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    opening, before = ([end], []) if begin == end else ([], [begin])
    try:
        count, documents, text_bytes, digest = _noted(temporary, note, fingerprint, dtype)
        with open(temporary, "r+b" if documents else "wb") as file:

            def put(values: list[int]) -> None:
                tokens = np.array(values, dtype=dtype)
                tokens.tofile(file)
                digest.update(tokens.tobytes())

            header_size = _write_header(file, dtype, 0)
            if documents:
                file.truncate(header_size + count * dtype.itemsize)
                file.seek(0, os.SEEK_END)
                log.info("tokenising %s (%s): goes on after %d documents", source.name, split, documents)
            else:
                put(opening)
                count = len(opening)
            last_line = time.monotonic()
            for texts in _groups(islice(source.documents(split), documents, None), DOCUMENTS_PER_CALL):
                if max_tokens is not None and count >= max_tokens:
                    break
                for text, ids in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
                    put([*before, *ids, end])
                    count += len(before) + len(ids) + 1
                    documents += 1
                    text_bytes += len(text.encode("utf-8"))
                    if max_tokens is not None and count >= max_tokens:
                        break
                if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                    last_line = time.monotonic()
                    file.flush()
                    os.fsync(file.fileno())
                    done = {"tokens": count, "documents": documents, "text_bytes": text_bytes}
                    write_json(note, {"fingerprint": fingerprint, "sha256": _note_seal(digest, done)} | done)
                    log.info(
                        "tokenising %s (%s): %d documents, %.1f M tokens", source.name, split, documents, count / 1e6
                    )
            if documents == 0:
                raise InputError(
                    f"{source.name}: no text in its {split} part; give more documents, or another source for it"
                )
            file.seek(0)
            if _write_header(file, dtype, count) != header_size:
                raise AssertionError("the .npy header changed its size")
            file.flush()
            os.fsync(file.fileno())
        meta = {
            "fingerprint": fingerprint,
            "source": source.name,
            "split": split,
            "tokenizer": tokenizer.fingerprint,
            "tokens": count,
            "documents": documents,
            "text_bytes": text_bytes,
        }
        write_json(path.with_suffix(".json"), meta | {"sha256": _seal(meta, temporary)})
        os.replace(temporary, path)
        note.unlink(missing_ok=True)
    except BaseException:
        if not note.is_file():  # nothing to go on from
            temporary.unlink(missing_ok=True)
        raise
    data = _read(path, source.name, split, fingerprint)
    if data is None:
        raise InputError(f"token cache {path} cannot be read back; check the disk, or set SPIKEOPD_CACHE elsewhere")
    return data


def _noted(temporary: Path, note: Path, fingerprint: str, dtype: np.dtype[Any]) -> tuple[int, int, int, Any]:
    """(tokens, documents, bytes of text, hash of the tokens) that work cut short has on disk, if it is what was
    written; zeros where there is none to go on from. Damaged tokens would be sealed with the rest and trained on.
    """
    digest = hashlib.sha256()
    try:
        found = read_json(note)
        done = {name: found[name] for name in ("tokens", "documents", "text_bytes")}
        if found["fingerprint"] == fingerprint and all(type(n) is int and n > 0 for n in done.values()):
            left = done["tokens"] * dtype.itemsize
            with open(temporary, "rb") as file:
                file.seek(_write_header(io.BytesIO(), dtype, 0))
                while left and (block := file.read(min(left, 1 << 20))):
                    digest.update(block)
                    left -= len(block)
            if not left and found["sha256"] == _note_seal(digest, done):
                return done["tokens"], done["documents"], done["text_bytes"], digest
    except (OSError, ValueError, TypeError, KeyError):
        pass
    note.unlink(missing_ok=True)
    return 0, 0, 0, hashlib.sha256()


def _note_seal(digest: Any, done: dict[str, Any]) -> str:
    return hashlib.sha256(f"{digest.hexdigest()} {json.dumps(done, sort_keys=True)}".encode()).hexdigest()


def _write_header(file: Any, dtype: np.dtype[Any], count: int) -> int:
    """The .npy header. numpy pads it so that a one-dimensional array can grow without moving its data."""
    description = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, description)  # type: ignore[no-untyped-call]
    return int(file.tell())


def _groups(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
