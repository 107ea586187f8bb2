"""Checkpoints: what does not fit or was damaged is never believed, and the newest good one is found."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spikeopd import checkpoint
from spikeopd.errors import InputError
from spikeopd.files import write_sums


def model(width=3):
    torch.manual_seed(0)
    objective = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    return objective, torch.optim.Adam(objective.parameters(), lr=0.1)


def train(objective, optimizer, updates):
    for _ in range(updates):
        objective(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path):
    objective, optimizer = model()
    for update in (1, 2, 3):
        train(objective, optimizer, 1)
        checkpoint.save(tmp_path, update, objective, optimizer, {"extra": update}, keep=9)
    return tmp_path


def weights(objective):
    return {name: value.clone() for name, value in objective.state_dict().items()}


def flip(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def test_a_restored_run_goes_on_as_the_first_did(folder):
    first, adam = model()
    train(first, adam, 4)
    second, again = model()
    state = checkpoint.load(folder / "update-000003", second, again)
    assert state["update"] == state["extra"] == 3
    train(second, again, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def resealed(path, change):
    """Change the tensors of a checkpoint and mend its sums, as a faulty tool would."""
    for name in ("objective", "optimizer"):
        tensors = load_file(path / f"{name}.safetensors")
        change(name, tensors)
        save_file(tensors, path / f"{name}.safetensors")
    write_sums(path)


def drop(part, key):
    return lambda name, tensors: tensors.pop(key) if name == part else None


def replace(part, key, value):
    return lambda name, tensors: tensors.update({key: value}) if name == part else None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("objective", "1.weight"), r"1\.weight is missing \(1 names differ\)"),
        (replace("objective", "2.weight", torch.zeros(2)), r"2\.weight is not a tensor of this model"),
        (replace("objective", "1.weight", torch.zeros(3, 2)), r"1\.weight is torch.float32 \[3, 2\], the model has"),
        (replace("objective", "1.weight", torch.zeros(2, 3).half()), r"1\.weight is torch.float16 \[2, 3\]"),
        (drop("optimizer", "1.weight\nexp_avg"), r"optimizer.safetensors holds 11 tensors"),
        (replace("optimizer", "1.weight\nexp_avg", torch.zeros(2)), r"optimizer state 1.weight exp_avg"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_change_nothing(folder, change, message):
    resealed(folder / "update-000003", change)
    objective, optimizer = model()
    before = weights(objective)
    with pytest.raises(InputError, match=rf"update-000003 does not fit: {message}"):
        checkpoint.load(folder / "update-000003", objective, optimizer)
    assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())
    assert not optimizer.state


def test_another_model_is_refused(folder):
    with pytest.raises(InputError, match="does not fit: 0.bias is torch.float32"):
        checkpoint.load(folder / "update-000003", *model(width=5))


def edit_state(path):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"update": 2}))


def renamed_state(path):
    edit_state(path)
    write_sums(path)


DAMAGE = {
    "weight": (lambda path: flip(path / "objective.safetensors"), "objective.safetensors: sha256 differs"),
    "moment": (lambda path: flip(path / "optimizer.safetensors"), "optimizer.safetensors: sha256 differs"),
    "header": (lambda path: flip(path / "objective.safetensors", 9), "objective.safetensors: sha256 differs"),
    "cut": (lambda path: os.truncate(path / "objective.safetensors", 99), "objective.safetensors: sha256 differs"),
    "empty": (lambda path: os.truncate(path / "state.json", 0), "state.json: sha256 differs"),
    "edited update": (edit_state, "state.json: sha256 differs"),
    "edited update, sums mended": (renamed_state, "state.json speaks of update 2"),
    "no weights": (lambda path: (path / "objective.safetensors").unlink(), "objective.safetensors is missing"),
    "no sums": (lambda path: (path / "SHA256SUMS").unlink(), "there is no SHA256SUMS"),
    "torn sums": (lambda path: os.truncate(path / "SHA256SUMS", 40), "SHA256SUMS is damaged"),
    "more files": (lambda path: (path / "x.bin").write_text(""), "x.bin is not in SHA256SUMS"),
    "a folder": (lambda path: ((path / "state.json").unlink(), (path / "state.json").mkdir()), "not a regular file"),
    "empty folder": (lambda path: (shutil.rmtree(path), path.mkdir()), "there is no SHA256SUMS"),
    "weights of holes": (lambda path: os.truncate(path / "objective.safetensors", 1 << 40), "nearly all of them holes"),
    "too many weights": (lambda path: os.truncate(path / "objective.safetensors", 1 << 30), "bytes, at most"),
    "sums of holes": (lambda path: os.truncate(path / "SHA256SUMS", 1 << 30), "bytes are too many"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_taken(folder, kind):
    damage, reason = DAMAGE[kind]
    damage(folder / "update-000003")
    said = []
    assert checkpoint.newest_good(folder, model()[0], said.append) == folder / "update-000002"
    (line,) = said
    assert reason in line and "kept as damaged-update-000003, continuing from update-000002" in line
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["update-000001", "update-000002"]
    if "mended" not in kind:
        with pytest.raises(InputError, match="is damaged"):
            checkpoint.load(folder / "damaged-update-000003", *model())


def test_if_nothing_good_is_left_that_is_an_error(folder):
    for path in checkpoint.checkpoints(folder):
        flip(path / "optimizer.safetensors")
    with pytest.raises(InputError, match=r"no checkpoint can be used; the newest, update-000003, is damaged"):
        checkpoint.newest_good(folder, model()[0], print)
    assert len(checkpoint.checkpoints(folder)) == 3


def test_nothing_is_said_of_good_ones_and_of_none(folder, tmp_path):
    said = []
    assert checkpoint.newest_good(folder, model()[0], said.append).name == "update-000003"
    assert checkpoint.newest_good(folder, model()[0], said.append, at_most=2).name == "update-000002"
    assert checkpoint.newest_good(folder, model()[0], said.append, at_most=0) is None
    assert checkpoint.newest_good(tmp_path / "none", model()[0], said.append) is None
    assert not said


def test_every_file_has_the_mode_of_its_neighbours(folder):
    modes = {path.stat().st_mode & 0o777 for path in (folder / "update-000003").iterdir()}
    mask = os.umask(0)
    os.umask(mask)
    assert modes == {0o666 & ~mask}


def test_the_newest_from_before_an_update_is_kept_besides_the_last(tmp_path):
    objective, optimizer = model()
    train(objective, optimizer, 1)
    for update in range(1, 8):
        checkpoint.save(tmp_path, update, objective, optimizer, {}, keep=2, before=4 if update > 4 else None)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"update-{n:06d}" for n in (3, 6, 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"param_groups": None},
        {"param_groups": [{}]},
        {"param_groups": [{"params": ["0.weight"]}]},
        {"param_groups": ["x"]},
        {"moments": "12"},
        {"betas": [0.5, 0.5]},
        {"eps": 1.0},
    ],
)
def test_a_state_sealed_by_another_hand_is_no_traceback_and_trains_no_other_student(folder, change):
    path = folder / "update-000003"
    state = json.loads((path / "state.json").read_text())
    options = {name: change[name] for name in ("betas", "eps") if name in change}
    state["param_groups"][0] |= options
    (path / "state.json").write_text(json.dumps(state | (change if not options else {})))
    write_sums(path)
    objective, optimizer = model()
    before = weights(objective)
    with pytest.raises(InputError, match="does not fit"):
        checkpoint.load(path, objective, optimizer)
    assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())


@pytest.mark.parametrize("update", ["3", None, [3], 3.0, 10**30, "x" * 9999])
def test_an_update_that_is_no_number_is_damage(folder, update):
    path = folder / "update-000003"
    state = json.loads((path / "state.json").read_text()) | {"update": update}
    (path / "state.json").write_text(json.dumps(state))
    write_sums(path)
    said = []
    assert checkpoint.newest_good(folder, model()[0], said.append).name == "update-000002"
    assert "state.json speaks of update" in said[0] and len(said[0]) < 600
