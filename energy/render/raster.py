"""The spike raster of a traced run: one small picture per neuron group, chosen from a list, coloured by the theme.

A trace is an .npz without pickles: per sequence and site one bool array [tokens, T_s, neurons], named `0/embed`,
`0/3.q` (sequence, layer and site). The attention map grows with every token and is not drawn.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from pathlib import Path

import numpy as np

from spikeopd.contracts import Array, ModelShape, load_trace
from spikeopd.contracts.trace import TRACE_LIMIT, SiteKey, site_order
from spikeopd.errors import InputError
from spikeopd.files import sha256

_MOST_NEURONS, _MOST_STEPS = 256, 2048


def load_groups(path: Path, shape: ModelShape) -> dict[SiteKey, Array]:
    """Spikes of every fixed-size group: (layer, site) -> bool [steps, neurons], one sequence after the other."""
    traces = load_trace(path, attention=False, shape=shape)
    keys = sorted({key for trace in traces for key in trace.sites}, key=site_order)
    rows = {key: [rows for trace in traces for rows in trace.sites.get(key, ())] for key in keys}
    return {key: np.concatenate(found) for key, found in rows.items() if found}


def raster_html(path: Path, shape: ModelShape, expected: str | None = None) -> str:
    """A card with a list of neuron groups and the raster of the chosen one. expected: the sha256 the trace must have.

    A trace that is missing, damaged or another one is an InputError.
    """
    if expected is not None and path.is_file() and path.stat().st_size <= TRACE_LIMIT and sha256(path) != expected:
        raise InputError(f"trace {path}: not the one this run recorded; another run has written it since")
    groups = load_groups(path, shape)
    if not groups:
        return ""
    options, boxes = [], []
    for layer, site in groups:
        spikes = groups[layer, site][:_MOST_STEPS]
        shown = spikes[:, _evenly(spikes.shape[1], _MOST_NEURONS)]
        name = f"raster-{layer + 1}-{site}"
        place = "embedding" if layer < 0 else f"layer {layer}, {site}"
        rate = float(spikes.mean()) if spikes.size else 0.0
        selected = " selected" if (layer, site) == list(groups)[-1] else ""
        options.append(f'<option value="{name}"{selected}>{html.escape(place)}</option>')
        data = base64.b64encode(mask_png(shown.T)).decode("ascii")
        url = f"url(data:image/png;base64,{data})"
        caption = (
            f"{place}: {shown.shape[1]} of {spikes.shape[1]} neurons (top to bottom) over {spikes.shape[0]} of "
            f"{groups[layer, site].shape[0]} steps (left to right, {shape.num_steps} per token), rate {rate:.4f} "
            "spikes/neuron/step"
        )
        boxes.append(
            f'<div class="rasterbox" id="{name}" hidden>'
            f'<div class="raster" role="img" aria-label="spike raster of {html.escape(place)}" '
            f'style="-webkit-mask-image:{url};mask-image:{url}"></div>'
            f'<p class="soft">{html.escape(caption)}</p></div>'
        )
    return (
        '<section class="card" id="raster"><h2>Spikes</h2><label class="soft">Neuron group '
        f'<select id="raster-choice">{"".join(options)}</select></label>{"".join(boxes)}</section>'
    )


def mask_png(bits: Array) -> bytes:
    """A one-bit PNG, opaque where `bits` is set and transparent elsewhere, so that the page can colour it."""
    height, width = bits.shape
    rows = np.packbits(bits.astype(bool), axis=1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 3, 0, 0, 0)
    palette, alpha = chunk(b"PLTE", bytes([0, 0, 0, 0, 0, 0])), chunk(b"tRNS", bytes([0, 255]))
    pixels = chunk(b"IDAT", zlib.compress(raw, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + alpha + pixels + chunk(b"IEND", b"")


def _evenly(number: int, most: int) -> Array:
    return np.arange(number) if number <= most else np.linspace(0, number - 1, most).round().astype(np.int64)
