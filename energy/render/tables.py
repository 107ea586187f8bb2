"""What stands in a report: its first lines, its tables, its tidy CSV. Every format shows these, so all agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from energy.costs import COSTS, EVENTS, MEMORY, MEMORY_CITATION, OPERATIONS, OPERATIONS_VERIFIED, PLACEMENTS
from energy.render.chip import chip_line, chip_tables
from energy.render.document import Document
from energy.render.table import Column, Table, Unit, significant, unit_of
from spikeopd.tables import comma_separated

COMPONENT_TITLES = {
    "embed": "embedding",
    "qkv": "QKV",
    "coincidence": "coincidence (QK)",
    "av": "attention sum (AV)",
    "output": "output projection",
    "residual": "residual gains",
    "ffn_in": "FFN in",
    "ffn_out": "FFN out",
    "head": "head",
    "neurons": "neuron updates",
    "routing": "spike delivery",
}
BOTH_WAYS = ("horowitz45", "loihi")  # tables that often disagree about who is cheaper: a report never shows one alone


def report_unit(report: dict[str, Any]) -> Unit:
    """The one unit of all energies a person sees in this report."""
    return unit_of("energy", report["summary"][-1]["energy_per_token_pj"])


def headline(report: dict[str, Any]) -> list[str]:
    """What the report is of, under which prices, and that other prices say something else."""
    source, costs, model = report["source"], report["costs"], report["model"]
    kind = "counted on the {backend} backend" if source["kind"] == "run" else "estimated from firing rates"
    state = "" if source["complete"] else " (run interrupted; the tokens that were fed are counted)"
    prices = ", ".join(f"{event} {value:g} pJ" for event, value in costs["prices_pj"].items())
    return [
        f"Energy of {source['name']}, {kind.format(**source)}{state}",
        f"model: {_shape(model)}; teacher: {report['teacher']['name']}",
        f"costs: {costs['name']}, {costs['node_nm']:g} nm: {prices}",
        f"source: {costs['citation']}",
        *(
            f"{event}: {note}; the teacher too, so the ratio mixes two nodes"
            for event, note in costs["price_notes"].items()
        ),
        "teacher/student: " + both_ways(report),
        "with memory, " + fair_ratio(report),
        *([chip_line(report["chip"])] if report.get("chip") else []),
        "arithmetic on counted events, not power measured on hardware"
        if source["kind"] == "run"
        else "arithmetic on given rates; nothing was counted, and no power was measured",
    ]


def _shape(model: dict[str, Any]) -> str:
    sizes = (
        f"{model['num_hidden_layers']} layers, d {model['hidden_size']}, FFN {model['ffn_dim']}, "
        f"vocabulary {model['vocab_size']}, T_s {model['num_steps']}"
    )
    form = []
    if model.get("neuron") == "quantised":
        form.append("a quantised twin: one step of counts up to T_s, its synapses multiply")
    if model.get("residual_write") == "current":
        form.append("current write")
    if model.get("readout") == "residual":
        form.append("residual readout")
    if model.get("distances"):
        form.append(f"distance bias {model['distances']}")
    if model.get("attention") == "inhibiting":
        form.append("attention that inhibits")
    return ", ".join([sizes, *form])


def both_ways(report: dict[str, Any]) -> str:
    """Teacher over student under the chosen table and under those of `BOTH_WAYS`."""
    rows = [row for row in report["prices"] if row["chosen"] or row["table"] in BOTH_WAYS]
    ratios = [(row["teacher_over_student"], row["table"]) for row in sorted(rows, key=lambda row: not row["chosen"])]
    return ", ".join(f"{'–' if ratio is None else significant(ratio)} × under {name}" for ratio, name in ratios)


def fair_ratio(report: dict[str, Any]) -> str:
    """Twin over student, under both conventions."""
    twin = report["twin"]
    if twin["basis"] == "counted":
        found = {key: value or 0.0 for key, value in twin["energy_per_token_pj"].items()}
        unit, name = unit_of("energy", min(found.values()))
        bills = {key: significant(value / unit, 4) for key, value in found.items()}
        return (
            f"this twin (int8 × {twin['activation_bits']} bit): {bills['dense']} {name} per token dense; zeros skipped "
            f"{bills['spike']} {name} per spike, {bills['token']} {name} per token"
        )
    ratios = [
        f"{'–' if ratio is None else significant(ratio, 3)} × per {name}"
        for name, ratio in twin["over_student"]["dense"].items()
    ]
    return (
        f"quantised twin/student (int8 × {twin['activation_bits']} bit, {twin['basis']}): {', '.join(ratios)}; "
        "see compare --twin"
    )


def report_tables(report: dict[str, Any]) -> list[Table]:
    """The tables of one report, most wanted first."""
    measured = report["source"]["kind"] == "run"
    tables = [_summary(report, measured), _components(report, measured), _prices(report)]
    if measured:
        tables.append(_checks(report))
    tables += [_layers(report), _memory(report), _break_even(report), *_sensitivity(report)]
    if report["alternatives"]:
        tables.append(_alternatives(report))
    if report.get("chip"):
        tables += chip_tables(report["chip"])
    tables.append(_not_costed(report))
    return [replace(table, energy_unit=table.energy_unit or report_unit(report)) for table in tables]


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
        note = "Analytical estimate f_r·T_s·FLOPs from given rates; nothing was counted."
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
        columns += [Column("analytical_energy_pj", "Analytical", "energy"), Column("relation", "Counted = analytical")]
    rows = [row | {"title": COMPONENT_TITLES[row["component"]]} for row in report["components"]]
    return Table("components", "By component", tuple(columns), rows)


def _prices(report: dict[str, Any]) -> Table:
    columns = (
        Column("table", "Prices"),
        Column("node_nm", "Node", "number", "nm"),
        Column("energy_per_token_pj", "Student per token", "energy"),
        Column("teacher_energy_per_token_pj", "Teacher per token", "energy"),
        Column("teacher_over_student", "Teacher/student", "ratio"),
        Column("mark", "Chosen"),
        Column("title", "What"),
    )
    rows = [row | {"mark": "yes" if row["chosen"] else ""} for row in report["prices"]]
    note = (
        "Above 1 the student is cheaper. A spiking chip pays for every synaptic operation and neuron update; its table "
        "prices the teacher's MACs on a 45 nm host."
    )
    return Table("prices", "The same events under other prices", columns, rows, note)


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
    return Table("checks", "Counted against analytical", columns, rows, note)


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
    return Table("layers", "By layer", columns, rows)


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
    titles = {"rate": "the firing rate", "num_steps": "T_s", "context": "the context"}
    note = "Analytical, with the firing rates of this report held fixed."
    return [
        Table(f"sensitivity_{name}", f"Sensitivity to {titles[name]}", (*first[name], *shared), rows, note)
        for name, rows in report["sensitivity"].items()
        if rows  # a quantised twin has one step and no other number of them
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
    """Rows of `comparison.compare_rows`: one model each."""
    columns: tuple[Column, ...] = (
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
    if any("chip_us_per_token" in row for row in rows):  # simulated, beside what was counted
        columns += (
            Column("chip_energy_per_token_pj", "SANA-FE per token", "energy"),
            Column("chip_energy_error_pj", "±", "energy"),
            Column("chip_us_per_token", "Latency per token", "number", "µs"),
            Column("chip_us_error", "±", "number", "µs"),
        )
    smallest = min((row["energy_per_token_pj"] for row in rows if row["energy_per_token_pj"]), default=None)
    return Table("compare", "Comparison", columns, rows, energy_unit=unit_of("energy", smallest))


def costs_document() -> Document:
    """Prices by table and event, where they come from, and the memory levels."""
    known = list(COSTS.values())
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
    levels = [{"name": m.name, "title": m.title, "price": m.pj_per_byte} for m in MEMORY.values()]
    memory = (Column("name", "Level"), Column("title", "What"), Column("price", "Price", "number", "pJ/byte"))
    places = [
        {"name": p.name, "title": p.title, "weights": p.weights.name, "cache": p.cache.name, "local": p.local.name}
        for p in PLACEMENTS.values()
    ]
    placed = (
        Column("name", "Placement"),
        Column("weights", "Weights"),
        Column("cache", "Keys and values"),
        Column("local", "Sums, membranes, spikes"),
        Column("title", "What"),
    )
    operations = [
        {"name": o.name, "pj": o.pj, "node": o.node_nm, "what": o.what, "boundary": o.boundary, "citation": o.citation}
        for o in OPERATIONS.values()
    ]
    operated = (
        Column("name", "Operation"),
        Column("pj", "Price", "number", "pJ"),
        Column("node", "Node", "number", "nm"),
        Column("what", "What"),
        Column("boundary", "Boundary"),
        Column("citation", "Source"),
    )
    tables = (
        Table("prices", "Prices", columns, prices),
        Table("sources", "Sources", described, sources),
        Table("memory", "Memory", memory, levels, MEMORY_CITATION),
        Table("placements", "Placements of the model with memory", placed, places),
        Table("operations", "Operations of the model with memory", operated, operations, OPERATIONS_VERIFIED),
    )
    return Document(("Cost tables", "an event without a price is reported as not costed, never as free"), tables)


def report_csv(report: dict[str, Any]) -> str:
    """Tidy: one row per phase, component, layer and event, with the analytical count beside the counted one."""
    matrix = {(row["scope"], row["component"], row["layer"]): row for row in report["matrix"]}
    counted = ["phase", "component", "layer", "event", "count [1]", "price [pJ]", "energy [pJ]"]
    estimated = ["rate [spikes/neuron/step]", "dense_macs [1]", "analytical_count [1]"]

    def rows() -> Iterator[list[Any]]:
        for line in report["lines"]:
            match = (
                matrix.get((line["scope"], line["component"], line["layer"]))
                if line["layer"] is not None and line["event"] in ("ac", "mac")
                else None
            )
            extra = [match[key] for key in ("rate", "dense_macs", "analytical")] if match else [None] * 3
            keys = ("scope", "component", "layer", "event", "count", "price_pj", "energy_pj")
            yield [*(line[key] for key in keys), *extra]

    return comma_separated(counted + estimated, rows())
