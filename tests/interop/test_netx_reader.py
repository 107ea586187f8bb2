"""lava-dl loads our netx files and runs them in Loihi fixed point; the spikes are those of the written integers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from random_models import random_model, random_shape

from export.netx import common_threshold, spiking_weights, write_netx

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SPIKEOPD_INTEROP_LAVADL_PYTHON", ROOT / ".venv-lavadl" / "bin" / "python"))
INSTALL = (
    "python3.11 -m venv .venv-lavadl && .venv-lavadl/bin/pip install torch==2.13.0 && "
    ".venv-lavadl/bin/pip install 'numpy<2.4' networkx scipy scikit-learn 'asteval>=0.9.31,<2' h5py matplotlib && "
    ".venv-lavadl/bin/pip install --no-deps --ignore-requires-python lava-nc==0.10.0 lava-dl==0.6.0"
)


def literal(layer, sites, weights, spikes, decay, steps):
    """Stock LIF on the integers of the file: fires at >, resets to zero; every dense block is one step late."""
    for name in weights:
        matrix, bias, threshold = common_threshold(getattr(layer, name), layer.sites[sites[name]])
        v = np.zeros(len(bias), np.int64)
        fired = np.zeros((steps, len(bias)), bool)
        for step in range(steps):
            arriving = matrix.astype(np.int64) @ spikes[step - 1] if step else np.zeros(len(bias), np.int64)
            v = np.sign(v) * ((np.abs(v) * decay) >> 12) + (arriving << 6) + (bias.astype(np.int64) << 6)
            fired[step] = v > threshold << 6
            v[fired[step]] = 0
        spikes = fired.astype(np.int64)
    return fired


@pytest.mark.parametrize(("chain", "weights"), [("q", ["w_q"]), ("ffn", ["w_1", "w_2"])])
def test_lava_dl_runs_the_file(tmp_path, chain, weights):
    if not PYTHON.exists():
        pytest.skip(f"no lava-dl environment; make one with: {INSTALL}")
    model = random_model(random_shape(layers=1), seed=5)
    report = write_netx(model, tmp_path)
    name = f"netx_layer000_{chain}.h5"
    assert report["files"][name]["relative_weight_error"] < 0.05
    spikes = (np.random.default_rng(0).random((6, 16)) < 0.4).astype(np.int64)
    np.save(tmp_path / "in.npy", spikes)
    script = Path(__file__).with_name("netx_reader.py")
    result = subprocess.run(
        [str(PYTHON), str(script), name, "in.npy", "out.npz"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    out = np.load(tmp_path / "out.npz")["out"] > 0  # [n, steps]
    steps = out.shape[1]
    padded = np.zeros((steps, 16), np.int64)
    padded[:6] = spikes
    want = literal(model.layers[0], spiking_weights(model.shape), weights, padded, int(model.decay), steps)
    assert want.any() and np.array_equal(out.T, want)
