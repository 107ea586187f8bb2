"""The promise of the project: torch integers = bundle read back = event engine = Lava processes, every spike of every
site, every token, every count, on a student of the tiny recipe's shape.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from export.bundle_writer import BundleOptions, write_bundle
from export.quantize import lower
from export.reference import TorchReference
from neuro_sim.dense import DenseDecoder
from neuro_sim.event.engine import EventDecoder
from spikeopd.config import load_config
from spikeopd.contracts import SpikeTrace, first_difference
from spikeopd.contracts.bundle import load_bundle
from spikeopd.models.initialise import build_student, calibrate

PROMPT, NEW = 8, 16


def tiny_student(seed):
    torch.manual_seed(seed)
    student = build_student(load_config("tiny").model).eval()
    calibrate(student, torch.randint(4, 1024, (8, 32)))
    return student


def greedy(decoder, prompt, new):
    """Feed the prompt, then the most likely token, `new` times: (tokens fed, logits, activities as plain dicts)."""
    fed, logits, counts = [], [], []
    token = prompt[0]
    for index in range(len(prompt) + new):
        fed.append(token)
        scores, activity = decoder.step(token)
        logits.append(scores)
        counts.append(activity.to_dict())
        token = prompt[index + 1] if index + 1 < len(prompt) else int(scores.argmax())
    return fed, np.stack(logits), counts


def check(seed, target, tmp_path, precision="int8"):
    student = tiny_student(seed)
    model = lower(student, precision).model
    write_bundle(model, tmp_path / "bundle", BundleOptions(target=target))
    loaded = load_bundle(tmp_path / "bundle")
    prompt = torch.randint(4, 1024, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    traces = {name: SpikeTrace() for name in ("oracle", "event")}
    results = {
        "oracle": greedy(DenseDecoder(loaded, traces["oracle"]), prompt, NEW),
        "event": greedy(EventDecoder(loaded, trace=traces["event"]), prompt, NEW),
    }
    fed = results["oracle"][0]
    reference_logits, traces["torch"] = TorchReference(model).run(fed)
    assert set(traces["oracle"].sites) == {
        (-1, "embed"),
        *((layer, s) for layer in range(4) for s in model.shape.layer_sites),
    }
    assert len(traces["oracle"].sites[0, "q"]) == PROMPT + NEW
    for name in ("torch", "event"):
        assert first_difference(traces["oracle"], traces[name]) is None, name
    assert np.array_equal(reference_logits, results["oracle"][1])
    return loaded, prompt, results, traces


def equal(results, name):
    assert results[name][0] == results["oracle"][0], "tokens"
    assert np.array_equal(results[name][1], results["oracle"][1]), "logits"
    assert results[name][2] == results["oracle"][2], "counts"


@pytest.mark.parametrize(
    ("seed", "target", "precision"),
    [(0, "nir", "int8"), (1, "lava", "int8"), (2, "nir", "int8"), (3, "nir", "int4"), (4, "lava", "int4")],
)
def test_torch_bundle_and_event_engine_agree(seed, target, precision, tmp_path):
    _, _, results, _ = check(seed, target, tmp_path, precision)
    equal(results, "event")


@pytest.mark.lava
@pytest.mark.parametrize(
    ("seed", "target", "precision"),
    [
        (0, "nir", "int8"),
        (3, "lava", "int4"),
        pytest.param(1, "nir", "int8", marks=pytest.mark.slow),
        pytest.param(2, "nir", "int8", marks=pytest.mark.slow),
    ],
)
def test_lava_processes_agree_too(seed, target, precision, tmp_path):
    from neuro_sim.lava.compat import lava_available

    if not lava_available():
        pytest.skip("lava-nc is not installed; `make install` does it")
    from neuro_sim.lava.decoder import LavaDecoder

    loaded, prompt, results, traces = check(seed, target, tmp_path, precision)
    traces["lava"] = SpikeTrace()
    with LavaDecoder(loaded, precision="fixed", timeout=120, trace=traces["lava"]) as decoder:
        results["lava"] = greedy(decoder, prompt, NEW)
    assert set(traces["lava"].sites) == set(traces["oracle"].sites)
    assert first_difference(traces["oracle"], traces["lava"]) is None
    equal(results, "lava")
