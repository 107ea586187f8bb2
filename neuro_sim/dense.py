"""The obvious slow simulator: the definition of the model in numpy, one token at a time, everything counted.

Nothing here is clever. It is the oracle against which the event engine and the Lava processes are tested,
and the recount against which their event counts are checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.fixed_point import run_site
from spikeopd.contracts import EMBED_SITE, Activity, Layer, Site, SpikeModel, SpikeTrace, head_logits, row_bytes
from spikeopd.errors import InputError

Array = NDArray[Any]


class DenseDecoder:
    """Decode token by token: `logits, activity = decoder.step(token)`. Its state is the K/V spike cache alone."""

    def __init__(self, model: SpikeModel, trace: SpikeTrace | None = None) -> None:
        self.model = model
        self.trace = trace
        # Sums, like membranes, must be exact: int64 for integers, float32 as the exported model has it.
        self._wide: Any = np.int64 if model.integer else np.float32
        head, wide = model.head, np.int64 if model.integer else np.float64
        self._head_rows: Array | None = None  # None: the identity
        if head.gamma is not None:
            self._head_rows = np.multiply(model.embedding.table.T, head.gamma[:, None], dtype=wide)  # [d, vocab]
        elif head.project_out is not None:
            self._head_rows = head.project_out.astype(wide)  # [d, w]
        self._head_sums = 1.0 if self._head_rows is None else self._head_rows.sum(0)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.keys: list[list[Array]] = [[] for _ in self.model.layers]  # per layer and token: bool [T_s, d]
        self.values: list[list[Array]] = [[] for _ in self.model.layers]
        self.position = 0

    def step(self, token: int) -> tuple[Array, Activity]:
        """Feed one token; return its logits (float64 [vocab]) and the events it caused."""
        model, shape = self.model, self.model.shape
        if not 0 <= token < shape.vocab_size:
            raise InputError(f"token {token} is outside the vocabulary of {shape.vocab_size}")
        if self.position >= shape.max_position_embeddings:
            raise InputError(f"the context is full: {self.position} tokens is this model's limit")
        activity = Activity.zeros(shape)
        activity.tokens = 1
        current = model.embedding.current(token, self.position)
        residual = self._start(current)
        spikes = self._fire(activity, -1, EMBED_SITE, residual)
        for index, layer in enumerate(model.layers):
            spikes, residual = self._block(activity, index, layer, spikes, residual)
        logits = self._head(activity, (spikes if shape.readout == "rate" else residual).sum(0))
        width, d = shape.word_embed_proj_dim, shape.hidden_size
        activity.macs["embed"] += width * d if shape.factorised else 0
        item = model.embedding.table.itemsize
        activity.bytes["embed"] += width * item + d * model.embedding.position.itemsize
        if shape.factorised:
            activity.bytes["embed"] += width * d * item
        self.position += 1
        if self.trace is not None:
            self.trace.tokens.append(token)
        return logits, activity

    def _start(self, current: Array) -> Array:
        """h before the first block, [T_s, d]."""
        return np.repeat(current[None].astype(self._wide), self.model.shape.num_steps, 0)

    def _bias(self, bias: Array) -> Array:
        """What a current write adds to h beside its sums."""
        return bias

    def close(self) -> None:
        """Nothing to end; every decoder has it."""

    def _block(self, activity: Activity, index: int, layer: Layer, x: Array, residual: Array) -> tuple[Array, Array]:
        q = self._fire(activity, index, "q", self._project(activity, index, "qkv", x, layer.w_q))
        k = self._fire(activity, index, "k", self._project(activity, index, "qkv", x, layer.w_k))
        v = self._fire(activity, index, "v", self._project(activity, index, "qkv", x, layer.w_v))
        self.keys[index].append(k)
        self.values[index].append(v)
        r = self._attend(activity, index, q)
        residual = self._write(activity, index, "o", "output", r, residual)
        x_mid = self._fire(activity, index, "x", residual)
        f = self._fire(activity, index, "f", self._project(activity, index, "ffn_in", x_mid, layer.w_1))
        residual = self._write(activity, index, "y", "ffn_out", f, residual)
        return self._fire(activity, index, "h", residual), residual

    def _attend(self, activity: Activity, index: int, q: Array) -> Array:
        shape = self.model.shape
        heads, head_dim, context = shape.num_attention_heads, shape.head_dim, self.position + 1
        keys = np.stack(self.keys[index], 1).reshape(shape.num_steps, context, heads, head_dim)
        values = np.stack(self.values[index], 1).reshape(shape.num_steps, context, heads, head_dim)
        queries = q.reshape(shape.num_steps, heads, head_dim)
        counts = (queries[:, None] & keys).sum(-1)  # C: [T_s, context, heads]
        counts = counts.transpose(0, 2, 1).reshape(shape.num_steps, heads * context)
        site = self.model.layers[index].sites["a"]
        a = self._fire(activity, index, "a", counts, spread_map(site, context))
        pairs = a.reshape(shape.num_steps, heads, context).transpose(0, 2, 1)
        z = (pairs[..., None] & values).sum(1).reshape(shape.num_steps, shape.hidden_size)
        q_spikes, a_spikes = q.sum(-1), a.sum(-1)
        activity.sops["coincidence"][index] += q_spikes * context
        activity.additions["coincidence"][index] += counts.sum(-1)
        activity.sops["av"][index] += a_spikes * head_dim
        activity.additions["av"][index] += a_spikes * head_dim if shape.inhibiting else z.sum(-1)
        row_bits = shape.num_steps * shape.hidden_size
        activity.bytes["kv_write"] += 2 * row_bits // 8
        activity.bytes["kv_read"] += context * row_bits // 8 + int(a_spikes.sum()) * head_dim // 8
        neurons, inhibition = self.model.layers[index].sites["r"], self.model.layers[index].inhibition
        if inhibition is None:
            return self._fire(activity, index, "r", z)
        seen = np.repeat(pairs.sum(1), head_dim, axis=-1)  # spikes of its head's map, [T_s, d]
        drive = (z << neurons.shift) + seen * inhibition if self.model.integer else z + seen * inhibition
        return self._fire(activity, index, "r", drive, replace(neurons, shift=0))

    def _fire(self, activity: Activity, layer: int, site: str, currents: Array, neurons: Site | None = None) -> Array:
        spikes, saturations = run_site(currents, neurons or self.model.site(layer, site), self.model.decay)
        row = max(layer, 0)
        activity.spikes[site][row] += spikes.sum(-1)
        activity.cells[site][row] += spikes.shape[-1]
        activity.saturations[site][row] += saturations
        if self.trace is not None:
            self.trace.add(layer, site, spikes)
        return spikes

    def _project(self, activity: Activity, layer: int, component: str, spikes: Array, weight: Array) -> Array:
        """Sum the rows of the inputs that spiked, step by step."""
        events = spikes.sum(-1) * weight.shape[1]
        activity.sops[component][layer] += events
        activity.additions[component][layer] += events
        rows = int(spikes.any(0).sum())
        activity.bytes[component] += rows * row_bytes(weight.shape[1], self.model.precision)
        return np.asarray(spikes.astype(self._wide) @ weight.astype(self._wide))

    def _write(self, activity: Activity, index: int, site: str, component: str, spikes: Array, h: Array) -> Array:
        """h plus what a sublayer adds: spikes of `site` times gains, or its shifted sums themselves."""
        layer = self.model.layers[index]
        sums = self._project(activity, index, component, spikes, layer.w_o if site == "o" else layer.w_2)
        if self.model.shape.residual_write == "spike":
            gain = layer.gain_o if site == "o" else layer.gain_y
            assert gain is not None
            return self._add_gain(activity, index, h, self._fire(activity, index, site, sums), gain)
        shift, bias = (layer.shift_o, layer.bias_o) if site == "o" else (layer.shift_y, layer.bias_y)
        assert bias is not None
        # In float precision the sublayer's own sum comes first, as in the student that was trained.
        return np.asarray(h + ((sums if shift is None else sums << shift) + self._bias(bias)))

    def _add_gain(self, activity: Activity, layer: int, residual: Array, spikes: Array, gain: Array) -> Array:
        activity.sops["residual"][layer] += spikes.sum(-1)
        activity.additions["residual"][layer] += spikes.sum(-1)
        activity.bytes["residual"] += int(spikes.any(0).sum()) * gain.itemsize
        return np.asarray(residual + spikes * gain.astype(self._wide))

    def _head(self, activity: Activity, counts: Array) -> Array:
        shape = self.model.shape
        active = int((counts > 0).sum()) if shape.readout == "rate" else shape.hidden_size
        width = shape.word_embed_proj_dim if shape.factorised else shape.vocab_size
        item = self.model.embedding.table.itemsize
        dense_tail = shape.vocab_size * shape.word_embed_proj_dim if shape.factorised else 0
        activity.macs["head"] += shape.hidden_size * width + dense_tail
        activity.macs["head_active"] += active * width + dense_tail
        activity.bytes["head"] += (active * width + dense_tail) * item
        accumulated = counts if self._head_rows is None else counts @ self._head_rows
        return head_logits(self.model, counts, accumulated, self._head_sums)


def spread_map(site: Site, context: int) -> Site:
    """The map's neurons, one per head and key: thresholds per head, biases per head and distance to the query."""
    if site.bias.ndim == 1:
        bias = np.repeat(site.bias, context)
    else:
        distance = np.minimum(np.arange(context)[::-1], site.bias.shape[1] - 1)
        bias = site.bias[:, distance].reshape(-1)
    return Site(np.repeat(site.threshold, context), bias, site.shift)


def unmasked_coincidences(activity: Activity, context: int) -> Array:
    """SOPs of a square attention over `context` keys: every query spike visits every key. [layers, T_s]"""
    return np.asarray(activity.spikes["q"] * context)
