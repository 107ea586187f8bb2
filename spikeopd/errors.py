"""Errors a user can cause, each with its exit code, and the wrapper every command uses.

0 done; 1 our bug (traceback); 2 wrong usage, config or input; 3 a check failed; 4 optional backend missing;
130 interrupted; 141 the reader of the output went away before the end (as shells say it of any program).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

PIPE_CLOSED = 141
# What a machine may refuse at any moment, and nobody's mistake in writing this program.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSALS = (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class SpikeOPDError(Exception):
    """Something the user can mend. The message says what, where and what to do, in one line."""

    exit_code = 2


class ConfigError(SpikeOPDError):
    """A configuration that cannot be used; lists every problem found."""


class InputError(SpikeOPDError):
    """A missing, corrupt or unsuitable input file."""


class CheckFailed(SpikeOPDError):
    """A parity check or a design rule did not hold."""

    exit_code = 3


class BackendMissing(SpikeOPDError):
    """An optional dependency is not installed; the message carries the install command."""

    exit_code = 4


def check_writable(path: Path | str, option: str, *, in_folder: bool = False) -> None:
    """Refuse, before the work, a file that could not be written after it. Leaves nothing behind.

    in_folder: its folder must exist; one that does not is a name mistyped.
    """
    path = Path(path)
    if in_folder and not path.resolve().parent.exists():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; make it, or correct the name")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; give the name of a file")
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise OSError(errno.EINVAL, "it is not a file")
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        # Permissions do not say it all (the superuser may write everywhere, but not in /proc): try.
        tempfile.TemporaryDirectory(dir=folder, prefix=".spikeopd.").cleanup()
    except OSError as error:
        raise cannot_write(path, option, error) from error


def cannot_write(path: Path | str, option: str, error: OSError) -> InputError:
    return InputError(f"{option} {path}: cannot be written ({error.strerror or error})")


def short(value: object, most: int = 160) -> str:
    """A value in a message: one line, cut where it is long, nothing in it that moves a terminal's cursor."""
    text = str(value)
    text = " ".join(printable(text[: 8 * most]).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """Text that a terminal shows as it is: control characters but line end and tab become `\\x1b` and the like.

    Also those that turn the direction of what follows, with which a name can pass for another.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def install_command(extra: str) -> str:
    """How to install an extra, as it was installed here: from a clone or by name."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        source = json.loads(distribution("spikeopd").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        source = {}
    path = str(source.get("url", "")).removeprefix("file://") if "dir_info" in source else ""
    if not path:
        return f"pip install 'spikeopd[{extra}]'"
    editable = "-e " if source["dir_info"].get("editable") else ""
    return f"pip install {editable}'{path}[{extra}]'"


def say(line: str) -> None:
    """A line on stderr. Work is never lost because nobody reads it, or because its file is on a full disk."""
    with contextlib.suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def say_loading(quiet: bool = False) -> None:
    """What a person at a terminal reads while torch is imported, which takes seconds."""
    if not quiet and sys.stderr.isatty():
        say("loading torch ...")


def discard_stdout() -> None:
    """After the reader of stdout went away: what is left in the buffer goes nowhere, so that the end is quiet."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file has none to redirect
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(prog: str, body: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None) -> int:
    """Run a command body; turn the user's mistakes into one line on stderr and an exit code."""
    # Threads that spin while they wait for each other bring a shared machine to a standstill: beside one busy process
    # on two cores two-thread training kept 14 % of its speed at 100,000 turns, and keeps half at 1,000, which costs a
    # tenth on a quiet machine (docs/reliability.md). Read when torch starts.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    _prepare_streams()
    with _told_interrupts() as told:
        return _answer(prog, body, argv, told)


def _answer(
    prog: str, body: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None, told: list[int]
) -> int:
    try:
        code = body(argv) or 0
        sys.stdout.flush()  # here, so that a reader that is gone is noticed here
        return code
    except SpikeOPDError as error:
        say(f"{prog}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say(f"{prog}: interrupted")
        return 130
    except MemoryError as error:
        say(f"{prog}: not enough memory{f' ({short(error)})' if str(error) else ''}")
        return SpikeOPDError.exit_code
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): nothing to complain about, but the work may not be complete.
        discard_stdout()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        place = f"{short(error.filename)}: " if error.filename else ""
        advice = "make room and run it again" if error.errno in DISK_FULL else "see to it and run it again"
        say(f"{prog}: {place}{error.strerror}; {advice}")
        return SpikeOPDError.exit_code
    except Exception:
        if not told:
            raise
        say(f"{prog}: interrupted")  # half an import: libraries turn it into errors of their own
        return 130


@contextlib.contextmanager
def _told_interrupts() -> Iterator[list[int]]:
    """Grows with every Ctrl-C; each is raised as ever."""
    told: list[int] = []

    def handler(number: int, frame: Any) -> None:
        told.append(number)
        signal.default_int_handler(number, frame)

    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield told
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield told
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _prepare_streams() -> None:
    """Text that the terminal's encoding cannot show must not end a command; neither must a stream that is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
            continue
        if hasattr(stream, "reconfigure") and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
    if sys.stdout.isatty():
        sys.stdout = cast(Any, _Terminal(sys.stdout))


class _Terminal:
    """stdout on a terminal: text of models and of strangers cannot move its cursor, or worse. A file gets it raw."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # colorama, which some libraries load, ends every process with a reset of the colours: nothing to show.
        self._stream.write(text if text == "\x1b[0m" else printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
