"""Errors a user can cause, each with its exit code, and the wrapper every command uses.

0 done; 1 our bug (traceback); 2 wrong usage, config or input; 3 a check failed; 4 optional backend missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence


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


def run_command(prog: str, body: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None) -> int:
    """Run a command body; turn the user's mistakes into one line on stderr and an exit code."""
    # Threads that spin while they wait for each other bring a shared machine to a standstill: with one other busy
    # process on two cores an update of the tiny recipe took 8 s instead of 0.8. Read when torch or numba start.
    # A short spin (about 0.1 ms) keeps the speed of a quiet machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    try:
        return body(argv) or 0
    except SpikeOPDError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): not an error. Keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
