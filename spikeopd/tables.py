"""Rows of text cells as aligned text, Markdown, LaTeX and CSV. What the cells say is for the caller. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "µ": r"\textmu{}", "×": r"$\times$", "·": r"$\cdot$",
    "±": r"$\pm$", "–": "--",
}  # fmt: skip


def aligned(lines: Sequence[Sequence[str]], left: Sequence[bool] | None = None, bar: int | None = None) -> list[str]:
    """Each line with columns of equal width. left: columns of text (default: the first); the others are numbers.

    bar: a column with a bar before it.
    """
    columns = range(len(lines[0]))
    widths = [max(len(line[column]) for line in lines) for column in columns]
    textual = left or [column == 0 for column in columns]

    def cell(line: Sequence[str], column: int) -> str:
        text = line[column].ljust(widths[column]) if textual[column] else line[column].rjust(widths[column])
        return f"|  {text}" if column == bar else text

    return ["  ".join(cell(line, column) for column in columns).rstrip() for line in lines]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[bool] | None = None) -> list[str]:
    """Lines of a Markdown table. left: columns of text, the others are set to the right (default: none is)."""
    marks = ["---" if textual else "---:" for textual in left or [True] * len(head)]
    body = ([cell.replace("|", r"\|") for cell in line] for line in (head, *rows))
    first, *rest = (f"| {' | '.join(line)} |" for line in body)
    return [first, f"| {' | '.join(marks)} |", *rest]


def tabular(head: Sequence[str], rows: Iterable[Sequence[str]], columns: str) -> list[str]:
    """Lines of a LaTeX tabular (booktabs). columns: such as `lrr|r`."""
    first, *rest = (" & ".join(map(latex_text, line)) + r" \\" for line in (head, *rows))
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return [begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", end]


def latex_text(text: str) -> str:
    """Text with the characters that LaTeX reads otherwise; µ needs textcomp."""
    return "".join(_LATEX.get(character, character) for character in text)


def comma_separated(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV with a final line end; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()
