"""Where training text comes from: named sources of documents, each with a train and a validation part.

    python-docs               the English prose of every Python installation (the default; needs no download)
    text:PATH                 plain UTF-8 text, one document per file
    jsonl:PATH[#FIELD]        one JSON object per line
    parquet:PATH[#FIELD]      one row per document
    hf:OWNER/NAME[/CONFIG][@REVISION][#FIELD]   a Hugging Face dataset, streamed

PATH is a file, a folder or a glob; `.gz` is read directly; FIELD is `text` unless named. Benchmark data is refused
here, because every token that can reach a gradient comes through `open_source`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from spikeopd.errors import BackendMissing, InputError, install_command, short
from spikeopd.files import parse_json, regular_size
from spikeopd.text import python_docs
from spikeopd.text.guard import benchmark_name, benchmark_record, refuse

Split = Literal["train", "validation", "all"]

VALIDATION_BUCKETS = 20  # one document in twenty is validation text
DEFAULT_FIELD = "text"
LONGEST_DOCUMENT = 256 << 20  # characters; packed files can be a thousand times larger than they look
LONGEST_ROW = 64 << 20  # characters of a line of JSON


class Source(Protocol):
    """Documents of one named source. `unbounded` ones are streamed and need a token limit."""

    @property
    def name(self) -> str: ...

    @property
    def unbounded(self) -> bool: ...

    def documents(self, split: Split) -> Iterator[str]: ...

    def fingerprint(self) -> str: ...


def open_source(name: str) -> Source:
    """Open a source by name; missing files and benchmark data fail here, before anything is read."""
    if name == "python-docs":
        return PythonDocs()
    kind, _, rest = name.partition(":")
    if kind not in SOURCES or not rest:
        known = ", ".join(["python-docs", *(f"{kind}:…" for kind in SOURCES)])
        raise InputError(f"text source '{name}' is not known; use one of {known} (docs/data.md)")
    return SOURCES[kind](name, rest)


def in_split(key: str, split: Split) -> bool:
    """Deterministic and independent of order: a document keeps its side however the collection grows."""
    if split == "all":
        return True
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % VALIDATION_BUCKETS
    return (bucket == 0) == (split == "validation")


# --- python-docs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonDocs:
    """Topics of the language reference and the docstrings of the standard library, read without importing anything.

    A document is a topic or a module, and its *name* decides its side: an edited docstring in another Python version
    does not carry text from one side to the other. Paragraphs that were seen before are left out, because topics
    contain one another and modules share docstrings.
    """

    name: str = "python-docs"
    unbounded: bool = False

    def documents(self, split: Split) -> Iterator[str]:
        for key, text in python_docs.documents_once(python_docs.standard_library()):
            if in_split(key, split):
                yield text

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"python-docs {python_docs.VERSION}".encode())
        stdlib = python_docs.standard_library()
        for path in [stdlib / "pydoc_data/topics.py", *python_docs.modules(stdlib)]:
            digest.update(path.relative_to(stdlib).as_posix().encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()


# --- files -----------------------------------------------------------------------------------------------------------


class _Files:
    """Files, a folder or a glob, in sorted order, keyed by their bytes."""

    unbounded = False
    suffixes: tuple[str, ...]

    def __init__(self, name: str, rest: str) -> None:
        self.name = name
        path, self.field = _split_field(rest)
        refuse(path, benchmark_name(path))
        self.paths = self._expand(Path(path).expanduser())
        for file in self.paths:
            refuse(str(file), benchmark_name(str(file)) or benchmark_name(str(file.resolve())))

    def _expand(self, path: Path) -> list[Path]:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.name.endswith(self.suffixes) and p.is_file())
            if not found:
                raise InputError(f"{self.name}: the folder {path} holds no {' or '.join(self.suffixes)} file")
        elif path.exists():
            found = [path]
        elif glob.has_magic(str(path)):
            found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
            if not found:
                raise InputError(f"{self.name}: no file matches {path}; check the pattern and quote it in the shell")
        else:
            raise InputError(f"{self.name}: no such file {path}; check the path")
        try:
            empty = not any([regular_size(p) for p in found])  # of every file: all of them are hashed
        except ValueError as error:
            raise InputError(f"{self.name}: {error}") from error
        if empty:
            raise InputError(f"{self.name}: {found[0]} is empty; give a file with text in it")
        return found

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{type(self).__name__} {self.field}".encode())
        for path in self.paths:
            digest.update(b"\0file\0")
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        raise AssertionError("a source with records defines this")

    def documents(self, split: Split) -> Iterator[str]:
        for path in self.paths:
            for where, record in self.records(path):
                text = _field_text(where, record, self.field, self.name)
                if text.strip() and in_split(text, split):
                    yield text


class TextFiles(_Files):
    """One document per file; the last twentieth of each file, from a line start on, is its validation part."""

    suffixes = (".txt", ".txt.gz", ".md", ".rst")

    def documents(self, split: Split) -> Iterator[str]:
        for path in self.paths:
            text = _whole(path)
            for record in _json_records(text):
                refuse(str(path), benchmark_record(record))
            part = _contiguous_part(text, split)
            if part.strip():
                yield part


class JsonlFiles(_Files):
    suffixes = (".jsonl", ".jsonl.gz", ".ndjson")

    def records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise InputError(
                    f"{where}: not a JSON object ({short(error)}); one object per line is expected"
                ) from error
            if not isinstance(record, dict):
                raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}")
            yield where, record


class ParquetFiles(_Files):
    suffixes = (".parquet",)

    def records(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise BackendMissing(f"{self.name}: reading Parquet needs pyarrow: {install_command('train')}") from error
        try:
            file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: not a readable Parquet file ({_first_line(error)})") from error
        columns = dict.fromkeys(file.schema_arrow.names)
        refuse(str(path), benchmark_record(columns))
        if self.field not in columns:
            _field_text(str(path), columns, self.field, self.name)  # raises, and names the columns there are
        row = 0
        try:
            for batch in file.iter_batches(batch_size=64, columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield f"{path} row {row}", {self.field: value}
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}: damaged behind row {row} ({short(_first_line(error))}); fetch it again"
            ) from error


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        while line := file.readline(LONGEST_ROW):
            if len(line) == LONGEST_ROW:
                raise InputError(f"{path}: a line has more than {LONGEST_ROW} characters; one document per line")
            yield line


def _whole(path: Path) -> str:
    with _opened(path) as file:
        text: str = file.read(LONGEST_DOCUMENT + 1)
    if len(text) > LONGEST_DOCUMENT:
        raise InputError(
            f"{path}: more than {LONGEST_DOCUMENT} characters in one document; use jsonl: or several files"
        )
    return text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A text file, packed or not; what goes wrong with it in the block is one line."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        regular_size(path)
        with opener(path, "rt", encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    except ValueError as error:
        raise InputError(f"{path}: cannot be read ({short(error)}); check the file") from error


def _contiguous_part(text: str, split: Split) -> str:
    if split == "all":
        return text
    cut = len(text) * (VALIDATION_BUCKETS - 1) // VALIDATION_BUCKETS
    cut = text.find("\n", cut) + 1 or cut
    return text[:cut] if split == "train" else text[cut:]


def _split_field(rest: str) -> tuple[str, str]:
    path, hash_sign, field = rest.rpartition("#")
    return (path, field) if hash_sign and re.fullmatch(r"\w+", field) else (rest, DEFAULT_FIELD)


def _field_text(where: str, record: Mapping[str, Any], field: str, name: str) -> str:
    refuse(where, benchmark_record(record))
    if field not in record:
        fields = short(", ".join(map(str, record))) or "no field"
        raise InputError(f"{where}: no field '{field}' (there is: {fields}); name it: {name.partition('#')[0]}#FIELD")
    value = record[field]
    if not isinstance(value, str):
        raise InputError(f"{where}: field '{field}' holds {type(value).__name__}, not text; name a text field: …#FIELD")
    return value


def _json_records(text: str) -> Iterator[Mapping[str, Any]]:
    """Objects of a text that is JSON lines or a JSON array in disguise."""
    for part in [text] if text.lstrip().startswith("[") else text.splitlines():
        if part.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                content = parse_json(part)
                entries = content if isinstance(content, list) else [content]
                yield from (entry for entry in entries if isinstance(entry, dict))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- Hugging Face datasets -------------------------------------------------------------------------------------------


class HubDataset:
    """The `train` part of a dataset on the hub, streamed; documents are divided by the hash of their text.

    Its key is its name (and revision, when pinned with @): the content of a stream cannot be hashed before it is read.
    """

    unbounded = True

    def __init__(self, name: str, rest: str) -> None:
        self.name = name
        path, self.field = _split_field(rest)
        path, _, self.revision = path.partition("@")
        parts = path.split("/")
        if not 2 <= len(parts) <= 3 or not all(parts):
            raise InputError(f"{name}: expected hf:OWNER/NAME[/CONFIG], e.g. hf:HuggingFaceFW/fineweb-edu/sample-10BT")
        refuse(name, benchmark_name(path))
        self.dataset = "/".join(parts[:2])
        self.config = parts[2] if len(parts) == 3 else None

    def fingerprint(self) -> str:
        key = f"hf {self.dataset} {self.config} {self.revision} {self.field}"
        return hashlib.sha256(key.encode()).hexdigest()

    def documents(self, split: Split) -> Iterator[str]:
        number = 0
        for number, record in enumerate(self._rows(), start=1):
            text = _field_text(f"{self.name} row {number}", record, self.field, self.name)
            if text.strip() and in_split(text, split):
                yield text
        if number == 0:
            raise InputError(f"{self.name}: the dataset is empty; check the configuration name")

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        try:
            import datasets
            import huggingface_hub
        except ImportError as error:
            raise BackendMissing(f"{self.name}: streaming needs datasets: {install_command('train')}") from error
        revision = self.revision or None
        try:
            # Asked first because it fails within seconds when there is no network; streaming would retry for minutes.
            huggingface_hub.HfApi().dataset_info(self.dataset, revision=revision, timeout=10)
            yield from datasets.load_dataset(
                self.dataset, self.config, split="train", streaming=True, revision=revision
            )
        except Exception as error:  # the hub client raises a dozen unrelated kinds
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise InputError(
                f"{self.name}: cannot be read from the Hugging Face hub ({reason}); "
                "check the name and the network, or give local files with text:, jsonl: or parquet:"
            ) from error


SOURCES: dict[str, Callable[[str, str], Source]] = {
    "text": TextFiles,
    "jsonl": JsonlFiles,
    "parquet": ParquetFiles,
    "hf": HubDataset,
}
