"""From a bundle alone: what was exported, read back, runs in Lava as it runs in the event engine and in the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from export.bundle_writer import BundleOptions, write_bundle  # noqa: E402
from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.event.engine import EventDecoder  # noqa: E402
from neuro_sim.lava import compiled  # noqa: E402
from neuro_sim.lava.decoder import LavaDecoder  # noqa: E402
from spikeopd.contracts import SpikeTrace, first_difference  # noqa: E402
from spikeopd.contracts.bundle import load_bundle  # noqa: E402


@pytest.mark.parametrize("target", ["nir", "lava"])
def test_bundle_to_event_and_lava(tmp_path: Path, target: str) -> None:
    model = random_model(random_shape(layers=2), seed=11, drive=1.5)
    loaded = load_bundle(write_bundle(model, tmp_path / "bundle", BundleOptions(target=target)))
    traces = [SpikeTrace() for _ in range(3)]
    dense, event = DenseDecoder(model, traces[0]), EventDecoder(loaded, traces[1], threads=1)
    with LavaDecoder(loaded, trace=traces[2]) as lava:
        token = 2
        for _ in range(20):
            results = [decoder.step(token) for decoder in (dense, event, lava)]
            for logits, activity in results[1:]:
                assert np.array_equal(logits, results[0][0])
                assert activity.to_dict() == results[0][1].to_dict()
            token = int(results[0][0].argmax())
    assert first_difference(traces[0], traces[1]) is None
    assert first_difference(traces[0], traces[2]) is None


@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING])
def test_no_process_compiles_for_itself(tmp_path: Path, form: dict) -> None:
    """`warm_up` must cover every type a bundle brings, or each process would compile the loops again, for seconds."""
    kernels = (compiled.fire, compiled.project, compiled.write, compiled.pack, compiled.attend)
    compiled.warm_up()
    before = [set(kernel.signatures) for kernel in kernels]
    model = random_model(random_shape(layers=1, **form))
    loaded = load_bundle(write_bundle(model, tmp_path / "bundle", BundleOptions(target="lava")))
    from lava_harness import drive

    from neuro_sim.lava.processes.block import SpikingBlock

    d, steps = loaded.shape.hidden_size, loaded.shape.num_steps
    block = SpikingBlock(layer=loaded.layers[0], shape=loaded.shape, decay=loaded.decay)
    drive(block, "fixed_pt", {"x_in": np.ones((steps, d), bool), "h_in": np.ones((steps, d), np.int64)}, steps)
    assert [set(kernel.signatures) for kernel in kernels] == before
