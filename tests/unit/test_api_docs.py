"""docs/api.md and the examples as a reader uses them: their code is run, in order, on toy runs."""

import importlib
import io
import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
PACKAGES = ("spikeopd", "export", "neuro_sim", "energy")


def python_blocks(page: str) -> list[tuple[int, str]]:
    """(line, code) of every python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [(page.count("\n", 0, match.start(1)), match.group(1)) for match in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_names_everything_that_is_public(package):
    for name in importlib.import_module(package).__all__:
        assert re.search(rf"`{package}\.{name}\b", PAGE), f"docs/api.md misses {package}.{name}"


def test_the_page_names_nothing_that_is_not():
    for package in PACKAGES:
        public = set(importlib.import_module(package).__all__) | {"errors", "models"}
        for name in re.findall(rf"(?<![\"/\w]){package}\.([A-Za-z_]+)\b", PAGE):
            assert name in public, f"docs/api.md: {package}.{name} is not public"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    printed = io.StringIO()
    with redirect_stdout(printed):
        for line, code in python_blocks(PAGE):
            exec(compile("\n" * line + code, "docs/api.md", "exec"), names)  # noqa: S102 - our own page
    text = printed.getvalue()
    assert "spikes and logits equal" in text and "all counts equal" in text and "did you mean" in text
    for file in ("runs/tiny/summary.json", "bundle/manifest.json", "run.json", "energy.html"):
        assert (tmp_path / file).is_file()


# --- examples --------------------------------------------------------------------------------------------------------

TOY = [
    "stage1.updates=2", "stage2.updates=1", "data.sequence_length=16", "stage2.prompt_length=8",
    "stage2.max_completion_length=4", "model.num_hidden_layers=1", "stage2.spike_layers=[1]",
]  # fmt: skip


def imports(code: str) -> set[str]:
    return set(re.findall(r"^(?:from|import) ([\w.]+)", code, re.MULTILINE))


def test_the_examples_use_the_api_alone():
    """A reader copies from them: what they import must be public."""
    public = {*PACKAGES, "spikeopd.contracts", "sys", "pathlib", "transformers", "numpy"}
    codes = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
    del codes["nir_reader.py"]  # shows the opposite: a bundle read without us
    assert len(codes) == 3
    codes |= {"walkthrough.ipynb": "\n".join(code_cells())}
    for name, code in codes.items():
        assert imports(code) <= public, name
        assert not re.search(r"subprocess|argparse|_cli|\.cli", code), name


def test_the_scripts_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    assert "export_and_verify.py run bundle" in call("train_tiny.py", "run", *TOY)
    out = call("export_and_verify.py", "run", "bundle")
    assert "tokens equal: True" in out and "counts equal: True" in out and "first differing spike: None" in out
    assert "energy_report.py bundle.run.json" in out
    out = call("energy_report.py", "bundle.run.json")
    assert re.search(r"horowitz45: \d+ tokens", out) and "loihi" in out and "ffn_out" in out


def notebook() -> dict:
    return json.loads((ROOT / "examples" / "walkthrough.ipynb").read_text("utf-8"))


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_one_and_holds_no_outputs():
    content = notebook()
    assert (content["nbformat"], content["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"]) > 10
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict = {"__name__": "notebook"}
    for number, code in enumerate(code_cells()):
        exec(compile(code, f"walkthrough.ipynb, code cell {number}", "exec"), names)  # noqa: S102 - our own notebook
    text = capsys.readouterr().out
    assert "spikes and logits equal" in text and "event = dense" in text and "µJ a token" in text
    assert "".join(names["result"].text.split()) in "".join(text.split())  # streamed, the same text again
    assert (tmp_path / "walkthrough" / "energy.html").is_file()
