"""The network as files that anything can read: network.json and network.npz. Format: docs/formats.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from neuro_sim.sanafe.network import EXTRAS, Array, Group, Network, Synapses
from neuro_sim.sanafe.placement import SOURCES, Placement
from spikeopd.contracts import parse_shape
from spikeopd.contracts.npz import open_npz, read_array
from spikeopd.errors import InputError, short
from spikeopd.files import machine_memory, read_json, write_json

SCHEMA = "spikeopd.sanafe/1"
FILES = ("network.json", "network.npz")


def write_network(folder: Path, network: Network, placement: Placement) -> None:
    """Write both files into an existing folder."""
    shape, chip = network.shape, placement.chip
    dense = network.matrix_targets
    arrays: dict[str, Array] = {}
    for name, group in network.groups.items():
        arrays[f"threshold/{name}"] = group.threshold.astype(np.int32)
        arrays[f"bias/{name}"] = group.bias.astype(np.int32)
        arrays[f"core/{name}"] = placement.core_of[name].astype(np.int32)
    for place, bundle in enumerate(network.synapses):
        arrays[f"weights/{place}"] = bundle.weights.astype(np.int32)
        if bundle.pairs is not None:
            arrays[f"pairs/{place}"] = bundle.pairs.astype(np.int32)
    np.savez(folder / "network.npz", **arrays)  # type: ignore[arg-type] # numpy's stub takes keywords for options
    write_json(
        folder / "network.json",
        {
            "schema": SCHEMA,
            "model": shape.to_dict(),
            "num_steps": shape.num_steps,
            "steps": network.steps,
            "slots": network.slots,
            "readout": network.last.name,
            "mesh": {"width": chip.width, "height": chip.height, "tile_cores": chip.tile_cores},
            "groups": [
                {
                    "name": group.name,
                    "kind": group.kind,
                    "layer": group.layer,
                    "site": group.site,
                    "neurons": group.neurons,
                    "start": group.start,
                    "decay": group.decay,
                    "synapses": "dense" if group.name in dense else "pairs",
                }
                for group in network.groups.values()
            ],
            "synapses": [_bundle(bundle) for bundle in network.synapses],
            "extras": EXTRAS,
            "placement": {**placement.report, "sources": SOURCES},
        },
    )


def read_network(folder: Path) -> Network:
    """The network of two files, as an executor sees it."""
    file = folder / "network.json"
    try:
        about = dict(read_json(file))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({short(error)})") from error
    if about.get("schema") != SCHEMA:
        raise InputError(f"{file}: expected schema {SCHEMA!r}, got {short(about.get('schema'))}")
    shape = parse_shape(about.get("model"), str(folder))
    with open_npz(folder / "network.npz", "network", machine_memory()) as archive:  # and what does not fit together
        infos = archive.infolist()
        room = sum(info.compress_size for info in infos)  # numpy.savez packs nothing
        arrays = {
            info.filename.removesuffix(".npy"): read_array(archive, info, room, _odd).astype(np.int64) for info in infos
        }
        network = Network(shape, about["slots"])
        for group in about["groups"]:
            fields = {name: group[name] for name in ("name", "kind", "layer", "site", "start", "decay")}
            threshold, bias = (arrays[f"{part}/{group['name']}"] for part in ("threshold", "bias"))
            network.groups[group["name"]] = Group(**fields, threshold=threshold, bias=bias)
        for place, bundle in enumerate(about["synapses"]):
            ends = {name: bundle[name] for name in ("source", "target", "role")}
            network.synapses.append(
                Synapses(**ends, weights=arrays[f"weights/{place}"], pairs=arrays.get(f"pairs/{place}"))
            )
        return network


def _odd(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> str:
    return "" if dtype == np.int32 else f"of {dtype}, not int32"


def _bundle(bundle: Synapses) -> dict[str, Any]:
    return {"source": bundle.source, "target": bundle.target, "role": bundle.role, "count": bundle.count}
