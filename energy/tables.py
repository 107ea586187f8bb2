"""Tables with units, and the tables of a report. Every renderer prints these, so all formats show the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from energy.costs import EVENTS, cost_tables, memory_citation, memory_levels
from energy.report import COMPONENT_TITLES

Kind = Literal["text", "int", "count", "energy", "bytes", "rate", "ratio", "percent", "number", "tenth", "exact"]
_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "energy": ((1.0, "pJ"), (1e3, "nJ"), (1e6, "µJ"), (1e9, "mJ"), (1e12, "J")),
    "count": ((1.0, "1"), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")),
    "bytes": ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")),
}
_UNITS = {"text": "", "int": "1", "rate": "spikes/neuron/step", "ratio": "×", "percent": "%", "number": "1",
          "tenth": "1", "exact": "1"}  # fmt: skip
DASH = "–"


@dataclass(frozen=True)
class Column:
    """One column: the row's key, its label and what kind of quantity it is. `unit` overrides the kind's own."""

    key: str
    label: str
    kind: Kind = "text"
    unit: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of raw values in base units (pJ, bytes, plain counts) with the scale each column is shown in."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    one_unit: bool = False  # all energy columns share one unit

    def scale(self, column: Column) -> tuple[float, str]:
        """Divisor and unit of a column, chosen by its largest value so that all its rows share one unit."""
        if column.unit is not None:
            return 1.0, column.unit
        if column.kind not in _SCALES:
            return 1.0, _UNITS[column.kind]
        units = _SCALES[column.kind]
        keys = [c.key for c in self.columns if c.kind == column.kind] if self.one_unit else [column.key]
        values = [row.get(key) for row in self.rows for key in keys]
        largest = max((abs(value) for value in values if value is not None), default=0.0)
        return next((unit for unit in reversed(units) if largest >= unit[0]), units[0])

    def header(self, column: Column) -> str:
        unit = self.scale(column)[1]
        return f"{column.label} [{unit}]" if unit else column.label

    def cell(self, row: dict[str, Any], column: Column) -> str:
        value = row.get(column.key)
        if value is None:
            return DASH
        if column.kind == "text":
            return str(value)
        if column.kind == "int":
            return f"{int(value):,}"
        if column.kind in ("tenth", "exact"):
            text = f"{value:,.1f}"
            return text if column.kind == "tenth" else text.removesuffix(".0")
        if column.kind == "percent":
            return significant(100 * value, 3)
        return significant(value / self.scale(column)[0])


def significant(value: float, digits: int = 4) -> str:
    """A plain decimal with `digits` significant figures; whole numbers below 10^6 keep all of theirs."""
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if abs(rounded) >= 1e15 or abs(rounded) < 1e-6:
        return f"{value:.{digits - 1}e}"
    return f"{rounded:,.{max(places, 0)}f}"


def report_tables(report: dict[str, Any]) -> list[Table]:
    """The tables of one report, most wanted first."""
    measured = report["source"]["kind"] == "run"
    tables = [_summary(report, measured), _components(report, measured)]
    if measured:
        tables.append(_checks(report))
    tables += [_layers(report), _memory(report), _break_even(report), *_sensitivity(report)]
    if report["alternatives"]:
        tables.append(_alternatives(report))
    tables.append(_not_costed(report))
    return tables


def _summary(report: dict[str, Any], measured: bool) -> Table:
    columns = [
        Column("scope", "Phase"),
        Column("tokens", "Fed", "int", "tokens"),
        Column("rate", "Rate", "rate"),
        Column("sops", "Synaptic ops", "count"),
        Column("macs", "MACs", "count"),
        Column("energy_pj", "Energy", "energy"),
        Column("energy_per_token_pj", "Per token", "energy"),
        Column("energy_per_sequence_pj", "Per sequence", "energy"),
    ]
    if measured:
        columns.append(Column("analytical_energy_pj", "Analytical", "energy"))
    columns += [
        Column("teacher_energy_pj", "Teacher", "energy"),
        Column("teacher_over_student", "Teacher/student", "ratio"),
    ]
    note = "Energy: counted events times their price. Analytical: f_r·T_s·FLOPs from the unrounded rates."
    if not measured:
        note = "Analytical estimate f_r·T_s·FLOPs from given rates; nothing was measured."
    return Table("summary", "Energy", tuple(columns), report["summary"], note)


def _components(report: dict[str, Any], measured: bool) -> Table:
    columns = [
        Column("scope", "Phase"),
        Column("title", "Component"),
        Column("count", "Events", "count"),
        Column("energy_pj", "Energy", "energy"),
        Column("energy_per_token_pj", "Per token", "energy"),
        Column("share", "Share", "percent"),
    ]
    if measured:
        columns += [Column("analytical_energy_pj", "Analytical", "energy"), Column("relation", "Measured = analytical")]
    rows = [row | {"title": COMPONENT_TITLES[row["component"]]} for row in report["components"]]
    return Table("components", "By component", tuple(columns), rows)


def _checks(report: dict[str, Any]) -> Table:
    columns = (
        Column("title", "Component"),
        Column("measured_sops", "Counted ops", "int"),
        Column("analytical_sops", "f_r·T_s·FLOPs", "exact"),
        Column("dense_macs", "FLOPs (dense MACs)", "int"),
        Column("owed", "Equality owed"),
        Column("verdict", "Equal"),
    )
    rows = [
        row
        | {
            "title": COMPONENT_TITLES.get(row["component"], "coincidence, unmasked"),
            "owed": "yes" if row["must_equal"] else "no",
            "verdict": "yes" if row["equal"] else "no",
        }
        for row in report["checks"]
    ]
    note = (
        "A query spike at position i meets i + 1 keys, so the masked coincidences differ from mean rate × pairs by how "
        "the rate varies with position; everything else must agree to the last operation."
    )
    return Table("checks", "Measured against analytical", columns, rows, note)


def _layers(report: dict[str, Any]) -> Table:
    names = [name for name in COMPONENT_TITLES if any(name in row["components_pj"] for row in report["layers"])]
    shown = [name for name in names if any(row["components_pj"].get(name) for row in report["layers"])]
    columns = (
        Column("layer", "Layer", "int", "index"),
        Column("sops", "Synaptic ops", "count"),
        *(Column(name, COMPONENT_TITLES[name], "energy") for name in shown),
        Column("energy_pj", "Total", "energy"),
        Column("energy_per_token_pj", "Per token", "energy"),
    )
    rows = [row | row["components_pj"] for row in report["layers"]]
    return Table("layers", "By layer", columns, rows, one_unit=True)


def _memory(report: dict[str, Any]) -> Table:
    memory = report["memory"]
    columns = (
        Column("title", "Memory"),
        Column("pj_per_byte", "Price", "number", "pJ/byte"),
        Column("energy_pj", "Student", "energy"),
        Column("energy_per_token_pj", "Student per token", "energy"),
        Column("teacher_energy_pj", "Teacher", "energy"),
        Column("mark", "Chosen"),
    )
    rows = [row | {"mark": "yes" if row["chosen"] else ""} for row in memory["levels"]]
    moved = "not counted" if memory["total_bytes"] is None else f"{memory['total_bytes']:,} bytes"
    note = (
        f"A line of its own, not part of the energy above. Student moved {moved}, teacher "
        f"{memory['teacher_total_bytes']:,} bytes. Counted: {memory['meaning']}."
    )
    return Table("memory", "Memory traffic", columns, rows, note)


def _break_even(report: dict[str, Any]) -> Table:
    columns = (
        Column("rate", "Break-even rate", "rate"),
        Column("measured_rate", "Rate here", "rate"),
        Column("headroom", "Headroom", "ratio"),
        Column("meaning", "Meaning"),
    )
    return Table("break_even", "Break-even with the teacher", columns, [report["break_even"]])


def _sensitivity(report: dict[str, Any]) -> list[Table]:
    shared = (
        Column("energy_per_token_pj", "Student per token", "energy"),
        Column("teacher_energy_per_token_pj", "Teacher per token", "energy"),
        Column("teacher_over_student", "Teacher/student", "ratio"),
    )
    first = {
        "rate": (Column("factor", "All rates times", "ratio"), Column("rate", "Rate", "rate")),
        "num_steps": (Column("num_steps", "T_s", "int", "steps"),),
        "context": (Column("context", "Context", "int", "tokens"),),
    }
    titles = {"rate": "Sensitivity to the firing rate", "num_steps": "Sensitivity to T_s",
              "context": "Sensitivity to the context"}  # fmt: skip
    note = "Analytical, with the firing rates of this report held fixed."
    return [
        Table(f"sensitivity_{name}", titles[name], (*first[name], *shared), rows, note)
        for name, rows in report["sensitivity"].items()
    ]


def _alternatives(report: dict[str, Any]) -> Table:
    columns = (
        Column("meaning", "Counting instead"),
        Column("energy_pj", "Energy", "energy"),
        Column("change_pj", "Change", "energy"),
    )
    return Table("alternatives", "The same run, counted otherwise", columns, report["alternatives"])


def _not_costed(report: dict[str, Any]) -> Table:
    columns = (Column("what", "Not in the energy above"), Column("count", "Events", "count"))
    return Table("not_costed", "Not costed", columns, report["not_costed"])


def compare_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `comparison.compare`: one model each."""
    columns = (
        Column("name", "Model"),
        Column("parameters", "Scale", "count"),
        Column("tokens", "Fed", "int", "tokens"),
        Column("ops", "OPs", "count"),
        Column("rate", "Rate", "rate"),
        Column("energy_pj", "Energy", "energy"),
        Column("ops_per_token", "OPs per token", "count"),
        Column("energy_per_token_pj", "Energy per token", "energy"),
        Column("relative", "Relative to first", "ratio"),
        Column("basis", "Basis"),
    )
    return Table("compare", "Comparison", columns, rows)


def cost_tables_tables() -> list[Table]:
    """Prices by table and event, where they come from, and the memory levels."""
    known = list(cost_tables().values())
    prices = [
        {"event": event, "what": what} | {table.name: table.prices_pj.get(event) for table in known}
        for event, what in EVENTS.items()
    ]
    columns = (
        Column("event", "Event"),
        Column("what", "One of it is"),
        *(Column(table.name, f"{table.name}, {table.node_nm:g} nm", "number", "pJ") for table in known),
    )
    sources = [
        {
            "name": table.name,
            "node": table.node_nm,
            "title": table.title,
            "basis": table.basis,
            "citation": table.citation,
            "verified": table.verified,
            "notes": "; ".join(f"{event}: {note}" for event, note in table.price_notes.items()),
        }
        for table in known
    ]
    described = (
        Column("name", "Table"),
        Column("node", "Node", "number", "nm"),
        Column("title", "What"),
        Column("basis", "Basis"),
        Column("citation", "Source"),
        Column("verified", "Verified"),
        Column("notes", "Notes"),
    )
    levels = [{"name": m.name, "title": m.title, "price": m.pj_per_byte} for m in memory_levels().values()]
    memory = (Column("name", "Level"), Column("title", "What"), Column("price", "Price", "number", "pJ/byte"))
    return [
        Table("prices", "Prices", columns, prices),
        Table("sources", "Sources", described, sources),
        Table("memory", "Memory", memory, levels, memory_citation()),
    ]
