"""What a run on a simulated chip measured, as run.json holds it under `chip`: read and checked. docs/formats.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spikeopd.errors import InputError, short

CHIP_SCHEMA = "spikeopd.chip/1"
CHIP_PRICES = ("dense_event", "sparse_event", "access", "update", "spike", "message", "hop_ew", "hop_ns")
ENERGIES = ("synapse_pj", "dendrite_pj", "soma_pj", "network_pj")
KINDS = ("site", "gate", "relay")
CHIP_TOTALS = (
    *ENERGIES,
    *(f"soma_{kind}_pj" for kind in KINDS),
    "seconds", "steps", "events", "accessed", "updated", "fired", "messages", "hops_ew", "hops_ns",
    "site_messages", "site_hops_ew", "site_hops_ns",
)  # fmt: skip
LARGEST = 1 << 62  # of any number; sums of a few still fit what is computed with them
CHIP_TABLES = ("roles", "dense_roles", "spikes")


@dataclass(frozen=True)
class ChipRun:
    """Totals over the tokens of a run; energies in pJ. `raw` is everything, as the file has it.

    roles        synaptic events by what they are: components of the model, and `extras` that only the mapping has
    dense_roles  those of them at the price `dense_event`; the others cost `sparse_event`
    spikes       by kind of neuron: site (the model's), gate, relay
    """

    simulator: str
    version: str
    prices_pj: Mapping[str, float]
    error: Mapping[str, float]
    error_source: str
    tokens: int
    totals: Mapping[str, float]
    roles: Mapping[str, int]
    dense_roles: Mapping[str, int]
    spikes: Mapping[str, int]
    extras: Mapping[str, str]
    neurons: Mapping[str, int]
    raw: Mapping[str, Any]

    @property
    def energy_pj(self) -> float:
        return sum(self.totals[name] for name in ENERGIES)

    @property
    def site_hops(self) -> tuple[float, float]:
        """Mean hops of a spike of the model, east-west and north-south, over all the cores it is sent to."""
        spikes = max(1, self.spikes["site"])
        return self.totals["site_hops_ew"] / spikes, self.totals["site_hops_ns"] / spikes


def parse_chip(raw: Any, where: str, tokens: int) -> ChipRun:
    """Check `chip` of a run that fed `tokens` tokens."""

    def fail(field: str, message: str) -> InputError:
        return InputError(f"{where}: field 'chip.{field}': {short(message, 300)}")

    def table(value: Any, field: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise fail(field, f"expected an object, got {type(value).__name__}")
        for name in names or tuple(value):
            number = value.get(name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < LARGEST:
                raise fail(f"{field}.{name}", f"expected a number from 0, got {number!r}")
        return value

    if not isinstance(raw, dict):
        raise InputError(f"{where}: field 'chip': expected an object")
    if raw.get("schema") != CHIP_SCHEMA:
        raise fail("schema", f"expected {CHIP_SCHEMA!r}, got {raw.get('schema')!r}")
    if raw.get("tokens") != tokens:
        raise fail("tokens", f"{raw.get('tokens')!r} should be {tokens} (tokens fed)")
    for name in ("simulator", "version"):
        if not isinstance(raw.get(name), str):
            raise fail(name, f"expected a name, got {raw.get(name)!r}")
    roles, dense = (table(raw.get(name), name) for name in ("roles", "dense_roles"))
    totals = table(raw.get("totals"), "totals", CHIP_TOTALS)
    if sum(roles.values()) != totals["events"]:
        raise fail("roles", f"{sum(roles.values())} should be {totals['events']} (all synaptic events)")
    for name, count in dense.items():
        if count > roles.get(name, 0):
            raise fail(f"dense_roles.{name}", "more than there are in 'roles'")
    extras, error, placement = raw.get("extras"), raw.get("published_error"), raw.get("placement")
    if not isinstance(extras, dict) or not all(isinstance(text, str) for text in extras.values()):
        raise fail("extras", "expected a sentence for every role that is not the model's")
    if not isinstance(error, dict) or not isinstance(error.get("source"), str):
        raise fail("published_error", "expected energy, latency and source")
    neurons = table(placement.get("neurons") if isinstance(placement, dict) else None, "placement.neurons", KINDS)
    return ChipRun(
        simulator=raw["simulator"],
        version=raw["version"],
        prices_pj=table(raw.get("prices_pj"), "prices_pj", CHIP_PRICES),
        error=table({name: error.get(name) for name in ("energy", "latency")}, "published_error"),
        error_source=error["source"],
        tokens=tokens,
        totals=totals,
        roles=roles,
        dense_roles=dense,
        spikes=table(raw.get("spikes"), "spikes", KINDS),
        extras=extras,
        neurons=neurons,
        raw=raw,
    )
