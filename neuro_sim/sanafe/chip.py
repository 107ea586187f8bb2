"""What a simulated chip measured over a run, summed for run.json: totals, links of its mesh, energy and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from neuro_sim.sanafe.network import EXTRAS
from spikeopd.contracts.chip import CHIP_SCHEMA, CHIP_TABLES, CHIP_TOTALS, ENERGIES

# Published of SANA-FE's Loihi against silicon, over three applications: J. Boyle et al., IEEE TCAD 2025.
PUBLISHED_ERROR = {"energy": 0.12, "latency": 0.25, "source": "doi:10.1109/TCAD.2025.3537971"}


def summarise(about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of a run's tokens."""
    traffic: Counter[tuple[int, int]] = Counter()
    for record in records:
        for source, target, count in record["traffic"].tolist():
            traffic[source, target] += count
    whole = {name: _plain(sum(record.get(name, 0) for record in records), name) for name in CHIP_TOTALS}
    energies = [float(sum(record[name] for name in ENERGIES)) for record in records]
    return {
        "schema": CHIP_SCHEMA,
        **about,
        "published_error": PUBLISHED_ERROR,
        "tokens": len(records),
        "slots": records[-1]["slots"],
        "totals": whole,
        **{name: _summed([record[name] for record in records]) for name in CHIP_TABLES},
        "extras": {role: text for role, text in EXTRAS.items() if role in records[-1]["roles"]},
        "links": link_loads(traffic, about["mesh"]["height"]),
        "per_token": {"energy_pj": energies, "seconds": [record["seconds"] for record in records]},
    }


def link_loads(traffic: Mapping[tuple[int, int], int], height: int) -> list[dict[str, int]]:
    """Messages over every link between neighbouring tiles that carried any, busiest first.

    Tiles are numbered column by column; a message goes east or west first, then north or south, as the simulator's do.
    """
    loads: Counter[tuple[int, int]] = Counter()
    for (source, target), count in traffic.items():
        (column, row), (end_column, end_row) = divmod(source, height), divmod(target, height)
        here = source
        while here != target:
            if column != end_column:
                column += 1 if end_column > column else -1
            else:
                row += 1 if end_row > row else -1
            there = column * height + row
            loads[here, there] += count
            here = there
    return [{"from": a, "to": b, "messages": count} for (a, b), count in loads.most_common()]


def _plain(value: float, name: str) -> float | int:
    return float(value) if name.endswith("_pj") or name == "seconds" else int(value)


def _summed(tables: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(table[name] for table in tables) for name in tables[0]}
