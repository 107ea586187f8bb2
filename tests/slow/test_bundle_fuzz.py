"""Mutation fuzz: 2,400 damaged bundles, read in processes with little memory. None may crash, hang or grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_models import random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle

pytestmark = pytest.mark.slow

CHILD = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from bundle_mutations import mutate
from pathlib import Path
from spikeopd.contracts.bundle import load_bundle
from neuro_sim.dense import DenseDecoder
from spikeopd.errors import InputError
good, bad, first, count = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
load_bundle(good)
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
tally = {}
slowest = 0.0
for seed in range(first, first + count):
    kind = mutate(good, bad, seed)
    start = time.perf_counter()
    try:
        DenseDecoder(load_bundle(bad)).step(0)
        outcome = 'read'
    except InputError as error:
        assert '\\n' not in str(error) and str(error), (seed, kind)
        outcome = 'refused'
    except BaseException as error:
        print(json.dumps({'seed': seed, 'kind': kind, 'error': repr(error)}))
        sys.exit(1)
    slowest = max(slowest, time.perf_counter() - start)
    tally.setdefault(kind, {}).setdefault(outcome, 0)
    tally[kind][outcome] += 1
print(json.dumps({'tally': tally, 'slowest': slowest}))
"""


@pytest.mark.parametrize(
    ("target", "width", "first"),
    [("nir", None, 0), ("nir", 8, 10_000), ("lava", None, 20_000), ("lava", 8, 30_000)],
)
def test_six_hundred_mutations(tmp_path, target, width, first):
    shape = random_shape(width=width, layers=1)
    good = write_bundle(random_model(shape), tmp_path / "good", BundleOptions(target=target))
    tests = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", CHILD, tests, str(good), str(tmp_path / "bad"), str(first), "600"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, (result.stdout[-500:], result.stderr[-2000:])
    outcome = json.loads(result.stdout)
    counts = [sum(kinds.values()) for kinds in outcome["tally"].values()]
    assert sum(counts) == 600 and len(counts) >= 8
    assert sum(kinds.get("refused", 0) for kinds in outcome["tally"].values()) > 300
    # What the hashes guard is always refused.
    assert "read" not in outcome["tally"]["flipped model"]
    assert "read" not in outcome["tally"]["wrong tokens"]
    assert outcome["slowest"] < 20
