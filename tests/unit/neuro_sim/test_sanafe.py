"""The model as a network for SANA-FE, without SANA-FE: spikes, counts, files, placement, words when it is missing."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

from neuro_sim.backends import BACKENDS, Running
from neuro_sim.cli import main
from neuro_sim.dense import DenseDecoder
from neuro_sim.sanafe.chip import link_loads
from neuro_sim.sanafe.decoder import NetworkDecoder
from neuro_sim.sanafe.description import read_network, write_network
from neuro_sim.sanafe.interpreter import Interpreter
from neuro_sim.sanafe.network import EXTRAS, build_network, events, token_biases
from neuro_sim.sanafe.placement import LOIHI1, messages, pack, place, trade, traffic
from neuro_sim.sanafe.process import VARIABLE
from spikeopd.contracts import SpikeTrace, first_difference
from spikeopd.errors import BackendMissing, CheckFailed, InputError

FORMS = {
    "paper": {},
    "plus": PLUS,
    "inhibiting": INHIBITING,
    "current": {"write": "current"},
    "readout": {"readout": "residual"},
    "distances": {"distances": 3},
    "factorised": {"width": 12},
}
TOKENS = (3, 7, 1, 9, 2)


def model_of(form, **sizes):
    return random_model(random_shape(**sizes, **FORMS[form]), seed=3, drive=1.5)


def test_weights_of_four_bits_are_integers_like_any_other():
    model = dataclasses.replace(model_of("plus"), precision="int4")
    logits, counts = decoded(NetworkDecoder(model), TOKENS[:2])
    expected, theirs = decoded(DenseDecoder(model), TOKENS[:2])
    assert np.array_equal(logits, expected) and counts == theirs
    with pytest.raises(InputError, match="SANA-FE runs integers"):
        NetworkDecoder(dataclasses.replace(model, precision="float32"))
    with pytest.raises(InputError, match="a quantised twin, whose neurons send counts"):
        build_network(random_model(random_shape(neuron="quantised")), 2)


def decoded(decoder, tokens=TOKENS):
    results = [decoder.step(token) for token in tokens]
    return np.stack([logits for logits, _ in results]), [activity.to_dict() for _, activity in results]


@pytest.mark.parametrize("form", FORMS)
def test_the_network_gives_the_models_spikes_logits_and_counts(form):
    model, mine, theirs = model_of(form), SpikeTrace(), SpikeTrace()
    logits, counts = decoded(DenseDecoder(model, theirs))
    decoder = NetworkDecoder(model, trace=mine, slots=3)  # the cache grows on the way
    found, counted = decoded(decoder)
    assert first_difference(mine, theirs) is None
    assert sum(int(spikes.sum()) for rows in theirs.sites.values() for spikes in rows) > 300
    assert np.array_equal(found, logits)
    assert counted == counts
    for record, activity in zip(decoder.records, counts, strict=True):
        for name, sops in activity["sops"].items():
            assert record["roles"][name] == np.sum(sops), name  # ours, once the extras are apart
        assert record["events"] == sum(record["roles"].values())
    assert [record["slots"] for record in decoder.records] == [3, 3, 3, 6, 6]
    assert model.shape.num_steps + 1 + (model.shape.num_hidden_layers * (10 if "o" in model.shape.layer_sites else 8)) \
        == decoder.records[0]["steps"] + 1  # fmt: skip


def test_a_second_sequence_begins_anew():
    decoder = NetworkDecoder(model_of("plus"))
    decoder.begin(5)
    first = decoded(decoder)[0]
    decoder.reset()
    assert np.array_equal(decoded(decoder)[0], first)
    assert decoder.records[0]["slots"] == 5 and len(decoder.records) == 10
    assert decoder.measured() is None  # nothing was simulated


@pytest.mark.parametrize("form", ["paper", "plus"])
def test_a_wrong_decay_shows(form):
    model, mine, theirs = model_of(form), SpikeTrace(), SpikeTrace()
    decoded(DenseDecoder(model, theirs))
    wrong = NetworkDecoder(dataclasses.replace(model, decay=model.decay - 64), trace=mine)
    decoded(wrong)
    assert first_difference(mine, theirs) is not None


def test_counts_that_do_not_add_up_are_refused():
    class Forgetful(Interpreter):
        def run(self, biases):
            outcome = super().run(biases)
            outcome.counts["events"] -= 1
            return outcome

    with pytest.raises(CheckFailed, match=r"token 0: the executor counts \d+ events, the network has \d+"):
        NetworkDecoder(model_of("paper"), Forgetful).step(3)


def test_one_token_counted_by_hand():
    """Two channels, one head, one layer of the paper's block: every bundle of synapses by its size."""
    shape = random_shape(heads=1, head_dim=2, layers=1, ffn=3, vocab=5, positions=4, num_steps=2)
    network = build_network(random_model(shape), 4)
    assert network.steps == 12
    assert {name: group.start for name, group in network.groups.items() if group.kind != "relay"} == {
        "embed": 0, "layer0.q": 1, "layer0.k": 1, "layer0.v": 1, "layer0.k.gate": 2, "layer0.a": 3,
        "layer0.v.gate": 4, "layer0.r": 5, "layer0.o": 6, "layer0.x": 7, "layer0.f": 8, "layer0.y": 9, "layer0.h": 10,
    }  # fmt: skip
    relays = {name: group.start for name, group in network.groups.items() if group.kind == "relay"}
    # Values wait for the map; the first write waits for the second.
    assert relays == {
        "layer0.v.relay1": 2, "layer0.v.relay2": 3, "layer0.o.relay1": 7, "layer0.o.relay2": 8, "layer0.o.relay3": 9
    }  # fmt: skip
    sites = {group.name: np.ones(group.neurons, np.int64) for group in network.of_kind("site")}
    counts, dense = events(network, sites, {"layer0.k.gate": 5, "layer0.v.gate": 4}, position=1)
    assert counts == {
        "qkv": 12, "coincidence": 4, "av": 8, "output": 4, "residual": 4, "ffn_in": 6, "ffn_out": 6,
        "reset": 25, "gated": 9, "own": 4, "empty": 4, "relay": 10, "copy": 2,
    }  # fmt: skip
    assert dense == {
        **dict.fromkeys(counts, 0), "qkv": 12, "output": 4, "ffn_in": 6, "ffn_out": 6, "reset": 13,
    }  # fmt: skip


@cache
def placed(form):
    network = build_network(model_of(form, heads=4, head_dim=16, layers=2, ffn=256, positions=32), 32)
    return network, place(network)


@pytest.mark.parametrize("form", ["paper", "plus"])
def test_placement_keeps_the_limits_and_lowers_the_hops(form):
    network, placement = placed(form)
    cores = np.concatenate([placement.core_of[name] for name in network.groups])
    assert len(cores) == network.neurons("site", "gate", "relay")
    assert cores.min() >= 0 and cores.max() < LOIHI1.cores and len(np.unique(cores)) == placement.report["cores"] > 20
    assert np.bincount(cores).max() <= LOIHI1.core_neurons
    assert placement.report["violations"] == [] and placement.report["chips"] == 1
    hops = placement.report["expected_hops"]
    assert hops["traded"]["mean"] < 0.8 * hops["in_order"]["mean"]
    bits = np.zeros(LOIHI1.cores)
    for bundle in network.synapses:
        if bundle.pairs is None:
            rows = len(bundle.weights)
            np.add.at(bits, placement.core_of[bundle.target], 8 * rows)
    assert bits.max() <= LOIHI1.core_synapse_bits


def test_trading_seats_by_hand():
    """Two pairs of cores that talk across the mesh, and all others silent: each pair ends in one tile."""
    between = np.zeros((128, 128))
    between[0, 127] = between[5, 100] = 1.0
    seats = trade(between, LOIHI1)
    assert sorted(seats) == list(range(128))
    assert seats[0] // 4 == seats[127] // 4 and seats[5] // 4 == seats[100] // 4


def test_messages_are_one_for_each_core_that_a_neuron_reaches():
    network = build_network(model_of("plus"), 4)
    core_of, cores = pack(network, dataclasses.replace(LOIHI1, core_neurons=64))
    reached = messages(network, core_of)
    between = traffic(network, reached, core_of, cores)
    q = network.groups["layer0.q"]
    neurons, ends = reached[q.name]
    for neuron in range(q.neurons):
        gates = np.arange(4) + 4 * neuron
        due = {*core_of["layer0.k.gate"][gates].tolist(), int(core_of[q.name][neuron])}  # and itself, for the reset
        assert set(ends[neurons == neuron].tolist()) == due
    assert between.shape == (cores, cores) and between.sum() > len(neurons)


def test_a_neuron_that_fits_no_core_is_refused():
    with pytest.raises(InputError, match=r"one neuron of layer1.h needs \d+ axons and \d+ bits: more than a core has"):
        pack(build_network(model_of("plus"), 2), dataclasses.replace(LOIHI1, core_synapse_bits=300))


def test_link_loads_by_hand():
    """Four rows: tile 1 is row 1 of column 0, tile 11 row 3 of column 2. East first, then north."""
    assert link_loads({(1, 11): 5, (5, 5): 9, (9, 10): 2}, 4) == [
        {"from": 9, "to": 10, "messages": 7},
        {"from": 1, "to": 5, "messages": 5},
        {"from": 5, "to": 9, "messages": 5},
        {"from": 10, "to": 11, "messages": 5},
    ]


@pytest.mark.parametrize("form", ["paper", "plus"])
def test_the_files_hold_the_network(form, tmp_path):
    model = model_of(form)
    network = build_network(model, 4)
    write_network(tmp_path, network, place(network, spread=False))
    again = read_network(tmp_path)
    shape = model.shape
    cache = [[np.zeros((0, shape.num_steps, shape.hidden_size), bool)] * 2] * shape.num_hidden_layers
    biases = token_biases(network, model, model.embedding.current(3, 0), cache)
    one, two = Interpreter(network).run(biases), Interpreter(again).run(biases)
    assert one.counts == two.counts and one.counts["fired"] > 100
    assert all(np.array_equal(one.spikes[name], two.spikes[name]) for name in one.spikes)
    about = json.loads((tmp_path / "network.json").read_text())
    assert {row["role"] for row in about["synapses"]} <= {*shape.layer_components, *EXTRAS}
    (tmp_path / "network.json").write_text("{}")
    with pytest.raises(InputError, match=r"expected schema 'spikeopd.sanafe/1', got None"):
        read_network(tmp_path)


def test_what_cannot_be_mapped_is_refused():
    model = model_of("paper")
    with pytest.raises(InputError, match="a cache of 99 tokens: this model takes 1 to 32"):
        build_network(model, 99)
    layer = model.layers[0]
    for site, message in (
        (dataclasses.replace(layer.sites["q"], threshold=layer.sites["q"].threshold * 0), "a threshold of 0"),
        (dataclasses.replace(layer.sites["q"], bias=layer.sites["q"].bias * 0 + (1 << 23)), "8388608 is beyond"),
    ):
        broken = dataclasses.replace(layer, sites={**layer.sites, "q": site})
        with pytest.raises(InputError, match=message):
            NetworkDecoder(dataclasses.replace(model, layers=(broken, *model.layers[1:])))


def test_without_sanafe_it_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    from export.bundle_writer import write_bundle

    write_bundle(model_of("paper"), tmp_path / "bundle")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    assert main([str(tmp_path / "bundle"), "--backend", "sanafe", "--prompt-tokens", "1,2"]) == 4
    said = capsys.readouterr().err
    assert "pip install sanafe" in said and "nowhere" in said and "Traceback" not in said
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("neuro_sim.sanafe.process.__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    with pytest.raises(BackendMissing, match=r"make sanafe, or python3 -m venv \.venv-sanafe"):
        BACKENDS["sanafe"].open(model_of("paper"), Running())


def test_a_python_without_sanafe_says_so(monkeypatch):
    monkeypatch.setenv(VARIABLE, sys.executable)
    decoder = BACKENDS["sanafe"].open(model_of("paper"), Running())
    with pytest.raises(BackendMissing, match="SANA-FE cannot be imported: .*; install it with: "):
        decoder.step(1)
    decoder.close()
