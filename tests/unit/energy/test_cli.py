"""The command: every example of every --help runs, every mistake is one line with the right code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from random_models import random_shape
from random_runs import make_run, write_run

from energy.cli import build_parser, main
from spikeopd.contracts import LAYER_COMPONENTS

COMMANDS = ["", "report", "compare", "breakeven", "audit", "paper", "costs", "example"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture()
def example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "example")[0] == 0
    return tmp_path / "example_run.json"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_every_help_run(command: str, example, capsys) -> None:
    code, out, _ = run(capsys, *([command] if command else []), "--help")
    lines = [line.strip() for line in out.split("examples:\n")[1].strip().splitlines()]
    assert code == 0 and len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "spikeopd-energy"
        code, out, err = run(capsys, *words[1:])
        assert code == 0 and (out or "wrote" in err), err


def test_without_arguments_it_explains_itself(capsys) -> None:
    code, out, err = run(capsys)
    assert code == 0 and "spikeopd-energy example" in out and err == ""


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    start = time.perf_counter()
    script = (
        "import sys; sys.argv = ['x', '--help']\nfrom energy.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    script += "print([m for m in ('numpy', 'torch', 'numba', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - start < 10  # 0.17 s on a quiet machine; this only catches an accident


def test_formats_agree(example, capsys, tmp_path) -> None:
    outputs = {}
    for form in ("text", "json", "csv", "markdown", "latex", "html"):
        code, outputs[form], err = run(capsys, "report", example, "--format", form)
        assert code == 0 and err == ""
    report = json.loads(outputs["json"])
    assert run(capsys, "report", example, "--json")[1] == outputs["json"]
    shown = f"{report['summary'][-1]['energy_per_token_pj'] / 1e3:.2f}"
    for form in ("text", "markdown", "latex", "html"):
        assert shown in outputs[form], form
    for ending, form in {"md": "markdown", "tex": "latex", "html": "html", "csv": "csv", "json": "json"}.items():
        path = tmp_path / "deep" / f"out.{ending}"
        code, out, err = run(capsys, "report", example, "--output", path)
        assert (code, out, err) == (0, "", f"wrote {path}\n")
        assert path.read_text(encoding="utf-8") == outputs[form]
    assert run(capsys, "report", example, "--output", path, "--quiet")[2] == ""


def test_costs_teacher_memory_and_hops_matter(example, capsys) -> None:
    def energy(*arguments: str) -> dict:
        return json.loads(run(capsys, "report", example, "--json", *arguments)[1])

    base = energy()
    assert energy("--costs", "loihi")["summary"][-1]["energy_pj"] > base["summary"][-1]["energy_pj"]
    hopped = energy("--costs", "loihi", "--hops", "2,1")
    assert hopped["summary"][-1]["energy_pj"] > energy("--costs", "loihi")["summary"][-1]["energy_pj"]
    assert energy("--memory", "dram")["memory"]["level"] == "dram"
    big = energy("--teacher", "opt-125m")
    assert big["teacher"]["name"] == "opt-125m" and big["teacher"]["parameters"] == 125_239_296
    assert big["summary"][-1]["teacher_energy_pj"] > base["summary"][-1]["teacher_energy_pj"]


def test_rates_from_files(tmp_path, capsys) -> None:
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": 40,
              "max_position_embeddings": 64, "num_steps": 4, "model_type": "bispikclm"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rates = tmp_path / "rates.json"

    def report(*extra: str) -> tuple[int, str, str]:
        return run(capsys, "report", "--config", tmp_path, "--rates", rates, "--context", "8", "--json", *extra)

    rates.write_text(json.dumps(0.25))
    flat = json.loads(report()[1])["summary"][-1]["energy_pj"]
    rates.write_text(json.dumps(dict.fromkeys(LAYER_COMPONENTS, 0.25)))
    assert json.loads(report()[1])["summary"][-1]["energy_pj"] == flat
    rates.write_text(json.dumps({"rates": {name: [0.25, 0.25] for name in LAYER_COMPONENTS}}))
    assert json.loads(report("--prompt-length", "5")[1])["summary"][-1]["energy_pj"] == pytest.approx(flat)
    for content, message in {
        json.dumps({name: 0.1 for name in LAYER_COMPONENTS[1:]}): "'qkv' is missing",
        json.dumps(dict.fromkeys(LAYER_COMPONENTS, 0.1) | {"attention": 1}): "unknown component 'attention'",
        json.dumps(dict.fromkeys(LAYER_COMPONENTS, [0.1])): "1 rates for 2 layers",
        json.dumps(dict.fromkeys(LAYER_COMPONENTS, 1.1)): "between 0 and 1",
        "[1": "not readable JSON",
    }.items():
        rates.write_text(content)
        code, out, err = report()
        assert code == 2 and message in err and out == "" and err.count("\n") == 1


MISTAKES = [
    (["report", "gone.json"], "does not exist"),
    (["report"], "give a RUN.json"),
    (["report", "example_run.json", "--costs", "free"], "unknown cost table 'free'"),
    (["report", "example_run.json", "--memory", "tape"], "unknown memory level"),
    (["report", "example_run.json", "--teacher", "opt-9t"], "unknown teacher"),
    (["report", "example_run.json", "--hops", "1"], "--hops"),
    (["report", "example_run.json", "--hops=-1,0"], "--hops"),
    (["report", "example_run.json", "--rates", "0.1"], "--rates does not go with a run"),
    (["report", "example_run.json", "--output", "example_run.json/x.md"], "cannot write"),
    (["report", "example_run.json", "--output", "example_run.json"], "made from it"),
    (["report", "example_run.json", "--format", "text", "--output", "./example_run.json"], "made from it"),
    (["report", "example_run.json", "--output", "rep.pdf"], "no report ends in '.pdf'; choose one of .txt"),
    (["compare", "a=example_run.json", "--output", "example_run.json"], "made from it"),
    (["paper", "--output", "paper.docx"], "no report ends in '.docx'"),
    (["report", "--config", "opt-125m"], "--config needs --rates"),
    (["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "0.1"], "--config needs --context"),
    (["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "1.1", "--context", "8"], "between 0 and 1"),
    (["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "nan", "--context", "8"], "between 0 and 1"),
    (
        ["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "x.json", "--context", "8"],
        "neither a number nor a file",
    ),
    (
        ["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "0.1", "--context", "9999"],
        "the context must lie",
    ),
    (
        ["report", "--config", "opt-125m", "--num-steps", "4", "--rates", "0.1", "--context", "0"],
        "the context must lie",
    ),
    (
        [
            "report",
            "--config",
            "opt-125m",
            "--num-steps",
            "4",
            "--rates",
            "0.1",
            "--context",
            "8",
            "--prompt-length",
            "9",
        ],
        "the prompt must lie",
    ),
    (["report", "--config", "opt-125m", "--rates", "0.1", "--context", "8"], "--num-steps"),
    (
        ["report", "--config", "opt-125m", "--num-steps", "-4", "--rates", "0.1", "--context", "8"],
        "'num_steps' must be",
    ),
    (["report", "--config", "opt-125m", "--num-steps", "0", "--rates", "0.1", "--context", "8"], "'num_steps' must be"),
    (["report", "example_run.json", "--num-steps", "0"], "--num-steps does not go with a run"),
    (["paper", "--tokens", "0"], "--tokens"),
    (["compare", "a=gone.json"], "gone.json"),
    (["compare"], "at least one RUN.json"),
    (["compare", "--twin"], "give a RUN.json, or --config"),
    (["compare", "example_run.json", "--config", "opt-125m"], "--config goes with --twin"),
    (["compare", "example_run.json", "--placement", "dram"], "--placement goes with --twin"),
    (["compare", "example_run.json", "--twin", "--placement", "moon"], "unknown placement 'moon'"),
    (["compare", "--twin", "--config", "opt-9t", "--rates", "0.1", "--context", "8"], "unknown teacher"),
    (["compare", "--twin", "--config", "opt-125m", "--rates", "0.1"], "--config needs --context"),
    (["breakeven"], "give a RUN.json"),
    (["breakeven", "example_run.json", "--rates", "0.1"], "--rates does not go with a run"),
    (["breakeven", "example_run.json", "--output", "example_run.json"], "made from it"),
    (["audit", "gone.json"], "gone.json does not exist"),
    (["audit", "spikeformer"], "unknown case 'spikeformer'"),
    (["audit", "example_run.json"], "'title' must say"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=lambda v: " ".join(v)[-40:] if isinstance(v, list) else ""
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], message: str, example, capsys) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert message in err and err.startswith("spikeopd-energy: ") and err.count("\n") == 1


def test_an_inconsistent_run_exits_2_with_its_field(tmp_path, capsys) -> None:
    raw = make_run()
    raw["phases"]["prompt"]["sops"]["qkv"][0][0] += 1
    code, _, err = run(capsys, "report", write_run(tmp_path / "bad.json", raw))
    assert code == 2 and "phases.prompt.sops.qkv" in err and "bad.json" in err


def test_compare_names(example, capsys) -> None:
    code, out, _ = run(capsys, "compare", f"KD={example}", f"SpikeOPD={example}", "--teacher", "opt-125m", "--spikegpt",
                       "--json")  # fmt: skip
    rows = json.loads(out)["compare"]
    assert code == 0 and [row["name"] for row in rows] == [
        "opt-125m",
        "KD",
        "SpikeOPD",
        "spikegpt-46m",
        "spikegpt-216m",
    ]
    assert "Energy per token [" in run(capsys, "compare", example, "--format", "markdown")[1]


def test_no_abbreviations_and_unknown_flags(capsys) -> None:
    assert run(capsys, "paper", "--tok", "4")[0] == 2
    assert run(capsys, "teleport")[0] == 2


def test_every_option_has_help() -> None:
    for line in build_parser().format_help().splitlines():
        assert not re.match(r"^  --?\w+\s*$", line)


def test_a_traced_run_gets_its_raster(tmp_path, capsys) -> None:
    import numpy as np

    np.savez(tmp_path / "spikes.npz", **{"0/0.h": np.ones((3, 4, 16), bool)})
    path = write_run(tmp_path / "traced.json", make_run() | {"trace": "spikes.npz"})
    assert "raster-1-h" in run(capsys, "report", path, "--format", "html")[1]


@pytest.mark.parametrize("fault", ["missing", "other", "damaged", "empty", "one array"])
def test_a_trace_that_is_not_this_runs_is_a_warning(fault: str, tmp_path, capsys) -> None:
    import numpy as np

    from spikeopd.files import sha256

    spikes = tmp_path / "sub" / "spikes.npz"
    spikes.parent.mkdir()
    np.savez_compressed(spikes, **{"0/0.h": np.arange(192).reshape(3, 4, 16) % 7 == 0})
    raw = make_run() | {"trace": "sub/spikes.npz"}
    if fault in ("missing", "other"):
        raw["trace_sha256"] = sha256(spikes)
    path = write_run(tmp_path / "traced.json", raw)
    code, page, err = run(capsys, "report", path, "--format", "html")
    assert code == 0 and err == "" and 'id="raster-choice"' in page
    if fault == "missing":
        spikes.unlink()
    elif fault == "other":
        np.savez_compressed(spikes, **{"0/0.h": np.ones((3, 4, 16), bool)})
    elif fault == "damaged":
        data = bytearray(spikes.read_bytes())
        data[60:70] = bytes(10)
        spikes.write_bytes(data)
    elif fault == "empty":
        spikes.write_bytes(b"")
    else:
        with open(spikes, "wb") as file:
            np.save(file, np.ones(3))
    code, page, err = run(capsys, "report", path, "--format", "html")
    assert code == 0 and 'id="raster-choice"' not in page and "</html>" in page
    assert "warning: no spike raster" in err and "spikes.npz" in err and err.count("\n") == 1
    assert run(capsys, "report", path)[::2] == (0, "")  # the numbers need no trace


def test_unpriced_hops_are_listed_with_their_count(example, capsys) -> None:
    def hops(*arguments: str) -> tuple[dict, list]:
        report = json.loads(run(capsys, "report", example, "--json", *arguments)[1])
        listed = [row["count"] for row in report["not_costed"] if "hop of a spike" in row["what"]]
        return report["summary"][-1], listed

    assert hops()[1] == [None, None]
    summary, listed = hops("--hops", "2,3")
    assert listed == [2 * summary["spikes"], 3 * summary["spikes"]]
    assert hops("--hops", "2,0")[1] == [2 * summary["spikes"], 0]


def test_a_terminal_without_unicode(example) -> None:
    import os

    words = [sys.executable, "-m", "energy.cli", "report", str(example)]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0 and done.stderr == b"" and b"[?]" in done.stdout


def test_the_commands_and_the_python_of_the_docs_run(example, capsys) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "energy.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("spikeopd-energy ")
    ]
    assert len(commands) == 13
    for name, neuron in (("student", "lif"), ("twin", "quantised")):  # of one shape, as the page has them
        write_run(Path(f"{name}.json"), make_run(random_shape(neuron=neuron)))
    shown = run(capsys, "report", example)[1]
    quoted = text.split("The first lines of a report:\n\n```\n")[1].split("```")[0]
    assert quoted in shown
    for words in commands:
        code, out, err = run(capsys, *words)
        assert code == 0 and (out or "wrote" in err), err
    exec(compile(text.split("```python\n")[1].split("```")[0], "docs/energy.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0 and Path("comparison.md").is_file()
    audited, prices = (part.split("```")[0] for part in text.split("```json\n")[1:3])
    Path("printed.json").write_text(audited)
    assert "printed: 0 of 2 printed energies" in run(capsys, "audit", "printed.json")[1]
    Path("mine.json").write_text(prices)
    assert "costs: mine, 7 nm: mac 1 pJ, ac 0.2 pJ" in run(capsys, "report", example, "--costs", "mine.json")[1]


def test_the_example_script_runs(example) -> None:
    script = Path(__file__).resolve().parents[3] / "examples" / "energy_report.py"
    done = subprocess.run([sys.executable, script, example], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "horowitz45: 32 tokens, 0.067 µJ a token" and "  teacher/student 2.474" in lines[1]
