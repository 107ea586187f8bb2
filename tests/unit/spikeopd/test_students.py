"""Model folders from strangers: only safetensors inside the folder, only sizes that some model could have."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from spikeopd.errors import InputError
from spikeopd.students import check_weights, is_student, read_config, read_model_config

CONFIG = {
    "model_type": "bispikclm", "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "ffn_dim": 16, "max_position_embeddings": 8, "num_steps": 2, "alpha": 0.9, "threshold": 0.7, "xi": 2.0,
}  # fmt: skip


def student(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_good_config_is_read(tmp_path):
    assert read_config(student(tmp_path))["hidden_size"] == 8 and is_student(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "8"), ("hidden_size", 8.0), ("hidden_size", True), ("hidden_size", 0), ("hidden_size", -8),
        ("hidden_size", 2**40), ("hidden_size", [8]), ("hidden_size", {}), ("hidden_size", "8" * 5000),
        ("num_attention_heads", 0), ("num_attention_heads", 3),
        ("num_hidden_layers", 10**9), ("num_hidden_layers", "1"),
        ("vocab_size", 10**30), ("num_steps", 0), ("num_steps", 1 << 20), ("max_position_embeddings", -1),
        ("alpha", float("nan")), ("alpha", "0.9"), ("alpha", 2.0), ("alpha", None), ("threshold", 0), ("xi", 1e999),
        ("threshold", float("inf")), ("residual_write", "x"), ("distances", -1), ("model_type", ["bispikclm"]),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_in_one_short_line(tmp_path, name, value):
    with pytest.raises(InputError, match=name) as caught:
        read_config(student(tmp_path, **{name: value}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "[" * 99_999, '{"hidden_size": ' + "9" * 5000 + "}", '{"a": "\\ud800"}']
)
def test_what_is_no_configuration_is_said(tmp_path, text):
    (student(tmp_path) / "config.json").write_text(text)
    assert not is_student(tmp_path)
    with pytest.raises(InputError, match="config.json"):
        read_model_config(tmp_path, "model")


def test_sizes_of_a_nested_configuration_are_checked_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 10**9}}))
    with pytest.raises(InputError, match="num_hidden_layers should be a whole number from 1 to 4096"):
        read_model_config(tmp_path, "model")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"{name} is a pickle.*only safetensors are.*save_pretrained\("):
        check_weights(tmp_path, "model")


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../other/model.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "pytorch_model.bin"}}, {"weight_map": {"a": 3}}, {"weight_map": []}, {}, [], None,
        {"weight_map": {"a": "model-00001.safetensors"}}, {"weight_map": {"a": "sub/../../x.safetensors"}},
    ],
)  # fmt: skip
def test_shards_lie_in_the_folder(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index.json|model-00001.safetensors cannot be read"):
        check_weights(tmp_path, "model")
    (tmp_path / "shard.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "shard.safetensors"}}')
    check_weights(tmp_path, "model")


def test_no_pickle_of_a_teacher_is_ever_opened(tmp_path):
    pytest.importorskip("torch", reason="the train extra brings torch")
    from spikeopd.models.teacher import load_teacher

    with resources.as_file(resources.files("spikeopd") / "assets" / "tiny") as tiny:
        folder = shutil.copytree(tiny, tmp_path / "teacher")
    marker = tmp_path / "ran"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (folder / "pytorch_model.bin").write_bytes(payload)
    load_teacher(str(folder), attentions=False)  # the safetensors beside it are taken
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="teacher: .*pytorch_model.bin is a pickle"):
        load_teacher(str(folder))
    assert not marker.exists()


def test_a_teacher_that_lacks_a_tensor_is_refused(tmp_path):
    pytest.importorskip("torch", reason="the train extra brings torch")
    from safetensors.torch import load_file, save_file

    from spikeopd.models.teacher import load_teacher

    with resources.as_file(resources.files("spikeopd") / "assets" / "tiny") as tiny:
        folder = shutil.copytree(tiny, tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("fc1.weight"))
    tensors.pop(gone)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"the weights lack {gone} \(1 missing\)"):
        load_teacher(str(folder))
