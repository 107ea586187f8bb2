"""The quantised twin by the obvious means: the definition of `spikeopd.contracts.model` in numpy, everything counted.

The dense oracle with one step of counts instead of T_s steps of spikes. An input that is zero needs no product, so an
event here is an activation that is not zero: `Activity` says what is counted of a twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim import dense
from neuro_sim.dense import DenseDecoder, spread_map
from spikeopd.contracts import Activity, Site, SpikeModel, row_bytes
from spikeopd.errors import ConfigError

Array = NDArray[Any]


def graded_counts(sums: Array, site: Site, levels: int, parts: int) -> Array:
    """n of every neuron: sums are `parts` times the mean current, in units of a weight or of a product of counts."""
    value = (sums.astype(np.int64) << site.shift) + parts * site.bias.astype(np.int64)
    step = 2 * parts * site.threshold.astype(np.int64)
    return np.clip((2 * levels * value + step // 2) // step, 0, levels)


def unary(counts: Array, levels: int) -> Array:
    """Counts [n] as so many of `levels` steps that fire, bool [levels, n]: how a trace holds them."""
    return np.asarray(counts > np.arange(levels)[:, None])


class GradedDecoder(DenseDecoder):
    """Decode token by token, as `DenseDecoder` does. Its state is the cache of key and value counts alone."""

    def _start(self, current: Array) -> Array:
        return np.asarray(current[None].astype(np.int64) * self.model.shape.num_steps)

    def _fire(self, activity: Activity, layer: int, site: str, currents: Array, neurons: Site | None = None) -> Array:
        levels, row = self.model.shape.num_steps, max(layer, 0)
        parts = levels**2 if site in ("a", "r") else levels
        counts = graded_counts(currents, neurons or self.model.site(layer, site), levels, parts)
        activity.spikes[site][row] += (counts > 0).sum(-1)
        activity.cells[site][row] += counts.shape[-1]
        if self.trace is not None:
            self.trace.add(layer, site, unary(counts[0], levels))
        return counts

    def _attend(self, activity: Activity, index: int, q: Array) -> Array:
        shape, context = self.model.shape, self.position + 1
        heads, head_dim = shape.num_attention_heads, shape.head_dim
        keys, values = (
            np.concatenate(cache[index]).reshape(context, heads, head_dim) for cache in (self.keys, self.values)
        )
        products = q.reshape(heads, head_dim) * keys  # [context, heads, d_h]
        site = spread_map(self.model.layers[index].sites["a"], context)
        a = self._fire(activity, index, "a", products.sum(-1).T.reshape(1, -1), site)
        weighted = a.reshape(heads, context).T[..., None] * values
        fired = int((a > 0).sum())
        activity.sops["coincidence"][index] += int((q > 0).sum()) * context
        activity.additions["coincidence"][index] += int((products > 0).sum())
        activity.sops["av"][index] += fired * head_dim
        activity.additions["av"][index] += int((weighted > 0).sum())
        bits = shape.num_steps.bit_length()  # of a count
        activity.bytes["kv_write"] += 2 * shape.hidden_size * bits // 8
        activity.bytes["kv_read"] += context * shape.hidden_size * bits // 8 + fired * head_dim * bits // 8
        return self._fire(activity, index, "r", weighted.sum(0).reshape(1, -1))

    def _project(self, activity: Activity, layer: int, component: str, spikes: Array, weight: Array) -> Array:
        fan_out = weight.shape[1]
        self._count(activity, layer, component, spikes > 0, fan_out, row_bytes(fan_out, self.model.precision))
        return np.asarray(spikes @ weight.astype(np.int64))

    def _add_gain(self, activity: Activity, layer: int, residual: Array, spikes: Array, gain: Array) -> Array:
        self._count(activity, layer, "residual", spikes > 0, 1, gain.itemsize)
        return np.asarray(residual + spikes * gain.astype(np.int64))

    def _bias(self, bias: Array) -> Array:
        return np.asarray(bias.astype(np.int64) * self.model.shape.num_steps)

    def _count(self, activity: Activity, layer: int, component: str, active: Array, fan_out: int, row: int) -> None:
        """Products of the inputs that are not zero, and the bytes of their rows, `row` each."""
        inputs = int(active.sum())
        activity.sops[component][layer] += inputs * fan_out
        activity.additions[component][layer] += inputs * fan_out
        activity.bytes[component] += inputs * row


def oracle(model: SpikeModel) -> DenseDecoder:
    """The slow simulator that a model's neuron needs."""
    return GradedDecoder(model) if model.shape.graded else dense.DenseDecoder(model)


def refuse_graded(backend: str) -> None:
    """One line for backends that know spikes only."""
    raise ConfigError(
        f"backend {backend}: this bundle is a quantised twin, whose activations are counts and not spikes; "
        "run it with --backend dense"
    )
