"""README and docs as a list of things to try: commands and Python, and why some are not run by a test.

A line `# not run by a test: REASON` in a block holds for what follows it there; at the end of a line for that line.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "results" / "README.md"])
MODULES = {
    "spikeopd-train": "spikeopd.cli",
    "spikeopd-eval": "spikeopd.evaluation.cli",
    "spikeopd-study": "spikeopd.studies.cli",
    "spikeopd-export": "export.cli",
    "spikeopd-run-lava": "neuro_sim.cli",
    "spikeopd-energy": "energy.cli",
    "spikeopd-serve": "neuro_sim.serve.cli",
    "spikeopd-bench": "neuro_sim.bench.cli",
}
NOT_RUN = "# not run by a test: "
# What installs or is a whole suite: it changes the machine, and whoever runs the tests has just done it.
INSTALLING = ("make", "pip")
OTHERS = (*INSTALLING, "python", "python3.11", "torchrun", "accelerate", "pytest", "hf", "curl", "git")
PROGRAMS = "|".join([*MODULES, *map(re.escape, OTHERS), "[.]venv[^ ]*"])
COMMAND = re.compile(rf"(?:\$ )?((?:\w+=\S+ )*(?:{PROGRAMS}) .+)")


class Step(NamedTuple):
    """text: Python, or the words of a command; reason: why it is not run."""

    text: str
    words: list[str]
    reason: str


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    found = re.findall(r"^ *```([\w-]*)[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [(language, text.replace("\\\n", " ")) for language, text in found]


def steps(page: Path) -> list[Step]:
    found = []
    for language, text in blocks(page):
        if language == "python":
            first = text.partition("\n")[0]
            found.append(Step(text, [], first.partition(NOT_RUN)[2]))
            continue
        reason = ""
        for line in text.splitlines():
            if line.startswith(NOT_RUN):
                reason = line.partition(NOT_RUN)[2]
            elif (match := COMMAND.fullmatch(line)) is not None:
                own = line.partition(NOT_RUN)[2]
                found.append(Step("", shlex.split(match[1], comments=True), own or reason))
    return found
