"""The block as a table, against the equations written out by hand and against what the oracle counts."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape

from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import ModelShape, component_drivers, connections, ordered_sites, parse_shape, projections
from spikeopd.contracts.topology import LAYER_COMPONENTS, LAYER_SITES, layer_macs, outer_macs
from spikeopd.errors import InputError

PAPER = ModelShape(8, 3, 2, 32, 100, 64, 4, 8)
CURRENT = ModelShape(8, 3, 2, 32, 100, 64, 4, 8, "current", "residual", 5)


def test_the_papers_block_by_hand() -> None:
    table = [(c.name, c.driver, c.target, c.fan_in, c.fan_out) for c in connections(PAPER)]
    assert table == [
        ("w_q", "input", "q", 8, 8),
        ("w_k", "input", "k", 8, 8),
        ("w_v", "input", "v", 8, 8),
        ("coincidence", "q", "a", 4, None),
        ("values", "a", "r", None, 4),
        ("w_o", "r", "o", 8, 8),
        ("gain_o", "o", "residual", 1, 1),
        ("gain_y", "y", "residual", 1, 1),
        ("w_1", "x", "f", 8, 32),
        ("w_2", "f", "y", 32, 8),
    ]
    assert PAPER.layer_sites == LAYER_SITES and PAPER.layer_components == LAYER_COMPONENTS
    assert layer_macs(PAPER, tokens=5, keys=15) == {
        "qkv": 3 * 64 * 5, "coincidence": 8 * 15, "av": 8 * 15, "output": 64 * 5, "residual": 16 * 5,
        "ffn_in": 256 * 5, "ffn_out": 256 * 5,
    }  # fmt: skip


def test_a_current_write_has_neither_gains_nor_the_sites_behind_them() -> None:
    assert CURRENT.layer_sites == ("q", "k", "v", "a", "r", "x", "f", "h")
    assert CURRENT.layer_components == tuple(name for name in LAYER_COMPONENTS if name != "residual")
    assert {c.name: c.target for c in projections(CURRENT)} == {
        "w_q": "q", "w_k": "k", "w_v": "v", "w_o": "residual", "w_1": "f", "w_2": "residual",
    }  # fmt: skip
    assert "residual" not in layer_macs(CURRENT, 5, 15)


def test_the_first_layer_is_driven_by_the_embedding() -> None:
    assert component_drivers(PAPER, "qkv", 0) == ((-1, "embed"),)
    assert component_drivers(PAPER, "qkv", 2) == ((1, "h"),)
    assert component_drivers(PAPER, "residual", 1) == ((1, "o"), (1, "y"))


def test_sites_in_the_order_of_computation() -> None:
    sites = list(ordered_sites(CURRENT))
    assert sites[0] == (-1, "embed") and sites[1:9] == [(0, site) for site in CURRENT.layer_sites]
    assert len(sites) == 1 + 3 * 8


@pytest.mark.parametrize(
    "form", [{}, PLUS, INHIBITING, {"write": "current"}, {"readout": "residual"}, {"distances": 3}]
)
def test_spikes_times_fan_out_is_what_the_oracle_counts(form: dict) -> None:
    shape = random_shape(**form)
    decoder = DenseDecoder(random_model(shape, drive=2.0))
    for position, token in enumerate([3, 1, 4, 1, 5]):
        activity = decoder.step(token)[1]
        assert set(activity.spikes) == {"embed", *shape.layer_sites} and set(activity.sops) == set(
            shape.layer_components
        )
        due = {name: np.zeros_like(table) for name, table in activity.sops.items()}
        for connection in connections(shape):
            for layer in range(shape.num_hidden_layers):
                row, site = connection.driver_of(layer)
                fan_out = position + 1 if connection.fan_out is None else connection.fan_out
                due[connection.component][layer] += activity.spikes[site][max(row, 0)] * fan_out
        for name, table in due.items():
            if name != "coincidence":  # a query spike meets the keys of its own head only: counted by the token
                assert np.array_equal(activity.sops[name], table), name
        assert np.array_equal(activity.sops["coincidence"], due["coincidence"])
        assert activity.macs["head"] == outer_macs(shape, 1)["head"]


def test_the_papers_form_is_left_out_of_files() -> None:
    assert "residual_write" not in PAPER.to_dict() and "distances" not in PAPER.to_dict()
    assert parse_shape(PAPER.to_dict(), "here") == PAPER
    assert parse_shape(CURRENT.to_dict(), "here") == CURRENT


@pytest.mark.parametrize(
    ("field", "value"), [("residual_write", "both"), ("readout", 1), ("distances", -1), ("distances", 2.0)]
)
def test_a_form_that_means_nothing_is_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"here: field '{field}'"):
        parse_shape(CURRENT.to_dict() | {field: value}, "here")
