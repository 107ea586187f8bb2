"""The definition of the deployable model does not move by accident."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from make_golden import CASES, decode  # noqa: E402

from neuro_sim.dense import DenseDecoder  # noqa: E402
from neuro_sim.event.engine import EventDecoder  # noqa: E402


@pytest.mark.parametrize("backend", [DenseDecoder, EventDecoder])
@pytest.mark.parametrize("name", sorted(CASES))
def test_spikes_and_logits_are_the_stored_ones(name, backend):
    with np.load(Path(__file__).parent / "spikes.npz", allow_pickle=False) as stored:
        found = decode(name, backend)
        assert np.array_equal(found[f"{name}_spikes"], stored[f"{name}_spikes"])
        # float64 from the same integers; libm may differ in the last bit between machines
        assert np.allclose(found[f"{name}_logits"], stored[f"{name}_logits"], rtol=1e-12, atol=1e-12)
        assert np.unpackbits(stored[f"{name}_spikes"]).mean() > 0.02
