"""Freed memory is used again instead of coming from the operating system page by page."""

import subprocess
import sys

import pytest

from spikeopd.allocation import keep_freed_memory

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
