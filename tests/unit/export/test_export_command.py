"""spikeopd-export end to end on a small checkpoint, and every way to call it wrongly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from random_models import random_model
from small_students import PLUS, small_student

import export
from export.api import choose_prompts
from export.cli import export_parser, main, map_parser
from export.report import parameter_count
from spikeopd.contracts.bundle import load_bundle, read_manifest
from spikeopd.errors import InputError
from spikeopd.registry import NEURONS
from spikeopd.students import load_student
from spikeopd.text.tokenizer import load_tokenizer

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A student of the second form whose own forward pass is the integers'."""
    folder = tmp_path_factory.mktemp("trained") / "final"
    small_student(vocab=1024, deploy_precision="int8", **PLUS).save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.parametrize("target", ["nir", "lava"])
def test_a_student_trained_in_integers_is_compared_itself(trained, tmp_path, capsys, target):
    assert run(trained, tmp_path / "b", "--to", target) == 0
    out = capsys.readouterr().out
    assert "exact: the student was trained with these integers" in out
    assert "token agreement   100.00 %" in out and "spike agreement   100.00 %" in out
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert report["verification"]["student"] == "spikes, tokens and log-likelihoods equal"
    assert report["evaluation"]["perplexity_student"] == report["evaluation"]["perplexity_lowered"]
    assert all(tensor["relative"] == 0 for tensor in report["tensors"])
    assert read_manifest(tmp_path / "b")["schema"] == "spikeopd.bundle/2"


def test_a_student_that_differs_from_its_bundle_is_exit_3(trained, tmp_path, capsys, monkeypatch):
    import export.api

    real = export.api.lower

    def off_by_one(student, precision, clips):
        student.model.layers[1].bias_x[7] += 0.5
        return real(student, precision, clips)

    monkeypatch.setattr(export.api, "compare", lambda *_: {})
    own = export.api.run_student

    def before(student, prompts):
        student.model.layers[1].bias_x[7] -= 0.5
        return own(student, prompts)

    with torch.no_grad():
        monkeypatch.setattr(export.api, "lower", off_by_one)
        monkeypatch.setattr(export.api, "run_student", before)
        assert run(trained, tmp_path / "b") == 3
    err = capsys.readouterr().err
    assert "layer 1, site x" in err and "neuron 7" in err and "otherwise than the student itself" in err
    assert not (tmp_path / "b").exists()


def test_scales_that_were_trained_are_not_searched(trained, tmp_path, capsys, unloaded):
    assert run(trained, tmp_path / "b", "--calibrate", "48") == 2
    assert "this student was trained with its own" in capsys.readouterr().err


def test_the_second_form_in_floats_and_calibrated(tmp_path, capsys):
    folder = tmp_path / "run" / "final"
    small_student(vocab=1024, **PLUS).save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    assert run(folder, tmp_path / "f", "--precision", "float32", "--nir-profile", "unrolled") == 0
    assert "equal output values" in capsys.readouterr().out
    assert run(folder, tmp_path / "i", "--calibrate", "48", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert "lowering" not in report and report["evaluation"]["spike_agreement"] > 0.9
    assert report["parameters"] == parameter_count(load_bundle(tmp_path / "i"))
    # The student's own count; its position table has OPT's two unused rows.
    parameters = sum(parameter.numel() for parameter in small_student(vocab=1024, **PLUS).parameters())
    assert report["parameters"] == parameters - 2 * 16


def test_from_python_with_a_loaded_student(checkpoint, tmp_path):
    import export

    student = small_student(vocab=1024).train()
    text = f"text:{checkpoint.parent / 'text.txt'}"
    lines = []
    bundle = export.export(
        student, tmp_path / "b", tokenizer=checkpoint, source=text, evaluation_tokens=0, verification_tokens=6,
        say=lines.append,
    )  # fmt: skip
    assert bundle.verified and bundle.path == tmp_path / "b" and student.training
    assert bundle.report["verification"]["tokens"] == 6 and bundle.seconds["total"] > 0
    assert "spikes and logits equal" in str(bundle) and lines
    placement = export.resource_map(bundle.path, context=8)
    assert placement.report["context"] == 8 and "8: " in str(placement)
    with pytest.raises(InputError, match="no tokenizer"):
        export.export(student, tmp_path / "c", source=text)
    with pytest.raises(InputError, match="--to lava writes integers"):
        export.export(student, tmp_path / "c", to="lava", precision="float32")


def test_importing_export_imports_nothing_heavy():
    code = (
        "import sys, export; names = dir(export); export.resource_map;"
        "print([m for m in ('torch', 'transformers', 'nir') if m in sys.modules], set(export.__all__) <= set(names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["[]", "True"]
    import export

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        export.nonsense  # noqa: B018


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
    assert main(["map", str(tmp_path / "b"), "--context", "0"]) == 2
    assert "--context 0: this model takes 1 to 24 tokens" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_before_the_bundle_is_read(tmp_path, capsys, monkeypatch):
    import export.loihi.map
    from export.bundle_writer import write_bundle

    write_bundle(random_model(), tmp_path / "b")

    def load(path):
        raise AssertionError("the bundle was loaded first")

    monkeypatch.setattr(export.loihi.map, "load_bundle", load)
    (tmp_path / "file.txt").write_text("mine")
    for place, message in (
        ("/proc/x.png", "--picture /proc/x.png: cannot be written"),
        (tmp_path / "file.txt" / "x.png", "cannot be written (Not a directory)"),
        (tmp_path, "it is a folder"),
    ):
        assert main(["map", str(tmp_path / "b"), "--picture", str(place)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


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
    load_tokenizer("tiny").save(tmp_path)
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "only a trained student" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "no model.safetensors" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:5000])
    assert main([str(tmp_path), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "model.safetensors is corrupt" in capsys.readouterr().err


@pytest.fixture
def unloaded(monkeypatch):
    """The model must not be loaded for what can be refused without it."""
    import export.api

    def load(folder):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(export.api, "load_student", load)


def test_refused_before_the_model_is_loaded(checkpoint, tmp_path, capsys, unloaded):
    (tmp_path / "file.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"manifest_version": 3}')
    for output, options, message in (
        ("/proc/bundle", [], "--output /proc/bundle: cannot be written"),
        (tmp_path / "file.txt" / "bundle", [], "cannot be written (Not a directory)"),
        (tmp_path / "file.txt", [], "exists and is not a bundle"),
        (tmp_path / "mine", [], "exists and is not a bundle"),
        (tmp_path / "b", ["--nir-profile", "unrolled", "--context", "1000"], "--context 1000: the unrolled profile"),
        (tmp_path / "b", ["--tokenizer", str(tmp_path / "file.txt")], "file.txt: not a tokenizer file"),
    ):
        assert run(checkpoint, output, *options) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "mine"]
    with pytest.raises(AssertionError, match="loaded first"):
        run(checkpoint, tmp_path / "b")


def test_a_student_of_another_neuron_is_refused(checkpoint, tmp_path, capsys, monkeypatch):
    """A bundle holds the leaky integrate-and-fire neuron: lowering anything else to it would be another model."""
    other = shutil.copytree(checkpoint, tmp_path / "other")
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"neuron": "mine"}))
    assert run(other, tmp_path / "b") == 2 and "its neuron is 'mine'" in capsys.readouterr().err
    monkeypatch.setitem(NEURONS, "mine", NEURONS["lif"])
    with pytest.raises(InputError, match="cannot be exported"):
        export.export(load_student(other), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_without_torch_the_extra_is_named(checkpoint, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from export.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, str(checkpoint), "--output", str(tmp_path / "b")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert "pip install" in done.stderr and "[train]'" in done.stderr


def test_the_student_of_stage_1_alone(checkpoint, tmp_path, capsys):
    (tmp_path / "run" / "stage1").mkdir(parents=True)
    (tmp_path / "run" / "stage1" / "final").symlink_to(checkpoint)
    text = f"text:{checkpoint.parent / 'text.txt'}"
    small = ["--evaluation-tokens", "0", "--verification-tokens", "4"]
    # --source is the name that all commands share; --text, as in `run`, means the same
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "b"), "--source", text, *small]) == 0
    assert f"loading {tmp_path / 'run' / 'stage1' / 'final'}" in capsys.readouterr().err


def test_verification_has_its_tokens_whatever_evaluation_takes(checkpoint, tmp_path, capsys):
    for evaluation, measured in (("0", None), ("24", 24), ("96", 96)):  # windows of this model have 24 tokens
        options = ("--evaluation-tokens", evaluation, "--verification-tokens", "60", "--json")
        assert run(checkpoint, tmp_path / "b", *options) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["verification"]["tokens"] == 60
        assert (report["evaluation"] or {}).get("tokens") == measured


def test_the_tokenizer_that_is_shipped_is_the_one_measured(checkpoint, tmp_path, capsys):
    load_tokenizer("tiny").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "neuron"}, "content": "x"}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    perplexities = []
    for name in ("tokenizer.json", "mine.json"):
        assert run(checkpoint, tmp_path / "b", "--json", "--tokenizer", str(tmp_path / name)) == 0
        perplexities.append(json.loads(capsys.readouterr().out)["evaluation"]["perplexity_lowered"])
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()
    assert perplexities[0] != perplexities[1]


def test_a_special_token_beyond_the_vocabulary_is_refused(checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path / "s")
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    (tmp_path / "s" / "config.json").write_text(json.dumps({**config, "eos_token_id": 1024}))
    assert main([str(tmp_path / "s"), "--output", str(tmp_path / "b"), "--quiet"]) == 2
    assert "eos_token_id 1024 in config.json is no token of a vocabulary of 1024" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--calibrate", "48")])
def test_clipped_values_are_printed(tmp_path, capsys, options):
    student = small_student(vocab=1024)
    with torch.no_grad():
        student.model.embed_positions.weight[-1, 0] = 100.0  # beyond 16 bits in units of 2^-12
    folder = tmp_path / "run" / "final"
    student.save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    assert run(folder, tmp_path / "b", *options) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("clipped")]
    assert "embedding.position:" in [line[1] for line in lines]
    tensors = json.loads((tmp_path / "b" / "report.json").read_text())["tensors"]
    assert [line[1].rstrip(":") for line in lines] == [tensor["name"] for tensor in tensors if tensor["clipped"]]


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
