"""`spikeopd-export --to sanafe`: written, read back, compared; refusals in one line."""

from __future__ import annotations

import json

import pytest
from random_models import PLUS, random_model, random_shape
from small_students import small_student

import export
from export.bundle_writer import write_bundle
from export.cli import main
from neuro_sim.sanafe.interpreter import Interpreter
from spikeopd.errors import CheckFailed


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(random_model(random_shape(**PLUS), seed=3, drive=1.5), tmp_path / "bundle")


def test_a_bundle_becomes_a_network(bundle, tmp_path, capsys):
    output = tmp_path / "network"
    assert main([str(bundle), "--to", "sanafe", "--output", str(output), "--context", "6", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "a cache of 6 tokens" in said and "spikes: equal" in said
    assert {path.name for path in output.iterdir()} == {"network.json", "network.npz", "report.json"}
    about = json.loads((output / "network.json").read_text())
    assert about["slots"] == 6 and about["steps"] == 20 and about["placement"]["violations"] == []
    # An older network is replaced; a folder that holds anything else is not.
    assert main([str(bundle), "--to", "sanafe", "--output", str(output), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 32
    (output / "mine.txt").write_text("a")
    for place in (output, bundle):
        assert main([str(bundle), "--to", "sanafe", "--output", str(place)]) == 2
        assert "is not such a network" in capsys.readouterr().err


def test_a_student_becomes_a_network(tmp_path):
    small_student(residual_write="current", distances=3).save_pretrained(tmp_path / "student")
    network = export.export_network(tmp_path / "student", tmp_path / "network", context=3, tokens=2)
    assert network.report["verification"]["tokens"] == 2 and network.report["verification"]["spikes"] > 0


def test_a_difference_writes_nothing(bundle, tmp_path, monkeypatch):
    run = Interpreter.run

    def wrong(self, biases):
        outcome = run(self, biases)
        outcome.membranes[0, 0] += 1 << 14  # one channel: what all have in common the LayerNorm takes away
        return outcome

    monkeypatch.setattr(Interpreter, "run", wrong)
    with pytest.raises(CheckFailed, match="the network's logits differ from the model's at token 0"):
        export.export_network(bundle, tmp_path / "network")
    assert not (tmp_path / "network").exists()


def test_options_of_other_targets_are_refused(bundle, tmp_path, capsys):
    base = [str(bundle), "--to", "sanafe", "--output", str(tmp_path / "network"), "--quiet"]
    for more, message in (
        (["--precision", "float32"], "--precision has no meaning with --to sanafe"),
        (["--neuron", "lif"], "--neuron has no meaning"),
        (["--context", "99"], "a cache of 99 tokens: this model takes 1 to 32"),
    ):
        assert main([*base, *more]) == 2
        assert message in capsys.readouterr().err
