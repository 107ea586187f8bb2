"""Spike traces of chosen sites, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spikeopd.contracts import EMBED_SITE, Array, ModelShape, SpikeTrace, ordered_sites
from spikeopd.contracts.trace import site_name, stack_tokens
from spikeopd.errors import BackendMissing, ConfigError, InputError, install_command
from spikeopd.files import write_bytes

MAX_PANELS = 12
MAX_STEPS_SHOWN = 1024


@dataclass
class SelectedTrace(SpikeTrace):
    """A trace that keeps only the wanted sites."""

    wanted: frozenset[tuple[int, str]] = frozenset()

    def add(self, layer: int, site: str, spikes: Array) -> None:
        if (layer, site) in self.wanted:
            super().add(layer, site, spikes)


def parse_sites(text: str, shape: ModelShape) -> frozenset[tuple[int, str]]:
    """`all`, or a comma list of `embed` and `LAYER.SITE`, where either part may be `*`: `0.q,*.h`."""
    known = set(ordered_sites(shape))
    chosen: set[tuple[int, str]] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        if item == "all":
            chosen |= known
        elif item == EMBED_SITE:
            chosen.add((-1, EMBED_SITE))
        else:
            layer, dot, site = item.partition(".")
            found = {(n, s) for n, s in known if n >= 0 and layer in ("*", str(n)) and site in ("*", s)}
            if not dot or not found:
                raise ConfigError(
                    f"trace site {item!r} does not exist; name all, embed, or LAYER.SITE with layers 0 to "
                    f"{shape.num_hidden_layers - 1} (or *) and sites {', '.join(shape.layer_sites)} (or *)"
                )
            chosen |= found
    if not chosen:
        raise ConfigError("no trace sites given; try --trace embed,0.q or --trace all")
    return frozenset(chosen)


def plot_raster(path: Path | str, trace: SpikeTrace, num_heads: int, labels: Sequence[str] | None = None) -> Path:
    """Spikes over time, one panel per site, as a PNG. Time runs token by token, T_s steps each."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BackendMissing(f"the raster plot needs matplotlib; install it with: {install_command('viz')}") from error
    if not trace.sites:
        raise InputError("the trace is empty: no token was fed")
    keys = list(trace.sites)[:MAX_PANELS]
    figure, axes = pyplot.subplots(len(keys), 1, figsize=(10, 0.6 + 1.5 * len(keys)), sharex=True, squeeze=False)
    steps = trace.sites[keys[0]][0].shape[0]
    for axis, (layer, site) in zip(axes[:, 0], keys, strict=True):
        stacked = stack_tokens(site, trace.sites[layer, site], num_heads)
        image = stacked.reshape(stacked.shape[0] * steps, -1)[:MAX_STEPS_SHOWN].T
        axis.imshow(image, aspect="auto", interpolation="nearest", cmap="Greys", origin="lower", vmin=0, vmax=1)
        rate = np.mean([spikes.mean() for spikes in trace.sites[layer, site]])
        axis.set_title(f"{site_name(layer, site)}   rate {rate:.3f}", fontsize=9, loc="left")
        axis.set_ylabel("head x key" if site == "a" else "neuron", fontsize=8)
        axis.tick_params(labelsize=7)
    tokens = min(len(trace.tokens), MAX_STEPS_SHOWN // steps)
    every = max(1, tokens // 24)
    shown = range(0, tokens, every)
    names = [labels[i] if labels is not None and i < len(labels) else str(trace.tokens[i]) for i in shown]
    bottom = axes[-1, 0]
    bottom.set_xticks([i * steps - 0.5 for i in shown], names, rotation=60, ha="right")
    bottom.set_xlabel(f"token ({steps} steps each)", fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    return write_bytes(path, buffer.getvalue())
