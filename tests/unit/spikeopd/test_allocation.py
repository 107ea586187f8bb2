"""Freed memory is used again instead of coming from the operating system page by page."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spikeopd.allocation import free_memory, keep_freed_memory
from spikeopd.config import load_config
from spikeopd.planning import GIB, needed

PROBE = """
import resource, sys
import numpy as np
from spikeopd.allocation import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = np.full(16 << 20, 1.0, np.float32)  # 64 MiB: 16384 pages
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's switch")
def test_the_second_tensor_takes_the_first_ones_pages(monkeypatch):
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    kept, plain = (
        int(subprocess.run([sys.executable, "-c", PROBE, way], capture_output=True, text=True, check=True).stdout)
        for way in ("kept", "plain")
    )
    assert kept < 200 and kept < plain / 2  # plain: 16384, or a few of two megabytes each


def test_a_user_who_has_decided_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's switch")
def test_where_the_gaps_may_not_fit_memory_goes_back(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    asked = []
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=lambda *option: asked.append(option) or 1))
    monkeypatch.setattr("spikeopd.allocation.free_memory", lambda: 20.0 * GIB)
    assert keep_freed_memory(10 * GIB) and len(asked) == 3
    assert not keep_freed_memory(10 * GIB + 1) and len(asked) == 3


def test_free_memory_by_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_memory(tmp_path) == math.inf
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   6000 kB\nHugePages_Total:\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1024\n")
    assert free_memory(tmp_path) == 6000 * 1024
    (group / "memory.max").write_text(f"{4001 * 1024}\n")
    assert free_memory(tmp_path) == 4000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_memory(tmp_path) == 2000 * 1024


def test_what_a_recipe_needs_is_its_larger_stage():
    """The micro-batch of the paper at 125M, which twice over does not fit 24 GiB; `tiny` fits everywhere."""
    assert needed(load_config("tiny")) < 3 * GIB
    large = needed(load_config("opt-125m", ["train.gradient_checkpointing=true"]))
    assert large < 12 * GIB < 2 * large
