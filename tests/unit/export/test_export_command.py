"""spikeopd-export end to end on a small checkpoint, and every way to call it wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from random_models import random_model
from small_students import small_student

from export.cli import export_parser, main, map_parser
from export.command import choose_prompts
from neuro_sim.bundle import load_bundle, read_manifest
from spikeopd.tokenizer import load_tokenizer

TEXT = "A neuron that fires tells the next one what it knows; a silent one costs nothing at all. " * 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "final"
    small_student(vocab=1024).save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPIKEOPD_CACHE", str(tmp_path_factory.getbasetemp() / "tokens"))


def run(checkpoint, output, *options):
    text = f"text:{checkpoint.parent / 'text.txt'}"
    small = ["--evaluation-tokens", "48", "--verification-tokens", "12"]
    return main([str(checkpoint), "--output", str(output), "--text", text, "--quiet", *small, *options])


def test_nir_by_default(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "b") == 0
    out = capsys.readouterr().out
    for part in ("perplexity", "token agreement", "12 tokens", "spikes and logits equal", "read literally"):
        assert part in out
    manifest = read_manifest(tmp_path / "b")
    assert set(manifest["files"]) == {"model.nir", "report.json", "tokenizer.json"}
    assert manifest["tokens"] == {"bos": 2, "eos": 2, "pad": 1}
    assert load_bundle(tmp_path / "b").shape.vocab_size == 1024
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert report["evaluation"]["tokens"] == 48 and report["verification"]["equal_spikes"] == 1.0
    assert {tensor["name"] for tensor in report["tensors"]} >= {"embedding.table", "layers.1.w_2", "head.gamma"}


def test_the_run_folder_will_do_and_json_is_one_object(checkpoint, tmp_path, capsys):
    assert run(checkpoint.parent, tmp_path / "b", "--json", "--text", f"text:{checkpoint.parent / 'text.txt'}") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"]["total"] > 0 and report["target"] == "nir"


def test_lava_with_netx(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "b", "--to", "lava") == 0
    out = capsys.readouterr().out
    assert "10 netx files" in out and "subtractive reset" in out
    manifest = read_manifest(tmp_path / "b")
    assert {"arrays.h5", "graph.json", "netx_layer001_ffn.h5"} <= set(manifest["files"])
    load_bundle(tmp_path / "b")


def test_unrolled_float_and_lif(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "u", "--nir-profile", "unrolled", "--context", "3", "--precision", "float32") == 0
    assert run(checkpoint, tmp_path / "l", "--neuron", "lif", "--calibrate", "48") == 0
    assert read_manifest(tmp_path / "u")["nir"] == {"profile": "unrolled", "neuron": "exact", "context": 3}
    assert read_manifest(tmp_path / "l")["nir"]["neuron"] == "lif"
    assert "resets hard" in capsys.readouterr().out


def test_map(checkpoint, tmp_path, capsys):
    run(checkpoint, tmp_path / "b")
    capsys.readouterr()
    assert main(["map", str(tmp_path / "b"), "--picture", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "ok        core_memory" in out and "192 KB" in out and "K/V cache" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["map", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "spikeopd.loihi-map/1"
    assert main(["map", str(tmp_path / "b"), "--context", "9999"]) == 2
    assert "--context 9999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "3"], "unrolled"),
        (["--to", "lava", "--precision", "float32"], "--to lava"),
        (["--to", "lava", "--neuron", "lif"], "drop them with --to lava"),
        (["--verification-tokens", "0"], "--verification-tokens 0"),
        (["--calibrate", "9", "--precision", "float32"], "--calibrate"),
        (["--tokenizer", "/nowhere"], "no tokenizer"),
        (["--nir-profile", "unrolled", "--context", "99"], "--context 99"),
    ],
)
def test_contradictions_are_refused(checkpoint, tmp_path, capsys, options, message):
    assert run(checkpoint, tmp_path / "b", *options) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_checkpoints_that_are_none(checkpoint, tmp_path, capsys):
    assert main([str(tmp_path), "--output", str(tmp_path / "b")]) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "only a trained student" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "no model.safetensors" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:5000])
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_a_difference_is_exit_3_and_leaves_nothing(checkpoint, tmp_path, capsys, monkeypatch):
    import export.verify

    real = export.verify.load_bundle

    def damaged(folder):
        model = real(folder)
        model.layers[1].w_1[:, 5] = 127
        return model

    monkeypatch.setattr(export.verify, "load_bundle", damaged)
    assert run(checkpoint, tmp_path / "b") == 3
    assert "layers.1.w_1" in capsys.readouterr().err and not (tmp_path / "b").exists()
    assert run(checkpoint, tmp_path / "b", "--allow-lossy") == 0
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert report["allow_lossy"] and any("layer 1, site f" in text for text in report["lossy"])


def test_prompts_share_the_tokens():
    windows = np.arange(40).reshape(4, 10)
    assert [len(prompt) for prompt in choose_prompts(windows, 10)] == [3, 3, 3, 1]
    assert [len(prompt) for prompt in choose_prompts(windows, 1000)] == [10, 10, 10, 10]
    assert choose_prompts(windows, 1) == [[0]]


def test_help_is_quick_and_ends_with_two_examples():
    start = time.perf_counter()
    code = "import sys; from export.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n" \
           "print([m for m in ('torch', 'numpy', 'h5py', 'nir') if m in sys.modules])"  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]") and time.perf_counter() - start < 20
    for parser in (export_parser(), map_parser()):
        last = [line for line in parser.format_help().splitlines() if line.strip()][-2:]
        assert all(line.strip().startswith("spikeopd-export") for line in last)


def test_strict_map_fails_on_a_violation(tmp_path, capsys):
    from random_models import random_shape

    from export.bundle_writer import write_bundle

    write_bundle(random_model(random_shape(ffn=5000, layers=1)), tmp_path / "b")  # a fan-in beyond 4096 axons
    assert main(["map", str(tmp_path / "b"), "--strict"]) == 3
    assert "input axons per core" in capsys.readouterr().err
