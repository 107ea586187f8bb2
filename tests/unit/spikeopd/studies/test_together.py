"""Runs of a study whose training several processes share."""

import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_setup import SMALL, small_setup

from spikeopd.config import load_config, with_overrides
from spikeopd.errors import CheckFailed
from spikeopd.files import read_json
from spikeopd.studies import runs, worker
from spikeopd.studies.cli import main
from spikeopd.studies.runs import stage1_run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    small_setup().teacher.save_pretrained(folder / "teacher")
    (folder / "text.txt").write_text("A study compares methods under matched seeds.\n" * 120)
    return load_config("tiny", (
        *SMALL, f"teacher.teacher_model_name_or_path={folder / 'teacher'}", f"data.source=text:{folder / 'text.txt'}",
        f"data.cache_dir={folder / 'cache'}", "model.init=random", "stage1.updates=3", "stage1.deploy_updates=0",
        "train.adam_epsilon=1e-4",
    ))  # fmt: skip


def test_more_processes_are_another_run_and_one_is_the_same(config):
    alone = stage1_run(config)
    assert stage1_run(config, processes=1).key == alone.key and "processes" not in alone.asked()
    together = stage1_run(config, processes=2)
    assert together.key != alone.key and together.asked()["processes"] == 2


def test_a_run_sees_as_many_gpus_as_it_has_processes(tmp_path, monkeypatch):
    seen = "import os, sys; open(sys.argv[1] + '/seen', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setattr(runs, "WORKER", seen)
    with runs.processes(["0", "1", "2"]) as start:
        for count, expected in ((2, "0,1"), (1, "0"), (5, "0,1,2")):
            start(tmp_path, count)
            assert (tmp_path / "seen").read_text() == expected


def test_no_process_is_refused(capsys, tmp_path):
    assert main(["stage1", "--processes", "0", f"--output={tmp_path}"]) == 2
    assert "--processes 0: give at least 1" in capsys.readouterr().err


def test_processes_that_fail_are_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "RANK", "raise SystemExit(3)")
    with pytest.raises(CheckFailed, match="2 processes did not train together"):
        worker.train_together(tmp_path, 2)


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_batch(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    halves = with_overrides(config, ["stage1.micro_batch_size=2"])
    (together,) = runs.execute([("two", stage1_run(halves, processes=2))], tmp_path, 1, print)
    (alone,) = runs.execute([("one", stage1_run(config))], tmp_path, 1, print)
    one, two = (load_file(f"{found['student']}/model.safetensors") for found in (alone, together))
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=2e-6), name
    assert alone["final"]["perplexity"] == pytest.approx(together["final"]["perplexity"], rel=1e-4)
    folder = replace(stage1_run(halves), processes=2).folder(tmp_path)
    assert read_json(folder / "request.json")["processes"] == 2
