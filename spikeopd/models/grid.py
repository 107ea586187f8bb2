r"""The integers of the deployable model as floats on a dyadic grid: training computes what is deployed.

float32 then adds what the integers of `spikeopd.contracts` add, exactly and in any order. Gradients pass straight
through the rounding.

    weights      sigma_n * k, |k| <= K, sigma_n = 2**ceil(log2(max |W_n| / K))       one scale per output neuron
                 int8: K = 127; int4: K = 7, and sigma_n a half or a quarter of that where clipping then costs less
    q, k, v, f   membrane unit sigma_n / 2**WEIGHT_SHIFT; threshold and bias in it
    a, r         unit 2**-COUNT_SHIFT            embed, x, h, residual stream: unit 2**-RESIDUAL_FRACTION_BITS
    embedding    int8 rows, 18-bit mantissas of row scale and channel gain (`contracts.Embedding`)
    head         14-bit integers of LN(mean h) meet the int8 rows

`deploy_precision: int8` (or int4) in the student's config makes its forward pass use these; export then only reads them
off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spikeopd.contracts import COUNT_SHIFT, LOGIT_INPUT_BITS, MEMBRANE_MAX, RESIDUAL_FRACTION_BITS, WEIGHT_SHIFT
from spikeopd.errors import InputError
from spikeopd.models import grid_cpu

WEIGHT_MAX = 127  # K of int8, and of the tables in every precision
FEW_LEVELS = 7  # up to this K a scale that clips the largest weights is worth trying
SITE_LIMIT = MEMBRANE_MAX // 4  # largest threshold or bias, in membrane units
INHIBITION_LIMIT = 1 << COUNT_SHIFT  # an attended token takes away as much as a spike gives, at most
COUNT_UNIT = 2.0**-COUNT_SHIFT
RESIDUAL_UNIT = 2.0**-RESIDUAL_FRACTION_BITS
MANTISSA_BITS = 18
HEAD_LIMIT = (1 << (LOGIT_INPUT_BITS - 1)) - 1
FRACTION = (1 << 52) - 1  # the bits of a float64 that are not its sign and exponent
HEAD_SIGMAS = 8.0  # a normalised feature further out than this is clipped


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, smooth: Tensor) -> Tensor:
        return exact.to(smooth.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad


def straight(exact: Tensor, smooth: Tensor) -> Tensor:
    """The value of `exact` with the gradient of `smooth`."""
    return _Straight.apply(exact.detach(), smooth)


def snap(values: Tensor, bits: int) -> Tensor:
    """values rounded to multiples of 2**-bits."""
    return straight(torch.round(values.detach() * 2.0**bits) * 2.0**-bits, values)


def on_unit(values: Tensor, unit: Tensor | float, low: int = -SITE_LIMIT, high: int = SITE_LIMIT) -> Tensor:
    """values rounded to multiples of `unit` (a power of two), between low and high of them."""
    return straight((values.detach().double() / unit).round().clamp(low, high) * unit, values)


def power_of_two_above(values: Tensor) -> Tensor:
    """The smallest power of two that is at least `values` > 0, float64."""
    # From the bits of the number: exact, and torch.compile has no working frexp.
    bits = values.double().view(torch.int64)
    power = bits & ~FRACTION
    return torch.where(bits == power, power, power + FRACTION + 1).view(torch.float64)


def weight_scale(weight: Tensor, floor: Tensor, limit: int = WEIGHT_MAX) -> Tensor:
    """sigma_n of each output neuron, float64 [out]; at least the next power of two above `floor`."""
    values = weight.detach()
    largest = values.abs().amax(1).double()
    whole = power_of_two_above(torch.maximum(largest / limit, floor.double()))
    if limit > FEW_LEVELS:
        return whole
    values = values.double()
    least = power_of_two_above(floor.double().expand_as(whole))
    scales = [torch.maximum(whole * share, least) for share in (1.0, 0.5, 0.25)]
    errors = torch.stack([(on_scale(values, scale, limit) - values).square().sum(1) for scale in scales])
    return torch.stack(scales).gather(0, errors.argmin(0, keepdim=True))[0]


def site_scale(weight: Tensor, bias: Tensor, threshold: float, limit: int = WEIGHT_MAX) -> Tensor:
    """sigma_n of a projection into neurons: threshold and bias must fit SITE_LIMIT membrane units sigma_n / 64."""
    floor = bias.detach().double().abs().clamp(min=threshold) * 2.0**WEIGHT_SHIFT / SITE_LIMIT
    return weight_scale(weight, floor, limit)


def write_scale(weight: Tensor, limit: int = WEIGHT_MAX) -> Tensor:
    """sigma_n of a projection into the residual stream: no finer than its unit."""
    return weight_scale(weight, torch.full_like(weight[:, 0], RESIDUAL_UNIT), limit)


def steps_of(weight: Tensor, scale: Tensor, limit: int = WEIGHT_MAX) -> Tensor:
    """The integers |k| <= limit nearest to weight / sigma_n, as floats; a division by a power of two is exact."""
    finer = (1 / scale)[:, None]
    return (weight.detach() * finer.to(weight.dtype)).round_().clamp_(-limit, limit)


def on_scale(weight: Tensor, scale: Tensor, limit: int = WEIGHT_MAX) -> Tensor:
    """sigma_n * k with integers |k| <= limit."""
    return straight(steps_of(weight, scale, limit).mul_(scale[:, None].to(weight.dtype)), weight)


# --- embedding and head ----------------------------------------------------------------------------------------------


def row_units(table: Tensor) -> Tensor:
    """Scale of each int8 row, float64 [rows]; a row of zeros gets the largest row's."""
    largest = table.detach().abs().amax(1).double()
    return torch.where(largest > 0, largest, largest.max().clamp(min=1e-30)) / WEIGHT_MAX


def integer_rows(table: Tensor, units: Tensor) -> Tensor:
    """The int8 table, float64 [rows, w]."""
    return (table.detach().double() / units[:, None]).round()


def snapped_rows(table: Tensor, units: Tensor) -> Tensor:
    """The int8 table as the numbers it stands for."""
    if grid_cpu.usable(table):
        return grid_cpu.snapped_rows(table, units)
    return integer_rows(table, units) * units[:, None]


def mantissas(values: Tensor) -> tuple[Tensor, int]:
    """(m, bits) with values = m * 2**-bits, the largest mantissa MANTISSA_BITS wide. int64."""
    bits = MANTISSA_BITS - math.frexp(max(float(values.detach().abs().max()), 1e-12))[1]
    return (values.detach().double() * 2.0**bits).round().long(), bits


class EmbeddingGrid:
    """`contracts.Embedding.current` of tokens, as multiples of the residual unit. What no token changes is made once.

    table [vocab, d]; position_table [rows, d] and `positions` count OPT's offset already.
    """

    @torch.no_grad()
    def __init__(self, table: Tensor, position_table: Tensor, gain: Tensor, bias: Tensor) -> None:
        self.table, self.units = table, row_units(table)
        self.row_scale, row_bits = mantissas(self.units)
        self.gain, gain_bits = mantissas(gain)
        self.shift = row_bits + gain_bits - RESIDUAL_FRACTION_BITS
        if not 0 <= self.shift <= 62:
            raise InputError("student: embed_gain times the token table is outside the integer range of the current")
        limit = (1 << 15) - 1
        self.place = ((gain * position_table + bias).double() / RESIDUAL_UNIT).round().clamp(-limit, limit).long()

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """float64 [batch, token, d]."""
        used, where = tokens.unique(return_inverse=True)
        rows = integer_rows(self.table[used], self.units[used]).long() * self.row_scale[used, None] * self.gain
        current = (rows + ((1 << self.shift) >> 1)) >> self.shift
        return (current[where] + self.place[positions]).double() * RESIDUAL_UNIT


def head_scale(norm: nn.LayerNorm) -> float:
    """s_y, a power of two: how many integers make one unit of LN's output."""
    reach = float((HEAD_SIGMAS * norm.weight.double().abs() + norm.bias.double().abs()).max())
    return 2.0 ** math.floor(math.log2(HEAD_LIMIT / max(reach, 1e-12)))


@torch.no_grad()
def head_features(h: Tensor, norm: nn.LayerNorm, levels: int = 1) -> Tensor:
    """y / s_y of LN(mean over steps of h [time, ..., d]), in float64 from exact sums. levels: h is a multiple of the
    residual unit divided by it.
    """
    steps, size = levels * h.shape[0] / RESIDUAL_UNIT, h.shape[-1]
    counts = (h.double().sum(0) * (levels / RESIDUAL_UNIT)).long()
    mean = counts.sum(-1, keepdim=True).double() / (size * steps)
    square = counts.square().sum(-1, keepdim=True).double() / (size * steps * steps)
    inverse = 1.0 / ((square - mean * mean).clamp(min=0.0) + norm.eps).sqrt()
    scale = head_scale(norm)
    y = scale * ((counts.double() / steps - mean) * inverse * norm.weight.double() + norm.bias.double())
    return y.round().clamp(-HEAD_LIMIT, HEAD_LIMIT) / scale


class HeadGrid:
    """logit_v = (e^s unit_v) sum_i (y_i / s_y) table[v, i] + bias_v; float64, the sum exact."""

    @torch.no_grad()
    def __init__(self, table: Tensor, logit_scale: Tensor, bias: Tensor) -> None:
        units = row_units(table)
        self.rows = integer_rows(table, units)
        self.scale, self.bias = math.exp(float(logit_scale)) * units, bias.double()

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        return features.double() @ self.rows.T * self.scale + self.bias
