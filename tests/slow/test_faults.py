"""Faults of machines and people while a run goes on: in the end the very same weights or a clear refusal, never other.

Counts are printed (`pytest -s`); SPIKEOPD_KILLS sets how many random kills there are. docs/reliability.md keeps the
figures of the last run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from safetensors.torch import load_file, save_file
from training_setup import SMALL

import spikeopd.training  # noqa: F401 - imported once, for all the forks
from spikeopd.cli import main
from spikeopd.files import write_sums
from spikeopd.runlog import read_metrics

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("SPIKEOPD_KILLS", "50"))
SIZES = [word for word in SMALL if not word.startswith(("stage1.updates", "stage2.updates", "train.save_every"))]
WORDS = [*SIZES, "stage1.updates=10", "stage2.updates=6", "train.save_every=2", "model.init=random"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "t"
    words = ["teacher", "--output", str(folder), "--updates", "2", "--hidden-size", "32", "--layers", "2"]
    process = Forked(lambda: main([*words, "--threads", "1"]))
    assert process.communicate() and process.returncode == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, teacher):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, teacher)[0] == 0
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory, teacher):
    """A run killed in Stage 2, with checkpoints of both stages."""
    folder = tmp_path_factory.mktemp("half") / "run"
    process = start(folder, teacher)
    wait_for_lines(folder, 15, process)
    process.kill()
    process.communicate()
    assert len(list((folder / "stage2" / "checkpoints").glob("update-*"))) == 2
    return folder


def start(folder, teacher, *flags, prelude="", words=(), environment=None):
    """A command in a process of its own; prelude: what happens to its machine first."""
    arguments = ["--config", "tiny", "--output", str(folder), "--quiet", *flags, *WORDS, *words]
    arguments += [f"teacher.teacher_model_name_or_path={teacher}"]

    def body():
        os.environ.update(environment or {})
        exec(prelude, {})
        return main(arguments)

    return Forked(body)


def train(folder, teacher, *flags, **options):
    process = start(folder, teacher, *flags, **options)
    _, err = process.communicate()
    return process.returncode, err


def wait_for_lines(folder, count, process):
    file = folder / "metrics.jsonl"
    while process.poll() is None and (file.read_bytes().count(b"\n") if file.is_file() else 0) < count:
        time.sleep(0.005)


def same(a, b):
    x, y = (load_file(folder / "final" / "model.safetensors") for folder in (a, b))
    assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
    lines = [[{k: v for k, v in line.items() if k != "time"} for line in read_metrics(folder)] for folder in (a, b)]
    # A first stage that was repeated stands behind the second.
    assert lines[0] == sorted(lines[1], key=lambda line: (line["stage"], line["update"]))


def tidy(folder):
    assert not list(folder.rglob("*.partial")) and not (folder / ".running").exists()


def one_line(err):
    assert "Traceback" not in err and err.count("\n") == 1 and len(err) < 1200, err


def test_random_kills(tmp_path, teacher, whole):
    """SIGKILL at any time; every third one while a checkpoint or a student is being written."""
    rng, counts, run, resume = random.Random(2026), Counter(), 0, ()
    slow_disk = "import os, time; real = os.fsync\ndef fsync(f):\n    time.sleep(0.02); real(f)\nos.fsync = fsync\n"
    folder = tmp_path / "run0"
    while counts["kills"] < KILLS:
        saving = counts["kills"] % 3 == 0
        process = start(folder, teacher, *resume, prelude=slow_disk if saving else "")
        before = len((folder / "metrics.jsonl").read_text().splitlines()) if (folder / "metrics.jsonl").is_file() else 0
        if saving:
            while process.poll() is None and not list(folder.rglob("*.partial")):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
        else:
            wait_for_lines(folder, before + rng.randint(0, 3), process)
            time.sleep(rng.random() * 0.3)
        left = bool(list(folder.rglob("*.partial")))
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            counts["kills"] += 1
            counts["while saving"] += left
        resume = ("--resume",) if (folder / "config.yaml").is_file() else ()
        if process.returncode == 0:  # it ended first: compare, and begin another run
            same(whole, folder)
            tidy(folder)
            counts["runs that ended"] += 1
            run += 1
            folder, resume = tmp_path / f"run{run}", ()
    assert train(folder, teacher, *resume)[0] == 0
    same(whole, folder)
    tidy(folder)
    print(f"\nkills: {dict(counts)}; every run bit-identical")


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals(tmp_path, teacher, whole, kind, code):
    rng = random.Random(int(kind))
    for trial in range(3):
        process = start(tmp_path / str(trial), teacher)
        wait_for_lines(tmp_path / str(trial), rng.randint(1, 14), process)
        process.send_signal(kind)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code and "Traceback" not in err, err
        assert train(tmp_path / str(trial), teacher, "--resume")[0] == 0
        same(whole, tmp_path / str(trial))
        tidy(tmp_path / str(trial))
    print(f"\n{kind.name}: 3 of 3 continued bit-identically")


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, -1))\n"


@pytest.mark.parametrize("size", [100, 3_000, 40_000, 300_000])
def test_no_room(tmp_path, teacher, whole, size):
    """No file can grow beyond `size` bytes: every file of a run meets the limit, or a later one does."""
    code, err = train(tmp_path / "run", teacher, prelude=FULL.format(size=size))
    if code:
        assert code == 2
        one_line(err)
        tidy(tmp_path / "run")
    resume = ("--resume",) if (tmp_path / "run" / "config.yaml").is_file() else ()
    assert train(tmp_path / "run", teacher, *resume)[0] == 0
    same(whole, tmp_path / "run")
    print(f"\nfiles of at most {size} bytes: exit {code}, then bit-identical")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk(tmp_path, teacher, whole):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        code, err = train(disk / "run", teacher)
        assert code == 2 and "No space left on device" in err
        one_line(err)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert train(disk / "run", teacher, "--resume")[0] == 0
        same(whole, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, err = train(disk / "run", teacher, "--resume")
        assert code == 2
        one_line(err)
        code, err = train(disk / "other", teacher)
        assert code == 2
        one_line(err)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    print("\nfull disk of 1 MiB and a read-only one: refused in one line, then bit-identical")


# --- damaged state ---------------------------------------------------------------------------------------------------


def flip(file, at=0.5):
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 4
    file.write_bytes(bytes(data))


def tensors(file, change):
    content = load_file(file)
    change(content)
    save_file(content, file)
    write_sums(file.parent)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def newest(folder, stage="stage2"):
    return sorted((folder / stage / "checkpoints").glob("update-*"))[-1]


def drop_first(content):
    content.pop(sorted(content)[0])


# Name: (what is done to the folder, whether the run may go on to the same end). False: it must be refused.
DAMAGES = {
    "weight bit": (lambda f: flip(newest(f) / "objective.safetensors", 0.9), True),
    "weight header": (lambda f: flip(newest(f) / "objective.safetensors", 0.01), True),
    "moment bit": (lambda f: flip(newest(f) / "optimizer.safetensors", 0.9), True),
    "moment header": (lambda f: flip(newest(f) / "optimizer.safetensors", 0.01), True),
    "state bit": (lambda f: flip(newest(f) / "state.json"), True),
    "sums bit": (lambda f: flip(newest(f) / "SHA256SUMS", 0.1), True),
    "edited update": (lambda f: edit(newest(f) / "state.json", update=1), True),
    "edited update, sealed": (lambda f: (edit(newest(f) / "state.json", update=1), write_sums(newest(f))), True),
    "weights cut": (lambda f: os.truncate(newest(f) / "objective.safetensors", 1000), True),
    "weights empty": (lambda f: os.truncate(newest(f) / "objective.safetensors", 0), True),
    "moments gone": (lambda f: (newest(f) / "optimizer.safetensors").unlink(), True),
    "state gone": (lambda f: (newest(f) / "state.json").unlink(), True),
    "sums gone": (lambda f: (newest(f) / "SHA256SUMS").unlink(), True),
    "newest gone": (lambda f: shutil.rmtree(newest(f)), True),
    "newest emptied": (lambda f: [path.unlink() for path in newest(f).iterdir()], True),
    "a tensor gone, sealed": (lambda f: tensors(newest(f) / "objective.safetensors", drop_first), False),
    "a moment gone, sealed": (lambda f: tensors(newest(f) / "optimizer.safetensors", drop_first), False),
    "all of stage 2 damaged": (
        lambda f: [flip(path / "objective.safetensors") for path in (f / "stage2" / "checkpoints").iterdir()], False,
    ),
    "all of stage 2 gone": (lambda f: shutil.rmtree(f / "stage2"), True),
    "stage 1 weight bit": (lambda f: flip(newest(f, "stage1") / "objective.safetensors", 0.9), True),
    "stage 1 gone": (lambda f: shutil.rmtree(f / "stage1"), True),
    "student of stage 1 bit": (lambda f: flip(f / "stage1" / "final" / "model.safetensors", 0.9), True),
    "student of stage 1 gone": (lambda f: shutil.rmtree(f / "stage1" / "final"), True),
    "config edited": (lambda f: (f / "config.yaml").write_text("stage1: {updates: 3}\n"), False),
    "config garbled": (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe"), False),
    "config gone": (lambda f: (f / "config.yaml").unlink(), False),
    "environment garbled": (lambda f: (f / "env.json").write_bytes(b"\xff"), True),
    "metrics torn": (lambda f: os.truncate(f / "metrics.jsonl", (f / "metrics.jsonl").stat().st_size - 9), True),
    "metrics garbled": (lambda f: (f / "metrics.jsonl").write_text("x\n"), False),
    "metrics gone": (lambda f: (f / "metrics.jsonl").unlink(), None),
    "leftovers": (
        lambda f: [(f / "stage2" / "checkpoints" / f".update-{n:06d}.xy.partial").mkdir() for n in range(5)], True,
    ),
    "a stale lock": (lambda f: (f / ".running").write_text("process 1 on elsewhere\n"), True),
    "folders called as checkpoints": (lambda f: (f / "stage2" / "checkpoints" / "update-999999").mkdir(), True),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_state(tmp_path, teacher, whole, half, kind):
    damage, goes_on = DAMAGES[kind]
    folder = shutil.copytree(half, tmp_path / "run")
    damage(folder)
    code, err = train(folder, teacher, "--resume")
    assert "Traceback" not in err, err
    if goes_on is False:
        assert code == 2
        one_line(err)
        print(f"\n{kind}: refused")
        return
    assert code == 0, err
    if goes_on:
        same(whole, folder)
    else:  # the lines of the past are gone, the weights are the same
        x, y = (load_file(f / "final" / "model.safetensors") for f in (whole, folder))
        assert all(torch.equal(x[name], y[name]) for name in x)
    tidy(folder)
    print(f"\n{kind}: bit-identical" + (", said" if err else ""))


def test_a_garbled_token_cache(tmp_path, teacher, whole):
    environment = {"SPIKEOPD_CACHE": str(tmp_path / "cache")}
    assert train(tmp_path / "first", teacher, environment=environment)[0] == 0
    same(whole, tmp_path / "first")
    for number, file in enumerate(sorted((tmp_path / "cache").glob("*.npy"))):
        tokens = np.load(file)
        np.save(file, tokens[::-1])
        code, err = train(tmp_path / str(number), teacher, environment=environment)
        assert code == 0 and "tokenised again" in err
        same(whole, tmp_path / str(number))
    print(f"\n{number + 1} garbled token caches: made anew, bit-identical")


# --- others ----------------------------------------------------------------------------------------------------------


def test_two_processes(tmp_path, teacher, whole):
    """Five at once into one folder: one ends, the others name it; metrics are not doubled."""
    processes = [start(tmp_path / "run", teacher) for _ in range(5)]
    done = [(process.communicate()[1], process.returncode, process.pid) for process in processes]
    winners = [pid for _, code, pid in done if code == 0]
    assert len(winners) == 1
    for err, code, _ in done:
        if code:
            assert code == 2 and (re.search(rf"process {winners[0]} on \S+ is at work", err) or "already holds" in err)
            one_line(err)
    same(whole, tmp_path / "run")
    print("\n5 processes on one folder: 1 ended bit-identically, 4 refused by name")


CLOCK = """
import random, time
real, rng = time.time, random.Random(3)
time.time = lambda: real() + rng.choice([-3e8, 0.0, 3e8, 1e9])
"""


def test_clock_jumps(tmp_path, teacher, whole):
    """time.time() jumps by years, forwards and backwards, at every call, and a kill and a resume come in between."""
    process = start(tmp_path / "run", teacher, prelude=CLOCK)
    wait_for_lines(tmp_path / "run", 5, process)
    process.kill()
    process.communicate()
    code, err = train(tmp_path / "run", teacher, "--resume", prelude=CLOCK)
    assert code == 0, err
    same(whole, tmp_path / "run")
    print("\nclock jumps: bit-identical")


def test_another_student_to_start_from_is_refused(tmp_path, teacher, whole):
    """Stage 2 alone: the reference is part of the run, as teacher and data are."""
    student = shutil.copytree(whole / "stage1" / "final", tmp_path / "student")
    words = ["train.stage=2", f"stage2.model_name_or_path={student}"]
    process = start(tmp_path / "run", teacher, words=words)
    wait_for_lines(tmp_path / "run", 3, process)
    process.kill()
    process.communicate()
    weights = load_file(student / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name].view(-1)[0] += 1
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    code, err = train(tmp_path / "run", teacher, "--resume", words=words)
    assert code == 2 and "the student to start from differ" in err
    one_line(err)


def test_a_killed_rank(tmp_path):
    """Two ranks under torchrun, one is killed: the other ends too, and a resumed pair equals an uninterrupted one."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join((str(tests), str(tests.parent)))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def launch(folder, *words):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        command += [
            "--rdzv-endpoint=localhost:0",
            str(tests / "two_ranks.py"),
            str(folder),
            "stage1.micro_batch_size=2",
        ]
        command += ["stage2.micro_batch_size=2", *words]
        return subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert launch(tmp_path / "whole").wait(timeout=900) == 0
    process = launch(tmp_path / "run")
    wait_for_lines(tmp_path / "run", 3, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"two_ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert process.wait(timeout=300) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert launch(tmp_path / "run", "--resume").wait(timeout=900) == 0
    same(tmp_path / "whole", tmp_path / "run")
    print("\na rank killed under torchrun: both ended, resumed bit-identically")
