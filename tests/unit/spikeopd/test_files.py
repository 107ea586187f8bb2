"""Model folders, places that cannot be written, and folders that are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spikeopd.errors import InputError
from spikeopd.files import (
    PrivateFolder,
    check_new_directory,
    find_model,
    new_directory,
    read_json,
    remove_leftovers,
    sole_process,
)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_holds_its_model_in_final_or_else_in_stage1(tmp_path):
    assert find_model(tmp_path) is None
    for place in ("stage1/final", "final", ""):  # each is preferred to those before it
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "config.json").write_text("{}")
        assert find_model(tmp_path) == tmp_path / place
    assert find_model(tmp_path, ("manifest.json",)) is None
    assert find_model(tmp_path / "nowhere") is None


def test_energy_finds_the_student_of_a_run(tmp_path):
    from energy.flops import load_shape

    (tmp_path / "stage1" / "final").mkdir(parents=True)
    with pytest.raises(InputError, match="neither config.json nor manifest.json"):
        load_shape(str(tmp_path))
    (tmp_path / "stage1" / "final" / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 10, '
        '"max_position_embeddings": 4, "num_steps": 3}'
    )
    assert load_shape(str(tmp_path)).ffn_dim == 16


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file.txt").write_text("mine")
    for path in (tmp_path / "file.txt" / "bundle", tmp_path / "file.txt" / "a" / "b", "/proc/x.png", "/proc/no/x.png"):
        with pytest.raises(InputError, match=rf"--output {path}: cannot be written \(.+\)"):
            check_new_directory(path, "--output")
    check_new_directory(tmp_path / "new" / "deep" / "file", "--output")
    assert tree(tmp_path) == {"file.txt": "mine"} and [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_is_replaced_when_the_block_ends_well(tmp_path):
    for content in ("one", "two"):
        with new_directory(tmp_path / "b") as folder:
            (folder / "file").write_text(content)
    assert tree(tmp_path) == {"b/file": "two"}
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "b") as folder:
        (folder / "file").write_text("three")
        raise ZeroDivisionError
    assert tree(tmp_path) == {"b/file": "two"} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_comes_back_when_the_exchange_fails(tmp_path, monkeypatch, failing):
    with new_directory(tmp_path / "b") as folder:
        (folder / "file").write_text("old")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) == failing:
            raise OSError("the disk is gone")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="the disk is gone"), new_directory(tmp_path / "b") as folder:
        (folder / "file").write_bytes(b"new")
    assert tree(tmp_path) == {"b/file": "old"} and len(list(tmp_path.iterdir())) == 1


# --- what killed processes leave -------------------------------------------------------------------------------------


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    kept = ["update-000002/state.json", ".hidden/file", "notes.partial", "final/config.json"]
    left = [".update-000004.abc/x", "stage1/.final.q1.partial/x", ".metrics.jsonl.k.partial", ".b.old.z.partial/b/x"]
    for name in (*kept, *left, "b/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    remove_leftovers(tmp_path)
    assert sorted(tree(tmp_path)) == sorted([*kept, "b/x"])


def test_a_process_killed_in_the_middle_of_an_exchange_loses_nothing(tmp_path, monkeypatch):
    """The old folder stands aside, the new one has not got its name: a kill there leaves neither in its place."""
    with new_directory(tmp_path / "b") as folder:
        (folder / "file").write_text("old")
    child = os.fork()
    if child == 0:
        real, calls = os.replace, []

        def replace(source, target):
            calls.append(source)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)

        os.replace = replace
        with new_directory(tmp_path / "b") as folder:
            (folder / "file").write_bytes(b"new")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "b").exists()
    remove_leftovers(tmp_path)
    assert tree(tmp_path) == {"b/file": "old"}


def test_a_full_disk_is_an_os_error_whoever_wrote(tmp_path):
    def writer():
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left") as caught, new_directory(tmp_path / "b"):
        writer()
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


# --- one process per folder ------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from spikeopd.files import sole_process
with sole_process(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_process_is_refused_by_name_until_the_first_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"held\n"
        words = rf"process {first.pid} on {re.escape(socket.gethostname())} is at work here"
        with pytest.raises(InputError, match=words), sole_process(tmp_path):
            pass
        first.kill()
    with sole_process(tmp_path):  # the file is still there, the lock is not
        assert (tmp_path / ".running").read_text().startswith(f"process {os.getpid()} ")
        with pytest.raises(InputError, match=f"process {os.getpid()} "), sole_process(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def test_temporary_folders_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import sys, time; from spikeopd.files import PrivateFolder; f = PrivateFolder('spikeopd-x-'); print(f.path, "
    )
    code += "flush=True); time.sleep(60)"
    folders = []
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        for _ in range(2)
    ]
    for worker in workers:
        folders.append(Path(worker.stdout.readline().decode().strip()))
        os.utime(folders[-1], (0, 0))
    workers[0].kill()
    workers[0].communicate()
    mine = PrivateFolder("spikeopd-x-")
    assert [folder.exists() for folder in folders] == [False, True]
    mine.cleanup()
    mine.cleanup()
    workers[1].kill()
    workers[1].communicate()
    assert not mine.path.exists()


# --- what strangers write --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 5000, "digits"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"\xff\xfe", "utf-8"),
        (b"", "Expecting value"),
        (b"x" * 2000, "too many"),
    ],
)
def test_json_that_cannot_be_held_is_a_value_error(tmp_path, content, reason):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_json(tmp_path / "file", limit=1000 if reason == "too many" else 1 << 20)


def test_text_beyond_the_basic_plane_is_read(tmp_path):
    (tmp_path / "file").write_text('["\\ud83d\\ude00", "\\u00e9"]')
    assert read_json(tmp_path / "file") == ["\U0001f600", "é"]


def test_a_pipe_does_not_hang_a_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "pipe")
