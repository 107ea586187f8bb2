"""The run folder: what is written, what survives a kill, and what progress looks like."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from spikeopd import runlog
from spikeopd.errors import BackendMissing, InputError
from spikeopd.runlog import RunLog, environment, read_metrics

ENV = {"device": "cpu"}


def updates(folder, stage="stage1") -> list[int]:
    return [line["update"] for line in read_metrics(folder) if line["stage"] == stage]


def test_a_run_leaves_its_files(tmp_path):
    with RunLog(tmp_path / "run") as log:
        log.start("train:\n  seed: 1\n", ENV)
        log.metrics(
            "stage2", 3, {"loss": 1.5, "validation/perplexity": np.float32(2.0), "rate": np.array([0.5, np.nan])}
        )
        log.summary({"perplexity": 3.0, "worst": float("inf")})
    assert (tmp_path / "run/config.yaml").read_text() == "train:\n  seed: 1\n"
    assert json.loads((tmp_path / "run/env.json").read_text()) == ENV
    (line,) = read_metrics(tmp_path / "run")
    assert line.pop("time") >= 0
    assert line == {
        "stage": "stage2",
        "update": 3,
        "stage2/loss": 1.5,
        "validation/perplexity": 2.0,
        "stage2/rate": [0.5, None],
    }
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary == {"schema_version": 1, "perplexity": 3.0, "worst": None}


def test_torch_scalars_are_plain_numbers(tmp_path):
    torch = pytest.importorskip("torch", reason="the train extra brings torch")
    with RunLog(tmp_path) as log:
        log.metrics("stage1", 1, {"loss": torch.tensor(0.25), "rates": torch.tensor([0.5, 1.0])})
    assert {k: v for k, v in read_metrics(tmp_path)[0].items() if "/" in k} == {
        "stage1/loss": 0.25,
        "stage1/rates": [0.5, 1.0],
    }


def test_an_existing_run_is_not_overwritten_and_a_missing_one_not_resumed(tmp_path):
    RunLog(tmp_path).start("a: 1\n", ENV)
    with pytest.raises(InputError, match=r"already holds a run; continue it with --resume, or give another --output"):
        RunLog(tmp_path).start("a: 2\n", ENV)
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    with pytest.raises(InputError, match=r"holds no run to resume \(no config.yaml\); leave --resume out to begin one"):
        RunLog(tmp_path / "other").start("a: 1\n", ENV, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run: cannot be written \(.*\); give another --output"):
        RunLog(tmp_path / "file" / "run").start("a: 1\n", ENV)


def test_a_resume_is_recorded_beside_the_first_environment(tmp_path):
    RunLog(tmp_path).start("a: 1\n", ENV)
    for device in ("one", "two"):
        RunLog(tmp_path).start("a: 1\n", {"device": device}, resume=True)
    record = json.loads((tmp_path / "env.json").read_text())
    assert record == {"device": "cpu", "resumed": [{"device": "one"}, {"device": "two"}]}


def test_truncation_forgets_what_comes_after_the_checkpoint(tmp_path):
    with RunLog(tmp_path) as log:
        for stage in ("stage1", "stage2"):
            for update in range(1, 6):
                log.metrics(stage, update, {"loss": update})
        log.truncate("stage2", 3)
        log.metrics("stage2", 4, {"loss": 40})
        assert (updates(tmp_path, "stage1"), updates(tmp_path, "stage2")) == ([1, 2, 3, 4, 5], [1, 2, 3, 4])
        log.truncate("stage2", 9)
        assert updates(tmp_path, "stage2") == [1, 2, 3, 4]
        log.truncate("stage1", 2)
        assert (updates(tmp_path, "stage1"), updates(tmp_path, "stage2")) == ([1, 2], [1, 2, 3, 4])


def test_a_torn_last_line_is_skipped_and_then_overwritten(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics("stage1", 1, {"loss": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "stage1", "upd')
    assert updates(tmp_path) == [1]
    with RunLog(tmp_path) as log:
        log.metrics("stage1", 2, {"loss": 1})
    assert updates(tmp_path) == [1, 2]


def test_damage_elsewhere_and_missing_files_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n{"update": 2}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not a JSON object; the file was damaged, remove this line"):
        read_metrics(tmp_path)
    with pytest.raises(InputError, match=r"No such file or directory; give a run folder or its metrics.jsonl"):
        read_metrics(tmp_path / "nowhere")


def _log_forever(folder):
    log = RunLog(folder)
    for update in range(1, 10**9):
        log.metrics("stage1", update, {"loss": update, "text": "x" * 5000})


def test_a_killed_run_loses_no_finished_line(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=_log_forever, args=(tmp_path,))
    worker.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (tmp_path / "metrics.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    found = updates(tmp_path)
    assert found == list(range(1, len(found) + 1)) and len(found) > 3


def test_only_the_first_process_writes(tmp_path, capsys):
    log = RunLog(tmp_path / "run", active=False)
    log.start("a: 1\n", ENV)
    log.metrics("stage1", 1, {"loss": 1})
    log.summary({})
    log.truncate("stage1", 0)
    log.note("hello")
    with log.progress("stage1", 2) as bar:
        bar.advance(loss=1.0)
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_progress_without_a_terminal_is_lines(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(runlog.time, "monotonic", lambda: clock[0])
    log = RunLog(tmp_path)
    with log.progress("stage1", 100, done=40) as bar:
        for _ in range(60):
            clock[0] += 7.0
            bar.advance(loss=0.123456)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "stage1: update 40 of 100"
    assert lines[1] == "stage1: update 45 of 100, loss 0.1235, 0:06:25 left"
    assert lines[-1] == "stage1: update 100 of 100, loss 0.1235, took 0:07:00"
    assert len(lines) == 1 + 60 // 5 + 1


def test_quiet_shows_nothing(tmp_path, capsys):
    log = RunLog(tmp_path, quiet=True)
    log.note("hello")
    with log.progress("stage1", 3) as bar:
        bar.advance(loss=1.0)
        assert bar.done == 1
    assert capsys.readouterr() == ("", "")


def test_notes_go_to_stderr_as_they_are(tmp_path, capsys):
    RunLog(tmp_path).note("[bold]collapse[/bold] at update 3 " + "x" * 200)
    assert capsys.readouterr() == ("", "[bold]collapse[/bold] at update 3 " + "x" * 200 + "\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_a_bar(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    log = RunLog(tmp_path)
    with log.progress("stage1", 4) as bar:
        for _ in range(4):
            bar.advance(loss=0.5)
        log.note("halfway")
    shown = terminal.getvalue()
    assert "4/4" in shown and "loss 0.5" in shown and "left" in shown and "halfway\n" in shown.replace("\r", "")


def test_environment_says_where_a_run_happened():
    record = environment(device="cpu", seeds={"train": 3}, argv=["spikeopd-train", "--config", "tiny"])
    json.dumps(record, allow_nan=False)
    assert record["seeds"] == {"train": 3} and record["argv"][0] == "spikeopd-train"
    assert record["versions"]["numpy"] == np.__version__ and record["python"] == sys.version.split()[0]
    assert environment(device="cpu", seeds={})["argv"] == sys.argv


def test_git_commit_and_dirty_flag(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "runlog.py").write_text("one\n")
    monkeypatch.setattr(runlog, "__file__", str(tmp_path / "runlog.py"))
    assert runlog._git() == {"git_commit": None, "git_dirty": None}
    git("init", "-q")
    assert runlog._git() == {"git_commit": None, "git_dirty": None}  # there is a repository, but not of this file
    git("add", "runlog.py")
    git("commit", "-qm", "x")
    clean = runlog._git()
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    (tmp_path / "runlog.py").write_text("two\n")
    assert runlog._git() == {**clean, "git_dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert runlog._git() == {"git_commit": None, "git_dirty": None}


def test_tensorboard_reads_the_metrics(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def seen():
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("stage1/loss")]

    with RunLog(tmp_path, tensorboard=True) as log:
        for update in (1, 2, 3):
            log.metrics("stage1", update, {"loss": update / 2, "rates": [1, 2], "sample": "text"})
    assert seen() == [(1, 0.5), (2, 1.0), (3, 1.5)]
    with RunLog(tmp_path, tensorboard=True) as log:
        log.truncate("stage1", 1)
        log.metrics("stage1", 2, {"loss": 4.0})
    assert seen() == [(1, 0.5), (2, 4.0)]


def test_missing_tensorboard_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BackendMissing, match="train.tensorboard needs TensorBoard: pip install tensorboard"):
        RunLog(tmp_path, tensorboard=True)


def test_a_refused_run_does_not_stand_in_the_way_of_its_correction(tmp_path):
    for new in (tmp_path / "new", tmp_path):
        with pytest.raises(InputError, match="too wide"), RunLog(new, quiet=True) as log:
            log.hold()
            log.start("a: 1", {})
            raise InputError("the student is too wide")
        assert not (new / "config.yaml").exists()
    assert not list(tmp_path.iterdir()), "not even an empty folder"
    with pytest.raises(InputError), RunLog(tmp_path, quiet=True) as log:
        log.start("a: 1", {})
        log.metrics("stage1", 1, {"loss": 1.0})
        raise InputError("the disk is gone")
    assert (tmp_path / "config.yaml").exists(), "what has begun can be resumed"


def test_numbers_beside_the_bar_leave_it_its_room():
    words = ["loss 2.098", "opd 2.046", "adj 0.1518", "dist4 0.9875"]
    assert runlog._fitting(words, 24) == "loss 2.098, opd 2.046"
    assert runlog._fitting(words, 200) == ", ".join(words) and runlog._fitting(words, 3) == "loss 2.098"
    assert runlog._fitting([], 24) == ""
