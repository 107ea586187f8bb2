"""NeuroBench's SynapticOperations and SpikingJelly's SynOpCounter on our own blocks, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from random_models import PLUS, random_model, random_shape

from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import Activity, SpikeTrace
from spikeopd.contracts.topology import layer_macs

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SPIKEOPD_INTEROP_ENERGY_PYTHON", ROOT / ".venv-interop-energy" / "bin" / "python"))
INSTALL = (
    "python3.11 -m venv .venv-interop-energy && .venv-interop-energy/bin/pip install torch==2.13.0 && "
    ".venv-interop-energy/bin/pip install --no-deps neurobench==2.3.0 spikingjelly==2.0.0 snntorch==1.0.0 && "
    ".venv-interop-energy/bin/pip install numpy tqdm loguru packaging requests scipy matplotlib h5py"
)
LAYERS, TOKENS, STEPS, HEADS, HEAD_DIM = 2, 6, 4, 2, 8
SHAPES = {
    name: random_shape(heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, **form)
    for name, form in (("paper", {}), ("plus", PLUS))
}
# Written out again, on purpose: this is what the table in spikeopd.contracts.topology is checked against.
PROJECTIONS = {
    "w_q": ("input", "qkv"),
    "w_k": ("input", "qkv"),
    "w_v": ("input", "qkv"),
    "w_o": ("r", "output"),
    "w_1": ("x", "ffn_in"),
    "w_2": ("f", "ffn_out"),
}


@cache
def counted(form: str) -> tuple[Activity, dict[str, np.ndarray]]:
    """Our counts of a short decode, and the spikes and weights they were counted from."""
    model = random_model(SHAPES[form], seed=3, drive=1.5)
    trace = SpikeTrace()
    decoder = DenseDecoder(model, trace)
    total = Activity.zeros(SHAPES[form])
    for token in range(TOKENS):
        _, activity = decoder.step(token)
        activity.sops_unmasked = activity.spikes["q"] * TOKENS
        total.add(activity)
    blocks: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        entering = trace.sites[-1, "embed"] if layer == 0 else trace.sites[layer - 1, "h"]
        for name, (site, _) in PROJECTIONS.items():
            recorded = entering if site == "input" else trace.sites[layer, site]
            blocks[f"{layer}.{name}.spikes"] = np.concatenate(recorded)
            blocks[f"{layer}.{name}.weight"] = getattr(model.layers[layer], name)
        for site in ("q", "k", "v"):
            blocks[f"{layer}.{site}"] = np.stack(trace.sites[layer, site]).reshape(TOKENS, STEPS, HEADS, HEAD_DIM)
        for token, spikes in enumerate(trace.sites[layer, "a"]):
            blocks[f"{layer}.a.{token}"] = spikes.reshape(STEPS, HEADS, token + 1)
    return total, blocks


Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=SHAPES)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, form: str) -> Counts:
    if not PYTHON.exists():
        pytest.skip(f"NeuroBench and SpikingJelly are not installed; install with: {INSTALL}")
    path = tmp_path_factory.mktemp("interop") / "blocks.npz"
    np.savez(path, **counted(form)[1])
    script = Path(__file__).with_name("energy_counters.py")
    done = subprocess.run([PYTHON, script, path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ours(form: str, component: str, layer: int, field: str = "sops") -> int:
    return int(getattr(counted(form)[0], field)[component][layer].sum())


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("component", ["qkv", "output", "ffn_in", "ffn_out"])
def test_projections(others: Counts, form: str, component: str, layer: int) -> None:
    """SpikingJelly counts what we count; NeuroBench skips synapses of weight zero, and with those added agrees too."""
    blocks = counted(form)[1]
    names = [name for name, (_, target) in PROJECTIONS.items() if target == component]
    found = [others[f"{layer}.{name}"] for name in names]
    assert sum(row["spikingjelly"] for row in found) == ours(form, component, layer) > 0
    hits = sum(
        int((blocks[f"{layer}.{name}.spikes"].sum(0)[:, None] * (blocks[f"{layer}.{name}.weight"] == 0)).sum())
        for name in names
    )
    assert sum(row["neurobench_acs"] for row in found) + hits == ours(form, component, layer)
    assert all(row["neurobench_macs"] == 0 for row in found)  # it sees spikes, so none of it is a MAC


@pytest.mark.parametrize("layer", range(LAYERS))
def test_zero_weights_occur(others: Counts, form: str, layer: int) -> None:
    """The difference explained above is really exercised: somewhere a spike meets a weight of zero."""
    mine = sum(ours(form, component, layer) for component in ("qkv", "output", "ffn_in", "ffn_out"))
    theirs = sum(others[f"{layer}.{name}"]["neurobench_acs"] for name in PROJECTIONS)
    assert theirs < mine


@pytest.mark.parametrize("layer", range(LAYERS))
def test_dense_operations(others: Counts, form: str, layer: int) -> None:
    """NeuroBench's Dense is T_s times our closed-form FLOPs."""
    flops = layer_macs(SHAPES[form], TOKENS, 0)
    for component in ("qkv", "output", "ffn_in", "ffn_out"):
        names = [name for name, (_, target) in PROJECTIONS.items() if target == component]
        dense = sum(others[f"{layer}.{name}"]["neurobench_dense"] for name in names)
        assert dense == STEPS * flops[component]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention(others: Counts, form: str, layer: int) -> None:
    """Synapses reached are our sops, pairs that both spike our additions; a square product is our unmasked count."""
    found = others[f"{layer}.attention"]
    assert found["spikingjelly_synapses"] == found["neurobench_synapses"] == ours(form, "coincidence", layer) > 0
    assert found["spikingjelly_pairs"] == found["neurobench_pairs"] == ours(form, "coincidence", layer, "additions") > 0
    assert found["spikingjelly_av_synapses"] == found["neurobench_av_synapses"] == ours(form, "av", layer) > 0
    assert found["spikingjelly_av_pairs"] == found["neurobench_av_pairs"] == ours(form, "av", layer, "additions")
    assert found["spikingjelly_square_synapses"] == int(counted(form)[0].sops_unmasked[layer].sum())
    assert found["spikingjelly_square_masked_pairs"] == ours(form, "coincidence", layer, "additions")
    assert found["spikingjelly_square_pairs"] > ours(
        form, "coincidence", layer, "additions"
    )  # it also counts the future
