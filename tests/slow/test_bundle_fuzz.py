"""Mutation fuzz: 4,200 damaged bundles, read in processes with little memory. None may crash, hang or grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_models import PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle

pytestmark = pytest.mark.slow

CHILD = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from bundle_mutations import mutate
from pathlib import Path
from spikeopd.contracts.bundle import load_bundle
from neuro_sim.graded import oracle
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
        oracle(load_bundle(bad)).step(0)
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


FORMS = {
    "nir": ("nir", "int8", {}, 0),
    "nir, factorised": ("nir", "int8", {"width": 8}, 10_000),
    "lava": ("lava", "int8", {}, 20_000),
    "lava, factorised": ("lava", "int8", {"width": 8}, 30_000),
    "nir, 4 bits": ("nir", "int4", {}, 40_000),
    "lava, the better block": ("lava", "int8", PLUS, 50_000),
    "the twin": ("arrays", "int8", {"neuron": "quantised"}, 60_000),
}


@pytest.mark.parametrize("form", FORMS)
def test_six_hundred_mutations(tmp_path, form):
    target, precision, options, first = FORMS[form]
    model = random_model(random_shape(layers=1, **options), precision=precision)
    good = write_bundle(model, tmp_path / "good", BundleOptions(target=target))
    tests = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", CHILD, tests, str(good), str(tmp_path / "bad"), str(first), "600"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, (result.stdout[-500:], result.stderr[-2000:])
    outcome = json.loads(result.stdout)
    counts = [sum(kinds.values()) for kinds in outcome["tally"].values()]
    print(f"\n{form}: {outcome}")
    assert sum(counts) == 600 and len(counts) >= 8
    assert sum(kinds.get("refused", 0) for kinds in outcome["tally"].values()) > 300
    # What the hashes guard is always refused.
    assert "read" not in outcome["tally"]["flipped model"]
    assert "read" not in outcome["tally"]["wrong tokens"]
    assert outcome["slowest"] < 20
