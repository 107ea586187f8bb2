"""The quantised twin as a bundle: a hand case, two independent writings of it, files, refusals, counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import PLUS, random_model, random_shape
from random_runs import make_run

from neuro_sim.backends import BACKENDS, Running, pick_backend
from neuro_sim.graded import GradedDecoder, graded_counts, oracle, unary
from spikeopd.contracts import Activity, Site, SpikeTrace, first_difference
from spikeopd.contracts.run import parse_run
from spikeopd.contracts.topology import layer_macs
from spikeopd.errors import ConfigError, InputError

TWINS = {name: random_shape(neuron="quantised", **form) for name, form in (("paper", {}), ("plus", PLUS))}


def site(threshold: int, bias: int = 0, shift: int = 0) -> Site:
    return Site(np.array([threshold], np.int32), np.array([bias], np.int32), shift)


def test_counts_by_hand() -> None:
    """T_s = 4, sums four times the mean current: with threshold 10, level k begins at a mean of 10 (k - 1/2) / 4."""
    for total, count in ((4, 0), (5, 1), (14, 1), (15, 2), (34, 3), (35, 4), (10**6, 4), (-7, 0)):
        assert graded_counts(np.array([[total]]), site(10), 4, 4).item() == count
    # sums of products of counts are sixteen times the mean; a bias counts in full, a shift before it
    assert graded_counts(np.array([[20]]), site(10), 4, 16).item() == 1
    assert graded_counts(np.array([[19]]), site(10), 4, 16).item() == 0
    assert graded_counts(np.array([[1]]), site(10, bias=2, shift=2), 4, 4).item() == 1  # (4 + 8) / 4 = 3
    assert unary(np.array([0, 3, 4]), 4).sum(0).tolist() == [0, 3, 4]


@given(st.integers(-(2**30), 2**30), st.integers(1, 2**21), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_counts_are_levels_reached(total: int, threshold: int, levels: int) -> None:
    reached = sum(2 * total >= (2 * k - 1) * threshold for k in range(1, levels + 1))
    assert graded_counts(np.array([[total]]), site(threshold), levels, levels).item() == reached


@pytest.mark.parametrize("form", TWINS)
def test_oracle_and_torch_reference_agree(form: str) -> None:
    reference = pytest.importorskip("export.reference")
    model = random_model(TWINS[form], seed=4, drive=1.5)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, model.shape.vocab_size, 9)]
    trace = SpikeTrace()
    decoder = GradedDecoder(model, trace)
    logits = np.stack([decoder.step(token)[0] for token in tokens])
    theirs, recorded = reference.TorchReference(model).run(tokens)
    assert first_difference(recorded, trace) is None and np.array_equal(logits, theirs)
    levels = np.concatenate([array.sum(0) for key in trace.sites for array in trace.sites[key]])
    assert set(levels.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("form", TWINS)
def test_events_are_what_the_trace_says(form: str) -> None:
    """Recounted from the counts alone: inputs that are not zero x fan-out; products of which no factor is zero."""
    shape = TWINS[form]
    trace = SpikeTrace()
    decoder = GradedDecoder(random_model(shape, seed=2, drive=1.5), trace)
    total = Activity.total([decoder.step(token)[1] for token in range(5)])

    def counts(layer: int, name: str) -> list[np.ndarray]:
        return [array.sum(0) for array in trace.sites[layer, name]]

    d, heads, size = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    for layer in range(shape.num_hidden_layers):
        entering = counts(-1, "embed") if layer == 0 else counts(layer - 1, "h")
        inputs = sum(int((n > 0).sum()) for n in entering)
        assert total.sops["qkv"][layer].tolist() == [inputs * 3 * d] == total.additions["qkv"][layer].tolist()
        q, k, v, a = (counts(layer, name) for name in "qkva")
        assert total.sops["coincidence"][layer].item() == sum(int((n > 0).sum()) * (i + 1) for i, n in enumerate(q))
        products = sum(int(((q[i] > 0) & (k[j] > 0)).sum()) for i in range(5) for j in range(i + 1))
        assert total.additions["coincidence"][layer].item() == products
        pairs = [n.reshape(heads, i + 1) for i, n in enumerate(a)]
        weighted = sum(
            int((pairs[i][h, j] > 0) * (v[j].reshape(heads, size)[h] > 0).sum())
            for i in range(5)
            for j in range(i + 1)
            for h in range(heads)
        )
        assert total.additions["av"][layer].item() == weighted
    assert total.sops["qkv"].shape == (shape.num_hidden_layers, 1) and total.cells["q"].sum() == 5 * 2 * d
    # three bits a cached count: two tables of five tokens, each 16 x 3 / 8 bytes, in two layers
    assert total.bytes["kv_write"] == 2 * 2 * 5 * (16 * 3 // 8)
    dense = layer_macs(shape, 5, 15)
    assert all(total.sops[name].sum() <= 2 * dense[name] for name in dense)


def test_no_other_backend_runs_it() -> None:
    shape = TWINS["plus"]
    assert pick_backend(shape, "int8")[0] == "dense"
    for name in BACKENDS:
        if name != "dense":
            with pytest.raises(ConfigError, match=f"backend {name}: this bundle is a quantised twin.*--backend dense"):
                pick_backend(shape, "int8", name)
    with pytest.raises(ConfigError, match="backend event: this bundle is a quantised twin"):
        BACKENDS["event"].open(random_model(shape), Running())
    assert isinstance(oracle(random_model(shape)), GradedDecoder)


@pytest.mark.parametrize("form", TWINS)
def test_a_bundle_says_that_its_activations_are_counts(form: str, tmp_path: Path) -> None:
    writer = pytest.importorskip("export.bundle_writer")
    from spikeopd.contracts.bundle import load_bundle, model_arrays

    model = dataclasses.replace(random_model(TWINS[form]), decay=0)
    folder = writer.write_bundle(model, tmp_path / "twin", writer.BundleOptions(target="arrays"))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema"] == "spikeopd.bundle/4" and manifest["shape"]["neuron"] == "quantised"
    read = load_bundle(folder)
    assert read.shape == model.shape and not (folder / "graph.json").exists()
    mine, theirs = model_arrays(model), model_arrays(read)
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    for target in ("nir", "lava"):
        with pytest.raises(InputError, match=f"a quantised twin has no {target} form"):
            writer.write_bundle(model, tmp_path / target, writer.BundleOptions(target=target))
    # an older schema cannot hold it, and a newer one cannot hold spikes
    for schema, neuron in (("spikeopd.bundle/2", "quantised"), ("spikeopd.bundle/4", "lif")):
        shape = manifest["shape"] | {"neuron": neuron}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"schema": schema, "shape": shape}))
        with pytest.raises(InputError, match="field 'shape.neuron' should be"):
            load_bundle(folder)


@pytest.mark.parametrize("form", TWINS)
def test_its_run_is_checked_and_says_so(form: str) -> None:
    run = make_run(TWINS[form], seed=3)
    assert run["schema"] == "spikeopd.run/3" and run["model"]["neuron"] == "quantised"
    assert parse_run(run, "run.json").shape.steps == 1
    for schema in ("spikeopd.run/2", "spikeopd.run/1"):
        with pytest.raises(InputError, match="field 'schema'"):
            parse_run(run | {"schema": schema}, "run.json")
    student = make_run(random_shape(**({} if form == "paper" else PLUS)))
    with pytest.raises(InputError, match="version 3, and it alone, is of a quantised twin"):
        parse_run(student | {"schema": "spikeopd.run/3"}, "run.json")
