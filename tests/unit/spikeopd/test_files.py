"""Model folders, places that cannot be written, and folders that are replaced whole or not at all."""

from __future__ import annotations

import os

import pytest

from spikeopd.errors import InputError
from spikeopd.files import check_new_directory, find_model, new_directory


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
