"""Spike traces: in memory, compared, and as a file (.npz) with one writer and one reader. numpy only."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from spikeopd.contracts.model import Array
from spikeopd.contracts.npz import open_npz, read_array
from spikeopd.contracts.topology import EMBED_SITE, LAYER_SITES, ModelShape
from spikeopd.errors import short
from spikeopd.files import write_bytes

SiteKey = tuple[int, str]
TRACE_LIMIT = 1 << 30  # bytes of the file, and of spikes, one each, that a reader takes in
_NAME = re.compile(r"^(\d{1,9})/(?:(\d{1,9})\.)?(\w{1,16})$")


@dataclass
class SpikeTrace:
    """Spikes of one decoded sequence: sites[(layer, site)] is a list with one bool array [T_s, n] per token.

    Layer is -1 for `embed`. For `a` the array is [T_s, heads * (position + 1)], head-major.
    """

    sites: dict[tuple[int, str], list[Array]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def add(self, layer: int, site: str, spikes: Array) -> None:
        self.sites.setdefault((layer, site), []).append(np.asarray(spikes, dtype=bool))


@dataclass(frozen=True)
class Difference:
    """The first place where two traces disagree."""

    token: int
    layer: int
    site: str
    step: int
    neuron: int

    def __str__(self) -> str:
        where = "embedding" if self.layer < 0 else f"layer {self.layer}"
        return f"token {self.token}, {where}, site {self.site}, step {self.step}, neuron {self.neuron}"


def first_difference(a: SpikeTrace, b: SpikeTrace) -> Difference | None:
    """First differing spike in the order token, site, step, neuron; None if the traces are equal.

    Sites that only one trace recorded are skipped; a missing token or another shape counts as a difference.
    """
    keys = sorted((key for key in a.sites if key in b.sites), key=site_order)
    for token in range(max((max(len(a.sites[k]), len(b.sites[k])) for k in keys), default=0)):
        for layer, site in keys:
            left, right = a.sites[layer, site], b.sites[layer, site]
            if token >= len(left) or token >= len(right) or left[token].shape != right[token].shape:
                return Difference(token, layer, site, 0, 0)
            if not np.array_equal(left[token], right[token]):
                step, neuron = np.argwhere(left[token] != right[token])[0]
                return Difference(token, layer, site, int(step), int(neuron))
    return None


def equal_share(a: SpikeTrace, b: SpikeTrace) -> dict[tuple[int, str], float]:
    """Share of equal spikes per site over the tokens both recorded, for float precision, where equality is not owed."""
    shares = {}
    for key in a.sites:
        pairs = [(x, y) for x, y in zip(a.sites[key], b.sites.get(key, []), strict=False) if x.shape == y.shape]
        total = sum(x.size for x, _ in pairs)
        if total:
            shares[key] = sum(int((x == y).sum()) for x, y in pairs) / total
    return shares


def site_order(key: SiteKey) -> tuple[int, int]:
    """Sorts (layer, site) in the order of computation."""
    layer, site = key
    return layer, LAYER_SITES.index(site) if site in LAYER_SITES else -1


def site_name(layer: int, site: str) -> str:
    return EMBED_SITE if layer < 0 else f"{layer}.{site}"


# --- file ------------------------------------------------------------------------------------------------------------


def stack_tokens(site: str, spikes: list[Array], num_heads: int) -> Array:
    """One array over all tokens: bool [tokens, T_s, neurons]; the map `a` is [tokens, T_s, heads, tokens]."""
    if site != "a":
        return np.stack(spikes)
    steps, tokens = spikes[0].shape[0], len(spikes)
    result = np.zeros((tokens, steps, num_heads, tokens), bool)
    for position, row in enumerate(spikes):
        result[position, :, :, : position + 1] = row.reshape(steps, num_heads, position + 1)
    return result


def save_trace(path: Path | str, traces: Sequence[SpikeTrace], num_heads: int) -> Path:
    """One array per sequence and site, named `0/tokens`, `0/embed`, `0/3.q`. Nothing in the file needs pickle."""
    arrays: dict[str, Array] = {}
    for index, trace in enumerate(traces):
        arrays[f"{index}/tokens"] = np.asarray(trace.tokens, np.int64)
        for (layer, site), spikes in trace.sites.items():
            arrays[f"{index}/{site_name(layer, site)}"] = stack_tokens(site, spikes, num_heads)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return write_bytes(path, buffer.getvalue())


def load_trace(path: Path | str, *, attention: bool = True, shape: ModelShape | None = None) -> list[SpikeTrace]:
    """Read what `save_trace` wrote, sequence by sequence. attention=False leaves the maps out, which are large.

    shape: of the model the trace must be of; what that model does not have is refused before it is allocated.
    """
    traces: dict[int, SpikeTrace] = {}
    with open_npz(path, "trace", TRACE_LIMIT) as archive:
        room = TRACE_LIMIT
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            match = _NAME.match(name)
            if match is None or (match[3] == "a" and not attention):
                continue
            if match[3] == "tokens" or match[3] not in (EMBED_SITE, *LAYER_SITES):
                key = None
            else:
                key = -1 if match[2] is None else int(match[2]), match[3]
            if match[3] != "tokens" and key is None:
                raise ValueError(f"array {name!r}: there is no site {match[3]!r}")
            if key is not None and (key[0] < 0) != (key[1] == EMBED_SITE):
                raise ValueError(f"array {name!r}: a site of a layer needs its number, and the embedding has none")
            stored = read_array(archive, info, room, partial(_misfit, key, shape))
            room -= stored.nbytes
            trace = traces.setdefault(int(match[1]), SpikeTrace())
            if key is None:
                trace.tokens = stored.tolist()
            else:
                trace.sites[key] = _tokens_of(key[1], stored)
    for trace in traces.values():
        trace.sites = {key: trace.sites[key] for key in sorted(trace.sites, key=site_order)}
    return [traces[index] for index in sorted(traces)]


def _misfit(key: SiteKey | None, shape: ModelShape | None, dtype: np.dtype[np.generic], sizes: tuple[int, ...]) -> str:
    """What is wrong with an array of tokens (key None) or of a site's spikes; empty if nothing is."""
    due = np.dtype(np.int64) if key is None else np.dtype(bool)
    axes = 1 if key is None else 4 if key[1] == "a" else 3
    if dtype != due or len(sizes) != axes:
        return f"expected {due} in {axes} axes, found {dtype} {short(sizes)}"
    return _wrong_sizes(key, sizes, shape) if shape is not None and key is not None else ""


def _wrong_sizes(key: SiteKey, sizes: tuple[int, ...], shape: ModelShape) -> str:
    layer, site = key
    if layer >= shape.num_hidden_layers or layer >= 0 and site not in shape.layer_sites:
        return f"the model has no such site in {shape.num_hidden_layers} layers"
    tokens, steps, *rest = sizes
    due = [shape.num_attention_heads, tokens] if site == "a" else [shape.site_size(site, 0)]
    if tokens > shape.max_position_embeddings or steps != shape.num_steps or rest != due:
        return f"shape {list(sizes)}, the model has [tokens, {shape.num_steps}, {due[0]}]"
    return ""


def _tokens_of(site: str, spikes: Array) -> list[Array]:
    if site != "a":
        return list(spikes)
    return [row[:, :, : position + 1].reshape(row.shape[0], -1) for position, row in enumerate(spikes)]
