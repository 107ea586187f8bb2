"""The text of `python-docs`: language reference and docstrings of the standard library, read without importing."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from spikeopd.errors import InputError

MIN_PARAGRAPH = 40  # characters; shorter docstrings say "See above" and the like
VERSION = 1  # raise when the extraction below changes, so that token caches are made anew
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "lib-dynload", "pydoc_data",
    "turtledemo", "_bundled", "__pycache__", "__phello__",
}  # fmt: skip


RULE = re.compile(r"\s*([*=\-~#_^+])\1{3,}\s*")  # underlines of headings, rows of asterisks


def standard_library() -> Path:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    if not (stdlib / "pydoc_data/topics.py").is_file():
        raise InputError(
            f"python-docs: {stdlib} has no pydoc_data/topics.py; install the complete Python standard library "
            "or give another text source, for example text:PATH"
        )
    return stdlib


def modules(stdlib: Path) -> list[Path]:
    found: list[Path] = []
    for folder, children, files in os.walk(stdlib):
        # Pruned, not filtered: site-packages can be a hundred times larger than the library itself.
        children[:] = [c for c in children if c not in SKIPPED_FOLDERS and not c.startswith("config-")]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(stdlib).as_posix())


def documents(stdlib: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    topics = _topics(stdlib / "pydoc_data/topics.py")
    # Long topics first: they contain short ones, which then shrink to what they alone say.
    for topic in sorted(topics, key=lambda t: (-len(topics[t]), t)):
        if text := _fresh_paragraphs([topics[topic]], seen):
            yield f"topic:{topic}", text
    for path in modules(stdlib):
        if text := _fresh_paragraphs(_docstrings(path), seen):
            yield f"module:{path.relative_to(stdlib).with_suffix('').as_posix()}", text


@lru_cache(maxsize=1)
def documents_once(stdlib: Path) -> tuple[tuple[str, str], ...]:
    """Kept in memory (2 MB), because parsing the library takes seconds and both parts are wanted."""
    return tuple(documents(stdlib))


def _topics(path: Path) -> dict[str, str]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return dict(ast.literal_eval(node.value))
    raise InputError(f"python-docs: {path} holds no topics; give another text source, for example text:PATH")


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the standard library's own strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []
    found: list[str] = []
    stack: list[ast.AST] = [tree]
    while stack:  # in the order of the source; only definitions can hold docstrings, so expressions are not walked
        node = stack.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=True)
            if text and len(text) >= MIN_PARAGRAPH:
                found.append(text)
        if isinstance(node, (ast.stmt, ast.Module, ast.ExceptHandler)):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
    return found


def _fresh_paragraphs(texts: list[str], seen: set[str]) -> str:
    kept: list[str] = []
    for text in texts:
        for paragraph in re.split(r"\n[ \t]*\n", _clean(text)):
            paragraph = paragraph.strip("\n")
            key = " ".join(paragraph.split())
            if not key or key in seen or _is_doctest(paragraph):
                continue
            if len(key) >= MIN_PARAGRAPH:
                seen.add(key)
            kept.append(paragraph)
    result = "\n\n".join(kept)
    return result if len(result) >= MIN_PARAGRAPH else ""


def _clean(text: str) -> str:
    lines = inspect.cleandoc(text).splitlines()
    return "\n".join(line.rstrip() for line in lines if not RULE.fullmatch(line))


def _is_doctest(paragraph: str) -> bool:
    return paragraph.lstrip().startswith((">>>", "..."))
