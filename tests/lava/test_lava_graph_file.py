"""The network built from graph.json and arrays.h5 alone, without our graph builder, runs in Lava like the oracle."""

from __future__ import annotations

import hashlib
import importlib
import json

import h5py
import numpy as np
import pytest

pytest.importorskip("lava.magma", reason="lava-nc is not installed")
pytestmark = pytest.mark.lava

from random_models import INHIBITING, PLUS, random_model, random_shape  # noqa: E402

from export.bundle_writer import BundleOptions, write_bundle  # noqa: E402
from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.lava.compat import quiet_logging, require_lava  # noqa: E402


class _Oracle(DenseDecoder):
    """Keeps what the head was given."""

    def _head(self, activity, counts):
        self.counts = counts
        return super()._head(activity, counts)


def build(folder):
    """What a stranger with Lava would do: import the classes, fill the parameters, connect the ports."""
    graph = json.loads((folder / "graph.json").read_text())
    processes = {}
    with h5py.File(folder / graph["arrays"]) as arrays:
        for entry in graph["processes"]:
            module, _, name = entry["class"].rpartition(".")
            parameters = {
                key: arrays[value["array"]][()] if isinstance(value, dict) else value
                for key, value in entry["parameters"].items()
            }
            if "shape" in parameters:
                parameters["shape"] = tuple(parameters["shape"])
            processes[entry["name"]] = getattr(importlib.import_module(module), name)(**parameters, name=entry["name"])

    def port(path):
        name, _, end = path.rpartition(".")
        return getattr(processes[name], end)

    for entry in graph["processes"]:
        for end, what in entry["ports"].items():
            assert tuple(what["shape"]) == port(f"{entry['name']}.{end}").shape
    for source, target in graph["connections"]:
        port(source).connect(port(target))
    return processes


def test_the_papers_form_is_described_as_ever(tmp_path):
    """The file of version 1, byte for byte: readers of it exist."""
    write_bundle(random_model(), tmp_path / "b", BundleOptions(target="lava"))
    digest = hashlib.sha256((tmp_path / "b" / "graph.json").read_bytes()).hexdigest()
    assert digest == "e1e65242cc73c432504710a839253d0637d672ea31d70417dc3f486860a15f96"


@pytest.mark.parametrize(
    ("form", "version"), [({}, 1), (PLUS, 2), (INHIBITING, 4), ({"write": "current"}, 2), ({"distances": 3}, 2)]
)
def test_the_described_network_runs(tmp_path, form, version):
    require_lava()
    from lava.magma.core.run_conditions import RunSteps
    from lava.magma.core.run_configs import Loihi2SimCfg

    from neuro_sim.lava import runtime

    model = random_model(random_shape(layers=1, positions=6, **form), drive=1.5)
    write_bundle(model, tmp_path / "b", BundleOptions(target="lava"))
    assert json.loads((tmp_path / "b" / "graph.json").read_text())["schema"] == f"spikeopd.lava-graph/{version}"
    oracle = _Oracle(model)
    with quiet_logging(), runtime.unregistered():
        processes = build(tmp_path / "b")
        running = runtime.start(processes["injector"], Loihi2SimCfg(select_tag="fixed_pt"), 60.0)
    try:
        for position, token in enumerate([3, 17, 5]):
            oracle.step(token)
            processes["injector"].send(model.embedding.current(token, position))
            running.start(RunSteps(num_steps=model.shape.num_steps))
            assert np.array_equal(processes["readout"].receive(), oracle.counts), position
    finally:
        running.stop()
