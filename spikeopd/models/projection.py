"""Projections of spikes, and what a site's neurons are made of: floats, or on the grid of the deployable integers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from spikeopd.contracts import WEIGHT_SHIFT, weight_limit
from spikeopd.models import grid, products
from spikeopd.models.configuration import BiSpikCLMConfig
from spikeopd.models.gradients import Gradients


class Neurons(NamedTuple):
    """What a site's neurons are made of: [n], [heads, 1, 1] of `a`, [1] where shared. `unit`: see neurons.lif."""

    threshold: Tensor
    bias: Tensor | None = None
    unit: Tensor | None = None


def place(threshold: Tensor, bias: Tensor | None, unit: float, integer: bool) -> Neurons:
    """Threshold and bias as they act: on multiples of `unit` if the neurons are integer."""
    if not integer:
        return Neurons(threshold, bias)
    return Neurons(
        grid.on_unit(threshold, unit, low=1),
        None if bias is None else grid.on_unit(bias, unit),
        torch.tensor([unit], dtype=torch.float64, device=threshold.device),
    )


class SpikeLinear(nn.Linear):
    """A projection of spikes: current = X W^T + b, with W and b as they act: on the config's grid, or on the one of the
    deployable integers. `writes`: it feeds the residual stream, not neurons.
    """

    def __init__(self, fan_in: int, fan_out: int, config: BiSpikCLMConfig, writes: bool = False) -> None:
        super().__init__(fan_in, fan_out)
        self.config, self.writes = config, writes
        self.keep_snapped = True
        self.gradients: Gradients = "fp32"
        self._snapped: tuple[tuple[object, ...], Tensor, Tensor, products.Planes | None] | None = None
        self._scaled: tuple[tuple[object, ...], Tensor] | None = None

    def on_grid(self) -> tuple[Tensor, Tensor]:
        """Weight and bias as they act."""
        return self.lowered()[:2]

    def lowered(self) -> tuple[Tensor, Tensor, products.Planes | None]:
        """Weight and bias as they act, and the weight's integers where int8 holds them. Without gradient they are kept
        until a parameter changes.
        """
        if torch.is_grad_enabled() and self.weight.requires_grad:
            self._snapped = None
            return self._act()
        key = self._state()
        if self._snapped is None or self._snapped[0] != key:
            with torch.no_grad():
                found = self._act()
            if not self.keep_snapped:
                return found
            self._snapped = (key, *found)
        return self._snapped[1:]

    def _act(self) -> tuple[Tensor, Tensor, products.Planes | None]:
        config, bits = self.config, self.config.grid_bits
        if config.deploy_precision != "none":
            scale = self.scale()
            unit = grid.RESIDUAL_UNIT if self.writes else scale / 2**WEIGHT_SHIFT
            steps = grid.steps_of(self.weight, scale, weight_limit(config.deploy_precision))
            scale = scale.to(steps.dtype)
            planes = products.Planes(steps.to(torch.int8), scale)
            weight = grid.straight(steps.mul_(scale[:, None]), self.weight)
            return weight, grid.on_unit(self.bias, unit), planes
        if bits is None:
            return self.weight, self.bias, None
        weight = grid.snap(self.weight, bits)
        fast = config.neuron == "lif" and products.serves(weight)
        return weight, grid.snap(self.bias, bits), products.planes(weight, 2.0**-bits) if fast else None

    def _state(self) -> tuple[object, ...]:
        """Changes whenever what acts does."""
        config = self.config
        return (
            self.weight.data_ptr(), self.weight.dtype, self.weight._version, self.bias._version, config.grid_bits,
            config.deploy_precision, config.threshold,
        )  # fmt: skip

    def scale(self) -> Tensor:
        """sigma_n: what one step of neuron n's integer weights is worth. float64 [out], no gradient."""
        if torch.compiler.is_compiling() or not self.keep_snapped:
            return self._find_scale()
        key = self._state()
        if self._scaled is None or self._scaled[0] != key:
            self._scaled = (key, self._find_scale())
        return self._scaled[1]

    def _find_scale(self) -> Tensor:
        limit = weight_limit(self.config.deploy_precision)
        if self.writes:
            return grid.write_scale(self.weight, limit)
        return grid.site_scale(self.weight, self.bias, self.config.threshold, limit)

    def neurons(self) -> Neurons:
        """The neurons behind the projection on the integer grid; their bias is the projection's."""
        unit = self.scale() / 2**WEIGHT_SHIFT
        threshold = torch.full_like(self.bias, self.config.threshold, dtype=torch.float64)
        return Neurons(grid.on_unit(threshold, unit, low=1).to(self.bias.dtype), None, unit)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, planes = self.lowered()
        if planes is not None and self.config.neuron == "lif" and products.usable(x):
            return products.spike_linear(x, weight, bias, planes, self.gradients)
        return nn.functional.linear(x, weight, bias)

    def unit(self) -> Tensor | float | None:
        """What weights as they act are multiples of: [out] or one for all; None without a grid."""
        if self.config.deploy_precision != "none":
            return self.scale().to(self.weight.dtype)
        bits = self.config.grid_bits
        return None if bits is None else 2.0**-bits
