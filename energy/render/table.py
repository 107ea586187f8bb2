"""Quantities with units as rows of text cells, which `spikeopd.tables` writes as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spikeopd.tables import aligned, comma_separated, latex_text, markdown, tabular

Kind = Literal["text", "int", "count", "energy", "bytes", "rate", "ratio", "percent", "number", "tenth", "exact"]
Unit = tuple[float, str]  # divisor and name
_SCALES: dict[str, tuple[Unit, ...]] = {
    "energy": ((1.0, "pJ"), (1e3, "nJ"), (1e6, "µJ"), (1e9, "mJ"), (1e12, "J")),
    "count": ((1.0, "1"), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")),
    "bytes": ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")),
}
_UNITS = {"text": "", "rate": "spikes/neuron/step", "ratio": "×", "percent": "%"}  # of the other kinds: 1
_BASE_UNITS = {"energy": "pJ", "bytes": "bytes", "rate": "spikes/neuron/step", "percent": "fraction"}
DASH = "–"


def unit_of(kind: str, value: float | None) -> Unit:
    """The largest unit in which a value is at least 1."""
    units = _SCALES[kind]
    return next((unit for unit in reversed(units) if abs(value or 0.0) >= unit[0]), units[0])


@dataclass(frozen=True)
class Column:
    """One column: the row's key, its label and what kind of quantity it is. `unit` overrides the kind's own."""

    key: str
    label: str
    kind: Kind = "text"
    unit: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of raw values in base units (pJ, bytes, plain counts).

    A column of counts or bytes is shown in the unit that suits its largest value. Energies share one unit: the given
    one, or the one that suits the largest of the table.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    energy_unit: Unit | None = None

    def scale(self, column: Column) -> Unit:
        """Divisor and unit of a column."""
        if column.unit is not None:
            return 1.0, column.unit
        if column.kind not in _SCALES:
            return 1.0, _UNITS.get(column.kind, "1")
        if column.kind == "energy" and self.energy_unit is not None:
            return self.energy_unit
        keys = [c.key for c in self.columns if c.kind == "energy"] if column.kind == "energy" else [column.key]
        values = (row.get(key) for row in self.rows for key in keys)
        return unit_of(column.kind, max((abs(value) for value in values if value is not None), default=0.0))

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

    @property
    def head(self) -> list[str]:
        return [self.header(column) for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        return [[self.cell(row, column) for column in self.columns] for row in self.rows]

    @property
    def textual(self) -> list[bool]:
        return [column.kind == "text" for column in self.columns]


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


def write_tables(tables: Sequence[Table], form: str, head: Sequence[str] = ()) -> str:
    """Tables under a few lines of introduction, as text, markdown, latex or csv."""
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
    return "\n".join(csv_table(table) for table in tables)


def text_table(table: Table, width: int = 100, widest: int = 240) -> str:
    """Aligned columns with their units below the labels; a table of long texts becomes one paragraph per row."""
    labels = [column.label for column in table.columns]
    units = [f"[{unit}]" if (unit := table.scale(column)[1]) else "" for column in table.columns]
    body = [labels, units, *table.cells]
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    if sum(widths) > widest:
        paragraphs = [
            "\n".join(
                textwrap.fill(f"{label}: {cell}", width, subsequent_indent="    ")
                for label, cell in zip(table.head, cells, strict=True)
                if cell
            )
            for cells in table.cells
        ]
        return "\n\n".join([table.title, *paragraphs])
    lines = aligned(body, table.textual)
    lines.insert(2, "  ".join("-" * w for w in widths))
    return "\n".join([table.title, *lines, *(textwrap.wrap(table.note, width) if table.note else [])])


def markdown_table(table: Table) -> str:
    lines = markdown(table.head, table.cells, table.textual)
    return "\n".join([f"## {table.title}", "", *lines, *(["", table.note] if table.note else [])])


def latex_table(table: Table) -> str:
    spec = "".join("l" if left else "r" for left in table.textual)
    caption = latex_text(f"{table.title}. {table.note}" if table.note else f"{table.title}.")
    lines = [r"\begin{table}", r"\centering", *tabular(table.head, table.cells, spec)]
    lines += [rf"\caption{{{caption}}}", rf"\label{{tab:energy-{table.name}}}", r"\end{table}"]
    return "\n".join(lines)


def csv_table(table: Table) -> str:
    """One table with raw values; the header carries the base unit."""
    units = [column.unit or _BASE_UNITS.get(column.kind, "") for column in table.columns]
    head = [f"{column.key} [{unit}]" if unit else column.key for column, unit in zip(table.columns, units, strict=True)]
    return comma_separated(head, ([row.get(column.key) for column in table.columns] for row in table.rows))
