"""Events of a token counted from its recorded spikes, for backends that can report spikes but do not count.

The dense oracle counts while it computes; this counts afterwards, from the spikes alone. Both must agree exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import EMBED_SITE, Activity, SpikeModel, connections, fetched_bytes, ordered_sites
from spikeopd.contracts.topology import outer_macs

Array = NDArray[Any]
SiteKey = tuple[int, str]


class EventCounter:
    """Counts one sequence, token by token. Of the past it keeps only sums of the key and value spikes."""

    def __init__(self, model: SpikeModel) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence."""
        shape = self.model.shape
        layers, steps = shape.num_hidden_layers, shape.num_steps
        self._key_sums = np.zeros((layers, steps, shape.hidden_size), np.int64)  # over positions, per key bit
        self._value_bits = np.zeros(  # per position: value spikes of each head
            (layers, steps, shape.num_attention_heads, shape.max_position_embeddings), np.int32
        )
        self.picked = np.zeros((layers, steps), np.int64)  # value spikes that the last token's map picked
        self.position = 0

    def count(self, spikes: Mapping[SiteKey, Array], saturations: Mapping[SiteKey, Array]) -> Activity:
        """Activity of the next token. spikes: bool [T_s, n] per (layer, site), `a` head-major; saturations: [T_s]."""
        model, shape = self.model, self.model.shape
        activity = Activity.zeros(shape)
        activity.tokens = 1
        totals: dict[SiteKey, Array] = {}
        for key in ordered_sites(shape):
            layer, site = max(key[0], 0), key[1]
            totals[key] = spikes[key].sum(-1)
            activity.spikes[site][layer] = totals[key]
            activity.cells[site][layer] = spikes[key].shape[-1]
            activity.saturations[site][layer] = saturations[key]
        for index in range(shape.num_hidden_layers):
            self._count_layer(activity, index, spikes, totals)
        last = spikes[shape.num_hidden_layers - 1, "h"] if shape.num_hidden_layers else spikes[-1, EMBED_SITE]
        # A head that reads the residual stream has no silent rows.
        _count_host(activity, model, int(last.any(0).sum()) if shape.readout == "rate" else shape.hidden_size)
        self.position += 1
        return activity

    def _count_layer(
        self, activity: Activity, index: int, spikes: Mapping[SiteKey, Array], totals: Mapping[SiteKey, Array]
    ) -> None:
        shape = self.model.shape
        for connection in connections(shape):
            if connection.fan_out is None or connection.component == "av":  # these read the cache, below
                continue
            component, driver = connection.component, connection.driver_of(index)
            activity.sops[component][index] += totals[driver] * connection.fan_out
            activity.additions[component][index] += totals[driver] * connection.fan_out
            read = fetched_bytes(connection, self.model.precision)
            activity.bytes[component] += int(spikes[driver].any(0).sum()) * read

        steps, heads, context = shape.num_steps, shape.num_attention_heads, self.position + 1
        q, k, v = (spikes[index, site] for site in "qkv")
        self._key_sums[index] += k
        bits = self._value_bits[index][:, :, :context]
        bits[:, :, self.position] = v.reshape(steps, heads, -1).sum(-1)
        # A coincidence needs both spikes: sum over keys first. The map selects value rows: sum their bits first.
        activity.additions["coincidence"][index] = (q * self._key_sums[index]).sum(-1)
        a = spikes[index, "a"].reshape(steps, heads, context)
        # An attended token that inhibits adds to every neuron of its head, one that does not only where its value is.
        self.picked[index] = (a * bits).sum((1, 2))
        reached = totals[index, "a"] * shape.head_dim if shape.inhibiting else self.picked[index]
        activity.additions["av"][index] = reached
        activity.sops["coincidence"][index] = totals[index, "q"] * context
        activity.sops["av"][index] = totals[index, "a"] * shape.head_dim
        row_bits = steps * shape.hidden_size
        activity.bytes["kv_write"] += 2 * row_bits // 8
        activity.bytes["kv_read"] += context * row_bits // 8 + int(totals[index, "a"].sum()) * shape.head_dim // 8


def _count_host(activity: Activity, model: SpikeModel, active: int) -> None:
    """Dense work outside the blocks. active: inputs of the head that are not silent."""
    shape, table = model.shape, model.embedding.table
    width = shape.word_embed_proj_dim
    tail = shape.vocab_size * width if shape.factorised else 0
    activity.macs |= outer_macs(shape, 1)
    activity.macs["head_active"] = active * (width if shape.factorised else shape.vocab_size) + tail
    activity.bytes["head"] = activity.macs["head_active"] * table.itemsize
    activity.bytes["embed"] = (width + activity.macs["embed"]) * table.itemsize
    activity.bytes["embed"] += shape.hidden_size * model.embedding.position.itemsize
