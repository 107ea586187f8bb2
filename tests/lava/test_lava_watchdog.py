"""What goes wrong inside Lava becomes an error with a name, soon, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from random_models import random_model, random_shape

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from neuro_sim.lava.compat import require_lava  # noqa: E402

require_lava()

from lava.magma.core.run_conditions import RunSteps  # noqa: E402
from lava.magma.core.run_configs import Loihi2SimCfg  # noqa: E402
from lava_faults import Relay, Start  # noqa: E402

from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.lava.decoder import LavaDecoder  # noqa: E402
from neuro_sim.lava.runtime import LavaRunError, WatchedRuntime, start  # noqa: E402
from spikeopd.contracts import ModelShape  # noqa: E402

TESTS = Path(__file__).parents[1]
TINY = dict(heads=1, head_dim=4, layers=1, ffn=6, vocab=9, positions=4)


def children() -> set[int]:
    """Child processes of this one, by the kernel's account."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def unclaimed_segments(before: set[str]) -> set[str]:
    """New segments that no other program has mapped: theirs come and go while the tests run, ours would be orphans."""
    new = segments() - before
    for entry in Path("/proc").iterdir() if new else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                maps = (entry / "maps").read_text()
                new -= {name for name in new if f"/dev/shm/{name}" in maps}
    return new


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = children(), segments(), threading.active_count(), open_files()
    yield
    assert multiprocessing.active_children() == []
    assert children() <= before[0]
    deadline = time.monotonic() + 5  # the listening threads of closed ports leave by themselves
    while (threading.active_count() > before[2] or unclaimed_segments(before[1])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert unclaimed_segments(before[1]) == set()
    assert threading.active_count() <= before[2]
    assert open_files() <= before[3]


def chain(*relays: Relay) -> Start:
    first = Start(name="source")
    out = first.a_out
    for relay in relays:
        out.connect(relay.a_in)
        out = relay.a_out
    return first


def run(process, timeout: float, steps: int = 4) -> WatchedRuntime:
    runtime = start(process, Loihi2SimCfg(), timeout=60)
    runtime.timeout = timeout  # of the run alone: on a busy machine it takes a while to start
    runtime.start(RunSteps(num_steps=steps))
    return runtime


def run_good_graph() -> None:
    run(chain(Relay(), Relay()), 60).stop()


@pytest.mark.parametrize("fault, text", [("raise", "ZeroDivisionError: a fault on purpose"), ("exit", "exit code 7")])
def test_a_failing_process_is_named_at_once(fault: str, text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(LavaRunError, match=f"culprit.*{text}") as caught:
        run(chain(Relay(name="before"), Relay(fault, name="culprit"), Relay(name="after")), timeout=60)
    assert time.monotonic() - begin < 30  # far below the time limit, even on a busy machine
    assert caught.value.process == "culprit"
    assert caught.value.exit_code == 1
    if fault == "raise":
        assert "run_spk" in caught.value.details
    run_good_graph()


def test_a_process_that_cannot_be_built_is_named() -> None:
    with pytest.raises(LavaRunError, match="culprit could not be built: ValueError: cannot be built"):
        run(chain(Relay(), Relay("build_error", name="culprit")), timeout=60)
    run_good_graph()


def test_a_process_that_hangs_while_it_is_built_meets_the_time_limit() -> None:
    with pytest.raises(LavaRunError, match="no progress for 2 s waiting for culprit to be built"):
        start(Relay("build_hang", name="culprit"), Loihi2SimCfg(), timeout=2)


def test_a_sleeping_process_meets_the_time_limit_and_is_named() -> None:
    with pytest.raises(LavaRunError, match=r"no progress for 1 s.*culprit \(__init__.py:\d+\)"):
        run(chain(Relay(), Relay("sleep", name="culprit")), timeout=1)
    run_good_graph()


def test_a_deadlock_meets_the_time_limit_and_names_the_processes() -> None:
    left, right = Relay(name="left"), Relay(name="right")
    left.a_out.connect(right.a_in)
    right.a_out.connect(left.a_in)
    with pytest.raises(LavaRunError, match="no progress") as caught:
        run(left, timeout=1)
    assert "left" in str(caught.value) and "right" in str(caught.value)
    run_good_graph()


def test_a_killed_process_is_named() -> None:
    runtime = start(chain(Relay(name="victim"), Relay("sleep", name="slow")), Loihi2SimCfg(), 60)
    runtime.start(RunSteps(num_steps=4, blocking=False))
    victim = runtime.process_names.index("victim")
    os.kill(runtime._messaging_infrastructure.actors[victim].pid, signal.SIGKILL)
    with pytest.raises(LavaRunError, match="victim ended unexpectedly .exit code -9"):
        runtime.wait()


def test_stopping_is_safe_before_and_after_a_run_and_twice() -> None:
    runtime = start(chain(Relay()), Loihi2SimCfg(), 60)
    runtime.stop()
    runtime.stop()
    with pytest.raises(LavaRunError, match="has been stopped"):
        runtime.check()
    run(chain(Relay()), 60).stop()


def test_stopping_in_the_middle_of_a_run_does_not_wait_for_it() -> None:
    runtime = start(chain(Relay("sleep")), Loihi2SimCfg(), 60)
    runtime.start(RunSteps(num_steps=4, blocking=False))
    begin = time.monotonic()
    runtime.stop()
    assert time.monotonic() - begin < 20


def test_the_decoder_survives_an_error_in_a_layer() -> None:
    model = random_model(random_shape(**TINY))
    with LavaDecoder(model) as decoder:
        decoder.step(1)
        decoder.network.blocks()[0].position.set(_four())  # beyond the cache: only a broken program does this
        with pytest.raises(LavaRunError, match="layer0 failed: OverflowError: the key/value cache is full"):
            decoder.step(1)
        with pytest.raises(LavaRunError, match="has been stopped"):
            decoder.step(1)
    with LavaDecoder(model) as decoder:
        assert (decoder.step(1)[0] == DenseDecoder(model).step(1)[0]).all()


def test_an_exception_of_the_program_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match="mine"), LavaDecoder(random_model(random_shape(**TINY))) as decoder:
        decoder.step(1)
        raise RuntimeError("mine")


# A shell that starts the tests in the background has them ignore SIGINT; the program must see it all the same.
PROGRAM = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, {tests!r})
    from random_models import random_model, random_shape
    from neuro_sim.lava.decoder import LavaDecoder
    from spikeopd.errors import run_command

    def body(argv):
        with LavaDecoder(random_model(random_shape(positions=10_000, layers=1))) as decoder:
            decoder.step(1)
            print("running", flush=True)
            while True:
                decoder.step(1)

    sys.exit(run_command("program", body, None))
"""


def _survivors(group: int) -> list[str]:
    """Processes still in a process group (zombies do not count)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(entry.name)
    return found


@pytest.mark.parametrize("to_group, number", [(True, signal.SIGINT), (False, signal.SIGKILL), (False, signal.SIGTERM)])
def test_no_process_survives_the_program(to_group: bool, number: signal.Signals) -> None:
    """Ctrl-C reaches the whole group; a kill reaches the program alone, and its processes must notice."""
    code = textwrap.dedent(PROGRAM.format(tests=str(TESTS)))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "running\n"
        assert len(_survivors(program.pid)) > 4
        (os.killpg if to_group else os.kill)(program.pid, number)
        deadline = time.monotonic() + 30
        while _survivors(program.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        survivors = _survivors(program.pid)
        for pid in survivors:  # do not let a failed test leave them
            os.kill(int(pid), signal.SIGKILL)
        assert survivors == []
        errors = program.stderr.read() if program.stderr else ""
    if number == signal.SIGINT:
        assert program.returncode == 130
        assert errors == "program: interrupted\n"


def test_a_program_that_forgets_to_close_ends_all_the_same() -> None:
    code = textwrap.dedent(PROGRAM.format(tests=str(TESTS))).replace("while True:", "for _ in range(2):")
    code = code.replace("with LavaDecoder(", "if decoder := LavaDecoder(").replace(") as decoder:", "):")
    assert "if decoder := LavaDecoder(random_model(random_shape(positions=10_000, layers=1))):" in code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (result.returncode, result.stdout, result.stderr) == (0, "running\n", "")


def test_a_forgotten_decoder_ends_its_processes() -> None:
    before = children()
    decoder = LavaDecoder(random_model(random_shape(**TINY)))
    decoder.step(1)
    assert len(children() - before) >= 5
    del decoder
    assert children() <= before


def _four():
    import numpy as np

    return np.full(1, 4.0)


def test_the_fixture_sees_an_orphan_segment() -> None:
    """Guards the guard: a segment nobody has mapped is noticed."""
    orphan, before = Path(f"/dev/shm/orphan-{os.getpid()}"), segments()
    try:
        orphan.touch()
        assert unclaimed_segments(before) >= {orphan.name}
    finally:
        orphan.unlink()


def test_the_fixture_sees_children() -> None:
    """Guards the guard: `children` must notice a process while one lives."""
    with LavaDecoder(random_model(ModelShape(4, 1, 1, 6, 9, 4, 2, 4))):
        assert len(children()) >= 5
