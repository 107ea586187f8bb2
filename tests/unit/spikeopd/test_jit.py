"""Compiled code is kept where that is possible, and the packages work where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from random_models import random_model

from export.bundle_writer import write_bundle

PACKAGES = Path(__file__).parents[3]
NO_HOME = {**os.environ, "HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "NUMBA_CACHE_DIR": ""}


def test_numba_is_asked_for_a_cache_only_where_it_can_have_one(tmp_path):
    code = "from spikeopd.jit import can_cache; print(can_cache('/proc/cpuinfo'), can_cache('/proc/meminfo'))"

    def run(**changes):
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=NO_HOME | changes, capture_output=True, text=True)

    without = run()
    assert without.stdout == "False False\n"
    assert without.stderr.count("\n") == 1 and "set NUMBA_CACHE_DIR to a folder" in without.stderr
    with_place = run(NUMBA_CACHE_DIR=str(tmp_path))
    assert (with_place.stdout, with_place.stderr) == ("True True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["decode", "train"])
def test_packages_beside_which_nothing_can_be_written_decode_and_train(tmp_path, command):
    """A file where numba wants its folder stops root too, unlike permissions."""
    for name in ("spikeopd", "export", "neuro_sim", "energy"):
        copied = shutil.copytree(PACKAGES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for source in copied.rglob("*.py"):
            (source.parent / "__pycache__").touch()
    bundle = write_bundle(random_model(), tmp_path / "bundle")
    words = {
        "decode": ["neuro_sim.cli", str(bundle), "--prompt-tokens", "1,2", "--backend", "event", "--json"],
        "train": ["spikeopd.cli", "--dry-run", "--config", "tiny", "--json", "train.threads=1"],
    }[command]
    environment = NO_HOME | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("set NUMBA_CACHE_DIR") == 1
