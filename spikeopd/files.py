"""Finding model folders, and writing files so that nothing half-written is ever seen. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spikeopd.errors import cannot_write

# Where a model lies in a run folder of spikeopd-train: Stage 2's student, or Stage 1's where there was no Stage 2.
MODEL_FOLDERS = ("", "final", "stage1/final")


def find_model(path: Path | str, names: Sequence[str] = ("config.json",)) -> Path | None:
    """The folder with one of the files `names`: the path itself, or the place of the student in a run folder."""
    folders = (Path(path) / place for place in MODEL_FOLDERS)
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Write through a temporary file in the same folder and rename: the old file or the new one, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_text(path: Path | str, text: str) -> Path:
    return write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_new_directory(path: Path | str, option: str) -> None:
    """Refuse, before the work, a `path` that `new_directory` could not make after it. Leaves nothing behind."""
    path = Path(path)
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    try:
        # Tried out: permission bits say nothing about /proc, a full disk or a read-only mount.
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix=f".{path.name}."))
    except OSError as error:
        raise cannot_write(path, option, error) from error


@contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well and vanishes when it does not.

    An existing `path` is replaced only at the very end, and is put back if that fails.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    os.chmod(temporary, 0o777 & ~_umask())
    try:
        yield temporary
        if path.exists():
            _exchange(path, temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _exchange(path: Path, new: Path) -> None:
    """Put `new` in the place of `path`. No system call swaps two folders everywhere, so the old one steps aside."""
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    try:
        os.replace(path, aside / "old")
        os.replace(new, path)
    except BaseException:
        if new.exists() and os.path.lexists(aside / "old"):
            os.replace(aside / "old", path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(aside)


def sha256(path: Path | str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
