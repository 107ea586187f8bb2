"""The package as a stranger meets it: imports, commands, documents, what is shipped."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import MODULES as COMMANDS

ROOT = Path(__file__).parents[2]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_packages_imports_nothing_heavy():
    heavy = "{'torch', 'numpy', 'numba', 'h5py'}"
    code = f"import sys, spikeopd, export, neuro_sim, energy; print({heavy} & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_no_public_name_is_also_a_module():
    """Importing such a module would put it in the place of the function."""
    for name in ("spikeopd", "export", "neuro_sim", "energy"):
        package = importlib.import_module(name)
        modules = {path.stem if path.suffix else path.name for path in (ROOT / name).iterdir()}
        shared = modules & set(package.__all__)
        assert all(isinstance(getattr(package, other), ModuleType) for other in shared), name


def test_deployment_side_imports_no_torch():
    code = "import sys, pkgutil, importlib, neuro_sim, energy\n"
    code += "skip = ('.lava', '.serve.app')\n"
    code += "for p in (neuro_sim, energy):\n"
    code += " for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.'):\n"
    code += "  if not any(s in m.name for s in skip): importlib.import_module(m.name)\n"
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(code).split() == ["False", "False"]


@pytest.mark.parametrize(("command", "module"), COMMANDS.items())
def test_help_answers_fast_and_ends_with_examples(command, module):
    code = f"import sys; from {module} import main; sys.exit(main(['--help']))"
    result = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-500:]
    assert "usage" in result.stdout and result.stdout.count(command) >= 3
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    # What makes a command slow to answer is what it imports; wall time depends on the machine.
    assert not imported & {"torch", "numba", "numpy", "transformers", "matplotlib"}, command


def test_every_paper_map_entry_exists():
    rows = [line for line in (ROOT / "docs" / "paper_map.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    for row in rows:
        _, code, test = [cell.strip() for cell in row.strip("|").split("|")]
        for name in re.findall(r"`([\w.]+)`", code):
            try:
                importlib.import_module(name)
            except ImportError:
                module, _, attribute = name.rpartition(".")
                assert hasattr(importlib.import_module(module), attribute), name
        for path in re.findall(r"`([\w/.]+\.py)`", test):
            assert (ROOT / path).is_file(), path


def test_every_document_that_is_pointed_to_exists():
    """Links and headings in Markdown, and `docs/...` named in messages, comments and the Makefile."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in documents:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if link.startswith(("http", "#")):
                continue
            name, _, heading = link.partition("#")
            target = path.parent / name
            assert target.exists(), f"{path.name} points to {link}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in slugs, f"{path.name} points to {link}"
    sources = [*documents, ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("spikeopd", "export", "neuro_sim", "energy", "benchmarks", "examples"):
        sources += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".sh", ".yaml")]
    for path in sources:
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"


def test_shipped_teacher_is_small_and_says_how_it_was_made():
    folder = ROOT / "spikeopd" / "assets" / "tiny"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
    record = json.loads((folder / "training.json").read_text())
    assert record["validation_perplexity"] < 30 and record["options"]["updates"] > 0


def test_nothing_loads_pickle():
    for package in ("spikeopd", "export", "neuro_sim", "energy"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    assert not any(alias.name in ("pickle", "cPickle", "dill", "joblib") for alias in node.names), path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = getattr(node.func.value, "id", "")
                    assert (owner, node.func.attr) != ("torch", "load"), path
                    if (owner, node.func.attr) == ("np", "load"):
                        flags = {keyword.arg: keyword.value for keyword in node.keywords}
                        value = flags.get("allow_pickle")
                        assert value is None or getattr(value, "value", None) is False, path


def test_documents_name_no_private_places():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text()
        assert not re.search(r"(^|[\s(`])/(work|root|tmp)/", text), path
