"""README and docs: every command in them exists with its options, every piece of Python is run or its names are there.

Running all commands takes hours, so they are parsed: each must know every option that a page gives it. Python blocks
are run by the tests that `RUN_BY` names; elsewhere they are excerpts, compiled, and what they import must exist.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "results" / "README.md"])
PACKAGES = ("spikeopd", "export", "neuro_sim", "energy")
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
# Pages whose Python is run, and by what.
RUN_BY = {
    "api.md": "test_api_docs.py runs them in order",
    "adding_things.md": "test_adding_things.py runs them",
    "README.md": "the lines of docs/api.md at full length",
    "quickstart.md": "the same",
    "serve.md": "test_serve.py: the same calls of OpenAI's client",
}
COMMAND = re.compile(r"(?<![\w/`-])(spikeopd-[a-z]+(?:-lava)?)\b([^\n`|#>;)]*)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    found = re.findall(r"^ *```([\w-]*)[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [(language, text.replace("\\\n", " ")) for language, text in found]


def commands(page: Path) -> list[list[str]]:
    """Commands of this package in blocks and in code spans, as lists of words."""
    text = page.read_text("utf-8")
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = []
    for part in [*(text for _, text in blocks(page)), *spans]:
        for name, rest in COMMAND.findall(part):
            if name in MODULES:
                with contextlib.suppress(ValueError):  # half of a quotation is prose
                    found.append([name, *shlex.split(rest)])
    return found


@cache
def options(command: str, child: str = "") -> set[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        import_module(MODULES[command]).main([*filter(None, [child]), "--help"])
    return set(re.findall(r"--[a-z][\w-]*", out.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_knows_the_options_that_the_page_gives_it(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it tells of options that are gone")
    for name, *words in commands(page):
        given = [word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)]
        child = words[0] if words and re.fullmatch(r"[a-z]+", words[0]) else ""
        known = options(name) | (options(name, child) if child else set())
        for option in given:
            assert option in known, f"{page.name}: {name} {' '.join(words)}: no option {option}"


def test_commands_are_found_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 60
    assert ["spikeopd-serve", "bundle"] in commands(ROOT / "docs" / "serve.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_are_run_somewhere_and_are_python(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            tree = ast.parse(text, str(page))
            if page.name not in RUN_BY:
                excerpts(page, tree)


def excerpts(page: Path, tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            base = ROOT.joinpath(*node.module.split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            for alias in node.names:
                known = (base / f"{alias.name}.py").is_file() or alias.name in file.read_text("utf-8")
                assert known, f"{page.name}: {node.module} has no {alias.name}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mkdocs is not installed: make docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "concepts" / "index.html").is_file(), done.stderr[-2000:]
