"""What a measurement gives its caller: progress while it runs, and at its end a summary and a text to print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

# (what, total) -> a context whose value has advance(count)
Progress = Callable[[str, int], AbstractContextManager[Any]]
Note = Callable[[str], None]


class Report(NamedTuple):
    """summary: what summary.json holds; text: the same for a reader."""

    summary: dict[str, Any]
    text: str


@contextmanager
def shown(progress: Progress | None, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """`with shown(…) as advance`: the progress asked for, or none."""
    if progress is None:
        yield lambda count: None
        return
    with progress(what, total) as bar:
        yield bar.advance
