"""graph.json: complete and consistent, in both forms of the block."""

from __future__ import annotations

import json

import h5py
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle


@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_lava_graph_names_every_port_once_and_arrays_exist(tmp_path, form):
    write_bundle(random_model(random_shape(**form)), tmp_path / "b", BundleOptions(target="lava"))
    graph = json.loads((tmp_path / "b" / "graph.json").read_text())
    ports = {
        f"{process['name']}.{port}": (what["direction"], what["shape"])
        for process in graph["processes"]
        for port, what in process["ports"].items()
    }
    fed = [target for _, target in graph["connections"]]
    assert sorted(fed) == sorted(port for port, (way, _) in ports.items() if way == "in")  # each input exactly once
    for source, target in graph["connections"]:
        assert ports[source][0] == "out" and ports[source][1] == ports[target][1], (source, target)
    with h5py.File(tmp_path / "b" / "arrays.h5") as file:
        for process in graph["processes"]:
            for value in process["parameters"].values():
                if isinstance(value, dict):
                    assert value["array"] in file
