"""What the live page draws of one token: some neurons' spikes, rates, attention as coincidences, and the bill."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.text import Text
from spikeopd.contracts import APPENDIX_E_PJ, EMBED_SITE, Activity, ModelShape, SpikeTrace
from spikeopd.contracts.topology import layer_macs, outer_macs

NEURONS_SHOWN = 32  # of each site, evenly spread
KEYS_SHOWN = 1024  # the latest, of the attention


class Watch:
    """Makes the page's view of a token of one model. Numbers are exact; only the raster shows a part of the neurons."""

    def __init__(self, shape: ModelShape, text: Text) -> None:
        self.shape, self.text = shape, text
        self.sites = tuple(site for site in shape.layer_sites if site != "a")
        self._chosen = {site: spread(shape.site_size(site, 0)) for site in (EMBED_SITE, *self.sites)}

    def layout(self) -> dict[str, Any]:
        """What the page must know to draw: told once."""
        return {
            "layers": self.shape.num_hidden_layers,
            "steps": self.shape.num_steps,
            "heads": self.shape.num_attention_heads,
            "sites": [{"name": site, "neurons": self.shape.site_size(site, 0)} for site in self.sites],
            "shown": {site: len(self._chosen[site]) for site in self.sites},
        }

    def token(self, trace: SpikeTrace, activity: Activity, position: int) -> dict[str, Any]:
        shape, layers = self.shape, range(self.shape.num_hidden_layers)
        raster = [trace.sites[layer, site][-1][:, self._chosen[site]] for layer in layers for site in self.sites]
        bits = np.concatenate([spikes.reshape(-1) for spikes in raster]) if raster else np.zeros(0, bool)
        attention = [self._coincidences(trace.sites[layer, "a"][-1]) for layer in layers]
        sops = {name: int(counts.sum()) for name, counts in activity.sops.items()}
        macs = activity.macs["embed"] + activity.macs["head"]
        spikes = {key: int(value.sum()) for key, value in activity.spikes.items() if key != "a"}
        cells = sum(int(value.sum()) for key, value in activity.cells.items() if key != "a")
        return {
            "position": position,
            "fed": trace.tokens[-1],
            "fed_text": self.text.decode(trace.tokens[-1:]),
            "raster": encode(np.packbits(bits)),
            "rates": [round(rate, 4) for rate in self._rates(activity)],
            "rate": round(sum(spikes.values()) / cells, 4),
            "attention": [encode(counts) for counts in attention],
            "sops": sops,
            "macs": macs,
            "pj": round(APPENDIX_E_PJ["ac"] * sum(sops.values()) + APPENDIX_E_PJ["mac"] * macs, 1),
            "dense_pj": round(APPENDIX_E_PJ["mac"] * dense_macs(shape, position), 1),
        }

    def _coincidences(self, spikes: NDArray[Any]) -> NDArray[Any]:
        """Map spikes of one layer by key, over heads and steps: how often query and key met often enough to fire."""
        steps, heads = spikes.shape[0], self.shape.num_attention_heads
        counts = spikes.reshape(steps, heads, -1).sum((0, 1))[-KEYS_SHOWN:]
        return np.asarray(np.minimum(counts, 255), np.uint8)

    def _rates(self, activity: Activity) -> list[float]:
        spikes = sum(activity.spikes[site].sum(1) for site in self.sites)
        cells = sum(activity.cells[site].sum(1) for site in self.sites)
        return [float(rate) for rate in np.asarray(spikes) / np.maximum(1, cells)]


def dense_macs(shape: ModelShape, position: int) -> int:
    """MACs of the OPT of these sizes for the token at a position: what a teacher of the same shape computes."""
    layer = layer_macs(shape, 1, position + 1)
    inner = sum(macs for name, macs in layer.items() if name != "residual")
    return shape.num_hidden_layers * inner + sum(outer_macs(shape, 1).values())


def spread(size: int) -> NDArray[Any]:
    return np.unique(np.linspace(0, size - 1, min(size, NEURONS_SHOWN)).astype(int))


def encode(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
