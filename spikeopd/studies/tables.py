"""One table, three notations. Cells are text already; the paper's columns stand at the right, after a bar."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """head and rows of text; the first `ours` columns are measured, the others the paper's."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: int
    notes: tuple[str, ...] = ()


def text(table: Table) -> str:
    lines = [table.head, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]

    def row(line: Sequence[str]) -> str:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        return "  ".join(cells[: table.ours]) + (
            "  |  " + "  ".join(cells[table.ours :]) if len(cells) > table.ours else ""
        )

    body = [row(line) for line in lines]
    rule = "-" * max(len(line) for line in body)
    return "\n".join([table.title, rule, body[0], rule, *body[1:], rule, *(f"note: {note}" for note in table.notes)])


def comma_separated(table: Table) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.head)
    writer.writerows(table.rows)
    return buffer.getvalue()


def markdown(table: Table) -> str:
    lines = [table.head, tuple("---" for _ in table.head), *table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(table: Table) -> str:
    columns = (
        "l"
        + "r" * (table.ours - 1)
        + ("|" + "r" * (len(table.head) - table.ours) if len(table.head) > table.ours else "")
    )
    body = [" & ".join(map(escape, line)) + r" \\" for line in (table.head, *table.rows)]
    notes = [f"% {note}" for note in table.notes]
    return "\n".join(
        [f"% {table.title}", *notes, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:],
         r"\bottomrule", r"\end{tabular}"]
    ) + "\n"  # fmt: skip


def escape(cell: str) -> str:
    for plain, escaped in (
        ("\\", r"\textbackslash{}"),
        ("%", r"\%"),
        ("_", r"\_"),
        ("&", r"\&"),
        ("#", r"\#"),
        ("±", r"$\pm$"),
    ):
        cell = cell.replace(plain, escaped)
    return cell
