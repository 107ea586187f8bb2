r"""The deployable model: everything needed to decode, nothing else. numpy only.

**The integer neuron** (every backend computes exactly this, in this order; membrane unit = one `membrane`):

    decay(v)  = sign(v) * ((|v| * a) >> 12)                      a = round(4096 * alpha), magnitude truncated
    v[tau]    = clip(decay(v[tau-1]) + (I[tau] << shift) + bias - threshold * s[tau-1],  -2**23, 2**23 - 1)
    s[tau]    = 1 if v[tau] >= threshold else 0                  v[0] = s[0] = 0 for every token, tau = 1 .. T_s

`I` is an exact integer sum: of int8 (or int4) weights over the spikes that arrived (projections), of coincidences
(attention), or the integer residual stream. A clip that changed a value is a *saturation* and is counted.

**The block** for one token at position i and step tau (`e` is the integer embedding current):

    h = e                                X = S_embed(h)
    per layer:  Q,K,V = S_q,k,v(X W)     C[j] = popcount(Q & K_j), j <= i      A[j] = S_a(C[j])   per head
                Z = sum_j A[j] V_j       R = S_r(Z)
      attention "inhibiting":            R = S_r of (Z << 10) + inhibition * sum_j A[j], and then its bias
      write "spike":    O = S_o(R W_o)   h = h + gain_o * O
      write "current":                   h = h + ((R W_o) << shift_o) + bias_o
                X' = S_x(h)              F = S_f(X' W_1)
      write "spike":    Y = S_y(F W_2)   h = h + gain_y * Y
      write "current":                   h = h + ((F W_2) << shift_y) + bias_y
                X = S_h(h)
    head:       n = sum_tau X (readout "rate") or sum_tau h (readout "residual")  ->  logits (float64, see `Head`)

K_j and V_j at step tau are the cached spikes of token j at *its* step tau. With a distance bias the current of A[j] is
(C[j] << 10) + bias[head, min(i - j, distances - 1)]: a pair may fire without a coincidence.

**The quantised twin** (`ModelShape.neuron`) is the same block in one step, summed over the T_s steps that it replaces:
activations are counts n = 0 .. T_s, the residual stream is H = T_s h, and a sum I of weights times counts, or of
products of counts, is m times the mean current: m = T_s, and T_s^2 for `a` (C[j] = sum n_q n_k) and `r`
(Z = sum_j n_a n_v). No membrane is kept (`decay` is 0) and nothing saturates:

    n = clip(floor((2 T_s v + m threshold) / (2 m threshold)), 0, T_s)        v = (I << shift) + m bias
    H = T_s e,  then  H + ((R W_o) << shift_o) + T_s bias_o  or  H + gain_o * O,  and likewise behind W_2
    head:       n = X or H, with the same units

**int4** is int8 with projection weights from -7 to 7 (a Layer holds them in int8 arrays all the same); neurons,
residual stream, embedding and head do not differ.

**Float precision**: the same dataclasses hold float32 arrays, `decay` is alpha itself, shifts are 0, nothing saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts.topology import EMBED_SITE, RESIDUAL_SITES, Connection, ModelShape

Array = NDArray[Any]
Precision = Literal["int8", "int4", "float32"]

DECAY_BITS = 12
MEMBRANE_BITS = 24
MEMBRANE_MIN, MEMBRANE_MAX = -(1 << (MEMBRANE_BITS - 1)), (1 << (MEMBRANE_BITS - 1)) - 1
RESIDUAL_FRACTION_BITS = 12  # one unit of the integer residual stream is 2**-12 of the float one
WEIGHT_SHIFT = 6  # a projection's integer weight counts 2**6 membrane units, as on Loihi
COUNT_SHIFT = 10  # an attention count counts 2**10 membrane units
LOGIT_INPUT_BITS = 14  # width of the integers y_k that meet the output table
WEIGHT_BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "float32": 32}  # of a projection; all else is the same in int4


def is_integer(precision: str) -> bool:
    """Whether a model of this precision has the integer neuron."""
    return precision != "float32"


def weight_limit(precision: str) -> int:
    """Largest magnitude of a projection's integer weight: symmetric, so the lowest number of its bits is not used."""
    return (1 << (WEIGHT_BITS[precision] - 1)) - 1


def row_bytes(columns: int, precision: str) -> int:
    """Bytes of one row of a projection: what the spike of one input reads."""
    return -(-columns * WEIGHT_BITS[precision] // 8)


def fetched_bytes(connection: Connection, precision: str) -> int:
    """Bytes that one active input of a connection reads: its row of weights, or its gains, which have 32 bits."""
    assert connection.fan_out is not None
    return row_bytes(connection.fan_out, precision) if connection.dense else 4 * connection.fan_out


@dataclass(frozen=True)
class Site:
    """One group of neurons. threshold: int32 [n] ([heads] for `a`); bias: int32 [n], zero where there is none.

    The bias of `a` is [heads, distances] with a distance bias, else zeros [heads].
    """

    threshold: Array
    bias: Array
    shift: int


@dataclass(frozen=True)
class Layer:
    """One block. Weights are input-major [in, out]: the spike of input i adds row i.

    Write "spike": gains int32 [d] in residual units. Write "current": shifts uint8 [d], one per output neuron (zero in
    float precision), and biases int32 [d] in residual units.
    inhibition: int32 [d], what every spike of the head's map adds to a neuron of S_r besides the value's spike, in
    membrane units; negative where it inhibits. None unless attention is "inhibiting".
    """

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    w_1: Array
    w_2: Array
    sites: Mapping[str, Site]
    gain_o: Array | None = None
    gain_y: Array | None = None
    shift_o: Array | None = None
    shift_y: Array | None = None
    bias_o: Array | None = None
    bias_y: Array | None = None
    inhibition: Array | None = None


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

    def current(self, token: int | Array, position: int | Array) -> Array:
        """Of one token, or [n, d] of as many tokens as positions."""
        row = self.table[token]
        if self.table.dtype.kind == "f":
            value = (row if self.project_in is None else row @ self.project_in) * self.channel_gain
            return np.asarray(value + self.position[position], dtype=np.float32)
        wide = row.astype(np.int64)
        if self.project_in is not None:
            wide = wide @ self.project_in.astype(np.int64)
        return self.scaled(wide, token, position)

    def scaled(self, wide: Array, token: int | Array, position: int | Array) -> Array:
        """The current from table[x] P, an int64 sum."""
        scale = np.asarray(self.row_scale[token], np.int64)[..., None]
        half = (1 << self.shift) >> 1
        value = wide * scale * self.channel_gain.astype(np.int64)
        return np.asarray(((value + half) >> self.shift) + self.position[position], dtype=np.int32)


@dataclass(frozen=True)
class Head:
    r"""What the readout counted, n_i, to logits: LayerNorm and the tied, dense output table. Host side.

    Readout "rate": n_i = sum_tau X_i, unit = T_s. Readout "residual": n_i = sum_tau h_i, unit = 4096 T_s.
    With x = n / unit, mu = mean(x), inv = 1 / sqrt(var(x) + epsilon), all float64 from exact integer sums:
      gamma given:   acc_v = sum_i n_i gamma_i table[v, i]        (exact integer; rate readout of a plain head)
                     logit_v = row_scale_v * ((acc_v / unit - mu * gamma_sum_v) * inv) + bias_v
      otherwise:     acc_k = sum_i n_i P[i, k]                    (exact integer)
                     y_k = clip(rint(out_scale_k * ((acc_k / unit - mu * out_sum_k) * inv) + out_bias_k))
                     logit_v = row_scale_v * (sum_k y_k table[v, k]) + bias_v             y_k are 14-bit integers
    P is `project_out` for a factorised head (gamma folded in), else the identity. `table` is the embedding's.
    gamma_sum_v = sum_i gamma_i table[v, i]; out_sum_k = sum_i P[i, k].
    In float precision the same formulas hold with float32 gamma / project_out, unit = T_s and y_k not rounded.
    """

    row_scale: Array  # float64 [vocab]
    bias: Array  # float64 [vocab]
    epsilon: float
    gamma: Array | None = None  # int16 [d]
    project_out: Array | None = None  # int8 [d, w], factorised
    out_scale: Array | None = None  # float64 [w]
    out_bias: Array | None = None  # float64 [w]


@dataclass(frozen=True)
class SpikeModel:
    """A deployable student: everything needed to decode, nothing else."""

    shape: ModelShape
    precision: Precision
    decay: float  # integers: a = round(4096 alpha); float32: alpha
    embedding: Embedding
    embed_site: Site
    layers: tuple[Layer, ...]
    head: Head

    @property
    def integer(self) -> bool:
        return is_integer(self.precision)

    def site(self, layer: int, site: str) -> Site:
        return self.embed_site if site == EMBED_SITE else self.layers[layer].sites[site]


def readout_unit(model: SpikeModel) -> int:
    """What the readout's sums are divided by to give a mean over the steps, in float units of the model."""
    fine = model.shape.readout == "residual" and model.integer
    return model.shape.num_steps << RESIDUAL_FRACTION_BITS if fine else model.shape.num_steps


def normalise_counts(counts: Array, unit: int, epsilon: float) -> tuple[float, float]:
    """Mean and 1/sqrt(var + epsilon) of counts / unit, from exact integer sums. float64."""
    n = counts.size
    if counts.dtype.kind == "f":  # the residual stream in float precision
        wide = counts.astype(np.float64)
        total, squares = float(wide.sum()), float((wide**2).sum())
    else:
        total, squares = int(counts.sum(dtype=np.int64)), int((counts.astype(np.int64) ** 2).sum())
    mu = total / (n * unit)
    variance = squares / (n * unit * unit) - mu * mu
    return mu, 1.0 / np.sqrt(max(variance, 0.0) + epsilon)


def head_logits(model: SpikeModel, counts: Array, accumulated: Array, sums: Array | float) -> Array:
    """Last, affine part of the head. accumulated: acc_v (gamma) or acc_k; sums: gamma_sum or out_sum."""
    head, unit = model.head, readout_unit(model)
    mu, inv = normalise_counts(counts, unit, head.epsilon)
    centred = (accumulated.astype(np.float64) / unit - mu * sums) * inv  # a float residual stream comes in float32
    if head.gamma is not None:
        return np.asarray(head.row_scale * centred + head.bias)
    assert head.out_scale is not None and head.out_bias is not None
    y = head.out_scale * centred + head.out_bias
    table = model.embedding.table
    if model.precision == "float32":
        return np.asarray(head.row_scale * (table.astype(np.float64) @ y) + head.bias)
    limit = (1 << (LOGIT_INPUT_BITS - 1)) - 1
    exact: Any = (
        np.int32 if table.shape[1] * limit * 128 < 1 << 31 else np.int64
    )  # the narrower one where no sum can wrap
    integers = np.clip(np.rint(y), -limit, limit).astype(exact)
    return np.asarray(head.row_scale * (table.astype(exact) @ integers) + head.bias)


def site_shift(site: str, precision: Precision) -> int:
    """Left shift of a site's input: what one unit of its integer current counts in membrane units."""
    if precision == "float32" or site in RESIDUAL_SITES:
        return 0
    return COUNT_SHIFT if site in ("a", "r") else WEIGHT_SHIFT
