"""Lava's runtime with a watchdog: what goes wrong in a process becomes an error here, and nothing is left behind.

Lava's own runtime waits for its processes without limit: an exception in the middle of a graph, a killed process or a
deadlock makes `run` hang, and then `stop` too. `WatchedRuntime` is Lava's Runtime with four things changed:

* every wait has a time limit and looks after the processes meanwhile;
* channels live in anonymous shared memory, inherited by fork: no name in /dev/shm, no manager process;
* the processes ignore Ctrl-C (the program decides), and end themselves if the program is gone;
* `stop` ends the processes, gently if they answer, by force if not. It may be called at any time, also twice.
"""

# mypy: allow-subclassing-any
# ruff: noqa: E402
from __future__ import annotations

import atexit
import contextlib
import faulthandler
import mmap
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from neuro_sim.lava.compat import fork_start_method, quiet_logging, require_lava
from spikeopd.errors import SpikeOPDError
from spikeopd.files import PrivateFolder

require_lava()

from lava.magma.compiler.executable import Executable
from lava.magma.core.process.message_interface_enum import ActorType
from lava.magma.core.process.process import AbstractProcess, ProcessServer
from lava.magma.core.process.variable import VarServer
from lava.magma.core.run_configs import RunConfig
from lava.magma.runtime.message_infrastructure.multiprocessing import MultiProcessing, SystemProcess
from lava.magma.runtime.mgmt_token_enums import MGMT_COMMAND, MGMT_RESPONSE, enum_equal
from lava.magma.runtime.runtime import Runtime

_LOOK_EVERY = 0.05  # seconds between two looks at the processes while waiting
_PATIENCE = 5.0  # seconds that processes get to stop by themselves, or to write their stacks
_FILES_PER_PROCESS = 6  # two pipes, a queue and a sentinel
_DUMP_SIGNAL = signal.SIGUSR1


class LavaRunError(SpikeOPDError):
    """A Lava process failed, died or hangs. `process` names it; `details` holds its traceback where there is one."""

    exit_code = 1

    def __init__(self, message: str, process: str, details: str = "") -> None:
        super().__init__(message)
        self.process = process
        self.details = details


class WatchedRuntime(Runtime):
    """Runs an executable that Lava compiled. timeout: seconds one call (a run, a Var access) may take."""

    service_to_runtime: list[Any]
    _is_started: bool
    _is_running: bool

    def __init__(self, executable: Executable, timeout: float = 60.0) -> None:
        super().__init__(executable, ActorType.MultiProcessing)
        self.timeout = timeout
        self._owner = os.getpid()
        self._ended = False
        self._host_ports: list[Any] = []
        self.process_names = [process.name for process in executable.proc_builders]
        self.process_names += [f"runtime service {index}" for index in range(len(executable.runtime_service_builders))]
        executable.assign_runtime_to_all_processes(self)

    def initialize(self, node_cfg_idx: int = 0) -> None:
        """Start the processes and wait until every one of them is built."""
        # Also keeps this object out of the garbage collector's hands, which would close pipes in any order.
        atexit.register(self.stop)
        try:
            _allow_open_files(256 + _FILES_PER_PROCESS * len(self.process_names))
            with fork_start_method(), _interrupts_held():
                self._build_watchdog_manager()
                self._build_message_infrastructure()
                self._build_channels()
                self._build_sync_channels()
                self._build_processes()
                self._build_runtime_services()
            self.service_to_runtime = [WatchedPort(port, self) for port in self.service_to_runtime]
            self._start_ports()
            for name, queue in zip(self.process_names, self.exception_q, strict=True):
                self._await_built(name, queue)
            self._is_initialized = True
        except BaseException:
            self.stop()
            raise

    def _await_built(self, name: str, queue: Any) -> None:
        self.wait_until(lambda: not queue.empty(), f"{name} to be built")
        if (error := queue.get()) is not None:
            raise self._failure(name, error, getattr(error, "trace", "")) from error

    def wait_until(self, ready: Callable[[], bool], purpose: str) -> None:
        """Wait for a condition; raise LavaRunError if a process is gone, or at the time limit."""
        deadline = time.monotonic() + self.timeout
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise self._hang(purpose)
            time.sleep(0.001)

    def check(self) -> None:
        """Raise LavaRunError if a process has failed or died."""
        self.check_open()
        for name, actor in zip(self.process_names, self._messaging_infrastructure.actors, strict=False):
            alive = actor.lives()  # asked first: a process that dies of an exception sends it before
            if failure := actor.exception:
                raise self._failure(name, *failure) from failure[0]
            if not alive:
                raise LavaRunError(f"Lava process {name} ended unexpectedly (exit code {actor.exitcode})", name)

    def check_open(self) -> None:
        """Raise LavaRunError if the runtime has been stopped, by the user or by an error."""
        if self._ended:
            raise LavaRunError("the Lava runtime has been stopped; build a new one", "")

    def stop(self) -> None:
        """End all processes and free everything. In good health they are asked to stop; otherwise they are killed."""
        if self._ended or os.getpid() != self._owner:
            return
        self._ended = True
        atexit.unregister(self.stop)
        actors = self._messaging_infrastructure.actors if self._messaging_infrastructure else []
        try:
            if self._is_started and not self._is_running:
                self._ask_to_stop(actors)
        finally:
            for actor in actors:
                actor.kill_if_alive()
            for port in (*self._open_ports, *self._host_ports):
                port.join()
            self._open_ports.clear()
            self._is_started = self._is_running = False
            for queue in self.exception_q:
                queue._reader.close()  # Queue.close would leave both ends to the garbage collector
                queue._writer.close()
            if self._watchdog_manager is not None:
                self._watchdog_manager.stop()
            if self._messaging_infrastructure is not None:
                self._messaging_infrastructure.stop()

    def _ask_to_stop(self, actors: list[Any]) -> None:
        if not all(actor.lives() for actor in actors):
            return
        for port in self.runtime_to_service:
            port.send(MGMT_COMMAND.STOP)
        deadline = time.monotonic() + min(self.timeout, _PATIENCE)
        while any(actor.lives() for actor in actors) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _build_message_infrastructure(self) -> None:
        self._messaging_infrastructure = ForkedActors()
        self._messaging_infrastructure.start()

    def _create_external_channels(self, proc: AbstractProcess, proc_builder: Any) -> None:
        super()._create_external_channels(proc, proc_builder)
        for name in proc_builder.py_ports:
            port = getattr(proc, name)
            for end in ("external_pipe_csp_send_port", "external_pipe_csp_recv_port"):
                if hasattr(port, end):
                    self._host_ports.append(getattr(port, end))

    def _get_resp_for_run(self) -> None:
        """Wait for the end of a run. Whatever happens instead ends the runtime: its state would be unknown."""
        if not self._is_running:
            return
        try:
            for port in self.service_to_runtime:
                answer = port.recv()
                if enum_equal(answer, MGMT_RESPONSE.REQ_PAUSE):
                    return self.pause()  # type: ignore[no-any-return]
                if enum_equal(answer, MGMT_RESPONSE.REQ_STOP):
                    return self.stop()
                if not enum_equal(answer, MGMT_RESPONSE.DONE):
                    # An error is on its way: the process that failed says so itself within a moment.
                    self.wait_until(lambda: False, "the failed process to say why")
            self._is_running = False
        except BaseException:
            self.stop()
            raise

    def _failure(self, name: str, error: Exception, trace: str) -> LavaRunError:
        what = "failed" if self._is_initialized else "could not be built"
        return LavaRunError(f"Lava process {name} {what}: {type(error).__name__}: {error}", name, trace)

    def _hang(self, purpose: str) -> LavaRunError:
        busy = self._busy_processes()
        names = ", ".join(f"{name} ({where})" for name, where in busy) or "no process is at work"
        first = busy[0][0] if busy else ""
        return LavaRunError(
            f"Lava made no progress for {self.timeout:g} s waiting for {purpose}; at work: {names}", first
        )

    def _busy_processes(self) -> list[tuple[str, str]]:
        """Process names with the line of `run_spk` they are in: a signal makes each process write its stack."""
        actors = self._messaging_infrastructure.actors
        asked = [actor for actor in actors if actor.lives() and actor.dump.exists()]
        for actor in asked:
            os.kill(actor.pid, _DUMP_SIGNAL)
        deadline = time.monotonic() + _PATIENCE
        while any(not actor.dump.stat().st_size for actor in asked) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # the last line of the last stack
        busy = []
        for name, actor in zip(self.process_names, actors, strict=False):
            stack = actor.dump.read_text() if actor.dump.exists() else ""
            if found := re.search(r'File "([^"]+)", line (\d+) in run_spk', stack):
                busy.append((name, f"{Path(found[1]).name}:{found[2]}"))
        return busy


class WatchedPort:
    """A receiving port of the runtime that does not wait for ever."""

    def __init__(self, port: Any, runtime: WatchedRuntime) -> None:
        self._port = port
        self._runtime = runtime
        self._arrived = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def recv(self) -> Any:
        deadline = time.monotonic() + self._runtime.timeout
        self._port.observer = self._arrived.set
        try:
            while not self._port.probe():
                self._arrived.wait(_LOOK_EVERY)
                self._arrived.clear()
                if self._port.probe():
                    break
                self._runtime.check()
                if time.monotonic() > deadline:
                    raise self._runtime._hang("the processes to answer")
        finally:
            self._port.observer = None
        return self._port.recv()


class ForkedActors(MultiProcessing):
    """Lava's multiprocessing infrastructure with anonymous shared memory and processes that can be ended."""

    def start(self) -> None:
        self._smm = AnonymousMemory()
        self._dumps = PrivateFolder("spikeopd-lava-")

    def build_actor(self, target_fn: Any, builder: Any, exception_q: Any = None) -> Any:
        actor = Actor(self._dumps.path / str(len(self._actors)), target_fn, builder, exception_q)
        actor.start()
        self._actors.append(actor)
        return actor

    def stop(self) -> None:
        """Wait for the processes, which must have been ended, and close their pipes."""
        for actor in self._actors:
            actor.join()
        self._dumps.cleanup()


class AnonymousMemory:
    """Shared memory without a name. The processes are forks, so they inherit the mapping; it ends with the last one."""

    class Block:
        def __init__(self, size: int) -> None:
            self.buf = memoryview(mmap.mmap(-1, max(1, size)))

    def create_shared_memory(self, size: int) -> Block:
        return self.Block(size)


class Actor(SystemProcess):
    """One operating-system process of a graph."""

    def __init__(self, dump: Path, target: Any, builder: Any, exception_q: Any) -> None:
        super().__init__(target=target, kwargs={"builder": builder, "exception_q": exception_q}, daemon=True)
        self.dump = dump

    def run(self) -> None:
        with self.dump.open("w") as dump:
            faulthandler.register(_DUMP_SIGNAL, file=dump, all_threads=True)
            threading.Thread(target=_leave_with, args=(self._parent_pid,), daemon=True).start()
            super().run()

    def lives(self) -> bool:
        """Like is_alive, also when the process has been joined already (at the end of the program, for one)."""
        return not self._is_done and self.is_alive()

    def kill_if_alive(self) -> None:
        if self.lives():
            self.kill()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _allow_open_files(needed: int) -> None:
    """Raise this program's soft limit of open files where a large graph needs it; a no to that shows up soon enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back in this thread. Processes forked within never see it; here it arrives on leaving."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(process: AbstractProcess, run_cfg: RunConfig, timeout: float = 60.0) -> WatchedRuntime:
    """Compile a process network with Lava's compiler and start it in a watched runtime, ready for `runtime.start`."""
    with quiet_logging():
        executable = process.compile(run_cfg, {"pypy_channel_size": 4})
        runtime = WatchedRuntime(executable, timeout)
    runtime.initialize()
    return runtime


@contextlib.contextmanager
def unregistered() -> Iterator[None]:
    """Forget the processes and Vars made within on leaving; Lava's global registers would keep their arrays alive."""
    processes, variables = ProcessServer(), VarServer()
    before = len(processes.processes), len(variables.vars)
    try:
        yield
    finally:
        del processes.processes[before[0] :]
        del variables.vars[before[1] :]
