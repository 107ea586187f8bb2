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

from export.quantize import MODULES, model_shape
from spikeopd.contracts import EMBED_SITE, RESIDUAL, projections
from spikeopd.contracts.topology import INPUT
from spikeopd.models.bispikclm import Recorder
from spikeopd.models.grid import WEIGHT_MAX

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)


@torch.no_grad()
def search_clips(student: BiSpikCLMForCausalLM, windows: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Share of max |W| to keep, per projection and output neuron."""
    # A current write has a power of two for its scale: there is nothing to search.
    searched = [weight for weight in projections(model_shape(student)) if weight.target != RESIDUAL]
    moments = _second_moments(student, windows, {weight.driver for weight in searched})
    return {
        f"layers.{index}.{weight.name}": best_ratios(
            getattr(block, MODULES[weight.name]).on_grid()[0].float(), moments[weight.driver_of(index)]
        ).numpy()
        for index, block in enumerate(student.model.layers)
        for weight in searched
    }


def best_ratios(weight: Tensor, moment: Tensor) -> Tensor:
    """weight [out, in], moment [in, in] -> the best of RATIOS for each output neuron."""
    largest = weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
    errors = []
    for ratio in RATIOS:
        scale = largest * ratio / WEIGHT_MAX
        difference = weight - (weight / scale).round().clamp(-WEIGHT_MAX, WEIGHT_MAX) * scale
        errors.append(((difference @ moment) * difference).sum(1))
    return torch.tensor(RATIOS, dtype=torch.float64)[torch.stack(errors).argmin(0)]


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
