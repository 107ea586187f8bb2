"""Tables and reports as text, JSON, CSV, Markdown and LaTeX. The HTML page is in page.py."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from energy.tables import Table, report_tables

_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
          "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "µ": r"\textmu{}", "×": r"$\times$",
          "·": r"$\cdot$", "–": "--"}  # fmt: skip


def render_report(report: dict[str, Any], form: str, raster: str = "") -> str:
    """One report in one format. `raster` is the spike raster's HTML, if the run was traced."""
    if form == "json":
        return to_json(report)
    if form == "csv":
        return report_csv(report)
    if form == "html":
        from energy.page import report_page

        return report_page(report, raster)
    return render_tables(report_tables(report), form, headline(report))


def render_tables(tables: Sequence[Table], form: str, head: Sequence[str] = ()) -> str:
    """Tables in one format, under a few lines of introduction."""
    if form == "text":
        return "\n\n".join([*(["\n".join(head)] if head else []), *(text_table(table) for table in tables)]) + "\n"
    if form == "markdown":
        title, *rest = head or [""]
        parts = [f"# {title}"] if title else []
        parts += ["\n".join(f"- {line}" for line in rest)] if rest else []
        return "\n\n".join([*parts, *(markdown_table(table) for table in tables)]) + "\n"
    if form == "latex":
        comments = "\n".join(f"% {line}" for line in [*head, "needs the booktabs and textcomp packages"])
        return "\n\n".join([comments, *(latex_table(table) for table in tables)]) + "\n"
    if form == "csv":
        return "\n".join(table_csv(table) for table in tables)
    if form == "html":
        from energy.page import tables_page

        return tables_page(tables, head)
    return to_json({table.name: list(table.rows) for table in tables})


def headline(report: dict[str, Any]) -> list[str]:
    """What the report is of, and under which prices."""
    source, costs, model = report["source"], report["costs"], report["model"]
    kind = f"measured on the {source['backend']} backend" if source["kind"] == "run" else "estimated from firing rates"
    state = "" if source["complete"] else " (run interrupted; the tokens that were fed are counted)"
    shape = (
        f"{model['num_hidden_layers']} layers, d {model['hidden_size']}, FFN {model['ffn_dim']}, "
        f"vocabulary {model['vocab_size']}, T_s {model['num_steps']}"
    )
    notes = costs["price_notes"]
    prices = ", ".join(f"{event} {value:g} pJ" for event, value in costs["prices_pj"].items())
    return [
        f"Energy of {source['name']}, {kind}{state}",
        f"model: {shape}; teacher: {report['teacher']['name']}",
        f"costs: {costs['name']}, {costs['node_nm']:g} nm: {prices}",
        f"source: {costs['citation']}",
        *(f"{event}: {note}; the teacher too, so the ratio mixes two nodes" for event, note in notes.items()),
        "analytical arithmetic, not a measurement of power on hardware",
    ]


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def text_table(table: Table, width: int = 100, widest: int = 240) -> str:
    """Aligned columns with their units below the labels; a table of long texts becomes one paragraph per row."""
    header = [table.header(column) for column in table.columns]
    labels = [column.label for column in table.columns]
    units = [f"[{unit}]" if (unit := table.scale(column)[1]) else "" for column in table.columns]
    body = [[table.cell(row, column) for column in table.columns] for row in table.rows]
    widths = [max(len(line[i]) for line in [labels, units, *body]) for i in range(len(labels))]
    left = [column.kind == "text" for column in table.columns]
    if sum(widths) > widest:
        paragraphs = [
            "\n".join(
                textwrap.fill(f"{label}: {cell}", width, subsequent_indent="    ")
                for label, cell in zip(header, cells, strict=True)
                if cell
            )
            for cells in body
        ]
        return "\n\n".join([table.title, *paragraphs])

    def line(cells: list[str]) -> str:
        padded = (c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left, strict=True))
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * w for w in widths)
    parts = [table.title, line(labels), line(units), rule, *(line(cells) for cells in body)]
    return "\n".join(parts + (textwrap.wrap(table.note, width) if table.note else []))


def markdown_table(table: Table) -> str:
    header = [table.header(column).replace("|", r"\|") for column in table.columns]
    marks = ["---" if column.kind == "text" else "---:" for column in table.columns]
    body = [[table.cell(row, column).replace("|", r"\|") for column in table.columns] for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in [header, marks, *body]]
    return "\n".join([f"## {table.title}", "", *lines, *(["", table.note] if table.note else [])])


def latex_table(table: Table) -> str:
    spec = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    header = " & ".join(latex_text(table.header(column)) for column in table.columns)
    rows = [" & ".join(latex_text(table.cell(row, column)) for column in table.columns) for row in table.rows]
    caption = f"{table.title}. {table.note}" if table.note else f"{table.title}."
    return "\n".join(
        [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{spec}}}", r"\toprule", rf"{header} \\", r"\midrule",
         *(rf"{row} \\" for row in rows), r"\bottomrule", r"\end{tabular}",
         rf"\caption{{{latex_text(caption)}}}", rf"\label{{tab:energy-{table.name}}}", r"\end{table}"]
    )  # fmt: skip


def latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def table_csv(table: Table) -> str:
    """One table with raw values; the header carries the base unit."""
    units = {"energy": "pJ", "bytes": "bytes", "rate": "spikes/neuron/step", "percent": "fraction"}
    header = [
        f"{column.key} [{unit}]" if (unit := column.unit or units.get(column.kind, "")) else column.key
        for column in table.columns
    ]
    return _csv(header, ([row.get(column.key) for column in table.columns] for row in table.rows))


def report_csv(report: dict[str, Any]) -> str:
    """Tidy: one row per phase, component, layer and event, with the analytical count beside the measured one."""
    matrix = {(row["scope"], row["component"], row["layer"]): row for row in report["matrix"]}
    header = ["phase", "component", "layer", "event", "count [1]", "price [pJ]", "energy [pJ]",
              "rate [spikes/neuron/step]", "dense_macs [1]", "analytical_count [1]"]  # fmt: skip

    def rows() -> Iterable[list[Any]]:
        for line in report["lines"]:
            match = matrix.get((line["scope"], line["component"], line["layer"])) if line["event"] == "ac" else None
            extra = [match[key] for key in ("rate", "dense_macs", "analytical")] if match else [None] * 3
            keys = ("scope", "component", "layer", "event", "count", "price_pj", "energy_pj")
            yield [*(line[key] for key in keys), *extra]

    return _csv(header, rows())


def _csv(header: list[str], rows: Iterable[list[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()
