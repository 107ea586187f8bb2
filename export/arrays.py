"""Where the model's arrays lie in the file that was written: the manifest's `arrays`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from spikeopd.contracts import SpikeModel
from spikeopd.contracts.bundle import NO_BIAS, PAIRED, array_specs


@dataclass(frozen=True)
class Location:
    """Where an array of the model lies in an HDF5 file.

    transposed: stored [out, in] as NIR wants it. paired: 4-bit weights, two in a byte.
    """

    path: str
    transposed: bool = False
    paired: bool = False
    transform: str = ""


def array_index(path: Path, locations: Mapping[str, Location], model: SpikeModel) -> dict[str, Any]:
    """For each array of the model: file, offset, dtype, shape and strides of a plain view into the file."""
    index = {}
    with h5py.File(path, "r") as file:
        for name, (_, shape) in array_specs(model.shape, model.precision).items():
            if name not in locations and name.endswith(".bias"):
                index[name] = dict(NO_BIAS)
                continue
            location = locations[name]
            dataset = file[location.path]
            offset = dataset.id.get_offset()
            if offset is None or dataset.chunks is not None:
                raise AssertionError(f"{location.path} is not stored contiguously")
            entry: dict[str, Any] = {
                "file": path.name,
                "path": location.path,
                "offset": int(offset),
                "dtype": PAIRED if location.paired else dataset.dtype.name,
                "shape": list(shape),
            }
            if location.transposed:
                item = dataset.dtype.itemsize
                entry["strides"] = [item, item * shape[0]]
            if location.transform:
                entry["transform"] = location.transform
            index[name] = entry
    return index
