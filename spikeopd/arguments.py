"""What commands share: their one vocabulary of precisions and seeds, and old spellings that still work. Light."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spikeopd import __version__
from spikeopd.errors import ConfigError, say

# The words of options and configurations, and torch's and the bundle's names for the same.
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"spikeopd {__version__}", help="print it and exit")


def precision(word: str) -> str:
    """A word of PRECISIONS; the long names are understood too."""
    names = {name: short for short, name in PRECISIONS.items()}
    found = names.get(word, word)
    if found not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"invalid choice: {word!r} (choose from {', '.join(PRECISIONS)})")
    return found


def seeds(words: Sequence[str]) -> tuple[int, ...]:
    """`0 3-5` is 0, 3, 4, 5."""
    found: list[int] = []
    for word in words:
        low, dash, high = word.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            raise ConfigError(f"--seeds {word}: give numbers or rising ranges, for example 0 1 2 or 0-9")
        found += range(int(low), int(high if dash else low) + 1)
    if len(set(found)) != len(found):
        raise ConfigError(f"--seeds {' '.join(words)}: a seed is named twice")
    return tuple(found)


def renamed(parser: argparse.ArgumentParser, old: str, new: str, **options: Any) -> None:
    """Accept the `old` spelling of the option `new`, with a line on stderr. It is left out of the help."""
    place = new.lstrip("-").replace("-", "_")
    parser.add_argument(
        old, dest=place, action=_Renamed, new=new, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options
    )


class _Renamed(argparse.Action):
    def __init__(self, *arguments: Any, new: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        say(
            f"{parser.prog.partition(' ')[0]}: {option_string} is now {self.new}; the old name goes in the next release"
        )
        setattr(namespace, self.dest, values)
