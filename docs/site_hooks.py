"""What the site takes from outside docs/: README and its kin become pages, links to code become plain names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=_links((ROOT / source).read_text("utf-8"), "")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return markdown if page.file.src_uri in PAGES.values() else _links(markdown, page.file.src_uri.rpartition("/")[0])


def _links(markdown: str, folder: str) -> str:
    """Links as they are from the site's root: files of the repository that are no pages lose theirs."""

    def one(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        if folder == "" and target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        name, _, anchor = target.partition("#")
        outside = name.removeprefix("../") if name.startswith("../") and not folder else name
        if outside in PAGES:
            return f"[{text}]({PAGES[outside]}{'#' + anchor if anchor else ''})"
        inside = (ROOT / "docs" / folder / name).resolve()
        if not inside.is_relative_to(ROOT / "docs") or not inside.exists():
            return text
        return match[0]

    return LINK.sub(one, markdown)
