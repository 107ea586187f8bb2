"""The raster holds the spikes that were recorded, and nothing that the form of the block does not have."""

from __future__ import annotations

import numpy as np
import pytest
from random_models import INHIBITING, PLUS, random_shape
from random_runs import make_run

from energy.render.raster import load_groups, mask_png, raster_html
from spikeopd.contracts import SpikeTrace, ordered_sites, save_trace
from spikeopd.errors import InputError


@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_raster_of_a_trace(tmp_path, form: dict) -> None:
    """The file neuro_sim writes, read back and drawn."""
    shape = random_shape(heads=2, head_dim=4, **form)
    traces = [SpikeTrace(), SpikeTrace()]
    for seed, trace in enumerate(traces):
        make_run(shape, prompts=(3,), generated=(3,), seed=seed, trace=trace, drive=2.0)
    save_trace(tmp_path / "t.npz", traces, 2)
    trace = load_groups(tmp_path / "t.npz", shape)
    assert list(trace) == [key for key in ordered_sites(shape) if key[1] != "a"]
    for key, rows in trace.items():
        assert np.array_equal(rows, np.concatenate([np.concatenate(t.sites[key]) for t in traces]))
    page = raster_html(tmp_path / "t.npz", shape)
    assert page.count("data:image/png;base64,") == 2 * len(trace)
    assert f"rate {trace[1, 'h'].mean():.4f}" in page and page.count(" selected") == 1


def test_mask_png_round_trip() -> None:
    """The picture holds exactly the bits: read back without an image library."""
    import zlib

    bits = np.random.default_rng(1).random((5, 13)) < 0.5
    data = mask_png(bits)
    start = data.index(b"IDAT") + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = np.frombuffer(zlib.decompress(data[start : start + length]), np.uint8).reshape(5, -1)
    assert (rows[:, 0] == 0).all()
    assert np.array_equal(np.unpackbits(rows[:, 1:], axis=1)[:, :13].astype(bool), bits)


def test_bad_traces_are_named(tmp_path) -> None:
    with pytest.raises(InputError, match="gone.npz"):
        load_groups(tmp_path / "gone.npz", random_shape())
    (tmp_path / "junk.npz").write_bytes(b"junk")
    with pytest.raises(InputError, match="junk.npz"):
        load_groups(tmp_path / "junk.npz", random_shape())
    np.savez(tmp_path / "flat.npz", **{"0/0.h": np.zeros(4, bool)})
    with pytest.raises(InputError, match="'0/0.h'"):
        load_groups(tmp_path / "flat.npz", random_shape())
    np.savez(tmp_path / "objects.npz", **{"0/0.h": np.array([{}], dtype=object)})
    with pytest.raises(InputError, match="objects.npz"):
        load_groups(tmp_path / "objects.npz", random_shape())
