"""NeuroBench's SynapticOperations and SpikingJelly's SynOpCounter on our own blocks, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from random_models import PLUS, random_model, random_shape

from energy.costs import MEMORY, OPERATIONS
from energy.flops import keys_of_sequence
from energy.memory import activity_work, student_tally
from neuro_sim.dense import DenseDecoder
from neuro_sim.graded import GradedDecoder
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


Counts = dict[str, dict]


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


def lemaire(others: Counts, key: str, part: str = "lemaire") -> float:
    """One of Lemaire's counts, over every projection of every layer."""
    return sum(others[f"{layer}.{name}"][part][key] for layer in range(LAYERS) for name in PROJECTIONS)


def test_memory_accesses_are_lemaires(others: Counts, form: str) -> None:
    """Per spike: as many reads of weights, reads and writes of sums, and addresses as SpikingJelly counts.

    It knows Linear and LIF alone, so the attention's synapses and the gains are added from our own counts.
    """
    activity, blocks = counted(form)
    tally = student_tally(activity_work(SHAPES[form], activity, keys_of_sequence(TOKENS)), "spike").blocks
    gains = sum(int(table.sum()) for name, table in activity.sops.items() if name == "residual")
    attention = sum(int(activity.sops[name].sum()) for name in ("coincidence", "av"))
    assert tally["weight_read"] - gains == lemaire(others, "read_params_words") > 0
    assert tally["sum_read"] - attention == lemaire(others, "read_potential_words")
    assert tally["sum_write"] - attention == lemaire(others, "write_potential_words")
    assert tally["address"] - attention - gains == lemaire(others, "acc_addr")
    assert tally["ac"] - attention - gains == lemaire(others, "ac")
    assert lemaire(others, "mac") == 0
    # A spike is read once by every component it drives; SpikingJelly reads it for each of the three matrices of qkv.
    read = lemaire(others, "read_in_words") - sum(
        int(blocks[f"{layer}.{name}.spikes"].sum()) for layer in range(LAYERS) for name in ("w_k", "w_v")
    )
    others_read = sum(int(activity.spikes[site].sum()) for site in ("q", "a", "o", "y") if site in activity.spikes)
    assert tally["spike_read"] == pytest.approx(read + others_read + int(activity.spikes["h"][-1].sum()))


def test_neuron_updates_are_lemaires(others: Counts, form: str) -> None:
    """A LIF is read, multiplied and written once per neuron and step, silent or not; a spike is written once."""
    blocks = counted(form)[1]
    for layer in range(LAYERS):
        for name in PROJECTIONS:
            spikes, found = blocks[f"{layer}.{name}.spikes"], others[f"{layer}.{name}"]["lemaire_neurons"]
            assert found["read_potential_words"] == found["write_potential_words"] == found["mac"] == spikes.size
            assert found["write_out_words"] == spikes.sum() > 0


def test_memory_prices_are_lemaires(others: Counts) -> None:
    """The same additions and products; the same SRAM figures, which it charges per 32 bits and we per 64."""
    prices = others["lemaire_prices"]
    assert prices["add"] == OPERATIONS["ac"].pj == OPERATIONS["address"].pj
    assert prices["add"] + prices["mul"] == pytest.approx(OPERATIONS["update"].pj)
    for name in ("sram-8kb", "sram-32kb", "sram-1mb"):
        assert prices[name] == 2 * MEMORY[name].pj_per_byte


def test_a_projections_whole_bill_is_lemaires(others: Counts, form: str) -> None:
    """Our counts at its widths and prices: its total, to the last pJ."""
    add = OPERATIONS["ac"].pj
    for layer in range(LAYERS):
        for name in PROJECTIONS:
            found, spikes = others[f"{layer}.{name}"]["lemaire"], counted(form)[1][f"{layer}.{name}.spikes"]
            weight = counted(form)[1][f"{layer}.{name}.weight"]
            synapses = int(spikes.sum()) * weight.shape[1]
            local = sram(4 * len(spikes) * weight.shape[1])  # its sums: every row is one sample here
            mine = 2 * synapses * add + 4 * synapses * sram(4 * weight.size) + 8 * synapses * local
            assert mine + 4 * int(spikes.sum()) * sram(4000) == pytest.approx(found["total_pj"])


def sram(size: float) -> float:
    """pJ per byte as Lemaire et al. interpolate: 0 at 0 bytes, then 10, 20 and 100 pJ per 32 bits."""
    return float(np.interp(size, (0, 8192, 32768, 1048576), (0, 2.5, 5, 25)))


# --- the quantised twin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paper", "plus"])
def test_products_of_a_twin_are_effective_macs(tmp_path: Path, name: str) -> None:
    """NeuroBench sees values that are not binary and counts MACs: those of inputs and weights that are not zero.
    SpikingJelly counts the synapses that inputs reach which are not zero; dense is one step of our FLOPs.
    """
    if not PYTHON.exists():
        pytest.skip(f"NeuroBench and SpikingJelly are not installed; install with: {INSTALL}")
    shape = replace(SHAPES[name], neuron="quantised")
    model, trace = random_model(shape, seed=3, drive=1.5), SpikeTrace()
    decoder = GradedDecoder(model, trace)
    total = Activity.total([decoder.step(token)[1] for token in range(TOKENS)])
    blocks: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        entering = trace.sites[-1, "embed"] if layer == 0 else trace.sites[layer - 1, "h"]
        for weight, (site, _) in PROJECTIONS.items():
            recorded = entering if site == "input" else trace.sites[layer, site]
            blocks[f"{layer}.{weight}.counts"] = np.stack([steps.sum(0) for steps in recorded])
            blocks[f"{layer}.{weight}.weight"] = getattr(model.layers[layer], weight)
    np.savez(tmp_path / "twin.npz", **blocks)
    script = Path(__file__).with_name("energy_counters.py")
    done = subprocess.run([PYTHON, script, tmp_path / "twin.npz"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    others, flops = json.loads(done.stdout.splitlines()[-1]), layer_macs(shape, TOKENS, 0)
    for layer in range(LAYERS):
        for component in ("qkv", "output", "ffn_in", "ffn_out"):
            names = [weight for weight, (_, target) in PROJECTIONS.items() if target == component]
            found = [others[f"{layer}.{weight}"] for weight in names]
            zeros = sum(
                int(((blocks[f"{layer}.{w}.counts"] > 0).sum(0)[:, None] * (blocks[f"{layer}.{w}.weight"] == 0)).sum())
                for w in names
            )
            mine = int(total.sops[component][layer].sum())
            assert sum(row["neurobench_macs"] for row in found) + zeros == mine > 0
            assert all(row["neurobench_acs"] == 0 for row in found)
            assert sum(row["neurobench_dense"] for row in found) == flops[component]
            assert sum(row["spikingjelly"] for row in found) == mine
