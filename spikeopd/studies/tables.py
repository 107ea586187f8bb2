"""The table of a study: a title, our columns, after a bar the paper's, and notes. Cells are text already."""

from __future__ import annotations

from dataclasses import dataclass

from spikeopd import tables


@dataclass(frozen=True)
class Table:
    """head and rows of text; the first `ours` columns are measured, the others the paper's."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: int
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        head, *body = tables.aligned([self.head, *self.rows], bar=self.ours)
        rule = "-" * max(map(len, (head, *body)))
        return "\n".join([self.title, rule, head, rule, *body, rule, *(f"note: {note}" for note in self.notes)])

    @property
    def csv(self) -> str:
        return tables.comma_separated(self.head, self.rows)

    @property
    def markdown(self) -> str:
        return "\n".join(tables.markdown(self.head, self.rows))

    @property
    def latex(self) -> str:
        papers = len(self.head) - self.ours
        columns = "l" + "r" * (self.ours - 1) + ("|" + "r" * papers if papers else "")
        comments = (f"% {line}" for line in (self.title, *self.notes))
        return "\n".join([*comments, *tables.tabular(self.head, self.rows, columns)]) + "\n"
