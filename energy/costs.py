"""What one event costs: published tables, each with its process node and citation. The one home of prices.

A table prices the events it has published figures for, and no others: an event without a price is reported as
not costed, never as free. The paper's two prices stand in `spikeopd.contracts`, because the simulator quotes them too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spikeopd.contracts import APPENDIX_E_PJ
from spikeopd.errors import InputError, short
from spikeopd.files import read_json

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


_HOROWITZ = "M. Horowitz, ISSCC 2014, doi:10.1109/ISSCC.2014.6757323"


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
    """Energy of moving one byte between the arithmetic and one kind of memory; writes are charged like reads."""

    name: str
    title: str
    pj_per_byte: float
    boundary: str
    citation: str = _HOROWITZ
    node_nm: float = 45.0


@dataclass(frozen=True)
class Price:
    """One operation of the memory-inclusive model (`energy.memory`): what it costs, who says so, what is inside."""

    name: str
    what: str
    pj: float
    boundary: str
    citation: str = _HOROWITZ
    node_nm: float = 45.0


@dataclass(frozen=True)
class Placement:
    """Where the three kinds of store lie: weights, the key/value cache, and what belongs to neurons (`local`)."""

    name: str
    title: str
    weights: MemoryLevel
    cache: MemoryLevel
    local: MemoryLevel


_HOST_MAC = APPENDIX_E_PJ["mac"]  # chips without a dense multiplier leave embedding and head to a 45 nm host
_ON_HOST = "embedding and head on a 45 nm host (Horowitz 2014)"
_TABLES = (
    CostTable(
        name="horowitz45",
        title="45 nm CMOS, 32-bit floating point (the paper's constants)",
        node_nm=45.0,
        basis="circuit estimates at 0.9 V",
        citation="M. Horowitz, Computing's energy problem (and what we can do about it), ISSCC 2014, pp. 10-14, "
        "doi:10.1109/ISSCC.2014.6757323",
        verified="4.6 pJ and 0.9 pJ are printed in the paper's Appendix E; 3.7 pJ (multiply) + 0.9 pJ (add) = 4.6 pJ "
        "is restated from the original in PMC8934428, Table 3",
        prices_pj=APPENDIX_E_PJ,
    ),
    CostTable(
        name="horowitz45-int8",
        title="45 nm CMOS, 8-bit weights with a 32-bit integer accumulator",
        node_nm=45.0,
        basis="circuit estimates at 0.9 V",
        citation="M. Horowitz, ISSCC 2014, doi:10.1109/ISSCC.2014.6757323",
        verified="32-bit integer add 0.1 pJ restated in PMC8934428, Table 3; 8-bit integer multiply 0.2 pJ restated in "
        "several public energy models; MAC = 0.2 + 0.1 pJ is our sum",
        prices_pj={"mac": 0.3, "ac": 0.1},
    ),
    CostTable(
        name="loihi",
        title="Intel Loihi, per-event energies",
        node_nm=14.0,
        basis="pre-silicon SDF and SPICE simulation; the synaptic operation is published as a minimum",
        citation="M. Davies et al., Loihi: A Neuromorphic Manycore Processor with On-Chip Learning, IEEE Micro 38(1), "
        "2018, Table 2, doi:10.1109/MM.2018.112130359",
        verified="all six figures against a transcript that quotes Table 2 row by row; 23.6 and 81 pJ also stand in "
        "KerasSpiking's ModelEnergy; SANA-FE's Loihi files carry 4.2 pJ for the N-S hop instead of 4.0",
        prices_pj={
            "ac": 23.6,
            "neuron_active": 81.0,
            "neuron_inactive": 52.0,
            "spike": 1.7,
            "hop_ew": 3.0,
            "hop_ns": 4.0,
            "mac": _HOST_MAC,
        },
        price_notes={"mac": "the chip has no dense multiplier: embedding and head run on a 45 nm host (Horowitz 2014)"},
    ),
    CostTable(
        name="truenorth",
        title="IBM TrueNorth, energy per synaptic event",
        node_nm=28.0,
        basis="measured on silicon; whole-chip power (static included) divided by events at 20 Hz and 128 active "
        "synapses per neuron, so neuron updates and routing are inside the figure",
        citation="P. A. Merolla et al., A million spiking-neuron integrated circuit with a scalable communication "
        "network and interface, Science 345(6197), 2014, doi:10.1126/science.1254642",
        verified="26 pJ and its operating point against three independent public restatements; the article itself was "
        "not at hand",
        prices_pj={"ac": 26.0, "mac": _HOST_MAC},
        price_notes={"mac": _ON_HOST},
    ),
    CostTable(
        name="spinnaker",
        title="SpiNNaker, software neurons on ARM cores",
        node_nm=130.0,
        basis="measured",
        citation="S. Hoeppner et al., Dynamic Power Management for Neuromorphic Many-Core Systems, IEEE TCAS-I 66(8), "
        "2019, arXiv:1903.08941",
        verified="13.3 nJ and 26 nJ as KerasSpiking's ModelEnergy states them from that article",
        prices_pj={"ac": 13300.0, "neuron_active": 26000.0, "neuron_inactive": 26000.0, "mac": _HOST_MAC},
        price_notes={"mac": _ON_HOST},
    ),
    CostTable(
        name="spinnaker2",
        title="SpiNNaker 2 prototype, software neurons on ARM cores with dynamic power management",
        node_nm=28.0,
        basis="measured on a test chip in 28 nm SLP CMOS",
        citation="S. Hoeppner et al., Dynamic Power Management for Neuromorphic Many-Core Systems, IEEE TCAS-I 66(8), "
        "2019, arXiv:1903.08941",
        verified="node against the abstract; 450 pJ and 2.19 nJ as KerasSpiking's ModelEnergy states them from that "
        "article",
        prices_pj={"ac": 450.0, "neuron_active": 2190.0, "neuron_inactive": 2190.0, "mac": _HOST_MAC},
        price_notes={"mac": _ON_HOST},
    ),
)
COSTS: dict[str, CostTable] = {table.name: table for table in _TABLES}  # the first is the default, the paper's

_SRAM = "one 64-bit access of an array of this size, divided by eight bytes; no cache tags, no wires to it"
_DRAM = "one 64-bit access of off-chip memory with its interface, divided by eight bytes; no refresh or idle power"
_LEVELS = (
    MemoryLevel("sram-8kb", "8 KB SRAM, 10 pJ per 64-bit access", 1.25, _SRAM),
    MemoryLevel("sram-32kb", "32 KB SRAM, 20 pJ per 64-bit access", 2.5, _SRAM),
    MemoryLevel("sram-1mb", "1 MB SRAM, 100 pJ per 64-bit access", 12.5, _SRAM),
    MemoryLevel("dram", "DRAM, 1.3 nJ per 64-bit access (lower end of 1.3-2.6 nJ)", 162.5, _DRAM),
    MemoryLevel("dram-high", "DRAM, 2.6 nJ per 64-bit access (upper end of 1.3-2.6 nJ)", 325.0, _DRAM),
)
MEMORY: Mapping[str, MemoryLevel] = {level.name: level for level in _LEVELS}  # cheapest first
MEMORY_CITATION = (
    "M. Horowitz, ISSCC 2014, doi:10.1109/ISSCC.2014.6757323, 45 nm; one 64-bit access divided by eight bytes, writes "
    "charged like reads. The 8 KB figure is restated in PMC8934428, Table 3; the others in several public energy models"
)

# Operations of the memory-inclusive model. The article itself was not at hand; see OPERATIONS_VERIFIED.
_ADDER = "the arithmetic circuit alone at 0.9 V: no registers, control or clock"
_OPERATIONS = (
    Price("ac", "accumulation of a weight or a bit: one 32-bit integer addition", 0.1, _ADDER),
    Price(
        "mac_int8",
        "8-bit product (0.2) added to a 32-bit sum (0.1); fewer bits are charged the same, if anything too dear",
        0.3,
        _ADDER,
    ),
    Price("mac_fp32", "32-bit floating-point product (3.7) and sum (0.9)", 4.6, _ADDER),
    Price(
        "update",
        "leak of a membrane, or rescaling of an activation: 32-bit integer product (3.1) and sum (0.1)",
        3.2,
        _ADDER + "; comparison and reset are not in it",
    ),
    Price("address", "one 32-bit integer addition that finds the next address", 0.1, _ADDER),
)
OPERATIONS: Mapping[str, Price] = {price.name: price for price in _OPERATIONS}
OPERATIONS_VERIFIED = (
    "int32 0.1 and 3.1 pJ, float32 0.9 and 3.7 pJ, and 10 pJ for a 64-bit access of 8 KB as restated in PMC8934428, "
    "Table 3; int8 0.03 and 0.2 pJ as restated by Qualia's EnergyEstimationMetric and by stillwater-sc/esim; 10, 20, "
    "100 pJ and 1.3-2.6 nJ as restated by SASiML. SpikingJelly 2.0.0's Lemaire profiler charges the same 10, 20 and "
    "100 pJ for 32 bits: twice as much per byte as here"
)

_PLACEMENTS = (
    Placement(
        "cores",
        "everything on chip: each core keeps its weights and cache in 32 KB, its neurons in 8 KB",
        MEMORY["sram-32kb"],
        MEMORY["sram-32kb"],
        MEMORY["sram-8kb"],
    ),
    Placement(
        "chip",
        "weights and cache in banks of 1 MB on the chip, neurons in 32 KB",
        MEMORY["sram-1mb"],
        MEMORY["sram-1mb"],
        MEMORY["sram-32kb"],
    ),
    Placement(
        "dram",
        "weights and cache in DRAM, neurons in 32 KB on the chip",
        MEMORY["dram"],
        MEMORY["dram"],
        MEMORY["sram-32kb"],
    ),
)
PLACEMENTS: Mapping[str, Placement] = {placement.name: placement for placement in _PLACEMENTS}


def load_placement(name: str | Placement) -> Placement:
    if isinstance(name, Placement):
        return name
    if name not in PLACEMENTS:
        raise InputError(f"unknown placement {name!r}: choose one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]


def load_costs(name: str | CostTable) -> CostTable:
    """A shipped table by name, a JSON file with the same fields, or a table as it is."""
    if isinstance(name, CostTable):
        return name
    if name in COSTS:
        return COSTS[name]
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        try:
            raw = read_json(path)
        except (OSError, ValueError) as error:
            raise InputError(f"cost table {path} is not readable JSON: {short(error)}") from error
        return parse_table(path.stem, raw)
    raise InputError(f"unknown cost table {name!r}: choose one of {', '.join(COSTS)}, or give a .json file")


def load_memory(name: str) -> MemoryLevel:
    if name not in MEMORY:
        raise InputError(f"unknown memory level {name!r}: choose one of {', '.join(MEMORY)}")
    return MEMORY[name]


def parse_table(name: str, raw: Any) -> CostTable:
    """Check one table. Refuses unknown events, negative prices and missing sources, and says which."""
    if not isinstance(raw, dict):
        raise InputError(f"cost table {name}: expected a JSON object")
    for key in ("title", "node_nm", "citation", "prices_pj"):
        if key not in raw:
            raise InputError(f"cost table {name}: field {key!r} is missing")
    if not _is_number(raw["node_nm"]) or raw["node_nm"] <= 0:
        raise InputError(
            f"cost table {name}: field 'node_nm' must be a number above 0, got {short(repr(raw['node_nm']))}"
        )
    notes = raw.get("price_notes", {})
    if not isinstance(notes, dict):
        raise InputError(f"cost table {name}: field 'price_notes' must map events to notes, got {short(repr(notes))}")
    prices = raw["prices_pj"]
    if not isinstance(prices, dict):
        raise InputError(f"cost table {name}: field 'prices_pj' must map events to pJ")
    for event, value in prices.items():
        if event not in EVENTS:
            raise InputError(
                f"cost table {name}: unknown event {short(repr(event))} in 'prices_pj'; known: {', '.join(EVENTS)}"
            )
        if not _is_number(value) or value < 0:
            raise InputError(f"cost table {name}: prices_pj.{event} must be a number >= 0, got {short(repr(value))}")
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
