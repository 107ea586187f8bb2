r"""The neuron, defined once (paper Eq. lif), with its reset-aware adjoint (Eq. app_adjoint_recursion).

    u[t] = alpha u[t-1] + I[t] - V s[t-1]        u[0] = s[0] = 0
    s[t] = 1 if u[t] >= V else 0

The reset is subtractive, arrives one step late and is not decayed; the comparison is `>=`.
`lif` runs all steps from rest on `[time, ...]`; `lif_step` is one step, for reading and for checking.
With `scaled`, the surrogate sees u/V - 1 instead of u - V: the same spikes, a usable gradient where V is far from 1.
With `rates`, the backward pass goes through firing rates: it takes and gives the mean over the steps (gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN
from spikeopd.models import lif_cpu, lif_triton
from spikeopd.models.gradients import Gradients, over_steps
from spikeopd.models.surrogate import psi, spike
from spikeopd.registry import GRADED, NEURONS, load

Neuron = Callable[..., Tensor]  # with the arguments of `lif`; registry.NEURONS lists them


def lif_step(
    current: Tensor,
    membrane: Tensor,
    spikes: Tensor,
    threshold: Tensor | float,
    alpha: float = 0.9,
    xi: float = 2.0,
    scaled: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step, differentiable by plain autograd: (membrane, spikes)."""
    membrane = alpha * membrane + current - threshold * spikes
    return membrane, spike(membrane / threshold - 1 if scaled else membrane - threshold, xi)


def lif(
    current: Tensor,
    threshold: Tensor,
    alpha: float = 0.9,
    xi: float = 2.0,
    scaled: bool = False,
    unit: Tensor | None = None,
    rates: bool = False,
) -> Tensor:
    """Spikes of all steps. current [time, ...]; threshold broadcasts against current[0] and may be learned.

    unit: with it the neuron is the integer one of `spikeopd.contracts`, in floats: currents and thresholds are
    multiples of `unit` (powers of two, shaped as the threshold or [1]), the decay truncates, membranes have 24 bits.
    """
    if unit is not None:
        unit = unit.to(current.dtype).expand_as(threshold)
    elif not torch.is_grad_enabled() and lif_cpu.usable(current, threshold):
        return lif_cpu.spikes(current, threshold.to(current.dtype), alpha)
    return _LIF.apply(current, threshold, alpha, xi, scaled, unit, rates)


def neuron_of(config: Any, gradients: Gradients = "fp32") -> Neuron:
    """The neuron that a student's config names."""
    neuron: Neuron = load(NEURONS[config.neuron])
    if config.neuron in GRADED:  # one step: nothing to average
        return partial(neuron, levels=config.num_steps)
    return partial(neuron, rates=True) if gradients == "rates" else neuron


@torch.no_grad()
def lif_membrane(current: Tensor, threshold: Tensor, alpha: float = 0.9, unit: Tensor | None = None) -> Tensor:
    """Membranes u[t] of all steps, for diagnostics; no gradient."""
    return _forward(current, threshold, alpha, unit)[0]


def rate_proxy(x: Tensor, num_steps: int, threshold: float | Tensor, alpha: float = 0.9) -> Tensor:
    """R_Ts(x): firing rate of the neuron under the constant current x (Eq. app_teacher_spike_proxy). No gradient."""
    limit = torch.as_tensor(threshold, dtype=x.dtype, device=x.device)
    if x.dim() and lif_cpu.usable(x[None], limit):
        return lif_cpu.rates(x, limit, num_steps, alpha)
    with torch.no_grad():
        membrane, spikes, total = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(num_steps):
            membrane = alpha * membrane + x - threshold * spikes
            spikes = (membrane >= threshold).to(x.dtype)
            total += spikes
        return total / num_steps


def _forward(current: Tensor, threshold: Tensor, alpha: float, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    membrane, spikes = torch.empty_like(current), torch.empty_like(current)
    u = s = torch.zeros_like(current[0])
    for t in range(current.shape[0]):
        if unit is None:
            u = alpha * u + current[t] - threshold * s
        else:  # float64 holds every intermediate value exactly
            wide = unit.double()
            decayed = (u / wide * (round(alpha * 2**DECAY_BITS) / 2**DECAY_BITS)).trunc() * wide
            u = (decayed + current[t] - threshold.double() * s) / wide
            u = (u.clamp(MEMBRANE_MIN, MEMBRANE_MAX) * wide).to(current.dtype)
        s = (u >= threshold).to(current.dtype)
        membrane[t], spikes[t] = u, s
    return membrane, spikes


def _backward(
    grad: Tensor, membrane: Tensor, threshold: Tensor, alpha: float, xi: float, scaled: bool
) -> tuple[Tensor, Tensor]:
    r"""a[t] = psi_t g[t] + alpha a[t+1],  g[t] = dL/ds[t] - V a[t+1]:  Eq. app_adjoint_recursion, with J in two parts.

    dL/dI[t] = a[t];  dL/dV = - sum_t ( psi_t g[t] + a[t] s[t-1] ).
    Scaled: psi_t = psi(u[t]/V - 1) / V, and psi_t g[t] counts u[t]/V times in dL/dV.
    """
    scale = 1 / threshold if scaled else torch.ones_like(threshold)
    adjoint = torch.empty_like(membrane)
    threshold_grad = torch.zeros_like(membrane[0])
    following = torch.zeros_like(membrane[0])
    for t in range(membrane.shape[0] - 1, -1, -1):
        distance = (membrane[t] - threshold) * scale
        through_spike = psi(distance, xi) * scale * (grad[t] - threshold * following)
        following = through_spike + alpha * following
        adjoint[t] = following
        threshold_grad -= through_spike * (1 + distance) if scaled else through_spike
        if t:
            threshold_grad -= following * (membrane[t - 1] >= threshold)
    return adjoint, threshold_grad


class _LIF(torch.autograd.Function):
    """Saves the membranes only: spikes are recomputed from them. Compiled for the CPU it saves the current instead,
    whose memory is there already, and recomputes both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        current: Tensor,
        threshold: Tensor,
        alpha: float,
        xi: float,
        scaled: bool,
        unit: Tensor | None,
        rates: bool,
    ) -> Tensor:
        threshold = threshold.to(current.dtype)
        ctx.alpha, ctx.xi, ctx.scaled, ctx.rates = alpha, xi, scaled, rates
        if lif_cpu.usable(current, threshold):
            ctx.save_for_backward(current, threshold, unit)
            return lif_cpu.spikes(current, threshold, alpha, unit)
        if unit is None and lif_triton.usable(current, threshold):
            membrane, spikes = lif_triton.forward(current, threshold, alpha)
        else:
            membrane, spikes = _forward(current, threshold, alpha, unit)
        ctx.save_for_backward(membrane, threshold)
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how = (ctx.alpha, ctx.xi, ctx.needs_input_grad[1], ctx.scaled)
        saved, shape = ctx.saved_tensors, grad.shape
        grad = over_steps(grad) if ctx.rates else grad
        if len(saved) == 3:
            current, threshold, unit = saved
            found = lif_cpu.backward(grad, current, threshold, *how, unit)
        else:
            membrane, threshold = saved
            grad = grad.expand(shape)
            if lif_triton.usable(membrane, threshold):
                found = lif_triton.backward(grad, membrane, threshold, *how)
            else:
                adjoint, wide = _backward(grad, membrane, threshold, ctx.alpha, ctx.xi, ctx.scaled)
                found = adjoint, wide.sum_to_size(threshold.shape)
        by_current, by_threshold = found
        if ctx.rates:
            by_current = over_steps(by_current).expand(shape)
        return by_current, by_threshold, None, None, None, None, None
