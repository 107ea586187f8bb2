"""README and docs: every command in them, also in running text, knows the options it is given; Python is Python, and
what it imports exists. test_docs_run.py runs what stands in blocks.
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

from tests.doc_blocks import MODULES, PAGES, ROOT, blocks

PACKAGES = ("spikeopd", "export", "neuro_sim", "energy")
COMMAND = re.compile(r"(?<![\w/`-])(spikeopd-[a-z]+(?:-lava)?)\b([^\n`|#>;)]*)")


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
def test_python_blocks_are_python_and_name_what_there_is(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            excerpts(page, ast.parse(text, str(page)))


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
