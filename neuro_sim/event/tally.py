"""From the few numbers the event kernels count to every event of a token, and from masks to traces."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.event.constants import NUM_DRIVERS
from neuro_sim.event.plan import Record
from spikeopd.contracts import EMBED_SITE, LAYER_SITES, Activity, SpikeModel, SpikeTrace, connections, fetched_bytes
from spikeopd.contracts.topology import INPUT, outer_macs

Array = NDArray[Any]
DRIVERS = (INPUT, "r", "x", "f", "o", "y")  # whose active rows the kernels count, in the order of constants.FROM_*
assert len(DRIVERS) == NUM_DRIVERS


class Tally:
    """Builds the Activity of every token of a block. What does not change from token to token is computed once."""

    def __init__(self, model: SpikeModel, plan: Record) -> None:
        shape, self.plan = model.shape, plan
        d, layers, steps = plan.hidden, plan.layers, plan.steps
        self._sites, self._components = shape.layer_sites, shape.layer_components
        self._columns = np.array([LAYER_SITES.index(site) for site in self._sites])  # of the kernels' counters
        sizes = [shape.site_size(site, 0) for site in self._sites]
        self._cells = np.repeat(np.array(sizes, np.int64), layers * steps).reshape(len(sizes), layers, steps)
        # Operations of one spike, and bytes of one active row: by component and by the site that drives it.
        drivers = (*self._sites, INPUT)
        self._fan_out = np.zeros((len(self._components), len(drivers)), np.int64)
        self._row_bytes = np.zeros((len(self._components), NUM_DRIVERS), np.int64)
        for connection in connections(shape):
            component = self._components.index(connection.component)
            if connection.fan_out is not None:
                self._fan_out[component, drivers.index(connection.driver)] += connection.fan_out
            if connection.driver in DRIVERS:
                read = fetched_bytes(connection, model.precision)
                self._row_bytes[component, DRIVERS.index(connection.driver)] += read
        self._coincidence, self._av = (self._components.index(name) for name in ("coincidence", "av"))
        self._query, self._map, self._last = (self._sites.index(site) for site in ("q", "a", "h"))
        self._macs, self._inhibiting = outer_macs(shape, 1), shape.inhibiting
        self._tail = shape.vocab_size * shape.word_embed_proj_dim if plan.factorised else 0
        self._outputs = shape.word_embed_proj_dim if plan.factorised else shape.vocab_size
        position = d * model.embedding.position.itemsize
        self._embed_bytes = shape.word_embed_proj_dim + position + self._macs["embed"]

    def activities(
        self, spikes: Array, saturations: Array, additions: Array, active: Array, head_active: Array, positions: Array
    ) -> list[Activity]:
        """Counters of n lanes as `kernels` keeps them: [n, layers + 1, 10, T_s] twice, [n, layers, 2, T_s],
        [n, layers, 6]; head_active and positions [n].

        The head is counted for every token, as the contract has it, also for a prompt's tokens whose logits nobody
        wants. Arrays are fresh: the caller may add to them.
        """
        plan, lanes, contexts = self.plan, len(positions), positions + 1
        layers, steps, d = plan.layers, plan.steps, plan.hidden
        embed = spikes[:, layers:, 0].copy()
        by_driver = np.empty((lanes, len(self._sites) + 1, layers, steps), np.int64)
        by_site = by_driver[:, :-1]
        by_site[:] = spikes[:, :layers].swapaxes(1, 2)[:, self._columns]
        by_driver[:, -1, 0] = embed[:, 0]
        by_driver[:, -1, 1:] = by_site[:, self._last, :-1]
        cells = np.empty((lanes, *self._cells.shape), np.int64)
        cells[:] = self._cells
        cells[:, self._map] = plan.heads * contexts[:, None, None]
        sops = (self._fan_out @ by_driver.reshape(lanes, len(by_driver[0]), -1)).reshape(lanes, -1, layers, steps)
        sops[:, self._coincidence] = by_site[:, self._query] * contexts[:, None, None]
        really = sops.copy()
        really[:, self._coincidence] = additions[:, :, 0]
        if not self._inhibiting:  # else every neuron of the head is reached, as the operations say
            really[:, self._av] = additions[:, :, 1]
        saturated = saturations[:, :layers].swapaxes(1, 2)[:, self._columns]
        of_embed = np.full((lanes, 1, steps), d, np.int64), saturations[:, layers:, 0].copy()
        unmasked = np.zeros((lanes, layers, steps), np.int64)
        read = (active.sum(1) @ self._row_bytes.T).tolist()
        kv_read = layers * (contexts * steps * d // 8) + (sops[:, self._av].sum(2) // 8).sum(1)
        active_macs = head_active * self._outputs + self._tail
        return [
            Activity(
                tokens=1,
                spikes=self._by_site(embed[lane], by_site[lane]),
                cells=self._by_site(of_embed[0][lane], cells[lane]),
                saturations=self._by_site(of_embed[1][lane], saturated[lane]),
                sops=dict(zip(self._components, sops[lane], strict=True)),
                sops_unmasked=unmasked[lane],
                additions=dict(zip(self._components, really[lane], strict=True)),
                macs=self._macs | {"head_active": head},
                bytes={
                    **dict(zip(self._components, read[lane], strict=True)),
                    "embed": self._embed_bytes,
                    "head": head,
                    "kv_read": cached,
                    "kv_write": layers * (2 * steps * d // 8),
                },
            )
            for lane, (head, cached) in enumerate(zip(active_macs.tolist(), kv_read.tolist(), strict=True))
        ]

    def _by_site(self, embed: Array, sites: Array) -> dict[str, Array]:
        return {EMBED_SITE: embed, **dict(zip(self._sites, sites, strict=True))}


def record_spikes(model: SpikeModel, plan: Record, work: Record, lane: int, position: int, trace: SpikeTrace) -> None:
    """Unpack the masks of every site into the trace."""
    bits = np.arange(plan.steps, dtype=np.uint32)[:, None]

    def unpack(masks: Array) -> Array:
        return ((masks[None] >> bits) & 1).astype(bool)

    trace.add(-1, EMBED_SITE, unpack(work.embed_masks[lane, : plan.hidden]))
    for layer in range(plan.layers):
        for site in model.shape.layer_sites:
            if site == "a":
                words = work.map_words[layer, lane].astype("<u8", copy=False)
                pairs = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")  # [heads, T_s, positions]
                spikes = pairs[:, :, : position + 1].transpose(1, 0, 2).reshape(plan.steps, -1).astype(bool)
            else:
                start = int(plan.offsets[LAYER_SITES.index(site)])
                spikes = unpack(work.masks[layer, lane, start : start + model.shape.site_size(site, position)])
            trace.add(layer, site, spikes)
