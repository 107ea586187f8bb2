"""kill -9 in the middle of either stage, resume, and end with the very same weights."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from training_setup import SMALL

from spikeopd.runlog import read_metrics

pytestmark = pytest.mark.slow
CHANGES = [word for word in SMALL if not word.startswith(("stage1.updates", "stage2.updates", "train.save_every"))]
CHANGES += ["stage1.updates=12", "stage2.updates=8", "train.save_every=3", "model.init=random"]
CHANGES += ["teacher.teacher_model_name_or_path={teacher}"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "t"
    command = [sys.executable, "-m", "spikeopd.cli", "teacher", "--output", str(folder), "--updates", "2"]
    subprocess.run(
        [*command, "--hidden-size", "32", "--layers", "2", "--threads", "1"], check=True, capture_output=True
    )
    return folder


def start(folder, teacher, *flags):
    words = [word.format(teacher=teacher) for word in CHANGES]
    command = [
        sys.executable,
        "-m",
        "spikeopd.cli",
        "--config",
        "tiny",
        "--output",
        str(folder),
        "--quiet",
        *flags,
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def lines(folder):
    return len(read_metrics(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else 0


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, teacher, seed):
    assert start(tmp_path / "whole", teacher).wait(timeout=600) == 0
    rng = random.Random(seed)
    flags = ()
    for target in sorted((rng.randint(2, 11), rng.randint(13, 19))):
        process = start(tmp_path / "killed", teacher, *flags)
        deadline = time.monotonic() + 600
        while lines(tmp_path / "killed") < target and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        flags = ("--resume",)
    assert start(tmp_path / "killed", teacher, "--resume").wait(timeout=600) == 0
    a, b = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "killed"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
