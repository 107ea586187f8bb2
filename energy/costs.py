"""What one event costs. The numbers live in data/costs.json, each table with its process node and citation.

A table prices the events it has published figures for, and no others: an event without a price is reported as
not costed, never as free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from spikeopd.errors import InputError

DEFAULT_COSTS = "horowitz45"
DEFAULT_MEMORY = "sram-1mb"

# Every event that can be priced, and what one of it is.
EVENTS = {
    "mac": "multiply-accumulate of a dense component (embedding projection, head, the whole teacher)",
    "ac": "synaptic operation: one spike reaching one synapse, one accumulation",
    "neuron_active": "membrane update of a neuron that fires in this step",
    "neuron_inactive": "membrane update of a neuron that stays silent in this step",
    "spike": "delivery of one spike inside its tile",
    "hop_ew": "one east-west hop of a spike between tiles",
    "hop_ns": "one north-south hop of a spike between tiles",
}


@dataclass(frozen=True)
class CostTable:
    """Prices in pJ per event, with their source. Only events in `prices_pj` are costed."""

    name: str
    title: str
    node_nm: float
    basis: str
    citation: str
    verified: str
    prices_pj: Mapping[str, float]
    price_notes: Mapping[str, str] = field(default_factory=dict)

    def price(self, event: str) -> float:
        """pJ of one event; 0 if the table has no figure for it (see `missing`)."""
        return self.prices_pj.get(event, 0.0)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(event for event in EVENTS if event not in self.prices_pj)


@dataclass(frozen=True)
class MemoryLevel:
    """Energy of moving one byte between the arithmetic and one kind of memory."""

    name: str
    title: str
    pj_per_byte: float


@cache
def _data() -> dict[str, Any]:
    text = resources.files("energy").joinpath("data/costs.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def cost_tables() -> dict[str, CostTable]:
    """Every shipped table by name; the first is the default."""
    return {name: parse_table(name, raw) for name, raw in _data()["tables"].items()}


def memory_levels() -> dict[str, MemoryLevel]:
    """Every memory level by name, cheapest first."""
    return {name: MemoryLevel(name, raw["title"], float(raw["pj_per_byte"])) for name, raw in _data()["memory"].items()}


def memory_citation() -> str:
    return str(_data()["memory_citation"])


def load_costs(name: str) -> CostTable:
    """A shipped table by name, or a JSON file with the same fields."""
    tables = cost_tables()
    if name in tables:
        return tables[name]
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"cost table {path} is not readable JSON: {error}") from error
        return parse_table(path.stem, raw)
    raise InputError(f"unknown cost table {name!r}: choose one of {', '.join(tables)}, or give a .json file")


def load_memory(name: str) -> MemoryLevel:
    levels = memory_levels()
    if name not in levels:
        raise InputError(f"unknown memory level {name!r}: choose one of {', '.join(levels)}")
    return levels[name]


def parse_table(name: str, raw: Any) -> CostTable:
    """Check one table. Refuses unknown events, negative prices and missing sources, and says which."""
    if not isinstance(raw, dict):
        raise InputError(f"cost table {name}: expected a JSON object")
    for key in ("title", "node_nm", "citation", "prices_pj"):
        if key not in raw:
            raise InputError(f"cost table {name}: field {key!r} is missing")
    if not _is_number(raw["node_nm"]) or raw["node_nm"] <= 0:
        raise InputError(f"cost table {name}: field 'node_nm' must be a number above 0, got {raw['node_nm']!r}")
    notes = raw.get("price_notes", {})
    if not isinstance(notes, dict):
        raise InputError(f"cost table {name}: field 'price_notes' must map events to notes, got {notes!r}")
    prices = raw["prices_pj"]
    if not isinstance(prices, dict):
        raise InputError(f"cost table {name}: field 'prices_pj' must map events to pJ")
    for event, value in prices.items():
        if event not in EVENTS:
            raise InputError(f"cost table {name}: unknown event {event!r} in 'prices_pj'; known: {', '.join(EVENTS)}")
        if not _is_number(value) or value < 0:
            raise InputError(f"cost table {name}: prices_pj.{event} must be a number >= 0, got {value!r}")
    for event in ("mac", "ac"):
        if event not in prices:
            raise InputError(f"cost table {name}: prices_pj.{event} is missing; both mac and ac are needed")
    if ("neuron_active" in prices) != ("neuron_inactive" in prices):
        raise InputError(f"cost table {name}: give both prices_pj.neuron_active and prices_pj.neuron_inactive, or none")
    if prices.get("neuron_active", 0) < prices.get("neuron_inactive", 0):
        raise InputError(f"cost table {name}: prices_pj.neuron_active is below prices_pj.neuron_inactive")
    return CostTable(
        name=name,
        title=str(raw["title"]),
        node_nm=float(raw["node_nm"]),
        basis=str(raw.get("basis", "not stated")),
        citation=str(raw["citation"]),
        verified=str(raw.get("verified", "supplied by the user, not verified here")),
        prices_pj={event: float(value) for event, value in prices.items()},
        price_notes={str(key): str(value) for key, value in notes.items()},
    )


def _is_number(value: Any) -> bool:
    """A finite int or float that fits a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
