"""Other tools execute our NIR files, in an environment of their own that does not have this project.

Weights, alpha and thresholds are short binary fractions, so that every tool computes exact numbers whatever its order.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nir
import numpy as np
import pytest
from small_students import PLUS, small_student, tokens

from export.bundle_writer import BundleOptions, write_bundle
from export.nir.graph import DT
from export.nir.runner import Runner
from export.quantize import lower
from export.reference import TorchReference

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SPIKEOPD_INTEROP_PYTHON", ROOT / ".venv-interop" / "bin" / "python"))
INSTALL = (
    "python3.11 -m venv .venv-interop && .venv-interop/bin/pip install torch==2.13.0 && "
    ".venv-interop/bin/pip install --no-deps nirtorch==2.6 snntorch==1.0.0 spikingjelly==2.0.0 && "
    ".venv-interop/bin/pip install 'numpy<2.4' nir==1.0.8 h5py tqdm loguru packaging requests scipy matplotlib"
)
STEPS = 4


@pytest.fixture(autouse=True)
def _environment():
    if not PYTHON.exists():
        pytest.skip(f"no interop environment; make one with: {INSTALL}")


def run_tool(tool: str, model: Path, inputs: np.ndarray, folder: Path) -> np.ndarray:
    np.save(folder / "in.npy", inputs)
    script = Path(__file__).with_name("nir_readers.py")
    # An empty PYTHONPATH and another folder: nothing of this project can be imported.
    result = subprocess.run(
        [str(PYTHON), str(script), tool, str(model), str(folder / "in.npy"), str(folder / "out.npz")],
        capture_output=True, text=True, timeout=600, cwd=folder, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return np.load(folder / "out.npz")["out"]


def currents(model, ids):
    whole = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(ids)])
    return np.repeat(whole[None], STEPS, 0)


@pytest.mark.parametrize("bias", [False, True])
def test_nirtorch_executes_the_exact_file(tmp_path, bias):
    model = lower(small_student(dyadic=True, alpha=0.5, bias=bias), "float32").model
    ids = tokens(3)
    write_bundle(model, tmp_path / "b", BundleOptions(profile="unrolled", context=3))
    out = run_tool("nirtorch", tmp_path / "b" / "model.nir", currents(model, ids), tmp_path)
    _, trace = TorchReference(model).run(ids)
    want = np.concatenate(trace.sites[1, "h"], 1)
    assert 0.05 < want.mean() < 0.95
    assert np.array_equal(out > 0, want)


@pytest.mark.parametrize("profile", ["cell", "unrolled"])
def test_nirtorch_executes_the_second_form(tmp_path, profile):
    model = lower(small_student(dyadic=True, alpha=0.5, **PLUS), "float32").model
    ids = tokens(3 if profile == "unrolled" else 1)
    write_bundle(model, tmp_path / "b", BundleOptions(profile=profile, context=len(ids)))
    out = run_tool("nirtorch", tmp_path / "b" / "model.nir", currents(model, ids), tmp_path)
    want = TorchReference(model).readout(ids).reshape(out.shape)
    assert np.array_equal(out, want)


@pytest.mark.parametrize("form", [{}, PLUS], ids=["paper", "plus"])
def test_nirtorch_executes_the_default_export(tmp_path, form):
    """int8 weights and all: as real numbers, as the literal runner does (docs/export.md says what that leaves out)."""
    model = lower(small_student(alpha=0.5, **form), "int8").model
    given = currents(model, tokens(1, seed=4))
    write_bundle(model, tmp_path / "b")
    out = run_tool("nirtorch", tmp_path / "b" / "model.nir", given, tmp_path)
    want = Runner(nir.read(tmp_path / "b" / "model.nir"), DT).run(given)
    assert want.any() and np.array_equal(out, want)


def test_nirtorch_executes_the_nested_cell(tmp_path):
    model = lower(small_student(dyadic=True, alpha=0.5, bias=False), "float32").model
    ids = tokens(1, seed=4)
    write_bundle(model, tmp_path / "b")
    out = run_tool("nirtorch", tmp_path / "b" / "model.nir", currents(model, ids), tmp_path)
    _, trace = TorchReference(model).run(ids)
    assert np.array_equal(out > 0, trace.sites[1, "h"][0])


def test_snntorch_keeps_its_membranes_from_token_to_token_unless_it_is_reset(tmp_path):
    model = lower(small_student(dyadic=True, alpha=0.5), "float32").model
    write_bundle(model, tmp_path / "b", BundleOptions(neuron="lif"))
    _, trace = TorchReference(model).run(tokens(8))
    spikes, ours = (np.concatenate(trace.sites[0, site]) for site in ("x", "y"))
    path = tmp_path / "b" / "model.nir"
    assert np.array_equal(run_tool("snntorch-reset", path, spikes.astype(np.float32), tmp_path) > 0, ours)
    assert not np.array_equal(run_tool("snntorch-carried", path, spikes.astype(np.float32), tmp_path) > 0, ours)


@pytest.fixture
def feed_forward(tmp_path):
    """A lif bundle, the spikes that entered its first feed-forward part and those that left it."""
    model = lower(small_student(dyadic=True, alpha=0.5), "float32").model
    write_bundle(model, tmp_path / "b", BundleOptions(neuron="lif"))
    _, trace = TorchReference(model).run(tokens(8))
    # The token with most spikes on the way in: resets matter there.
    place = int(np.argmax([spikes.sum() for spikes in trace.sites[0, "f"]]))
    return tmp_path / "b" / "model.nir", trace.sites[0, "x"][place], trace.sites[0, "y"][place]


def literal(path: Path, spikes: np.ndarray, *, subtractive: bool) -> np.ndarray:
    block = nir.read(path).nodes["n00001_block"]
    chain = [node for name, node in block.nodes.items() if name.endswith(("_w_1", "_f_lif", "_w_2", "_y_lif"))]
    return Runner(nir.NIRGraph.from_list(*chain), DT, subtractive=subtractive).run(spikes) > 0


@pytest.mark.parametrize("tool", ["snntorch", "spikingjelly"])
def test_the_feed_forward_part_as_imported(feed_forward, tmp_path, tool):
    """As imported, the tool does what NIR says: the literal runner's spikes, not ours."""
    path, spikes, ours = feed_forward
    out = run_tool(tool, path, spikes.astype(np.float32), tmp_path) > 0
    assert np.array_equal(out, literal(path, spikes, subtractive=False))


@pytest.mark.parametrize("tool", ["snntorch-patched", "spikingjelly-patched"])
def test_the_feed_forward_part_with_the_documented_patch(feed_forward, tmp_path, tool):
    path, spikes, ours = feed_forward
    assert np.array_equal(literal(path, spikes, subtractive=True), ours)
    assert not np.array_equal(literal(path, spikes, subtractive=False), ours)  # else the patch would prove nothing
    assert np.array_equal(run_tool(tool, path, spikes.astype(np.float32), tmp_path) > 0, ours)
