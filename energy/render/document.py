"""Anything that can be shown: rendered in every format, saved by the ending of a file's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energy.render import FORMATS, format_of
from energy.render.table import Table, write_tables
from spikeopd.errors import InputError
from spikeopd.files import write_text


@dataclass(frozen=True, repr=False)
class Document:
    """Tables under a few lines of introduction.

    head    the title, then facts
    prose   Markdown that follows the tables, in Markdown alone
    inputs  the files it was made from, which `save` refuses to replace
    """

    head: tuple[str, ...]
    tables: tuple[Table, ...]
    prose: str = ""
    inputs: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what the JSON holds."""
        return {table.name: list(table.rows) for table in self.tables}

    def render(self, form: str = "text") -> str:
        """The whole document as text in one of `energy.render.FORMATS`."""
        if form not in FORMATS:
            raise InputError(f"unknown format {form!r}: choose one of {', '.join(FORMATS)}")
        if form == "json":
            return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if form == "html":
            return self._html()
        if form == "csv":
            return self._csv()
        text = write_tables(self.tables, form, self.head)
        return f"{text}\n{self.prose}" if form == "markdown" and self.prose else text

    def save(self, path: Path | str, form: str | None = None) -> Path:
        """Write the document; the ending says how (.txt .json .csv .md .tex .html) unless `form` does."""
        form = form or format_of(path)
        refuse_inputs(path, self.inputs)
        return save_text(path, self.render(form))

    def _html(self) -> str:
        from energy.render.page import tables_page

        return tables_page(self)

    def _csv(self) -> str:
        return write_tables(self.tables, "csv")

    def __str__(self) -> str:
        return self.render("text")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.head[0]}>"


def refuse_inputs(path: Path | str, inputs: Sequence[Path]) -> None:
    """What a document was made from is never replaced by it."""
    target = Path(path)
    for source in inputs:
        if target == source or (target.exists() and source.exists() and target.samefile(source)):
            raise InputError(f"cannot write {path}: this report is made from it; choose another name")


def save_text(path: Path | str, text: str) -> Path:
    try:
        return write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
