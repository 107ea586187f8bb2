"""Which netx chains a model has: stacks of projections with neurons behind each. Needs no Lava."""

from __future__ import annotations

import h5py
import pytest
from random_models import PLUS, random_model, random_shape

from export.netx import CANNOT, write_netx


@pytest.mark.parametrize(
    ("form", "chains", "left_out"),
    [
        ({}, {"q": 1, "k": 1, "v": 1, "o": 1, "ffn": 2}, 0),
        ({"readout": "residual", "distances": 3}, {"q": 1, "k": 1, "v": 1, "o": 1, "ffn": 2}, 0),
        (PLUS, {"q": 1, "k": 1, "v": 1, "ffn": 1}, 1),
    ],
)
def test_only_chains_that_end_in_neurons_are_written(tmp_path, form, chains, left_out):
    model = random_model(random_shape(layers=1, **form))
    report = write_netx(model, tmp_path)
    names = {f"netx_layer000_{chain}.h5": blocks for chain, blocks in chains.items()}
    assert {path.name for path in tmp_path.iterdir()} == set(report["files"]) == set(names)
    for name, blocks in names.items():
        assert len(report["files"][name]["weights"]) == blocks
        with h5py.File(tmp_path / name) as file:
            assert len(file["layer"]) == blocks
            assert file["layer/0/weight"].shape == (24 if "ffn" in name else 16, 16)
    assert report["cannot_express"][: len(CANNOT)] == list(CANNOT)
    assert len(report["cannot_express"]) == len(CANNOT) + left_out
