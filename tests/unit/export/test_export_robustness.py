"""Damaged and hostile bundles: a clear error that names the field, and nothing worse."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from bundle_mutations import mutate, reseal
from random_models import INHIBITING, PLUS, random_model, random_shape

from export.bundle_writer import BundleOptions, write_bundle
from spikeopd.contracts import SpikeModel
from spikeopd.contracts.bundle import load_bundle, read_manifest
from spikeopd.errors import InputError


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_bundle(random_model(), tmp_path_factory.mktemp("good") / "bundle")


@pytest.fixture
def bundle(good, tmp_path):
    import shutil

    return shutil.copytree(good, tmp_path / "bundle")


def edit(bundle, change, mend=True):
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    if mend:
        reseal(bundle, manifest)
    else:
        (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_no_bundle_at_all(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_bundle(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"manifest\.json: cannot be read"):
        load_bundle(tmp_path / "empty")


def test_a_future_version_asks_for_an_update(bundle):
    edit(bundle, lambda m: m.update(schema="spikeopd.bundle/9"))
    with pytest.raises(InputError, match=r"'schema' is 'spikeopd\.bundle/9'.*update spikeopd"):
        read_manifest(bundle)


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("schema", "other/1", "schema"),
        ("schema", None, "schema"),
        ("precision", "int4", "precision"),
        ("decay", 4097, "decay"),
        ("decay", 0.9, "decay"),
        ("decay", True, "decay"),
        ("epsilon", 0.0, "epsilon"),
        ("epsilon", float("nan"), "epsilon"),
        ("embedding_shift", 63, "embedding_shift"),
        ("shape", [], "shape"),
        ("files", None, "files"),
        ("arrays", 3, "arrays"),
        ("tokens", None, "tokens'"),
        ("tokens", [2], "tokens'"),
        ("tokens", {"bos": "</s>"}, r"tokens\.bos'"),
        ("tokens", {"eos": 40}, r"tokens\.eos' should be a token id from 0 to 39"),
        ("tokens", {"pad": -1}, r"tokens\.pad'"),
        ("tokens", {"bos": True}, r"tokens\.bos'"),
        ("tokens", {"bos": None}, r"tokens\.bos'"),
    ],
)
def test_a_wrong_field_is_named(bundle, field, value, names):
    edit(bundle, lambda m: m.update({field: value}), mend=False)
    with pytest.raises(InputError, match=f"field '{names}"):
        load_bundle(bundle)


def test_special_tokens_are_those_of_the_vocabulary_or_absent(bundle):
    edit(bundle, lambda m: m.update(tokens={"bos": 0, "eos": 39}))
    assert read_manifest(bundle)["tokens"] == {"bos": 0, "eos": 39}
    edit(bundle, lambda m: m.pop("tokens"))
    load_bundle(bundle)


def test_commands_refuse_a_wrong_special_token_in_one_line(bundle, tmp_path, capsys):
    from neuro_sim.cli import main as run_lava
    from spikeopd.evaluation.cli import main as evaluate

    edit(bundle, lambda m: m.update(tokens={"bos": "</s>"}))
    for command, words in ((run_lava, ["--prompt-tokens", "1"]), (evaluate, ["--output", str(tmp_path / "out")])):
        code = command([*(["perplexity"] if command is evaluate else []), str(bundle), *words])
        err = capsys.readouterr().err
        assert code == 2 and "field 'tokens.bos'" in err and err.count("\n") == 1


@pytest.mark.parametrize("value", [0, -1, 2**24 + 1, 2**70, 1.0, "16", None, True])
def test_a_wrong_size_is_named(bundle, value):
    edit(bundle, lambda m: m["shape"].update(ffn_dim=value))
    with pytest.raises(InputError, match=r"shape\.ffn_dim"):
        load_bundle(bundle)


def test_heads_must_divide_the_width(bundle):
    edit(bundle, lambda m: m["shape"].update(num_attention_heads=3))
    with pytest.raises(InputError, match=r"shape\.num_attention_heads"):
        load_bundle(bundle)


def test_a_million_layers_cost_nothing(bundle):
    edit(bundle, lambda m: m["shape"].update(num_hidden_layers=1 << 24))
    with pytest.raises(InputError, match="num_hidden_layers"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", -1),
        ("offset", 2**60),
        ("offset", None),
        ("dtype", "object"),
        ("dtype", "int64"),
        ("shape", [10**9, 10**9]),
        ("shape", "all"),
        ("strides", [0]),
        ("strides", [-1, 1]),
        ("strides", [2**47, 2**47]),
        ("file", "../../etc/passwd"),
        ("file", ["model.nir"]),
        ("file", "tokenizer.json"),
        ("transform", "eval"),
    ],
)
def test_a_hostile_view_is_refused_by_name(bundle, key, value):
    edit(bundle, lambda m: m["arrays"]["layers.1.w_2"].update({key: value}))
    with pytest.raises(InputError, match=r"arrays\.layers\.1\.w_2"):
        load_bundle(bundle)


def test_overlapping_views_cannot_claim_more_than_the_files_hold(bundle):
    """Strides of zero would turn one byte into a huge array; the sum of all claims is bounded by the files."""

    def lie(manifest):
        manifest["shape"]["vocab_size"] = 1 << 19
        for name in ("embedding.table", "embedding.row_scale", "head.row_scale", "head.bias"):
            entry = manifest["arrays"][name]
            entry["shape"][0] = 1 << 19
            entry["strides"] = [0] * len(entry["shape"])

    edit(bundle, lie)
    with pytest.raises(InputError, match=r"arrays"):
        load_bundle(bundle)


def test_a_missing_array_is_named(bundle):
    edit(bundle, lambda m: m["arrays"].pop("layers.0.w_1"))
    with pytest.raises(InputError, match=r"'arrays\.layers\.0\.w_1' is missing"):
        load_bundle(bundle)


def test_only_a_bias_may_be_left_out(bundle):
    edit(bundle, lambda m: m["arrays"].update({"layers.0.q.bias": {"constant": 0}}))
    assert not load_bundle(bundle).layers[0].sites["q"].bias.any()
    edit(bundle, lambda m: m["arrays"].update({"layers.0.w_q": {"constant": 0}}))
    with pytest.raises(InputError, match=r"arrays\.layers\.0\.w_q"):
        load_bundle(bundle)


def test_a_flipped_bit_is_found_by_the_hash(bundle):
    data = bytearray((bundle / "model.nir").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.nir").write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"model\.nir: sha256 differs"):
        load_bundle(bundle)


def test_a_truncated_file_is_found_by_its_size(bundle):
    data = (bundle / "model.nir").read_bytes()
    (bundle / "model.nir").write_bytes(data[:-10])
    with pytest.raises(InputError, match=r"model\.nir: .* bytes, but the manifest says"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("embed.threshold", np.float32(-1), "thresholds that are not positive"),
        ("embed.threshold", np.float32(2**25), "thresholds beyond"),
        ("embed.threshold", np.float32(np.nan), "not finite"),
        ("layers.0.q.bias", np.float32(2**22), "beyond the 24-bit membrane"),
        ("layers.0.q.bias", np.float32(0.001), "not integers"),
        ("head.row_scale", np.float64(np.inf), "not finite"),
    ],
)
def test_values_without_meaning_are_refused(bundle, array, value, message):
    entry = read_manifest(bundle)["arrays"][array]
    data = bytearray((bundle / "model.nir").read_bytes())
    data[entry["offset"] : entry["offset"] + value.nbytes] = value.tobytes()
    (bundle / "model.nir").write_bytes(bytes(data))
    edit(bundle, lambda m: None)
    with pytest.raises(InputError, match=message):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("value", "message"), [(3.0, "shifts outside"), (0.5, "shifts outside"), (2.0**17, "shifts outside"), (0, "shifts")]
)
def test_a_shift_that_is_no_power_of_two_is_refused(tmp_path, value, message):
    bundle = write_bundle(random_model(random_shape(**PLUS)), tmp_path / "b")
    entry = read_manifest(bundle)["arrays"]["layers.1.shift_o"]
    data = bytearray((bundle / "model.nir").read_bytes())
    data[entry["offset"] : entry["offset"] + 4] = np.float32(value).tobytes()
    (bundle / "model.nir").write_bytes(bytes(data))
    edit(bundle, lambda m: None)
    with pytest.raises(InputError, match=rf"layers\.1\.shift_o.*{message}"):
        load_bundle(bundle)


def test_a_pipe_does_not_hang_the_reader(bundle):
    (bundle / "model.nir").unlink()
    os.mkfifo(bundle / "model.nir")
    with pytest.raises(InputError, match="not a regular file"):
        load_bundle(bundle)


def test_deeply_nested_json_is_an_error_not_a_crash(bundle):
    (bundle / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="not valid JSON"):
        load_bundle(bundle)
    (bundle / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid JSON"):
        load_bundle(bundle)


def test_a_giant_manifest_is_not_even_read(bundle):
    with open(bundle / "manifest.json", "wb") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(InputError, match="too large for a manifest"):
        load_bundle(bundle)


@pytest.mark.parametrize("target", ["nir", "lava"])
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_random_mutations(tmp_path, target, form):
    """The long version is in tests/slow."""
    write_bundle(random_model(random_shape(**form)), tmp_path / "good", BundleOptions(target=target))
    refused, kinds = 0, set()
    for seed in range(60):
        kind = mutate(tmp_path / "good", tmp_path / "bad", seed)
        kinds.add(kind)
        try:
            assert isinstance(load_bundle(tmp_path / "bad"), SpikeModel)
            assert kind != "wrong tokens", seed
        except InputError as error:
            assert "\n" not in str(error), kind
            refused += 1
    assert refused > 30 and "wrong tokens" in kinds
