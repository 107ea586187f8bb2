r"""What the packages exchange: the deployable model, spike traces and counted activity. numpy only.

**The integer neuron** (every backend computes exactly this, in this order; membrane unit = one `membrane`):

    decay(v)  = sign(v) * ((|v| * a) >> 12)                      a = round(4096 * alpha), magnitude truncated
    v[tau]    = clip(decay(v[tau-1]) + (I[tau] << shift) + bias - threshold * s[tau-1],  -2**23, 2**23 - 1)
    s[tau]    = 1 if v[tau] >= threshold else 0                  v[0] = s[0] = 0 for every token, tau = 1 .. T_s

`I` is an exact integer sum: of int8 weights over the spikes that arrived (projections), of coincidences
(attention), or the integer residual stream. A clip that changed a value is a *saturation* and is counted.

**The block** for one token at position i and step tau (`e` is the integer embedding current):

    h = e                                X = S_embed(h)
    per layer:  Q,K,V = S_q,k,v(X W)     C[j] = popcount(Q & K_j), j <= i      A[j] = S_a(C[j])   per head
                Z = sum_j A[j] V_j       R = S_r(Z)                            O = S_o(R W_o)
                h = h + gain_o * O       X' = S_x(h)      F = S_f(X' W_1)      Y = S_y(F W_2)
                h = h + gain_y * Y       X = S_h(h)
    head:       n = sum_tau X  ->  logits (float64, formula in `Head`)

K_j and V_j at step tau are the cached spikes of token j at *its* step tau.

**Float precision**: the same dataclasses hold float32 arrays, `decay` is alpha itself, shifts are 0, nothing saturates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Precision = Literal["int8", "float32"]

DECAY_BITS = 12
MEMBRANE_BITS = 24
MEMBRANE_MIN, MEMBRANE_MAX = -(1 << (MEMBRANE_BITS - 1)), (1 << (MEMBRANE_BITS - 1)) - 1
RESIDUAL_FRACTION_BITS = 12  # one unit of the integer residual stream is 2**-12 of the float one
WEIGHT_SHIFT = 6  # a projection's int8 weight counts 2**6 membrane units, as on Loihi
COUNT_SHIFT = 10  # an attention count counts 2**10 membrane units
LOGIT_INPUT_BITS = 14  # width of the integers that enter a factorised head

# The neuron sites of one layer in the order in which they fire, and the one before the first layer.
EMBED_SITE = "embed"
LAYER_SITES = ("q", "k", "v", "a", "r", "o", "x", "f", "y", "h")
# The components of one layer, in the order in which they compute, and the sites whose spikes drive them.
COMPONENT_DRIVERS: dict[str, tuple[str, ...]] = {
    "qkv": ("input",),  # the previous layer's h, or embed
    "coincidence": ("q",),
    "av": ("a",),
    "output": ("r",),
    "residual": ("o", "y"),
    "ffn_in": ("x",),
    "ffn_out": ("f",),
}
LAYER_COMPONENTS = tuple(COMPONENT_DRIVERS)


@dataclass(frozen=True)
class ModelShape:
    """Sizes, named as in OPTConfig. `word_embed_proj_dim` differs from `hidden_size` in OPT-350M only."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_steps: int
    word_embed_proj_dim: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def factorised(self) -> bool:
        return self.word_embed_proj_dim != self.hidden_size

    def site_size(self, site: str, position: int) -> int:
        """Neurons of one site for the token at `position` (0-based). Only the attention map `a` grows."""
        if site == "a":
            return self.num_attention_heads * (position + 1)
        return self.ffn_dim if site == "f" else self.hidden_size

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Site:
    """One group of neurons. threshold: int32 [n] ([heads] for `a`); bias: int32 [n], zero where there is none."""

    threshold: Array
    bias: Array
    shift: int


@dataclass(frozen=True)
class Layer:
    """One block. Weights are input-major [in, out]: the spike of input i adds row i. Gains are residual units."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    w_1: Array
    w_2: Array
    gain_o: Array
    gain_y: Array
    sites: Mapping[str, Site]


@dataclass(frozen=True)
class Embedding:
    r"""Token and position to the constant current of a token, in residual units (int32 [d]).

    int8:    e = ((table[x] P) * row_scale[x] * channel_gain + 2**(shift-1) >> shift) + position[i]   (int64 inside)
    float32: e = (table[x] P) * channel_gain + position[i]
    P is `project_in` [w, d] for a factorised embedding (OPT-350M), else the identity. `position` row i belongs to
    the token at position i; OPT's offset of two is already removed, so the table has max_position_embeddings rows.
    """

    table: Array  # int8 [vocab, w]
    row_scale: Array  # int32 [vocab]; ones in float
    channel_gain: Array  # int32 [d]
    shift: int
    position: Array  # int16 [positions, d]
    project_in: Array | None = None  # int8 [w, d]

    def current(self, token: int, position: int) -> Array:
        row = self.table[token]
        if self.table.dtype.kind == "f":
            value = (row if self.project_in is None else row @ self.project_in) * self.channel_gain
            return np.asarray(value + self.position[position], dtype=np.float32)
        wide = row.astype(np.int64)
        if self.project_in is not None:
            wide = wide @ self.project_in.astype(np.int64)
        value = wide * int(self.row_scale[token]) * self.channel_gain.astype(np.int64)
        half = (1 << self.shift) >> 1
        return np.asarray(((value + half) >> self.shift) + self.position[position], dtype=np.int32)


@dataclass(frozen=True)
class Head:
    r"""Spike counts n_i = sum_tau X_i to logits: LayerNorm and the tied, dense output table. Host side.

    With x = n / T_s, mu = mean(x), inv = 1 / sqrt(var(x) + epsilon), all float64 from exact integer sums:
      plain:      acc_v = sum_i n_i gamma_i table[v, i]        (exact integer)
                  logit_v = row_scale_v * ((acc_v / T_s - mu * gamma_sum_v) * inv) + bias_v
      factorised: acc_k = sum_i n_i project_out[i, k]          (exact integer, gamma folded in)
                  y_k = clip(rint(out_scale_k * ((acc_k / T_s - mu * out_sum_k) * inv) + out_bias_k))   14-bit integers
                  logit_v = row_scale_v * (sum_k y_k table[v, k]) + bias_v
    `table` is the embedding's. gamma_sum_v = sum_i gamma_i table[v, i]; out_sum_k = sum_i project_out[i, k].
    In float precision the same formulas hold with float32 gamma / project_out and y_k not rounded.
    """

    row_scale: Array  # float64 [vocab]
    bias: Array  # float64 [vocab]
    epsilon: float
    gamma: Array | None = None  # int16 [d], plain
    project_out: Array | None = None  # int8 [d, w], factorised
    out_scale: Array | None = None  # float64 [w]
    out_bias: Array | None = None  # float64 [w]


@dataclass(frozen=True)
class SpikeModel:
    """A deployable student: everything needed to decode, nothing else."""

    shape: ModelShape
    precision: Precision
    decay: float  # int8: the integer a = round(4096 alpha); float32: alpha
    embedding: Embedding
    embed_site: Site
    layers: tuple[Layer, ...]
    head: Head

    def site(self, layer: int, site: str) -> Site:
        return self.embed_site if site == EMBED_SITE else self.layers[layer].sites[site]


def normalise_counts(counts: Array, num_steps: int, epsilon: float) -> tuple[float, float]:
    """Mean and 1/sqrt(var + epsilon) of the rates counts / num_steps, from exact integer sums. float64."""
    n = counts.size
    total = int(counts.sum(dtype=np.int64))
    squares = int((counts.astype(np.int64) ** 2).sum())
    mu = total / (n * num_steps)
    variance = squares / (n * num_steps * num_steps) - mu * mu
    return mu, 1.0 / np.sqrt(max(variance, 0.0) + epsilon)


def head_logits(model: SpikeModel, counts: Array, accumulated: Array, sums: Array) -> Array:
    """Last, affine part of the head. accumulated: acc_v (plain) or acc_k (factorised); sums: gamma_sum or out_sum."""
    head, steps = model.head, model.shape.num_steps
    mu, inv = normalise_counts(counts, steps, head.epsilon)
    centred = (accumulated / steps - mu * sums) * inv
    if head.project_out is None:
        return np.asarray(head.row_scale * centred + head.bias)
    assert head.out_scale is not None and head.out_bias is not None
    y = head.out_scale * centred + head.out_bias
    table = model.embedding.table
    if model.precision == "float32":
        return np.asarray(head.row_scale * (table.astype(np.float64) @ y) + head.bias)
    limit = (1 << (LOGIT_INPUT_BITS - 1)) - 1
    integers = np.clip(np.rint(y), -limit, limit).astype(np.int64)
    return np.asarray(head.row_scale * (table.astype(np.int32) @ integers.astype(np.int32)) + head.bias)


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


def ordered_sites(num_layers: int) -> Iterator[tuple[int, str]]:
    """All sites in the order of computation."""
    yield -1, EMBED_SITE
    for layer in range(num_layers):
        for site in LAYER_SITES:
            yield layer, site


def first_difference(a: SpikeTrace, b: SpikeTrace) -> Difference | None:
    """First differing spike in the order token, site, step, neuron; None if the traces are equal.

    Sites that only one trace recorded are skipped; a missing token or another shape counts as a difference.
    """
    shared = [key for key in a.sites if key in b.sites]
    num_layers = max((layer for layer, _ in shared), default=-1) + 1
    keys = [key for key in ordered_sites(num_layers) if key in a.sites and key in b.sites]
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


@dataclass
class Activity:
    """Events counted over some tokens. Every array is int64; `site` arrays are [layers, T_s] ([1, T_s] for embed).

    spikes          per site and step
    cells           per site and step: neuron slots that existed (rate = spikes / cells). Also the neuron updates:
                    each slot is updated once per step.
    saturations     per site and step: membranes that hit the 24-bit limit
    sops            per component and step: spikes of the driver x its fan-out; attention masked (fan-out i + 1 keys
                    for a query spike at position i, head_dim values for a spike of the map)
    sops_unmasked   coincidence only, [layers, T_s]: the same with fan-out = `context` keys for every query spike,
                    where context is the length of the whole sequence (what a square attention would do)
    additions       per component and step: accumulations that really happen (a coincidence counts 1 only when both
                    spikes are there; an `av` event adds only the value bits that are set); equals sops elsewhere
    macs            dense host work: "embed" (factorised), "head" (all rows), "head_active" (rows with a spike)
    bytes           weight and cache bytes touched by an event-driven implementation that loads each active row once
                    per token: components + "embed" + "head" + "kv_read" + "kv_write"
    """

    tokens: int
    spikes: dict[str, Array]
    cells: dict[str, Array]
    saturations: dict[str, Array]
    sops: dict[str, Array]
    sops_unmasked: Array
    additions: dict[str, Array]
    macs: dict[str, int]
    bytes: dict[str, int]

    @staticmethod
    def zeros(num_layers: int, num_steps: int) -> Activity:
        def sites() -> dict[str, Array]:
            shape = {EMBED_SITE: 1} | {site: num_layers for site in LAYER_SITES}
            return {site: np.zeros((rows, num_steps), np.int64) for site, rows in shape.items()}

        def components() -> dict[str, Array]:
            return {name: np.zeros((num_layers, num_steps), np.int64) for name in LAYER_COMPONENTS}

        return Activity(
            tokens=0,
            spikes=sites(),
            cells=sites(),
            saturations=sites(),
            sops=components(),
            sops_unmasked=np.zeros((num_layers, num_steps), np.int64),
            additions=components(),
            macs={"embed": 0, "head": 0, "head_active": 0},
            bytes=dict.fromkeys((*LAYER_COMPONENTS, "embed", "head", "kv_read", "kv_write"), 0),
        )

    def add(self, other: Activity) -> None:
        """Add another activity of the same model in place."""
        self.tokens += other.tokens
        for name in ("spikes", "cells", "saturations", "sops", "additions"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key in mine:
                mine[key] += theirs[key]
        self.sops_unmasked += other.sops_unmasked
        for name in ("macs", "bytes"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key in mine:
                mine[key] += theirs[key]

    def to_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return value.tolist()
            return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

        return {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Activity:
        def arrays(value: Mapping[str, Any]) -> dict[str, Array]:
            return {key: np.asarray(rows, dtype=np.int64) for key, rows in value.items()}

        return Activity(
            tokens=int(data["tokens"]),
            spikes=arrays(data["spikes"]),
            cells=arrays(data["cells"]),
            saturations=arrays(data["saturations"]),
            sops=arrays(data["sops"]),
            sops_unmasked=np.asarray(data["sops_unmasked"], dtype=np.int64),
            additions=arrays(data["additions"]),
            macs={key: int(value) for key, value in data["macs"].items()},
            bytes={key: int(value) for key, value in data["bytes"].items()},
        )


RUN_SCHEMA = "spikeopd.run/1"
BUNDLE_SCHEMA = "spikeopd.bundle/1"
