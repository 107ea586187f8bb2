"""run.json and trace files: written, read back, refused when they contradict themselves."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from random_models import random_model, random_shape

from neuro_sim.decode import Sampling, generate
from neuro_sim.dense import DenseDecoder
from neuro_sim.raster import SelectedTrace, parse_sites, plot_raster
from neuro_sim.runfile import build_run, summary
from neuro_sim.verify import agreement, compare, different_count
from spikeopd.contracts import Activity, SpikeTrace, first_difference, load_trace, parse_run, save_trace, write_run
from spikeopd.contracts.run import read_run
from spikeopd.errors import CheckFailed, ConfigError, InputError


@pytest.fixture(scope="module")
def finished():
    model = random_model(seed=3)
    traces = [SpikeTrace(), SpikeTrace()]
    sampling = Sampling(max_new_tokens=3)
    result = generate(DenseDecoder(model), [[1, 2, 3], [4, 5]], sampling, traces=traces)
    run = build_run(
        result, model, backend="dense", bundle={"name": "b", "sha256": "0" * 64}, sampling=sampling, load_seconds=0.1,
        threads=1, trace="trace.npz",
    )  # fmt: skip
    return model, result, traces, run


def test_run_is_read_back(finished, tmp_path: Path) -> None:
    model, result, _, run = finished
    again = read_run(write_run(tmp_path / "run.json", run))
    assert again == json.loads(json.dumps(run))
    assert again["model"] == model.shape.to_dict() and again["trace"] == "trace.npz"
    generation = Activity.from_dict(again["phases"]["generation"])
    assert generation.to_dict() == result.phases["generation"].to_dict()
    assert again["sequences"][0]["stopped"] == "length" and again["complete"] is True
    assert {"python", "numpy", "numba", "machine"} <= set(again["environment"])


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("schema",), "other/1", "schema"),
        (("complete",), "yes", "complete"),
        (("backend",), "<b>", "backend"),
        (("precision",), "int3", "precision"),
        (("model",), {"hidden_size": 1}, "model"),
        (("sequences",), [], "sequences"),
        (("sequences", 0, "stopped"), "bored", "sequences"),
        (("sequences", 0, "stopped"), "interrupted", "complete"),
        (("phases", "prompt", "tokens"), 9, "phases.prompt.tokens"),
        (("phases", "prompt", "spikes", "q"), [[1, 2]], "phases.prompt.spikes.q"),
        (("phases", "prompt", "bytes", "qkv"), 1, "per_token.bytes"),
        (("per_token", "spikes"), [1], "per_token.spikes"),
        (("timing",), None, "timing"),
    ],
)
def test_contradictions_are_named(finished, path: tuple, value: object, field: str) -> None:
    run = copy.deepcopy(finished[3])
    place = run
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=field):
        parse_run(run, "run.json")


def test_unreadable_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        read_run(tmp_path / "run.json")


def test_summary_by_hand(finished) -> None:
    _, result, _, _ = finished
    numbers = summary(result)
    tokens = 5 + 4
    sops = sum(result.per_token["sops"])
    macs = tokens * 16 * 40  # d x vocabulary
    assert numbers["sops_per_token"] == sops / tokens
    assert numbers["pj_per_token"] == pytest.approx((0.9 * sops + 4.6 * macs) / tokens)
    assert 0 < numbers["firing_rate"] < 1 and numbers["generated_tokens"] == 6


TWO_LAYERS = random_shape()


def test_sites_are_chosen_by_name() -> None:
    assert parse_sites("embed,0.q", TWO_LAYERS) == {(-1, "embed"), (0, "q")}
    assert parse_sites("*.h", TWO_LAYERS) == {(0, "h"), (1, "h")}
    assert len(parse_sites("all", TWO_LAYERS)) == 21
    assert len(parse_sites("1.*", TWO_LAYERS)) == 10
    for wrong in ("2.q", "0.z", "q", "", "0."):
        with pytest.raises(ConfigError, match="trace site"):
            parse_sites(wrong, TWO_LAYERS)


def test_trace_is_read_back(finished, tmp_path: Path) -> None:
    traces = finished[2]
    again = load_trace(save_trace(tmp_path / "trace.npz", traces, num_heads=2))
    for before, after in zip(traces, again, strict=True):
        assert before.tokens == after.tokens and set(before.sites) == set(after.sites)
        assert first_difference(before, after) is None
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not an .npz file"):
        load_trace(tmp_path / "bad.npz")


def test_selected_trace_keeps_only_what_is_wanted() -> None:
    trace = SelectedTrace(wanted=frozenset({(0, "q")}))
    trace.add(0, "q", np.ones((2, 3), bool))
    trace.add(0, "k", np.ones((2, 3), bool))
    assert list(trace.sites) == [(0, "q")]


def test_raster_is_a_picture(finished, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = plot_raster(tmp_path / "trace.png", finished[2][0], num_heads=2, labels=["a", "b"])
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(InputError, match="trace is empty"):
        plot_raster(tmp_path / "none.png", SpikeTrace(), num_heads=2)


def test_compare_names_the_first_difference(finished) -> None:
    _, result, traces, _ = finished
    assert "all counts equal" in compare("a", result, traces, "b", result, traces)
    flipped = copy.deepcopy(traces)
    flipped[1].sites[1, "f"][2][3, 7] ^= True
    with pytest.raises(CheckFailed, match="sequence 1, token 2, layer 1, site f, step 3, neuron 7") as error:
        compare("a", result, flipped, "b", result, traces)
    assert error.value.exit_code == 3
    other = copy.deepcopy(result)
    other.sequences[0].generated_tokens[1] += 1
    with pytest.raises(CheckFailed, match="different tokens: sequence 0, token 1"):
        compare("a", result, traces, "b", other, traces)
    other = copy.deepcopy(result)
    other.phases["prompt"].sops["qkv"][0, 0] += 1
    with pytest.raises(CheckFailed, match=r"phase prompt: sops\.qkv"):
        compare("a", result, traces, "b", other, traces)
    assert "99." in agreement("a", flipped, "b", traces) and "1.f" in agreement("a", flipped, "b", traces)


def test_different_count_of_equal_activities(finished) -> None:
    activity = finished[1].phases["prompt"]
    assert different_count(activity, copy.deepcopy(activity)) is None
