"""Events counted over some tokens: what a run reports and what energy is computed from. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from spikeopd.contracts.model import Array
from spikeopd.contracts.topology import CACHE_TRAFFIC, EMBED_SITE, HOST_COMPONENTS, ModelShape

MAC_KEYS = ("embed", "head", "head_active")
# pJ of one dense multiply-accumulate and of one accumulation (a synaptic operation): the paper's Appendix E, 45 nm.
APPENDIX_E_PJ = {"mac": 4.6, "ac": 0.9}


def site_rows(shape: ModelShape) -> dict[str, int]:
    """Rows of the tables kept per site: one per layer, and one for the embedding."""
    return {EMBED_SITE: 1} | dict.fromkeys(shape.layer_sites, shape.num_hidden_layers)


def byte_keys(shape: ModelShape) -> tuple[str, ...]:
    return (*shape.layer_components, *HOST_COMPONENTS, *CACHE_TRAFFIC)


@dataclass
class Activity:
    """Events counted over some tokens. Every array is int64; `site` arrays are [layers, T_s] ([1, T_s] for embed).

    spikes          per site and step
    cells           per site and step: neuron slots that existed (rate = spikes / cells). Also the neuron updates:
                    each slot is updated once per step.
    saturations     per site and step: membranes that hit the 24-bit limit
    sops            per component and step: spikes of the driver x its fan-out; attention masked (fan-out i + 1 keys
                    for a query spike at position i, head_dim values for a spike of the map)
    sops_unmasked   coincidence only, [layers, T_s]: the same with fan-out = `context` keys for every query spike,
                    where context is the length of the whole sequence (what a square attention would do)
    additions       per component and step: accumulations that really happen (a coincidence counts 1 only when both
                    spikes are there; an `av` event adds only the value bits that are set); equals sops elsewhere
    macs            dense host work: "embed" (factorised), "head" (all rows), "head_active" (rows with a spike; a head
                    that reads the residual stream has no silent rows)
    bytes           weight and cache bytes touched by an event-driven implementation that loads each active row once
                    per token: components + "embed" + "head" + "kv_read" + "kv_write"

    Of a quantised twin, which takes one step: `spikes` are activations that are not zero, `sops` the multiply-
    accumulates that they drive (those of all inputs follow from the shape), `additions` the products of which neither
    factor is zero; cached activations are ceil(log2(T_s + 1)) bits wide.
    """

    tokens: int
    spikes: dict[str, Array]
    cells: dict[str, Array]
    saturations: dict[str, Array]
    sops: dict[str, Array]
    sops_unmasked: Array
    additions: dict[str, Array]
    macs: dict[str, int]
    bytes: dict[str, int]

    @staticmethod
    def zeros(shape: ModelShape) -> Activity:
        layers, steps = shape.num_hidden_layers, shape.steps

        def sites() -> dict[str, Array]:
            return {site: np.zeros((rows, steps), np.int64) for site, rows in site_rows(shape).items()}

        def components() -> dict[str, Array]:
            return {name: np.zeros((layers, steps), np.int64) for name in shape.layer_components}

        return Activity(
            tokens=0,
            spikes=sites(),
            cells=sites(),
            saturations=sites(),
            sops=components(),
            sops_unmasked=np.zeros((layers, steps), np.int64),
            additions=components(),
            macs=dict.fromkeys(MAC_KEYS, 0),
            bytes=dict.fromkeys(byte_keys(shape), 0),
        )

    @staticmethod
    def total(parts: Iterable[Activity]) -> Activity:
        """The sum of at least one activity of the same model."""
        first, *others = parts
        result = deepcopy(first)
        for other in others:
            result.add(other)
        return result

    def add(self, other: Activity) -> None:
        """Add another activity of the same model in place."""
        self.tokens += other.tokens
        for name in ("spikes", "cells", "saturations", "sops", "additions"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key in mine:
                mine[key] += theirs[key]
        self.sops_unmasked += other.sops_unmasked
        for name in ("macs", "bytes"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key in mine:
                mine[key] += theirs[key]

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return value.tolist()
            return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

        return {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Activity:
        def arrays(value: Mapping[str, Any]) -> dict[str, Array]:
            return {key: np.asarray(rows, dtype=np.int64) for key, rows in value.items()}

        return Activity(
            tokens=int(data["tokens"]),
            spikes=arrays(data["spikes"]),
            cells=arrays(data["cells"]),
            saturations=arrays(data["saturations"]),
            sops=arrays(data["sops"]),
            sops_unmasked=np.asarray(data["sops_unmasked"], dtype=np.int64),
            additions=arrays(data["additions"]),
            macs={key: int(value) for key, value in data["macs"].items()},
            bytes={key: int(value) for key, value in data["bytes"].items()},
        )
