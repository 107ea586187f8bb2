"""torch student = float lowering = NIR executed literally; torch integer reference = re-read bundle in the oracle."""

from __future__ import annotations

import dataclasses

import nir
import numpy as np
import pytest
import torch
from random_models import random_model, random_shape
from small_students import small_student, tokens

from export.bundle_writer import BundleOptions, write_bundle
from export.nir_graph import DT, build_graph
from export.nir_runner import Runner
from export.quantize import lower
from export.reference import TorchReference
from export.verify import verify_bundle
from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import SpikeTrace, first_difference
from spikeopd.contracts.bundle import load_bundle
from spikeopd.errors import CheckFailed
from spikeopd.models.bispikclm import Recorder

STEPS = 4


def oracle(model, ids):
    trace = SpikeTrace()
    decoder = DenseDecoder(model, trace)
    logits = np.stack([decoder.step(token)[0] for token in ids])
    return logits, trace


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("drive", [0.5, 1.0, 3.0, 1000.0])
def test_reference_equals_oracle_on_random_integers(width, drive):
    """Drives from near silence to membranes that saturate."""
    model = random_model(random_shape(width=width), seed=int(drive * 10), drive=drive)
    ids = tokens(7, vocab=40)
    logits, trace = TorchReference(model).run(ids)
    want_logits, want = oracle(model, ids)
    assert first_difference(want, trace) is None
    assert set(trace.sites) == set(want.sites) and trace.tokens == want.tokens
    assert np.array_equal(logits, want_logits)


def test_reference_equals_oracle_where_membranes_saturate():
    model = random_model(random_shape(ffn=64), seed=1)
    layer = model.layers[0]
    heavy = dataclasses.replace(
        layer.sites["y"], bias=np.full(16, 2**23 - 1, np.int32), threshold=np.full(16, 2**23 - 1, np.int32)
    )
    layers = (dataclasses.replace(layer, sites={**layer.sites, "y": heavy}), *model.layers[1:])
    model = dataclasses.replace(model, layers=layers)
    ids = tokens(4, vocab=40)
    decoder = DenseDecoder(model)
    assert sum(int(decoder.step(token)[1].saturations["y"].sum()) for token in ids) > 0
    assert first_difference(oracle(model, ids)[1], TorchReference(model).run(ids)[1]) is None


@pytest.mark.parametrize("options", [BundleOptions(), BundleOptions(target="lava")], ids=["nir", "lava"])
@pytest.mark.parametrize("width", [None, 8])
def test_a_bundle_read_back_gives_the_same_spikes(tmp_path, options, width):
    model = lower(small_student(width=width)).model
    write_bundle(model, tmp_path / "b", options)
    ids = tokens(10)
    logits, trace = TorchReference(model).run(ids)
    got_logits, got = oracle(load_bundle(tmp_path / "b"), ids)
    assert first_difference(trace, got) is None and np.array_equal(logits, got_logits)


def sites_of(graph: nir.NIRGraph, runner: Runner, context: int) -> dict[str, np.ndarray]:
    """Spikes by site: [T_s, all tokens' neurons], tokens in order. Metadata only tells which node is which."""
    found: dict[str, list[np.ndarray]] = {}
    for name, node in graph.nodes.items():
        if isinstance(node, nir.Threshold | nir.LIF) and "site" in node.metadata:
            site = node.metadata["site"]
            found.setdefault(site if isinstance(site, str) else site.decode(), []).append(runner.fired[f"/{name}"])
    assert all(len(parts) == context * (context + 1) // 2 if site.endswith(".a") else len(parts) == context
               for site, parts in found.items())  # fmt: skip
    return {site: np.concatenate(parts, 1) for site, parts in found.items()}


@pytest.mark.parametrize("alpha", [0.5, 0.875])
@pytest.mark.parametrize("bias", [True, False])
def test_the_unrolled_float_file_executed_literally_is_the_student(tmp_path, alpha, bias):
    student = small_student(dyadic=True, alpha=alpha, bias=bias)
    ids, context = tokens(4), 4
    recorder = Recorder()
    with torch.no_grad():
        student(torch.tensor([ids]), use_cache=False, recorder=recorder)
    model = lower(student, "float32").model
    write_bundle(model, tmp_path / "b", BundleOptions(profile="unrolled", context=context))
    graph = nir.read(tmp_path / "b" / "model.nir")
    runner = Runner(graph, DT)
    currents = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(ids)])
    out = runner.run(np.repeat(currents[None], STEPS, 0))
    got = sites_of(graph, runner, context)
    compared = 0
    for (layer, site), spikes in recorder.spikes.items():
        spikes = spikes[:, 0] > 0
        if site == "a":  # pairs in the order (0, 0), (1, 0), (1, 1), ...
            pairs = [spikes[:, :, i, j] for i in range(context) for j in range(i + 1)]
            want = torch.cat(pairs, 1)
        else:
            want = spikes.flatten(1)
        name = "embed" if layer < 0 else f"layers.{layer}.{site}"
        assert np.array_equal(got[name], want.numpy()), name
        compared += 1
    assert compared == 21
    assert np.array_equal(out > 0, (recorder.spikes[1, "h"][:, 0] > 0).flatten(1).numpy())


def test_the_cell_is_the_model_for_a_single_token_and_only_there(tmp_path):
    model = lower(small_student(dyadic=True), "float32").model
    ids = tokens(6, seed=3)
    _, trace = TorchReference(model).run(ids)
    graph = build_graph(model).graph
    agree = []
    for place, token in enumerate(ids):
        out = Runner(graph, DT).run(np.repeat(model.embedding.current(token, place)[None], STEPS, 0)) > 0
        agree.append(np.array_equal(out, trace.sites[1, "h"][place]))
    assert agree[0] and not all(agree)  # later tokens attend to earlier ones, which one cell cannot


def test_the_threshold_itself_fires_in_every_form():
    """u exactly V: ours fires at >=, NIR at >; the file holds the float32 just below."""
    graph = nir.NIRGraph.from_list(
        nir.Threshold(np.nextafter(np.array([0.7, 2867.0], np.float32), np.float32(-np.inf)))
    )
    assert Runner(graph, DT).run(np.array([[np.float32(0.7), 2867.0]])).tolist() == [[1.0, 1.0]]
    below = np.nextafter(np.array([[0.7, 2867.0]], np.float32), np.float32(-np.inf))
    assert Runner(graph, DT).run(below).tolist() == [[0.0, 0.0]]


def test_verification_names_the_first_difference(tmp_path):
    model = random_model()
    write_bundle(model, tmp_path / "b")
    prompts = [tokens(5, vocab=40)]
    assert verify_bundle(model, tmp_path / "b", prompts)["differences"] == []
    weights = model.layers[1].w_1.copy()
    weights[:, 3] = 127 - weights[:, 3] // 2
    layers = (model.layers[0], dataclasses.replace(model.layers[1], w_1=weights))
    other = dataclasses.replace(model, layers=layers)
    with pytest.raises(CheckFailed, match=r"array layers\.1\.w_1 changed"):
        verify_bundle(other, tmp_path / "b", prompts)
    listed = verify_bundle(other, tmp_path / "b", prompts, allow_lossy=True)["differences"]
    assert any("layer 1, site f, step" in text and "neuron 3" in text for text in listed)
