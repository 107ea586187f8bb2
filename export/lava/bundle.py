"""The Lava bundle: the same integers as arrays in HDF5, and the process graph that runs them as JSON.

graph.json names every process with its class, parameters and ports, and every connection, exactly as
`neuro_sim.lava` builds them, so that another Lava installation can build the network without our reader. An array
parameter is written {"array": NAME}; NAME is the dataset's path in arrays.h5. Needs no Lava to write.
Weights of a bundle with 4 bits are uint8 [in, ceil(out / 2)], the even column in the low half of a byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py

from export.arrays import Location
from spikeopd.contracts import EMBED_SITE, RESIDUAL, Layer, Site, SpikeModel, projections
from spikeopd.contracts.bundle import is_weight, model_arrays, pack_nibbles
from spikeopd.files import write_json

# Version 1: the paper's block; 2: any form; 3: weights of 4 bits, two in a byte; 4: attention that inhibits
GRAPH_SCHEMA = "spikeopd.lava-graph"
PACKAGE = "neuro_sim.lava.processes"
ARRAYS, GRAPH = "arrays.h5", "graph.json"


def write_lava(model: SpikeModel, folder: Path) -> tuple[str, dict[str, Location]]:
    """Write arrays.h5 and graph.json; return the array file's name and where each array lies in it."""
    write_json(folder / GRAPH, process_graph(model))
    return write_arrays(model, folder)


def write_arrays(model: SpikeModel, folder: Path) -> tuple[str, dict[str, Location]]:
    """Write arrays.h5 alone."""
    locations = {}
    with h5py.File(folder / ARRAYS, "w") as file:
        for name, values in model_arrays(model).items():
            path, paired = "/" + name.replace(".", "/"), model.precision == "int4" and is_weight(name)
            file.create_dataset(path, data=pack_nibbles(values) if paired else values)
            locations[name] = Location(path, paired=paired)
    return ARRAYS, locations


def process_graph(model: SpikeModel) -> dict[str, Any]:
    """Processes in the order of computation, and connections "process.port" -> "process.port"."""
    shape, d, steps = model.shape, model.shape.hidden_size, model.shape.num_steps
    processes: list[dict[str, Any]] = []
    connections: list[tuple[str, str]] = []

    def process(name: str, kind: str, parameters: dict[str, Any], **ports: tuple[str, int]) -> None:
        processes.append(
            {
                "name": name,
                "class": f"{PACKAGE}.{kind}",
                "parameters": parameters,
                "ports": {port: {"direction": way, "shape": [size]} for port, (way, size) in ports.items()},
            }
        )

    def bias(site: Site, array: str) -> Any:
        return _array(f"{array}.bias") if site.bias.any() else 0

    def neurons(name: str, site: Site, array: str) -> None:
        parameters = {
            "threshold": _array(f"{array}.threshold"),
            "bias": bias(site, array),
            "shift": site.shift,
            "decay": int(model.decay),
            "num_steps": steps,
        }
        size = int(site.threshold.size)
        process(name, "neuron.SubtractiveLIF", parameters, a_in=("in", size), s_out=("out", size))

    def layer(index: int, values: Layer, x: str, h: str) -> tuple[str, str]:
        name = f"layer{index}"
        for connection in projections(shape):
            weight, site, kind = connection.name, connection.target, "synapse.Projection"
            fan_in, fan_out = getattr(values, weight).shape
            parameters: dict[str, Any] = {"weights": _array(f"layers.{index}.{weight}")}
            if site == RESIDUAL:
                end, kind = "o" if weight == "w_o" else "y", "synapse.CurrentWrite"
                parameters |= {key: _array(f"layers.{index}.{key}_{end}") for key in ("shift", "bias")}
            process(f"{name}.{weight}", kind, parameters, s_in=("in", fan_in), a_out=("out", fan_out))
            if site == RESIDUAL:
                connections.append((f"{name}.{weight}.a_out", f"{name}.add_{end}.a_in"))
                continue
            neurons(f"{name}.s_{site}", values.sites[site], f"layers.{index}.{site}")
            connections.append((f"{name}.{weight}.a_out", f"{name}.s_{site}.a_in"))
        a, r = values.sites["a"], values.sites["r"]
        parameters = {
            "map_threshold": _array(f"layers.{index}.a.threshold"),
            "map_shift": a.shift,
            "value_threshold": _array(f"layers.{index}.r.threshold"),
            "value_shift": r.shift,
            "decay": int(model.decay),
            "num_steps": steps,
            "capacity": shape.max_position_embeddings,
        }
        if not shape.paper_block:
            parameters |= {"map_bias": bias(a, f"layers.{index}.a"), "value_bias": bias(r, f"layers.{index}.r")}
        if shape.inhibiting:
            parameters["value_inhibition"] = _array(f"layers.{index}.inhibition")
        ends = {"q_in": ("in", d), "k_in": ("in", d), "v_in": ("in", d), "s_out": ("out", d)}
        process(f"{name}.attention", "attention.SpikingAttention", parameters, **ends)
        spikes = shape.residual_write == "spike"
        for end in "oy":
            if spikes:
                gains = {"gain": _array(f"layers.{index}.gain_{end}")}
                process(f"{name}.gain_{end}", "synapse.OneToOneGain", gains, s_in=("in", d), a_out=("out", d))
            ends = {"h_in": ("in", d), "a_in": ("in", d), "h_out": ("out", d)}
            process(f"{name}.add_{end}", "synapse.Residual", {"shape": [d]}, **ends)
        for site in ("x", "h"):
            neurons(f"{name}.s_{site}", values.sites[site], f"layers.{index}.{site}")
        wires = [
            *((x, f"{name}.{weight}.s_in") for weight in ("w_q", "w_k", "w_v")),
            *((f"{name}.s_{site}.s_out", f"{name}.attention.{site}_in") for site in "qkv"),
            (f"{name}.attention.s_out", f"{name}.w_o.s_in"),
            (f"{name}.s_o.s_out", f"{name}.gain_o.s_in"),
            (h, f"{name}.add_o.h_in"),
            (f"{name}.gain_o.a_out", f"{name}.add_o.a_in"),
            (f"{name}.add_o.h_out", f"{name}.s_x.a_in"),
            (f"{name}.add_o.h_out", f"{name}.add_y.h_in"),
            (f"{name}.s_x.s_out", f"{name}.w_1.s_in"),
            (f"{name}.s_f.s_out", f"{name}.w_2.s_in"),
            (f"{name}.s_y.s_out", f"{name}.gain_y.s_in"),
            (f"{name}.gain_y.a_out", f"{name}.add_y.a_in"),
            (f"{name}.add_y.h_out", f"{name}.s_h.a_in"),
        ]
        connections.extend(wire for wire in wires if spikes or not any(".gain_" in end for end in wire))
        return f"{name}.s_h.s_out", f"{name}.add_y.h_out"

    process("injector", "host.EmbeddingInjector", {"shape": [d], "num_steps": steps}, a_out=("out", d))
    neurons("s_embed", model.embed_site, EMBED_SITE)
    connections.append(("injector.a_out", "s_embed.a_in"))
    x, h = "s_embed.s_out", "injector.a_out"
    for index, values in enumerate(model.layers):
        x, h = layer(index, values, x, h)
    kind, end, source = ("RateReadout", "s_in", x) if shape.readout == "rate" else ("ResidualReadout", "h_in", h)
    process("readout", f"host.{kind}", {"shape": [d], "num_steps": steps}, **{end: ("in", d)})
    connections.append((source, f"readout.{end}"))
    version = 4 if shape.inhibiting else 3 if model.precision == "int4" else 1 if shape.paper_block else 2
    return {
        "schema": f"{GRAPH_SCHEMA}/{version}",
        "precision": model.precision,
        "steps_per_token": steps,
        "arrays": ARRAYS,
        "host": "embedding and head run on the host: arrays embedding.* and head.* (docs/export.md)",
        "processes": processes,
        "connections": [list(pair) for pair in connections],
    }


def _array(name: str) -> dict[str, str]:
    return {"array": name.replace(".", "/")}
