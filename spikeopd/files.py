"""Finding model folders, reading what strangers wrote, and writing so that nothing half-written is ever seen.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spikeopd.errors import InputError, cannot_write, short

# Where a model lies in a run folder of spikeopd-train: Stage 2's student, or Stage 1's where there was no Stage 2.
MODEL_FOLDERS = ("", "final", "stage1/final")
JSON_LIMIT = 64 << 20  # bytes; no file that is meant to be read whole is larger
JSON_VALUES = 1 << 22  # values in it: an empty list is three bytes in a file and sixty in memory
SUMS = "SHA256SUMS"
LOCK = ".running"
PARTIAL = ".partial"  # ends the name of everything that is not finished yet


def find_model(path: Path | str, names: Sequence[str] = ("config.json",)) -> Path | None:
    """The folder with one of the files `names`: the path itself, or the place of the student in a run folder."""
    folders = (Path(path) / place for place in MODEL_FOLDERS)
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def regular_size(path: Path) -> int:
    """Size of a regular file, in bytes; a pipe or a device would block the reader or never end.

    A large file that is nearly all holes takes no room and hours to read: it is refused.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a regular file")
    if info.st_size > 1 << 30 and _nearly_all_holes(path, info.st_size):
        raise ValueError(f"{info.st_size} bytes, nearly all of them holes")
    return info.st_size


def _nearly_all_holes(path: Path, size: int) -> bool:
    """Whether less than a 64th was ever written, by the first thousand stretches of data."""
    place = written = 0
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(1000):
            start = os.lseek(handle, place, os.SEEK_DATA)
            place = os.lseek(handle, start, os.SEEK_HOLE)
            written += place - start
            if written * 64 >= size:
                return False
    except OSError as error:
        if error.errno != errno.ENXIO:  # a file system that does not know; otherwise no data follows
            return False
        place = size
    finally:
        os.close(handle)
    return written * 64 < place


def machine_memory() -> int:
    """Bytes of memory of this machine: what has to be held whole cannot be larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_text(path: Path | str, limit: int = JSON_LIMIT) -> str:
    """A UTF-8 text file of at most `limit` bytes. Everything wrong with it is a ValueError or an OSError."""
    path = Path(path)
    if (size := regular_size(path)) > limit:
        raise ValueError(f"{size} bytes are too many, at most {limit} are read")
    return path.read_bytes().decode("utf-8")


def parse_json(text: str) -> Any:
    """JSON as strangers write it: what Python cannot hold (deep nesting, endless digits) is a ValueError too.

    A lone surrogate (`"\\ud800"`) is no text: it could be neither printed nor written, so it is refused here.
    """
    if len(text) > JSON_VALUES and sum(map(text.count, ",[{")) > JSON_VALUES:
        raise ValueError(f"more than {JSON_VALUES} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # UnicodeEncodeError is a ValueError
    return value


def read_json(path: Path | str, limit: int = JSON_LIMIT) -> Any:
    """`parse_json` of `read_text`."""
    return parse_json(read_text(path, limit))


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Write through a temporary file in the same folder and rename: the old file or the new one, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
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
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix=f".{path.name}.", suffix=PARTIAL))
    except OSError as error:
        raise cannot_write(path, option, error) from error


@contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well and vanishes when it does not.

    An existing `path` is replaced only at the very end, and is put back if that fails. All files get the mode that
    the umask asks for, whichever library wrote them, and reach the disk before the folder gets its name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL))
    try:
        yield temporary
        mask = _umask()
        for entry in (temporary, *temporary.rglob("*")):
            os.chmod(entry, (0o777 if entry.is_dir() else 0o666) & ~mask)
            _sync(entry)
        if path.exists():
            _exchange(path, temporary)
        else:
            os.replace(temporary, path)
        _sync(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # Writers in Rust (safetensors) have their own exceptions for a full disk.
        if not isinstance(error, OSError) and (code := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise


def _exchange(path: Path, new: Path) -> None:
    """Put `new` in the place of `path`. No system call swaps two folders everywhere, so the old one steps aside."""
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old.", suffix=PARTIAL))
    try:
        os.replace(path, aside / path.name)
        os.replace(new, path)
    except BaseException:
        if new.exists() and os.path.lexists(aside / path.name):
            os.replace(aside / path.name, path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(aside)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path | str) -> list[Path]:
    """Remove what killed processes left half-written anywhere below `folder`; nobody else may be writing there.

    A process killed between the two steps of an exchange left the old folder aside: it gets its place back.
    """
    ours = re.compile(rf"\..+{re.escape(PARTIAL)}|\.update-\d{{6}}\..+")
    found = sorted(path for path in Path(folder).rglob(".*") if ours.fullmatch(path.name))
    for path in found:
        aside = re.fullmatch(rf"\.(.+)\.old\.[^.]+{re.escape(PARTIAL)}", path.name)
        linked = path.is_symlink()  # by somebody else, to a place that is not ours
        if aside and not linked and (path / aside[1]).is_dir() and not path.with_name(aside[1]).exists():
            os.replace(path / aside[1], path.with_name(aside[1]))
        remove_tree(path)
    return found


def remove_tree(path: Path) -> None:
    """Remove a file, a folder, or a link alone: what it points to is not ours."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- checksums -------------------------------------------------------------------------------------------------------


def write_sums(folder: Path) -> None:
    """SHA256SUMS over every file of a folder, in the form that `sha256sum --check` reads."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    write_text(folder / SUMS, "".join(f"{sha256(folder / name)}  {name}\n" for name in names))


def check_sums(folder: Path, most: int) -> str:
    """What is wrong with the files of a folder by its SHA256SUMS; empty if nothing is.

    most: bytes that a file of it may have. More are not read: a terabyte of holes would be hashed for half an hour.
    """
    try:
        lines = read_text(folder / SUMS, 1 << 20).splitlines()
    except FileNotFoundError:
        return f"there is no {SUMS}"
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read ({short(error)})"
    listed = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line)
        if match is None:
            return f"{SUMS} is damaged"
        listed[match[2]] = match[1]
    try:
        present = {path.name for path in folder.iterdir()} - {SUMS}
        if odd := sorted(listed.keys() ^ present):
            return f"{odd[0]} is {'missing' if odd[0] in listed else f'not in {SUMS}'}"
        for name, digest in listed.items():
            if (size := regular_size(folder / name)) > most:
                return f"{name}: {size} bytes, at most {most} belong here"
            if sha256(folder / name) != digest:
                return f"{name}: sha256 differs"
    except (OSError, ValueError) as error:
        return short(error)
    return ""


def sha256(path: Path | str) -> str:
    """Of a regular file; anything else is refused before it is opened."""
    digest = hashlib.sha256()
    try:
        regular_size(Path(path))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- one process per folder ------------------------------------------------------------------------------------------


@contextmanager
def sole_process(folder: Path) -> Iterator[None]:
    """Be the only process at work in `folder`; another one is refused by name. The lock ends with its process.

    A file system without locks (some network mounts) is used without one.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        handle = _open_lock(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 300).decode("utf-8", "replace").strip() or "another process"
            os.close(handle)
            raise InputError(f"{folder}: {short(owner)} is at work here; wait for its end, or stop it") from None
        except OSError:
            break
        # The one before may have removed the file between our opening it and its own end.
        if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
            break
        os.close(handle)
    try:
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _open_lock(path: Path) -> int:
    """The lock file is emptied and written, so a link in a stranger's folder must not lead to a file of the user."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise InputError(f"{path}: a lock is a file, and this is none; remove it") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{path}: a lock is a file, and this is none; remove it")
    return handle


class PrivateFolder:
    """A temporary folder that is removed by `cleanup`, or when a process with the same prefix starts after a crash."""

    def __init__(self, prefix: str) -> None:
        import fcntl

        _sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._handle = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks is never swept
            fcntl.flock(self._handle, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _sweep(prefix: str) -> None:
    """Remove the folders whose processes are gone: their locks went with them."""
    import fcntl

    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or just removed by another process
            if time.time() - path.stat().st_mtime < 60:  # it may be a moment before its owner locks it
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
