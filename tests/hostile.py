"""Files as no friend writes them, for every reader: whole documents, single fields, and random mutations.

`READERS` (tests/readers.py) names each reader with a good file; `corpus(reader)` yields the variants of it.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bundle_mutations import HOSTILE, _paths
from readers import READERS

from spikeopd.errors import SpikeOPDError

LAUGHS = "a: &a [x, x]\n" + "".join(f"k{n}: &k{n} [*{'a' if n == 0 else f'k{n - 1}'}, *a]\n" for n in range(40))

DOCUMENTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(4096),
    "not utf-8": b"\xff\xfe\x00\xd8",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "number": b"-1e999",
    "nan": b"NaN",
    "string": b'"x"',
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "5,000 digits": b"9" * 5000,
    "5,000 digits in a field": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"schema": "\\ud800"}',
    "surrogate key": b'{"\\udc00": 1}',
    "control characters": b'{"schema": "\\u001b]0;x\\u0007\\u009b2J"}',
    "long string": b'{"schema": "' + b"x" * 1_000_000 + b'"}',
    "long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "many keys": json.dumps({str(n): n for n in range(50_000)}).encode(),
    "repeated keys": b'{"schema": 1, "schema": 2}',
    "torn": b'{"schema": "spikeopd',
    "bom": b"\xef\xbb\xbf{}",
    "yaml laughs": LAUGHS.encode(),
    "yaml object": b"!!python/object/apply:os.system ['touch ran']",
    "pickle": b"cos\nsystem\n(S'touch ran'\ntR.",
    "zip": b"PK\x03\x04" + bytes(100),
    "html": b"<!--<script>alert(1)</script>",
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


# What may stand in a file's place and is none, or is one of holes.
PLACES: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of holes": _hole,
}


def corpus(name: str, good: bytes) -> Iterator[tuple[str, bytes]]:
    """(what it is, content) of every variant of one reader's file."""
    yield from DOCUMENTS.items()
    try:
        content = json.loads(good)
    except ValueError:
        return
    places = _paths(content)
    rng = random.Random(name)
    for path in places if len(places) <= 12 else rng.sample(places, 12):
        for value in HOSTILE:
            yield f"{'.'.join(map(str, path))[:60]} = {value!r:.30}", _changed(content, path, value)


def meet(name: str, place: Path, mutations: int) -> int:
    """A reader against all of it, for a process of its own: 0 and the counts in found.json, or 1 and what went wrong.

    The process may take 2 GiB more than it has, and ends (99) at the first attempt to run something.
    """
    reader = READERS[name]
    folder, file = place / "try", place / "try" / reader.file
    (place / "good").mkdir()
    reader.make(place / "good")

    def renew() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / "good", folder)

    def tell(**found: Any) -> int:
        (place / "found.json").write_text(json.dumps(found))
        return int("executions" not in found)

    tell()
    renew()
    reader.read(folder)  # the good one is read, and what is imported is imported
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # lines that are said, of which nobody reads so many
    good = (place / "good" / reader.file).read_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + (2 << 30),) * 2)
    watching = _nothing_runs()
    counts, slowest, rng = Counter({"read": 0, "refused": 0}), 0.0, random.Random(name)
    mutants = ((f"mutation {number}", mutated(good, rng)) for number in range(mutations))
    for kind, content in itertools.chain(PLACES.items(), corpus(name, good), mutants):
        if reader.fresh or not isinstance(content, bytes):
            renew()
        signal.alarm(0 if isinstance(content, bytes) else 300)  # wall: who waits for a pipe takes no CPU
        if isinstance(content, bytes):
            if not file.is_file() or file.is_symlink() or file.stat().st_size > 1 << 30:
                renew()
            file.write_bytes(content)
        else:
            file.unlink()
            content(file)
        counts["variants"] += not kind.startswith("mutation")
        began = time.process_time()
        watching.append(kind)
        try:
            reader.read(folder)
            counts["read"] += 1
        except SpikeOPDError as error:
            counts["refused"] += 1
            text = str(error)
            if len(text) > 2500 or "\x1b" in text or ("\n" in text and name != "recipe"):
                return tell(kind=kind, message=text[:3000])
        except BaseException as error:
            place_of = traceback.extract_tb(error.__traceback__)[-1]
            return tell(kind=kind, error=repr(error)[:500], at=str(place_of), content=repr(content)[:300])
        watching.clear()
        slowest = max(slowest, time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    executions = counts["read"] + counts["refused"]
    return tell(**counts, executions=executions, slowest_s=round(slowest, 2), peak_mib=peak)


def _nothing_runs() -> list[str]:
    """While the list that it gives has an entry, whoever runs something ends this process (99)."""
    watching: list[str] = []
    events = ("os.system", "os.exec", "os.fork", "pickle.find_class", "ctypes.dlopen")

    def hook(event: str, arguments: Any) -> None:
        ours = event == "subprocess.Popen" and "spikeopd.text.backend" in str(arguments)
        if watching and (event in events or event == "subprocess.Popen" and not ours):
            os._exit(99)

    sys.addaudithook(hook)
    return watching


def mutated(good: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or exchanged, or one field of a JSON file replaced."""
    kind = rng.randrange(6)
    if kind >= 3 and good[:1] == b"{":
        try:
            content = json.loads(good)
            return _changed(content, rng.choice(_paths(content)), rng.choice(HOSTILE))
        except ValueError:
            pass
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice([1, 5, 1000])]
        else:
            data[at:at] = rng.choice(
                [b"[", b"{", b'"', b"9" * 400, b"\\ud800", b"-", b"\0", b": ", b"*a", bytes(data[:50])]
            )
    return bytes(data)


def _changed(content: Any, path: tuple[Any, ...], value: Any) -> bytes:
    copy = json.loads(json.dumps(content))
    parent = copy
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return json.dumps(copy).encode()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()
