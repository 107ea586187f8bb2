"""The Python API of training: `import spikeopd` is light, its names are there, a short run from Python."""

import os
import resource
import subprocess
import sys

import pytest
import transformers

import spikeopd
from spikeopd import training
from spikeopd.errors import ConfigError, InputError
from spikeopd.runlog import RunLog

SHORT = {
    "stage1.updates": 1, "stage2.updates": 1, "stage1.micro_batch_size": 2, "stage2.batch_size": 2,
    "stage2.micro_batch_size": 2, "data.sequence_length": 16, "stage2.prompt_length": 8,
    "stage2.max_completion_length": 4, "train.threads": 1,
}  # fmt: skip


def test_every_name_is_there_and_the_list_is_complete():
    for name in spikeopd.__all__:
        assert getattr(spikeopd, name) is not None
        assert name in dir(spikeopd)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        spikeopd.trian  # noqa: B018


def test_configurations_need_no_torch():
    code = "import sys, spikeopd; spikeopd.load_config('tiny'); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_torch_the_install_command_is_named():
    code = "import sys; sys.modules['torch'] = None; from spikeopd.cli import main; sys.exit(main(['--dry-run']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "training needs torch and transformers" in done.stderr
    assert "pip install" in done.stderr and "[train]'" in done.stderr


def test_a_run_from_python_gives_its_numbers_and_places(tmp_path, capfd):
    transformers.utils.logging.enable_progress_bar()
    run = spikeopd.train("tiny", output=tmp_path / "run", overrides=SHORT, quiet=True)
    assert capfd.readouterr().err == ""  # quiet: no bar of transformers either
    assert len(repr(run)) < 200  # a notebook shows it
    assert run.main and run.summary["stage2"]["updates"] == 1
    assert [(line["stage"], line["update"]) for line in run.metrics()] == [("stage1", 1), ("stage2", 1)]
    student = spikeopd.load_student(run.student)
    assert student.config.hidden_size == 128
    with pytest.raises(InputError, match="already holds a run"):
        spikeopd.train("tiny", tmp_path / "run", SHORT)
    again = spikeopd.train(run.config, tmp_path / "run", resume=True, quiet=True)
    assert again.summary["stage2"]["final"] == run.summary["stage2"]["final"]
    first = spikeopd.train(run.config, tmp_path / "one", {"train.stage": 1}, quiet=True)
    assert first.student == tmp_path / "one" / "stage1" / "final" and (first.student / "config.json").is_file()


def test_an_old_config_is_resumed_whatever_it_says_of_a_retired_option(tmp_path):
    run = spikeopd.train("tiny", tmp_path / "run", SHORT | {"train.stage": 1}, quiet=True)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("train:\n", "train:\n  compile: true\n"))
    assert spikeopd.train(run.config, tmp_path / "run", resume=True, quiet=True).summary["stage1"]["updates"] == 1


def test_mistakes_are_the_same_errors_as_on_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'stage1.updates'"):
        spikeopd.train("tiny", tmp_path / "run", {"stage1.update": 3})
    with pytest.raises(InputError, match="no config.json there"):
        spikeopd.load_student(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_second_process_is_refused_before_it_reads_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "build", lambda *_: pytest.fail("nothing may be loaded"))
    with RunLog(tmp_path / "run") as log:
        log.hold()
        with pytest.raises(InputError, match=rf"run: process {os.getpid()} on \S+ is at work here; wait for its end"):
            spikeopd.train("tiny", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    """No file above 700 kB can be written, so the first checkpoint cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, hard))
    try:
        with pytest.raises(InputError, match=r"cannot be written \(File too large\).*make room, then continue with"):
            spikeopd.train("tiny", tmp_path / "run", SHORT | {"train.stage": 1}, quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "stage1",
    }
    assert not [path for path in (tmp_path / "run" / "stage1").rglob("*") if path.is_file()]
