"""torch student = float lowering = NIR executed literally; torch integer reference = re-read bundle in the oracle."""

from __future__ import annotations

import dataclasses

import nir
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import INHIBITING, PLUS, random_model, random_shape, real_valued
from small_students import PLUS as PLUS_STUDENT
from small_students import small_student, tokens

from export.bundle_writer import BundleOptions, write_bundle
from export.nir.graph import DT, build_graph
from export.nir.runner import Runner
from export.quantize import lower
from export.reference import TorchReference
from export.verify import run_student, verify_bundle
from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import SpikeTrace, first_difference, weight_limit
from spikeopd.contracts.bundle import load_bundle
from spikeopd.errors import CheckFailed
from spikeopd.models.bispikclm import Recorder
from spikeopd.students import load_student

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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 6),
    layers=st.integers(1, 2),
    ffn=st.integers(1, 12),
    num_steps=st.integers(1, 5),
    width=st.one_of(st.none(), st.integers(1, 9)),
    write=st.sampled_from(["spike", "current"]),
    readout=st.sampled_from(["rate", "residual"]),
    distances=st.integers(0, 6),
    drive=st.sampled_from([0.5, 1.0, 3.0, 300.0]),
    precision=st.sampled_from(["int8", "int4"]),
    seed=st.integers(0, 99),
)
def test_reference_equals_oracle_in_every_form_of_the_block(seed, drive, precision, **options):
    shape = random_shape(vocab=20, positions=9, **options)
    model = random_model(shape, seed=seed, drive=drive, precision=precision)
    ids = tokens(7, vocab=20, seed=seed)
    logits, trace = TorchReference(model).run(ids)
    want_logits, want = oracle(model, ids)
    assert set(trace.sites) == set(want.sites) and first_difference(want, trace) is None
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
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_bundle_read_back_gives_the_same_spikes(tmp_path, options, width, precision):
    model = lower(small_student(width=width), precision).model
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


FORMS = {
    "plus": PLUS,
    "inhibiting": INHIBITING,
    "current": {"write": "current"},
    "residual": {"readout": "residual"},
    "distance": {"distances": 2},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("neuron", ["exact", "lif"])
def test_the_unrolled_file_of_every_form_executed_literally_is_the_oracle(tmp_path, form, neuron):
    """Every site, every token, every pair; the file is read by `nir.read` and nothing but its nodes is used."""
    model = real_valued(random_model(random_shape(**FORMS[form]), seed=5, drive=1.5))
    ids, context = tokens(4, vocab=40), 4
    write_bundle(model, tmp_path / "b", BundleOptions(profile="unrolled", context=context, neuron=neuron))
    graph = nir.read(tmp_path / "b" / "model.nir")
    runner = Runner(graph, DT, subtractive=neuron == "lif")
    currents = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(ids)])
    out = runner.run(np.repeat(currents[None], STEPS, 0))
    _, want = oracle(load_bundle(tmp_path / "b"), ids)
    got = sites_of(graph, runner, context)
    assert len(got) == len(want.sites)
    for (layer, site), spikes in want.sites.items():
        name = "embed" if layer < 0 else f"layers.{layer}.{site}"
        if site == "a":  # the trace has [head, key] for each query, the file a node for each pair
            heads = model.shape.num_attention_heads
            spikes = [s.reshape(STEPS, heads, -1)[:, :, j] for s in spikes for j in range(s.shape[1] // heads)]
        assert np.array_equal(got[name], np.concatenate(spikes, 1)), name
    assert all(0 < spikes.mean() < 1 for spikes in got.values())
    assert np.array_equal(out, TorchReference(model).readout(ids).reshape(out.shape))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 2), head_dim=st.integers(1, 4), layers=st.integers(1, 2), num_steps=st.integers(1, 4),
    write=st.sampled_from(["spike", "current"]), readout=st.sampled_from(["rate", "residual"]),
    distances=st.integers(0, 4), attention=st.sampled_from(["sum", "inhibiting"]),
    neuron=st.sampled_from(["exact", "lif"]), context=st.integers(1, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_graph_of_any_form_is_the_model(seed, neuron, context, **options):
    model = real_valued(random_model(random_shape(ffn=6, vocab=20, positions=6, **options), seed=seed, drive=1.5))
    ids = tokens(context, vocab=20, seed=seed)
    # The cell is the model for one token: one pair, at distance 0, is all the attention there is.
    graph = build_graph(model, profile="unrolled" if context > 1 else "cell", neuron=neuron, context=context).graph
    currents = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(ids)])
    runner = Runner(graph, DT, subtractive=neuron == "lif")
    out = runner.run(np.repeat(currents[None], model.shape.num_steps, 0))
    assert np.array_equal(out, TorchReference(model).readout(ids).reshape(out.shape))


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


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_student_trained_in_integers_is_its_file(tmp_path, precision):
    """Gradient steps through the integer forward pass, saved, loaded, exported: one function all the way."""
    student = small_student(deploy_precision=precision, **PLUS_STUDENT).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    batch = torch.tensor([tokens(16, seed=seed) for seed in range(8)])
    losses = []
    for _ in range(12):
        loss = student(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    student.save_pretrained(tmp_path / "final")
    student = load_student(tmp_path / "final")
    lowered = lower(student, precision)
    assert max(np.abs(layer.w_1).max() for layer in lowered.model.layers) == weight_limit(precision)
    assert all(error.relative == 0 for error in lowered.errors)
    prompts = [tokens(12, seed=seed) for seed in (3, 99)]
    for options in (BundleOptions(), BundleOptions(target="lava")):
        write_bundle(lowered.model, tmp_path / options.target, options)
        found = verify_bundle(lowered.model, tmp_path / options.target, prompts, student=run_student(student, prompts))
        assert found["student"] == "spikes, tokens and log-likelihoods equal"
    logits, trace = run_student(student, prompts)[0]
    assert 0.02 < np.concatenate([s.ravel() for spikes in trace.sites.values() for s in spikes]).mean() < 0.9
    # Decoding token by token with a cache gives the same policy, bit for bit.
    cache, rows = None, []
    with torch.no_grad():
        for token in prompts[0]:
            step = student(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            rows.append(step.logits[0, 0].numpy())
    assert np.array_equal(np.stack(rows), logits)


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
