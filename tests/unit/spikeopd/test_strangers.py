"""Attacks that once went through, each in its smallest form: pipes, links, holes, packed and growing files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import struct
import zipfile
from importlib import resources

import numpy as np
import pytest
from random_models import random_model, random_shape

from spikeopd.contracts import load_trace
from spikeopd.contracts.bundle import load_bundle
from spikeopd.errors import BackendMissing, ConfigError, InputError
from spikeopd.evaluation.tasks import check_records, choose
from spikeopd.files import parse_json, regular_size, remove_leftovers, sha256, sole_process
from spikeopd.options import parse_yaml
from spikeopd.runlog import RunLog, read_metrics
from spikeopd.students import check_sizes, check_weights, read_model_config
from spikeopd.text import sources
from spikeopd.text.backend import Guarded, is_plain, read_backend
from spikeopd.text.sources import open_source
from spikeopd.text.tokenizer import load_tokenizer

TINY = json.loads((resources.files("spikeopd") / "assets" / "tiny" / "tokenizer.json").read_text())
ROLES = '{"bos_token": "</s>", "eos_token": "</s>"}'
ODD = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}  # nobody knows it


# --- tokenizers ------------------------------------------------------------------------------------------------------


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


TEXT_PART = {"Sequence": {"id": "A", "type_id": 0}}
GROWING = {
    "each makes sixty of one": {"normalizer": sequence(*[replace("a", "a" * 60)] * 6)},
    "when decoding": {"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 60)] * 6}},
    "bytes of bytes": {"normalizer": sequence(*[sequence(*[{"type": "ByteLevel"}] * 16)] * 3)},
    "many parts": {"normalizer": sequence(*[sequence(*[{"type": "Prepend", "prepend": "x"}] * 16)] * 16)},
    "a template of copies": {"post_processor": {"type": "TemplateProcessing", "single": [TEXT_PART] * 1000,
                                                "pair": [], "special_tokens": {}}},
    "a template of ids": {"post_processor": {"type": "TemplateProcessing", "single": [TEXT_PART], "pair": [],
                                             "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": []}}}},
    "an affix that is cut off": {"model": TINY["model"] | {"continuing_subword_prefix": "é" * 50}},
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_parts_whose_growth_multiplies_do_not_run_here(kind):
    assert not is_plain(TINY | GROWING[kind])


def test_the_parts_of_known_families_do(tmp_path):
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    decoder = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " "}]
    assert is_plain(TINY | {"normalizer": llama, "decoder": {"type": "Sequence", "decoders": decoder}})
    assert is_plain(TINY | {"normalizer": sequence({"type": "NFKC"}, {"type": "Lowercase"})})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": TINY["model"] | {"vocab": TINY["model"]["vocab"] | {"x" * 5000: 9999}}}, "has 5000 characters"),
        ({"model": {"type": "Unigram", "vocab": [["x" * 5000, 0.0]], "unk_id": 0}}, "has 5000 characters"),
        ({"model": TINY["model"] | {"vocab": TINY["model"]["vocab"] | {"zz": 1 << 31}}}, "has the number 2147483648"),
        ({"added_tokens": [{"content": "zz", "id": 1 << 31}]}, "has the number 2147483648"),
        ({"added_tokens": [{"content": f"{n:01000d}"} for n in range(1100)]}, "more than 1048576 characters"),
    ],
)
def test_a_token_is_no_book(tmp_path, changes, reason):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | changes))
    with pytest.raises(InputError, match=reason):
        read_backend(tmp_path / "tokenizer.json")


def test_a_worker_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    """`python -c` looks there first, and it may be the stranger's."""
    for name in ("json", "tokenizers", "signal", "contextlib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | {"pre_tokenizer": ODD}))
    monkeypatch.chdir(tmp_path)
    assert read_backend(tmp_path / "tokenizer.json").encode("1").ids
    assert not (tmp_path / "ran").exists()


def test_a_guarded_tokenizer_is_framed_and_saved_as_any_other(tmp_path):
    parts = {"type": "Sequence", "pretokenizers": [ODD, TINY["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | {"pre_tokenizer": parts, "post_processor": None}))
    (tmp_path / "tokenizer_config.json").write_text(ROLES)
    given = load_tokenizer(tmp_path)
    assert isinstance(given.backend, Guarded)
    again = load_tokenizer(given.save(tmp_path / "saved"))
    assert again.encode("a 1") == [given.bos_token_id, *given.encode("a 1")] == given.framed().encode("a 1")
    assert again.fingerprint == given.fingerprint


def test_a_template_that_names_no_token_is_one_line(tmp_path):
    template = json.loads(json.dumps(TINY["post_processor"]))
    template["single"][0]["SpecialToken"]["id"] = ""
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY | {"post_processor": template}))
    (tmp_path / "tokenizer_config.json").write_text(ROLES)
    with pytest.raises(InputError, match="fails|not a tokenizer file"):
        load_tokenizer(tmp_path).framed()


@pytest.mark.parametrize("number", [2**70, 2**32, -1, True, [2**40], "2"])
def test_ids_of_roles_that_no_tokenizer_has_are_passed_over(tmp_path, number):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": number, "eos_token_id": 2}))
    assert load_tokenizer(tmp_path).eos_token_id == 2


def test_opt_files_are_bounded_and_their_roles_looked_up(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "</s>": 2, "<pad>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert load_tokenizer(tmp_path).encode("a") == [2, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "none"}')
    with pytest.raises(InputError, match="the vocabulary has no token 'none'"):
        load_tokenizer(tmp_path)
    os.truncate(tmp_path / "merges.txt", 1 << 30)
    with pytest.raises(InputError, match="bytes are too many"):
        load_tokenizer(tmp_path)


# --- pipes, holes, packed files --------------------------------------------------------------------------------------


def test_a_pipe_in_the_place_of_a_file_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        load_trace(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read_metrics(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        open_source(f"text:{tmp_path / 'pipe'}")
    with pytest.raises(InputError, match="not a regular file"):
        check_records(choose(["arc_easy"])[0], tmp_path / "pipe")
    os.rename(tmp_path / "pipe", tmp_path / "metrics.jsonl")
    with RunLog(tmp_path, quiet=True) as log, pytest.raises(InputError, match="not a file of this folder"):
        log.metrics("stage1", 1, {"loss": 1.0})


def members(path, count):
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(str(number), b"")
    return path


def test_a_list_of_members_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("spikeopd.contracts.npz.DIRECTORY_LIMIT", 1000)
    assert load_trace(members(tmp_path / "few.npz", 10)) == []
    with pytest.raises(InputError, match="too many members"):
        load_trace(members(tmp_path / "many.npz", 30))
    data = bytearray(members(tmp_path / "t.npz", 2).read_bytes())
    end = data.rfind(b"PK\5\6")
    data[end:end] = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)  # a zip64 record that says otherwise
    (tmp_path / "t.npz").write_bytes(bytes(data))
    with pytest.raises(InputError, match="too many members"):
        load_trace(tmp_path / "t.npz")


def test_files_of_holes_are_refused_before_they_are_read(tmp_path):
    (tmp_path / "t.npz").touch()
    os.truncate(tmp_path / "t.npz", 1 << 40)
    with pytest.raises(InputError, match="nearly all of them holes"):
        load_trace(tmp_path / "t.npz")
    os.rename(tmp_path / "t.npz", tmp_path / "metrics.jsonl")
    os.truncate(tmp_path / "metrics.jsonl", 1 << 30)
    with pytest.raises(InputError, match="bytes are too many"):
        read_metrics(tmp_path)


def test_a_large_file_of_holes_is_no_file_and_a_large_file_of_data_is_one(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match="1099511627776 bytes, nearly all of them holes"):
        regular_size(path)
    with pytest.raises(InputError, match="nearly all of them holes"):
        sha256(path)
    with open(path, "r+b") as file:  # islands in the sea do not help
        for place in range(0, 1 << 40, 1 << 30):
            file.seek(place)
            file.write(b"x")
    with pytest.raises(ValueError, match="nearly all of them holes"):
        regular_size(path)
    os.truncate(path, 100)
    assert regular_size(path) == 100 and len(sha256(path)) == 64


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_text_of_holes_is_refused_before_it_is_hashed(tmp_path, name):
    (tmp_path / "rows.txt").touch()
    os.truncate(tmp_path / "rows.txt", 1 << 40)
    with pytest.raises(InputError, match="nearly all of them holes"):
        open_source(f"{name}:{tmp_path / 'rows.txt'}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "shard.bin"])
def test_a_study_hashes_neither_pipes_nor_holes(tmp_path, name):
    """`--start` and the teacher are hashed before anything is loaded."""
    from spikeopd.studies.runs import student_hash, teacher_hash

    for kind in ("pipe", "holes"):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "model.safetensors").touch()
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).touch()
            os.truncate(folder / name, 1 << 40)
        for function in (student_hash, teacher_hash):
            with pytest.raises(InputError, match="not a regular file|nearly all of them holes"):
                function(str(folder))


@pytest.mark.parametrize("name", ["model.nir", "report.json"])
def test_a_bundle_of_holes_is_refused_before_it_is_hashed(tmp_path, name):
    from export.bundle_writer import write_bundle

    bundle = write_bundle(random_model(random_shape(layers=1)), tmp_path / "b")
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / name).touch()
    os.truncate(bundle / name, 1 << 40)
    manifest["files"].setdefault(name, {"sha256": "0" * 64})["bytes"] = 1 << 40
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="1099511627776 bytes, and the model's arrays take"):
        load_bundle(bundle)


def test_a_bundle_without_the_bias_of_its_head_is_refused(tmp_path):
    from export.bundle_writer import write_bundle

    bundle = write_bundle(random_model(random_shape(layers=1)), tmp_path / "b")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["arrays"]["head.bias"] = {"constant": 0}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"arrays\.head\.bias"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", float("nan")), ("top_k", float("inf")), ("temperature", float("nan")), ("temperature", 10**400)],
    ids=["k nan", "k inf", "t nan", "t long"],
)
def test_a_bundle_that_would_be_sampled_without_sense_is_refused(tmp_path, name, value):
    from export.bundle_writer import write_bundle

    bundle = write_bundle(random_model(random_shape(layers=1)), tmp_path / "b")
    manifest = json.loads((bundle / "manifest.json").read_text()) | {"generation": {name: value}}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="field 'generation'"):
        load_bundle(bundle)


def test_a_packed_file_is_not_unpacked_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 1000)
    monkeypatch.setattr(sources, "LONGEST_ROW", 1000)
    for name, kind, reason in (("a.txt.gz", "text", "in one document"), ("a.jsonl.gz", "jsonl", "a line")):
        (tmp_path / name).write_bytes(gzip.compress(b" " * 1_000_000))
        with pytest.raises(InputError, match=reason):
            list(open_source(f"{kind}:{tmp_path / name}").documents("all"))


def test_parquet_damaged_in_the_middle_is_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the train extra brings pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"row {n} " * 40 for n in range(500)]}), path)
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="damaged behind row 0"):
        list(open_source(f"parquet:{path}").documents("all"))


def test_a_file_of_millions_of_empty_lists_is_not_built():
    with pytest.raises(ValueError, match="more than 4194304 values"):
        parse_json("[" + "[]," * 3_000_000 + "[]]")
    with pytest.raises(ConfigError, match="characters are too many"):
        parse_yaml("a: [" + "1," * 100_000 + "1]", "recipe")


def test_a_cut_off_tokenisation_that_was_damaged_begins_again(tmp_path, monkeypatch):
    """Its tokens would be sealed with the rest, and trained on."""
    from types import SimpleNamespace

    from spikeopd.text import tokens

    texts = [f"text number {n}" for n in range(6)]
    source = SimpleNamespace(
        name="given", unbounded=False, documents=lambda split: iter(texts), fingerprint=lambda: "given"
    )
    whole = tokens.prepare(source, load_tokenizer(), "train", tmp_path / "whole").tokens.tolist()
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 2)
    monkeypatch.setattr(tokens, "SECONDS_BETWEEN_LINES", 0.0)

    def cut(split):
        yield from texts[:4]
        raise KeyboardInterrupt

    for damage in (False, True):
        folder = tmp_path / f"cut{damage}"
        with pytest.raises(KeyboardInterrupt):
            tokens.prepare(SimpleNamespace(**vars(source) | {"documents": cut}), load_tokenizer(), "train", folder)
        (partial,) = folder.glob(".*.partial")
        if damage:
            data = bytearray(partial.read_bytes())
            data[140] ^= 1
            partial.write_bytes(bytes(data))
        monkeypatch.setattr(tokens, "_noted", seen := Seen(tokens._noted))
        assert tokens.prepare(source, load_tokenizer(), "train", folder).tokens.tolist() == whole
        assert (seen.result[1] == 0) == damage
        monkeypatch.setattr(tokens, "_noted", seen.function)


class Seen:
    """A function that remembers what it gave."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        self.result = self.function(*arguments)
        return self.result


def test_the_python_of_a_simulator_is_not_taken_from_the_working_folder(tmp_path, monkeypatch):
    from neuro_sim.sanafe import process

    (tmp_path / ".venv-sanafe" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-sanafe" / "bin" / "python").write_text("#!/bin/sh\n")
    monkeypatch.delenv(process.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(BackendMissing):
        assert tmp_path not in process.find_python().resolve().parents


def test_a_chip_of_endless_numbers_is_refused():
    from spikeopd.contracts.chip import CHIP_SCHEMA, CHIP_TOTALS, parse_chip

    raw = {"schema": CHIP_SCHEMA, "tokens": 1, "simulator": "s", "version": "v", "roles": {}, "dense_roles": {}}
    with pytest.raises(InputError, match="expected a number from 0"):
        parse_chip(raw | {"totals": dict.fromkeys(CHIP_TOTALS, 10**400)}, "run.json", 1)


def test_llama2c_files_of_holes_and_odd_heads_are_one_line(tmp_path):
    pytest.importorskip("torch", reason="the train extra brings torch")
    from spikeopd.llama2c import HEADER, convert_llama2c

    for values, reason in (((8, 8, 1, 8, 8, 4, 4), "not a model file"), ((8, 8, 1, 2, 2, 4, 4), "bytes of tokens")):
        (tmp_path / "m.bin").write_bytes(HEADER.pack(*values))
        os.truncate(tmp_path / "m.bin", 1 << 30)
        with pytest.raises(InputError, match=reason):
            convert_llama2c(tmp_path / "m.bin", tmp_path / "out")


@pytest.mark.parametrize(("vocabulary", "reason"), [(1, "vocab_size"), (2, "vocab_size"), (300, "bytes of weights")])
def test_llama2c_files_without_special_tokens_or_larger_than_the_machine(tmp_path, monkeypatch, vocabulary, reason):
    pytest.importorskip("torch", reason="the train extra brings torch")
    from spikeopd import llama2c

    monkeypatch.setattr(llama2c, "machine_memory", lambda: 20_000)
    (tmp_path / "m.bin").write_bytes(llama2c.HEADER.pack(8, 8, 1, 2, 2, vocabulary, 4) + bytes(20_000))
    with pytest.raises(InputError, match=reason):
        llama2c.convert_llama2c(tmp_path / "m.bin", tmp_path / "out")


# --- links in a stranger's run folder --------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    """A file and a folder of the user, outside the run folder."""
    (tmp_path / "mine" / "Documents").mkdir(parents=True)
    (tmp_path / "mine" / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    return tmp_path / "mine"


def test_a_lock_does_not_empty_what_it_links_to(tmp_path, mine):
    (tmp_path / "run" / ".running").symlink_to(mine / "precious")
    with pytest.raises(InputError, match="a lock is a file, and this is none"), sole_process(tmp_path / "run"):
        pass
    (tmp_path / "run" / ".running").unlink()
    os.mkfifo(tmp_path / "run" / ".running")
    with pytest.raises(InputError, match="a lock is a file, and this is none"), sole_process(tmp_path / "run"):
        pass
    assert (mine / "precious").read_text() == "precious"


def test_metrics_are_not_written_through_a_link(tmp_path, mine):
    (tmp_path / "run" / "metrics.jsonl").symlink_to(mine / "precious")
    with RunLog(tmp_path / "run", quiet=True) as log, pytest.raises(InputError, match="not a file of this folder"):
        log.metrics("stage1", 1, {"loss": 1.0})
    assert (mine / "precious").read_text() == "precious"


def test_leftovers_that_are_links_are_only_unlinked(tmp_path, mine):
    (tmp_path / "run" / ".Documents.old.abc.partial").symlink_to(mine)
    (tmp_path / "run" / ".x.partial").symlink_to(mine)
    assert len(remove_leftovers(tmp_path / "run")) == 2
    assert (mine / "Documents").is_dir() and (mine / "precious").exists() and not list((tmp_path / "run").iterdir())


def test_a_checkpoint_moved_elsewhere_and_linked_back_is_dropped_as_a_link(tmp_path, mine):
    torch = pytest.importorskip("torch", reason="the train extra brings torch")
    from spikeopd import checkpoint

    objective = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(objective.parameters())
    (tmp_path / "run" / "update-000001").symlink_to(mine)
    for update in (2, 3):
        checkpoint.save(tmp_path / "run", update, objective, adam, {})
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["update-000002", "update-000003"]
    assert (mine / "precious").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_code_and_other_models_are_not_fetched(tmp_path):
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", name: "evil/kernel"}))
        with pytest.raises(InputError, match=f"{name} names a kernel"):
            read_model_config(tmp_path, "model")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(InputError, match="adapter_config.json makes it a part of another model"):
        check_weights(tmp_path, "model")


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 1 << 20},
        {"num_hidden_layers": 4096, "hidden_size": 512},
        {"vocab_size": 1 << 24},
        {"model_type": "opt", "max_position_embeddings": 1 << 24},
        {"model_type": "llama", "intermediate_size": 1 << 24},
        {"model_type": "opt", "ffn_dim": 1 << 24},
        {"model_type": "llama", "num_attention_heads": 2, "head_dim": 1 << 20},
        {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 1 << 20},
    ],
)
def test_sizes_that_the_weights_cannot_fill_are_refused_before_they_are_allocated(tmp_path, sizes):
    from safetensors.numpy import save_file

    save_file({"embed": np.zeros((64, 8), np.float32)}, tmp_path / "model.safetensors")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 60, "max_position_embeddings": 1}
    check_sizes(tmp_path, small, "model")
    with pytest.raises(InputError, match="the weights hold 512 numbers"):
        check_sizes(tmp_path, small | sizes, "model")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match="model.safetensors is corrupt"):
        check_sizes(tmp_path, small, "model")


@pytest.mark.parametrize("family", [[], {}, 1, "x" * 5000])
def test_a_family_that_is_no_name_is_refused(family):
    from energy.flops import parse_teacher

    with pytest.raises(InputError, match="no closed form for a") as caught:
        parse_teacher({"model_type": family, "hidden_size": 8}, "config.json")
    assert len(str(caught.value)) < 500


def test_a_family_that_is_no_name_is_no_student_either(tmp_path):
    from energy.flops import load_shape

    shape = random_shape()
    (tmp_path / "config.json").write_text(json.dumps(shape.to_dict() | {"model_type": []}))
    assert load_shape(str(tmp_path)) == shape


def test_an_odd_number_in_an_old_environment_does_not_stop_a_resume(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {seed: 1}\n")
    (tmp_path / "env.json").write_text('{"argv": NaN, "resumed": 3}')
    with RunLog(tmp_path, quiet=True) as log:
        log.start("train: {seed: 1}\n", {"argv": []}, resume=True)
    assert json.loads((tmp_path / "env.json").read_text()) == {"argv": None, "resumed": [{"argv": []}]}


@pytest.mark.parametrize("content", ["[]", "x", "9" * 5000, None])
def test_the_sampling_of_a_model_is_bounded_before_transformers_reads_it(tmp_path, content):
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "generation_config.json"
    file.write_text(content or "")
    if content is None:
        os.truncate(file, 1 << 40)
    with pytest.raises(InputError, match="generation_config.json cannot be read"):
        check_weights(tmp_path, "model")


def test_names_of_tensors_do_not_reach_the_terminal(tmp_path, capfd):
    """transformers lists what is missing and unexpected, as the file spells it, on many lines."""
    torch = pytest.importorskip("torch", reason="the train extra brings torch")
    from safetensors.torch import load_file, save_file

    from spikeopd.models.teacher import load_teacher

    tiny = resources.files("spikeopd") / "assets" / "tiny"
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    weights = load_file(str(tiny / "model.safetensors"))
    weights["\x1b]0;owned\x07"] = torch.zeros(1)
    weights.pop("model.decoder.final_layer_norm.bias", None)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"the weights lack model\.decoder\.final_layer_norm\.bias"):
        load_teacher(str(tmp_path))
    assert capfd.readouterr() == ("", "")
