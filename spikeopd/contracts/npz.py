"""Arrays of an .npz file that a stranger may have written: every size is checked before anything is allocated. numpy.

Nothing needs pickle. zipfile believes a central directory of any length and numpy any claimed shape, so both are
looked at here first.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spikeopd.contracts.model import Array
from spikeopd.errors import InputError, short
from spikeopd.files import regular_size

DIRECTORY_LIMIT = 1 << 20  # bytes of the list of members: some ten thousand of them
_END = struct.Struct("<4s4H2LH")  # the last record of a zip file


@contextmanager
def open_npz(path: Path | str, what: str, limit: int) -> Iterator[zipfile.ZipFile]:
    """The archive, at most `limit` bytes of it. Everything wrong in the block is an InputError that names `what`."""
    path = Path(path)
    try:
        try:
            size = regular_size(path)
        except FileNotFoundError:
            raise InputError(f"{what} {path}: there is no such file") from None
        if size > limit:
            raise ValueError(f"{size} bytes are too many, at most {limit} are read")
        with open(path, "rb") as file:
            _check_directory(file.seek(max(0, size - _END.size - 0xFFFF)), file.read())
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (OSError, EOFError, ValueError, TypeError, SyntaxError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{what} {path}: cannot be read ({short(error)})") from error
    except (zipfile.BadZipFile, zlib.error, KeyError, struct.error, AttributeError) as error:
        raise InputError(f"{what} {path}: damaged ({short(error)})") from error


def _check_directory(begin: int, tail: bytes) -> None:
    """zipfile reads as many bytes of members as this record says, or a record of zip64 before it."""
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise ValueError("not an .npz file")
    directory = _END.unpack_from(tail, at)[5]
    if directory > min(begin + at, DIRECTORY_LIMIT) or tail[max(0, at - 20) : at].startswith(b"PK\6\7"):
        raise ValueError("too many members, or a damaged list of them")


def read_array(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    room: int,
    fits: Callable[[np.dtype[np.generic], tuple[int, ...]], str],
) -> Array:
    """One member as an array of at most `room` bytes. fits: what is wrong with a dtype and shape; empty if nothing."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)  # type: ignore[no-untyped-call]
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {name!r}: version {version} of .npy")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        sizes, fortran, dtype = read(member)  # type: ignore[no-untyped-call]
        if any(type(n) is not int or not 0 <= n < 1 << 40 for n in sizes) or fortran and min(sizes, default=0) > 1:
            raise ValueError(f"array {name!r}: shape {short(sizes)}")
        if dtype.hasobject or (problem := fits(dtype, sizes)):
            raise ValueError(f"array {name!r}: {'objects' if dtype.hasobject else problem}")
        count = math.prod(sizes) * dtype.itemsize
        if count > min(room, info.file_size):
            raise ValueError(f"array {name!r} claims {count} bytes, more than the file can hold")
        data = member.read(count)
    return np.frombuffer(data, dtype).reshape(sizes)
