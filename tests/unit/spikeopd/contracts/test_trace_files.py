"""Spike traces of strangers: bounded by the model's shape and by the file before anything is allocated."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from random_models import random_shape

from spikeopd.contracts import SpikeTrace, load_trace, save_trace
from spikeopd.errors import InputError

SHAPE = random_shape()
T, D, F = SHAPE.num_steps, SHAPE.hidden_size, SHAPE.ffn_dim


def spikes(*size):
    return np.zeros(size, bool)


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def header(shape, dtype="|b1", data=b""):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


def test_what_is_written_is_read_with_and_without_the_shape(tmp_path):
    trace = SpikeTrace(tokens=[1, 2])
    for position in range(2):
        trace.add(-1, "embed", spikes(T, D))
        trace.add(0, "f", np.ones((T, F), bool))
        trace.add(0, "a", np.ones((T, SHAPE.num_attention_heads * (position + 1)), bool))
    path = save_trace(tmp_path / "t.npz", [trace], SHAPE.num_attention_heads)
    for options in ({}, {"shape": SHAPE}):
        (again,) = load_trace(path, **options)
        assert again.tokens == [1, 2] and list(again.sites) == [(-1, "embed"), (0, "a"), (0, "f")]
        assert all(
            np.array_equal(a, b) for key in trace.sites for a, b in zip(trace.sites[key], again.sites[key], strict=True)
        )


BAD = {
    "layer": {"0/30000000.q": spikes(1, T, D)},
    "unknown site": {"0/0.zz": spikes(1, T, D)},
    "site without layer": {"0/q": spikes(1, T, D)},
    "embedding with layer": {"0/0.embed": spikes(1, T, D)},
    "width": {"0/0.q": spikes(1, T, D + 1)},
    "steps": {"0/0.q": spikes(1, T + 1, D)},
    "too many tokens": {"0/0.q": spikes(SHAPE.max_position_embeddings + 1, T, D)},
    "axes": {"0/0.q": spikes(T, D)},
    "floats": {"0/0.q": np.zeros((1, T, D))},
    "text": {"0/0.q": np.array([[["x"]]])},
    "tokens": {"0/tokens": np.array(["a"])},
    "tokens of two axes": {"0/tokens": np.zeros((2, 2), np.int64)},
}


@pytest.mark.parametrize("kind", BAD)
def test_what_the_model_does_not_have_is_refused(tmp_path, kind):
    with pytest.raises(InputError, match="trace .*: cannot be read") as caught:
        load_trace(npz(tmp_path / "t.npz", **BAD[kind]), shape=SHAPE)
    assert len(str(caught.value)) < 500


def test_unequal_widths_without_a_shape_are_the_readers_business(tmp_path):
    path = npz(tmp_path / "t.npz", **{"0/0.q": spikes(1, T, D), "1/0.q": spikes(1, T, D + 3)})
    assert len(load_trace(path)) == 2
    with pytest.raises(InputError):
        load_trace(path, shape=SHAPE)


@pytest.mark.parametrize(
    "member",
    [
        header((1 << 34,)), header((1 << 20, 1 << 10, 1 << 4)), header((1, T, 1 << 62)), header((-1, T, D)),
        header((1, T, D)), b"", b"\x93NUMPY\x09\x00", header((1, T, D), "|O"),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"shape": SHAPE}])
def test_a_claimed_shape_is_checked_before_it_is_allocated(tmp_path, member, options):
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0/0.q.npy", member)
    with pytest.raises(InputError, match="trace "):
        load_trace(tmp_path / "t.npz", **options)


def test_a_small_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("spikeopd.contracts.trace.TRACE_LIMIT", 1 << 20)
    path = npz(tmp_path / "t.npz", **{"0/0.q": spikes(1 << 10, 1, 1 << 9), "0/0.k": spikes(1 << 10, 1, 1 << 10)})
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match="more than the file can hold"):
        load_trace(path)


def test_a_bad_trace_is_a_warning_of_the_report(tmp_path):
    import json
    import warnings
    from importlib import resources

    import energy

    run = json.loads((resources.files("energy") / "data" / "example_run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(run | {"trace": "t.npz"}))
    for arrays in BAD.values():
        npz(tmp_path / "t.npz", **arrays)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            page = energy.report(tmp_path / "run.json").render("html")
        assert "</html>" in page and 'id="raster"' not in page and "no spike raster" in str(caught[0].message)
