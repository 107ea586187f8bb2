"""How a report is shown: text, JSON, CSV, Markdown, LaTeX, and one HTML page.

`table` turns quantities into cells, `tables` says what stands in them, `charts`, `raster` and `page` make the page,
`document` renders and saves.

One rule for units: what programs read (JSON, CSV) is in base units, pJ and bytes; what people read shows all energies
of one document in one unit, the largest in which its energy per token is at least 1.
"""

from pathlib import Path

from spikeopd.errors import InputError

FORMATS = ("text", "json", "csv", "markdown", "latex", "html")
SUFFIXES = {
    "": "text",
    ".txt": "text",
    ".json": "json",
    ".csv": "csv",
    ".md": "markdown",
    ".tex": "latex",
    ".html": "html",
    ".htm": "html",
}


def format_of(path: Path | str) -> str:
    """The format that the ending of a file's name asks for."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        known = ", ".join(filter(None, SUFFIXES))
        raise InputError(f"cannot write {path}: no report ends in {suffix!r}; choose one of {known}")
    return SUFFIXES[suffix]
