r"""Choose each output neuron's clipping scale from data: the one with the least error of its input current.

With spikes x and rounding error D = W - W', the mean squared error of a neuron's current is D G D^T, where
G = E[x x^T] is measured on calibration text. Clipping the largest weights buys a finer scale for all others; where it
does not lower the error the full range stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.quantize import MODULES, best_ratios, model_shape
from spikeopd.contracts import EMBED_SITE, RESIDUAL, Precision, projections, weight_limit
from spikeopd.contracts.topology import INPUT
from spikeopd.models.bispikclm import Recorder

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM


@torch.no_grad()
def search_clips(
    student: BiSpikCLMForCausalLM, windows: NDArray[Any], precision: Precision = "int8"
) -> dict[str, NDArray[Any]]:
    """Share of max |W| to keep, per projection and output neuron."""
    # A current write has a power of two for its scale: there is nothing to search.
    searched = [weight for weight in projections(model_shape(student)) if weight.target != RESIDUAL]
    moments = _second_moments(student, windows, {weight.driver for weight in searched})
    return {
        f"layers.{index}.{weight.name}": best_ratios(
            getattr(block, MODULES[weight.name]).on_grid()[0].float(),
            moments[weight.driver_of(index)],
            weight_limit(precision),
        ).numpy()
        for index, block in enumerate(student.model.layers)
        for weight in searched
    }


def _second_moments(
    student: BiSpikCLMForCausalLM, windows: NDArray[Any], drivers: set[str]
) -> dict[tuple[int, str], Tensor]:
    """E[x x^T] of every site that drives a searched weight."""
    sites = [EMBED_SITE, *("h" if site == INPUT else site for site in drivers)]
    moments: dict[tuple[int, str], Tensor] = {}
    count = 0
    for window in windows:
        recorder = Recorder(sites=sites)
        student(torch.from_numpy(np.asarray(window))[None], use_cache=False, recorder=recorder)
        for key, spikes in recorder.spikes.items():
            rows = spikes.flatten(0, 2)
            moments[key] = moments.get(key, 0) + rows.T @ rows
        count += recorder.spikes[-1, EMBED_SITE].flatten(0, 2).shape[0]
    return {key: value / count for key, value in moments.items()}
