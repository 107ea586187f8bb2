"""From the few numbers the event kernels count to every event of a token, and from masks to traces."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim import kernel_base
from neuro_sim.plan import Record
from spikeopd.contracts import EMBED_SITE, LAYER_COMPONENTS, LAYER_SITES, Activity, SpikeModel, SpikeTrace

Array = NDArray[Any]
SITE = {name: index for index, name in enumerate(LAYER_SITES)}


class Tally:
    """Builds the Activity of one token. What does not change from token to token is computed once."""

    def __init__(self, model: SpikeModel, plan: Record) -> None:
        shape, self.plan = model.shape, plan
        d, f, width, layers, steps = plan.hidden, plan.ffn, shape.word_embed_proj_dim, plan.layers, plan.steps
        sizes = [shape.site_size(site, 0) for site in LAYER_SITES]
        self._cells = np.repeat(np.array(sizes, np.int64), layers * steps).reshape(len(sizes), layers, steps)
        self._heads = shape.num_attention_heads
        self._tail = shape.vocab_size * width if plan.factorised else 0
        self._embed_macs = width * d if plan.factorised else 0
        self._embed_bytes = width + d * model.embedding.position.itemsize + self._embed_macs
        # bytes of one active row: qkv, output, ffn_in, ffn_out, and one gain for each of O and Y
        gain = model.layers[0].gain_o.itemsize
        self._row_bytes = np.array([3 * d, d, f, d, gain, gain], np.int64)

    def activity(
        self, spikes: Array, saturations: Array, additions: Array, active: Array, head_active: int, position: int
    ) -> Activity:
        """Counters of one lane as `kernels` keeps them: [layers + 1, 10, T_s] twice, [layers, 2, T_s], [layers, 6].

        The head is counted for every token, as the contract has it, also for a prompt's tokens whose logits nobody
        wants. Arrays are fresh: the caller may add to them.
        """
        plan, context = self.plan, position + 1
        layers, steps, d = plan.layers, plan.steps, plan.hidden
        by_site = spikes[:layers].transpose(1, 0, 2).copy()
        embed = spikes[layers:, 0].copy()
        cells = self._cells.copy()
        cells[SITE["a"]] = self._heads * context
        sops = np.empty((len(LAYER_COMPONENTS), layers, steps), np.int64)
        sops[0, 0] = embed[0]
        sops[0, 1:] = by_site[SITE["h"], :-1]
        sops[0] *= 3 * d
        np.multiply(by_site[SITE["q"]], context, out=sops[1])
        np.multiply(by_site[SITE["a"]], plan.head_dim, out=sops[2])
        np.multiply(by_site[SITE["r"]], d, out=sops[3])
        np.add(by_site[SITE["o"]], by_site[SITE["y"]], out=sops[4])
        np.multiply(by_site[SITE["x"]], plan.ffn, out=sops[5])
        np.multiply(by_site[SITE["f"]], d, out=sops[6])
        really = sops.copy()
        really[1], really[2] = additions[:, 0], additions[:, 1]
        read = (active.sum(0) * self._row_bytes).tolist()
        map_bytes = int((sops[2].sum(1) // 8).sum())
        head_active_macs = head_active * plan.head_width + self._tail
        return Activity(
            tokens=1,
            spikes=_by_site(embed, by_site),
            cells=_by_site(np.full((1, steps), d, np.int64), cells),
            saturations=_by_site(saturations[layers:, 0].copy(), saturations[:layers].transpose(1, 0, 2).copy()),
            sops=dict(zip(LAYER_COMPONENTS, sops, strict=True)),
            sops_unmasked=np.zeros((layers, steps), np.int64),
            additions=dict(zip(LAYER_COMPONENTS, really, strict=True)),
            macs={"embed": self._embed_macs, "head": d * plan.head_width + self._tail, "head_active": head_active_macs},
            bytes={
                "qkv": read[kernel_base.FROM_INPUT],
                "coincidence": 0,
                "av": 0,
                "output": read[kernel_base.FROM_R],
                "residual": read[kernel_base.FROM_O] + read[kernel_base.FROM_Y],
                "ffn_in": read[kernel_base.FROM_X],
                "ffn_out": read[kernel_base.FROM_F],
                "embed": self._embed_bytes,
                "head": head_active_macs,
                "kv_read": layers * (context * steps * d // 8) + map_bytes,
                "kv_write": layers * (2 * steps * d // 8),
            },
        )


def _by_site(embed: Array, sites: Array) -> dict[str, Array]:
    result = {EMBED_SITE: embed}
    result.update(zip(LAYER_SITES, sites, strict=True))
    return result


def record_spikes(model: SpikeModel, plan: Record, work: Record, lane: int, position: int, trace: SpikeTrace) -> None:
    """Unpack the masks of every site into the trace."""
    bits = np.arange(plan.steps, dtype=np.uint32)[:, None]

    def unpack(masks: Array) -> Array:
        return ((masks[None] >> bits) & 1).astype(bool)

    trace.add(-1, EMBED_SITE, unpack(work.embed_masks[lane, : plan.hidden]))
    for layer in range(plan.layers):
        for index, site in enumerate(LAYER_SITES):
            if site == "a":
                words = work.map_words[layer, lane].astype("<u8", copy=False)
                pairs = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")  # [heads, T_s, positions]
                spikes = pairs[:, :, : position + 1].transpose(1, 0, 2).reshape(plan.steps, -1).astype(bool)
            else:
                start = int(plan.offsets[index])
                spikes = unpack(work.masks[layer, lane, start : start + model.shape.site_size(site, position)])
            trace.add(layer, site, spikes)
