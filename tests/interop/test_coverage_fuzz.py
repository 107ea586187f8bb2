"""atheris against the parsers of plain data, in an environment of its own; SPIKEOPD_ATHERIS_RUNS: how many times."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from importlib import resources
from pathlib import Path

import pytest
from random_models import random_shape

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SPIKEOPD_ATHERIS_PYTHON", ROOT / ".venv-atheris" / "bin" / "python"))
INSTALL = "python3.11 -m venv .venv-atheris && .venv-atheris/bin/pip install atheris"
RUNS = int(os.environ.get("SPIKEOPD_ATHERIS_RUNS", "20000"))
# In the order of the parsers in coverage_fuzz.py.
SEEDS = (
    "train: {seed: 1}\nstage1:\n  updates: 3\n",
    "stage1.updates=3",
    (resources.files("energy") / "data" / "example_run.json").read_text(),
    json.dumps({"title": "t", "node_nm": 45, "citation": "c", "prices_pj": {"mac": 4.6, "ac": 0.9}}),
    json.dumps(dict.fromkeys(random_shape().layer_components, 0.1)),
    json.dumps(random_shape().to_dict()),
    '{"schema": "spikeopd.chip/1", "tokens": 1, "simulator": "s", "version": "v", "roles": {}, "totals": {}}',
    '{"prompt": ["a"], "n": 2, "stop": ["x"], "temperature": 0.5, "stream": true}',
    '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}',
    '{"model": {"type": "BPE", "vocab": {"a": 0}}, "normalizer": {"type": "Replace", "pattern": {"String": "a"}}}',
)


def test_nothing_but_refusals(tmp_path):
    if not PYTHON.exists():
        pytest.skip(f"no environment with atheris; make one with: {INSTALL}")
    (tmp_path / "seeds").mkdir()
    for number, text in enumerate(SEEDS):
        (tmp_path / "seeds" / str(number)).write_bytes(bytes([number]) + text.encode())
    script = Path(__file__).with_name("coverage_fuzz.py")
    limits = [f"-atheris_runs={RUNS}", "-timeout=10", "-rss_limit_mb=2048", "-seed=1", "seeds"]
    path = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))
    done = subprocess.run(
        [PYTHON, script, *limits], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"#(\d+).* cov: (\d+)", done.stderr)[-1]
    print(f"\natheris: {RUNS} executions asked for, {said[1]} places reached, nothing but refusals")
