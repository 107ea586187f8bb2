"""The report as one self-contained page: charts, sortable tables, the JSON itself. Opens from disk, no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from energy.memory import CONVENTIONS
from energy.render.charts import (
    break_even_lines,
    component_bars,
    fair_bars,
    layer_columns,
    sensitivity_lines,
    token_line,
)
from energy.render.document import Document
from energy.render.table import DASH, Column, Table, significant, unit_of
from energy.render.tables import both_ways, report_unit

if TYPE_CHECKING:
    from energy.twin import FairComparison

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def report_page(document: Document, raster: str = "") -> str:
    """The page of one report. `raster` is ready HTML for the spike raster, empty if the run was not traced."""
    report = document.to_dict()
    charts = [_figure("By component", component_bars(report), "Per fed token, student and teacher.")]
    pair = [_figure("By layer", layer_columns(report), "Per fed token; embedding and head are outside the layers.")]
    if report["tokens"]:
        pair.append(_figure("Over tokens", token_line(report), "A query meets more keys the later its token."))
    charts.append(f'<div class="columns">{"".join(pair)}</div>')
    if raster:
        charts.append(raster)
    charts.append(_sensitivity(report))
    return _page(document, [_tiles(report), *charts, *map(table_html, document.tables)])


def fair_page(document: FairComparison) -> str:
    """Students beside their twins: bars and break-even curves of each, then the tables."""
    data = document.to_dict()
    sections = []
    for subject in document.subjects:
        rows = [row for row in data["fair"] if row["subject"] == subject.name]
        curves = [row for row in data["curves"] if row["subject"] == subject.name]
        smallest = min((row["energy_per_token_pj"] for row in rows if row["energy_per_token_pj"]), default=None)
        unit = unit_of("energy", smallest)
        caption = f"Per token, placement {document.placement.name}. The twin is computed from shapes."
        sections.append(_figure(f"{subject.name}: operations, memory, addressing", fair_bars(rows, unit), caption))
        if curves:
            plots = (
                _figure(
                    f"{subject.name}: break-even, per {convention}",
                    break_even_lines(curves, convention, subject.work.rate, _at(rows, convention), unit),
                    meaning[0].upper()
                    + meaning[1:]
                    + f". Dashed: its rate ({subject.basis}); dots: what each costs there, layer by layer.",
                )
                for convention, meaning in CONVENTIONS.items()
            )
            sections.append(f'<div class="columns">{"".join(plots)}</div>')
    return _page(document, [*sections, *map(table_html, document.tables)])


def _at(rows: Sequence[dict[str, Any]], convention: str) -> dict[str, float]:
    """Energy per token of every model of a comparison, under one convention where it has two."""
    return {row["key"]: row["energy_per_token_pj"] for row in rows if row["convention"] in (convention, "any")}


def tables_page(document: Document) -> str:
    """A page of tables alone (comparisons, the paper's table, cost tables)."""
    return _page(document, [table_html(table) for table in document.tables])


def table_html(table: Table) -> str:
    """A sortable table. Every number carries its raw value in base units."""
    # A long unit may break after its slashes, or one column would widen the whole table.
    labels = [html.escape(table.header(column)).replace("/", "/<wbr>") for column in table.columns]
    head = "".join(
        f'<th class="{_side(column)}" scope="col"><button type="button">{label}</button></th>'
        for column, label in zip(table.columns, labels, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(table, row, column) for column in table.columns) + "</tr>" for row in table.rows
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<section class="card" id="{table.name}"><h2>{html.escape(table.title)}</h2><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>"
    )


def _cell(table: Table, row: dict[str, Any], column: Column) -> str:
    text = table.cell(row, column)
    value = row.get(column.key)
    classes = [_side(column)]
    if column.kind == "text":
        classes += ["long"] if len(text) > 48 else []
        classes += ["yes"] if text in ("yes", "equal", "student cheaper") else ["wrong"] if text == "DIFFERS" else []
        return f'<td class="{" ".join(c for c in classes if c)}">{html.escape(text)}</td>'
    raw = "" if value is None else f' data-value="{value!r}" data-key="{column.key}" title="{value!r}"'
    return f"<td{raw}>{html.escape(text)}</td>"


def _side(column: Column) -> str:
    return "text" if column.kind == "text" else ""


def _tiles(report: dict[str, Any]) -> str:
    whole, even = report["summary"][-1], report["break_even"]
    memory = next(level for level in report["memory"]["levels"] if level["chosen"])
    teacher, costs = report["teacher"]["name"], report["costs"]["name"]
    scale, unit = report_unit(report)

    def energy(value: float | None) -> str:
        return DASH if value is None else f"{significant(value / scale)} {unit}"

    def number(value: float | None, sign: str = "") -> str:
        return DASH if value is None else significant(value) + sign

    ratio = whole["teacher_over_student"]
    entries = [
        (energy(whole["energy_per_token_pj"]), f"per token, prices of {costs}", "energy_per_token_pj",
         whole["energy_per_token_pj"]),
        (number(ratio, "×"), f"energy of {teacher} over ours: {both_ways(report)}", "teacher_over_student", ratio),
        (number(whole["rate"]), "spikes per neuron and step", "rate", whole["rate"]),
        (number(even["rate"]), f"break-even rate: {_break_even(even['rate'])}", "break_even", even["rate"]),
    ]  # fmt: skip
    if memory["energy_per_token_pj"] is not None:
        value = memory["energy_per_token_pj"]
        entries.append(
            (energy(value), f"memory traffic per token, {memory['level']}, apart", "memory_per_token_pj", value)
        )
    tiles = "".join(
        f'<div class="card tile" data-key="{key}" data-value="{value!r}"><b>{html.escape(big)}</b>'
        f"<span>{html.escape(small)}</span></div>"
        for big, small, key, value in entries
    )
    return f'<div class="tiles">{tiles}</div>'


def _break_even(rate: float | None) -> str:
    """What the number is for, in a tile's few words."""
    if rate is None:
        return "under these prices even a silent student costs more than its teacher"
    meaning = "firing like this everywhere, the student would cost what its teacher costs"
    return f"{meaning}; no rate exceeds 1, so it is always cheaper" if rate > 1 else meaning


def _sensitivity(report: dict[str, Any]) -> str:
    whole, model = report["summary"][-1], report["model"]
    mean_context = whole["tokens"] / report["sequences"] if report["sequences"] else None
    plots = [
        ("Firing rate", sensitivity_lines(report, "factor", "all rates times", 1.0, log=False)),
        *(
            [("Time steps", sensitivity_lines(report, "num_steps", "T_s", model["num_steps"], log=False))]
            if report["sensitivity"]["num_steps"]
            else []
        ),
        ("Context", sensitivity_lines(report, "context", "tokens", mean_context, log=True)),
    ]
    inner = "".join(f"<figure><figcaption>{html.escape(name)}</figcaption>{plot}</figure>" for name, plot in plots)
    return (
        '<section class="card"><h2>What if</h2><p class="soft">Energy per token when one thing changes and the firing '
        "rates stay. Coloured: student; grey: teacher; dashed: this report.</p>"
        f'<div class="columns">{inner}</div></section>'
    )


def _figure(title: str, chart: str, caption: str) -> str:
    return (
        f'<section class="card"><h2>{html.escape(title)}</h2><figure><figcaption>{html.escape(caption)}</figcaption>'
        f"{chart}</figure></section>"
    )


def _page(document: Document, sections: Sequence[str]) -> str:
    title, *facts = document.head
    css, script = (resources.files("energy").joinpath(f"data/page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    # Neither "</script" nor "<!--<script" may be seen by the page's parser; JSON reads "\u003c" as the same text.
    raw = json.dumps(document.to_dict(), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    lines = "".join(f'<p class="soft">{html.escape(fact)}</p>' for fact in facts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        f"<style>\n{css}</style></head>\n<body><main><header><div><h1>{html.escape(title)}</h1>{lines}</div>"
        '<div class="tools"><button type="button" id="theme">Light / dark</button> '
        '<button type="button" id="download">JSON</button></div></header>\n'
        + "\n".join(sections)
        + f'\n</main><script type="application/json" id="report">{raw}</script>\n'
        + f"<script>\n{script}</script></body></html>\n"
    )
