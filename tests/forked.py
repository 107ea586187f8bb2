"""Commands as forks of a process that has imported everything: a real process to kill, without a minute of imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


class Forked:
    """As much of subprocess.Popen as the fault tests use. body: gives the exit code; its stderr is kept."""

    def __init__(self, body: Callable[[], int]) -> None:
        self._err, written = os.pipe()  # a file would meet the limits that a test sets
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(written)
            return
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(written, 2)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = body()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{timeout} s")
            time.sleep(0.01)
        with open(self._err, "rb") as err:
            return "", err.read().decode("utf-8", "replace")

    def send_signal(self, kind: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, kind)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
