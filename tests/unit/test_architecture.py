"""docs/architecture.md names every file of the four packages, in its own words: the first sentence of its docstring.

`python tests/unit/test_architecture.py` writes the tree anew.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("spikeopd", "export", "neuro_sim", "energy")
OPEN, CLOSE = "<!-- tree -->\n```\n", "```\n<!-- end of tree -->"
WIDTH = 28  # of the names' column
END = re.compile(r"(?<!\bApp)(?<!\bEq)(?<!\bEqs)(?<!\bFig)(?<!\bFigs)\.(?=\s|$)|:?$")  # of a sentence


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, or of the comment at the head of a recipe."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return END.split(paragraph, maxsplit=1)[0]


def sentence_of(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    comment = [line.removeprefix("#").strip() for line in text.splitlines()[:3] if line.startswith("#")]
    return first_sentence(" ".join(comment))


def entries(folder: Path, depth: int = 0) -> list[tuple[int, str, Path]]:
    """(depth, name, file whose sentence it shows) of a package and all in it, folders after files."""
    found = [(depth, f"{folder.name}/", folder / "__init__.py")]
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".yaml")]
    found += [(depth + 1, path.name, path) for path in files if path.name != "__init__.py"]
    for below in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        found += entries(below, depth + 1)
    return found


def tree(root: Path = ROOT) -> str:
    rows = [row for package in PACKAGES for row in entries(root / package)]
    return "".join(f"{'  ' * depth + name:<{WIDTH}} {sentence_of(path)}".rstrip() + "\n" for depth, name, path in rows)


def page_tree(page: str) -> str:
    return page.split(OPEN)[1].split(CLOSE)[0]


def test_the_first_sentence():
    assert first_sentence("Losses (Eq. opd, App. B, Figs. 1-2) of `a.b`.\nMore.") == (
        "Losses (Eq. opd, App. B, Figs. 1-2) of `a.b`"
    )
    assert first_sentence("A loop: it\nends here:\n\nfor x in y: ...") == "A loop: it ends here"
    assert first_sentence("") == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_says_what_it_is_on_its_first_line(package):
    for _, _, path in entries(ROOT / package):
        sentence = sentence_of(path)
        assert sentence, f"{path.relative_to(ROOT)} has no docstring"
        first = next(line for line in path.read_text("utf-8").splitlines() if not line.startswith("#!"))
        assert sentence in first, f"{path.relative_to(ROOT)}: the first sentence runs over the first line; shorten it"


def test_the_page_shows_the_tree_as_it_is():
    """A file that is missing, new, or says something else of itself shows here; run this file to write the tree."""
    assert page_tree(PAGE.read_text("utf-8")) == tree()


def test_a_change_shows(tmp_path):
    for package in PACKAGES:
        (tmp_path / package / "part").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(f'"""{package}. And more."""')
        (tmp_path / package / "part" / "__init__.py").write_text('"""A part."""')
        (tmp_path / package / "part" / "one.py").write_text('"""One thing."""')
    before = tree(tmp_path)
    assert before.splitlines()[:3] == [
        "spikeopd/                    spikeopd",
        "  part/                      A part",
        "    one.py                   One thing",
    ]
    (tmp_path / "energy" / "part" / "two.py").write_text('"""Another."""')
    added = tree(tmp_path)
    (tmp_path / "energy" / "part" / "one.py").write_text('"""Something else."""')
    assert before != added != tree(tmp_path) and len(added.splitlines()) == len(before.splitlines()) + 1


def imported(package: str) -> set[str]:
    """What the files of a package import of ours, as `package.module`; the package itself left out."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{alias.name}" for alias in node.names] if "." not in node.module else []
                found |= {".".join(name.split(".")[:2]) for name in inside or [node.module]}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in set(PACKAGES) - {package}}


def test_the_arrows_of_the_page_are_those_of_the_code():
    page = PAGE.read_text("utf-8")
    names = re.search(r"──► spikeopd\.([\w, ]+)\n", page)
    assert names
    light = {f"spikeopd.{name}" for name in names.group(1).split(", ")} | {"spikeopd.__version__"}
    assert imported("neuro_sim") | imported("energy") == light
    assert {name.split(".")[0] for name in imported("export")} == {"spikeopd", "neuro_sim"}
    # evaluation/bundle_model.py and studies/efficiency.py
    assert {name.split(".")[0] for name in imported("spikeopd")} == {"neuro_sim", "energy"}


def test_the_files_that_the_prose_names_exist():
    prose = PAGE.read_text("utf-8").replace(page_tree(PAGE.read_text("utf-8")), "")
    named = set(re.findall(r"`((?:spikeopd|export|neuro_sim|energy|tests)/[\w/.]*)`", prose))
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    head, _, rest = text.partition(OPEN)
    PAGE.write_text(head + OPEN + tree() + CLOSE + rest.split(CLOSE)[1], "utf-8")
