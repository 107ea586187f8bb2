"""Bundles: what is written is what is read, in every profile, and writing again gives the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import h5py
import nir
import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_model, random_shape
from small_students import small_student

from export.bundle_writer import BundleOptions, bundle_draft, write_bundle
from export.quantize import lower
from spikeopd.contracts.bundle import array_specs, load_bundle, model_arrays, read_manifest
from spikeopd.errors import InputError

PROFILES = {
    "cell": BundleOptions(),
    "cell-lif": BundleOptions(neuron="lif"),
    "unrolled": BundleOptions(profile="unrolled", context=3),
    "lava": BundleOptions(target="lava"),
}


def assert_same(a, b):
    assert a.shape == b.shape and a.precision == b.precision and a.decay == b.decay
    assert a.embedding.shift == b.embedding.shift and a.head.epsilon == b.head.epsilon
    left, right = model_arrays(a), model_arrays(b)
    for name, values in left.items():
        assert values.dtype == right[name].dtype and np.array_equal(values, right[name]), name
    for index, layer in enumerate(a.layers):
        for site, values in layer.sites.items():
            other = b.layers[index].sites[site]
            assert values.shift == other.shift and np.array_equal(values.bias, other.bias), (index, site)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_what_is_written_is_read(tmp_path, profile, width, form):
    model = random_model(random_shape(width=width, **form))
    write_bundle(model, tmp_path / "b", PROFILES[profile])
    assert_same(model, load_bundle(tmp_path / "b"))


@pytest.mark.parametrize("profile", ["cell", "cell-lif", "unrolled"])
@pytest.mark.parametrize("bias", [True, False])
def test_float_bundles_too(tmp_path, profile, bias):
    model = lower(small_student(bias=bias), "float32").model
    write_bundle(model, tmp_path / "b", PROFILES[profile])
    assert_same(model, load_bundle(tmp_path / "b"))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_write_read_write_is_stable_to_the_byte(tmp_path, profile, form):
    write_bundle(random_model(random_shape(**form)), tmp_path / "first", PROFILES[profile])
    write_bundle(load_bundle(tmp_path / "first"), tmp_path / "second", PROFILES[profile])
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_int8_weights_are_stored_as_int8(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    arrays = read_manifest(tmp_path / "b")["arrays"]
    with h5py.File(tmp_path / "b" / "model.nir") as file:
        for name in ("layers.0.w_q", "layers.1.w_2", "embedding.table"):
            assert file[arrays[name]["path"]].dtype == np.int8


def test_plain_nir_reads_it_and_names_sort_topologically(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    # A fresh interpreter that may not import this project's packages.
    code = (
        "import sys, nir\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('spikeopd', 'export', 'neuro_sim', 'torch'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "g = nir.read(sys.argv[1]); print(sorted(g.nodes) == list(g.nodes), len(g.nodes))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b" / "model.nir")], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["True", "7"]  # current, two blocks, three nodes of the last site, spikes
    graph = nir.read(tmp_path / "b" / "model.nir")
    for part in (graph, *(node for node in graph.nodes.values() if isinstance(node, nir.NIRGraph))):
        backward = [(a, b) for a, b in part.edges if a > b]
        assert all(a.endswith("_reset") and b.endswith("_membrane") for a, b in backward)
        assert not any("/" in name for name in part.nodes)


def test_the_cell_profile_says_loudly_what_it_leaves_out(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    about = nir.read(tmp_path / "b" / "model.nir").metadata["spikeopd"]
    assert "Replicate" in str(about["warning"]) and "self-attention" in str(about["warning"])
    assert "token j" in str(about["replicate"])


def test_a_model_of_the_papers_block_is_still_of_schema_1(tmp_path):
    """The file that the first version wrote: none of the better block's arrays, and it reads back whole."""
    model = random_model()
    write_bundle(model, tmp_path / "b")
    manifest = read_manifest(tmp_path / "b")
    assert manifest["schema"] == "spikeopd.bundle/1" and not {"distances", "residual_write"} & set(manifest["shape"])
    assert "layers.0.shift_y" not in manifest["arrays"]
    found = load_bundle(tmp_path / "b")
    assert np.array_equal(found.layers[0].w_o, model.layers[0].w_o) and found.shape == model.shape


def test_schema_2_by_hand(tmp_path):
    """A current write is a plain int8 matrix, a power of two and a constant current; every array a view of the file."""
    model = random_model(random_shape(layers=1, **PLUS))
    write_bundle(model, tmp_path / "b")
    manifest = read_manifest(tmp_path / "b")
    assert manifest["schema"] == "spikeopd.bundle/2"
    assert {name: manifest["shape"][name] for name in ("residual_write", "readout", "distances")} == {
        "residual_write": "current", "readout": "residual", "distances": 5,
    }  # fmt: skip
    layer, views = model.layers[0], manifest["arrays"]
    graph = nir.read(tmp_path / "b" / "model.nir")
    block = {name.partition("_")[2]: node for name, node in graph.nodes["n00001_block"].nodes.items()}
    assert block["w_o"].weight.dtype == np.int8 and np.array_equal(block["w_o"].weight.T, layer.w_o)
    assert np.array_equal(block["shift_y"].scale, 2.0**layer.shift_y)
    assert views["layers.0.shift_y"]["transform"] == "exponent"
    assert np.array_equal(block["count"].bias, layer.sites["a"].bias[:, 0] / 1024)  # the pair (i, i)
    assert np.array_equal(graph.metadata["distance_bias"]["layer000"], layer.sites["a"].bias)
    about = graph.metadata["spikeopd"]
    assert "min(i - j, distances - 1)" in str(about["distance"]) and "residual stream" in str(about["output"])
    with h5py.File(tmp_path / "b" / "model.nir") as file:
        for name, values in (("bias_o", layer.bias_o), ("x.bias", layer.sites["x"].bias)):
            assert np.array_equal(file[views[f"layers.0.{name}"]["path"]], values)
        assert np.array_equal(file[views["layers.0.r.bias"]["path"]], layer.sites["r"].bias / 1024)


def test_an_old_bundle_is_replaced_but_nothing_else(tmp_path):
    write_bundle(random_model(seed=1), tmp_path / "b")
    write_bundle(random_model(seed=2), tmp_path / "b")
    assert_same(random_model(seed=2), load_bundle(tmp_path / "b"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a bundle"):
        write_bundle(random_model(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_stranger_s_manifest_is_no_bundle(tmp_path):
    """A browser extension has a manifest.json too."""
    (tmp_path / "mine").mkdir()
    for content in ('{"manifest_version": 3, "name": "extension"}', "not even JSON"):
        (tmp_path / "mine" / "manifest.json").write_text(content)
        with pytest.raises(InputError, match="exists and is not a bundle"):
            write_bundle(random_model(), tmp_path / "mine")
        assert (tmp_path / "mine" / "manifest.json").read_text() == content
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists and is not a bundle"):
        write_bundle(random_model(), tmp_path / "link")


def test_a_bundle_with_something_of_the_user_s_in_it_is_kept(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    (tmp_path / "b" / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"run\.json is not part of it; move it"):
        write_bundle(random_model(seed=2), tmp_path / "b")
    assert (tmp_path / "b" / "run.json").read_text() == "{}"
    assert_same(random_model(), load_bundle(tmp_path / "b"))


def test_what_was_added_while_the_bundle_was_written_is_kept_too(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    draft = bundle_draft(random_model(seed=2), tmp_path / "b", BundleOptions())
    with pytest.raises(InputError, match=r"run\.json is not part of it"), draft:
        (tmp_path / "b" / "run.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert_same(random_model(), load_bundle(tmp_path / "b"))


def test_the_working_folder_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is the working folder"):
        write_bundle(random_model(), ".")


def test_a_disk_that_fails_on_the_way_is_one_line(tmp_path):
    draft = bundle_draft(random_model(), tmp_path / "b", BundleOptions())
    with pytest.raises(InputError, match=r"--output .*b: cannot be written \(No space left on device\)"), draft:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not any(tmp_path.iterdir())


def test_reading_needs_neither_torch_nor_nir_nor_hdf5(tmp_path):
    write_bundle(random_model(), tmp_path / "b")
    code = (
        "import sys; from spikeopd.contracts.bundle import load_bundle; load_bundle(sys.argv[1]);"
        "print([name for name in ('torch', 'nir', 'h5py', 'export') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_manifest_lists_every_array_of_the_model(tmp_path):
    model = random_model()
    write_bundle(model, tmp_path / "b")
    assert set(read_manifest(tmp_path / "b")["arrays"]) == set(array_specs(model.shape, "int8"))
