"""Every reader against the hostile corpus and random mutations, in a process with limits: refused in a line, or read.

SPIKEOPD_FUZZ sets the number of mutations per reader. Nothing may run code, hang or grow; counts are printed. Readers
that write sync each file: in memory (`--basetemp /dev/shm/hostile`) the whole takes minutes.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from forked import Forked
from hostile import meet
from readers import READERS

import spikeopd.training  # noqa: F401 - imported once, for all the forks

pytestmark = pytest.mark.slow
FUZZ = int(os.environ.get("SPIKEOPD_FUZZ", "3000"))


@pytest.fixture(scope="module")
def total():
    """What all readers met, printed at the end."""
    sums = Counter()
    yield sums
    print(f"\nall together: {dict(sums)}")


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_or_reads(tmp_path, monkeypatch, name, total):
    monkeypatch.chdir(tmp_path)
    process = Forked(lambda: meet(name, tmp_path, FUZZ // READERS[name].each))
    _, err = process.communicate(timeout=3000)
    found = json.loads((tmp_path / "found.json").read_text() or "{}")
    assert process.returncode == 0, (process.returncode, found, err[-2000:])
    print(f"\n{name}: {found}")
    total.update({key: found[key] for key in ("variants", "executions", "read", "refused")} | {"readers": 1})
    assert found["slowest_s"] < 10 and found["peak_mib"] < 2048 and not (tmp_path / "ran").exists()
    assert found["refused"] > 0 or name.startswith(("token cache", "environment", "batch"))  # which are made anew
    assert found["variants"] >= 33
