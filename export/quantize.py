r"""Lower a trained student to the deployable `SpikeModel`: int8 with exact integer semantics, or float32.

One scale per output neuron: with sigma_n = max_i |W_ni| / 127 (or less, if calibration clips),

    w = round(W / sigma)     threshold = round(V / sigma * 2**6)     bias = round(b / sigma * 2**6)

so sigma disappears into that neuron's membrane unit and no rescaling is left at run time. Attention counts are
integers already; their thresholds are rounded in units of 2**-10. Residual stream, gains and embedding current are
integers in units of 2**-12 of the float ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spikeopd.contracts import (
    COUNT_SHIFT,
    DECAY_BITS,
    LOGIT_INPUT_BITS,
    MEMBRANE_MAX,
    RESIDUAL_FRACTION_BITS,
    WEIGHT_SHIFT,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Precision,
    Site,
    SpikeModel,
    projections,
    site_shift,
)
from spikeopd.contracts.topology import SIZES
from spikeopd.errors import InputError
from spikeopd.models.bispikclm import POSITION_OFFSET, BiSpikCLMBlock, BiSpikCLMForCausalLM, SpikeLinear

Array = NDArray[Any]

WEIGHT_MAX = 127
# A threshold or bias above a quarter of the membrane range would leave too little room for the sums around it.
SITE_LIMIT = MEMBRANE_MAX // 4
MANTISSA_BITS = 18  # of the embedding's row scales and channel gains: their product with the table stays below 2**63
RESIDUAL_UNIT = 1 << RESIDUAL_FRACTION_BITS
HEAD_SIGMAS = 8.0  # a normalised feature further out than this is clipped at the 14-bit input of a factorised head

MODULES = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj", "w_1": "fc1", "w_2": "fc2"}


@dataclass(frozen=True)
class TensorError:
    """What rounding did to one tensor. `relative` is ||x - x'|| / ||x||; `adapted` neurons got a coarser scale."""

    name: str
    elements: int
    relative: float
    largest: float
    clipped: int = 0
    adapted: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Lowered:
    model: SpikeModel
    errors: tuple[TensorError, ...]


def model_shape(model: BiSpikCLMForCausalLM) -> ModelShape:
    config = model.config
    return ModelShape(**{name: int(getattr(config, name)) for name in SIZES})


@torch.no_grad()
def lower(
    model: BiSpikCLMForCausalLM, precision: Precision = "int8", clips: Mapping[str, Array] | None = None
) -> Lowered:
    """The deployable model and the error of each tensor. clips: per projection, share of max |W| kept per neuron."""
    _check_finite(model)
    if precision == "float32":
        return Lowered(_lower_float(model), ())
    errors: list[TensorError] = []
    config, core = model.config, model.model
    if not 0 <= config.alpha <= 1:
        raise InputError(f"checkpoint: alpha {config.alpha} is outside 0 to 1; the membrane would grow without input")
    embedding, row_unit = _lower_embedding(model, errors)
    residual = _residual_site(config.threshold, config.hidden_size, errors)
    layers = []
    for index, block in enumerate(core.layers):
        layers.append(_lower_block(block, index, model_shape(model), residual, clips or {}, errors))
    head = _lower_head(model, row_unit, errors)
    spike_model = SpikeModel(
        shape=model_shape(model),
        precision="int8",
        decay=round(config.alpha * (1 << DECAY_BITS)),
        embedding=embedding,
        embed_site=residual,
        layers=tuple(layers),
        head=head,
    )
    return Lowered(spike_model, tuple(errors))


# --- blocks ----------------------------------------------------------------------------------------------------------


def _lower_block(
    block: BiSpikCLMBlock,
    index: int,
    shape: ModelShape,
    residual: Site,
    clips: Mapping[str, Array],
    errors: list[TensorError],
) -> Layer:
    head_dim = block.config.hidden_size // block.config.num_attention_heads
    weights, sites = {}, {}
    for connection in projections(shape):
        name, site = connection.name, connection.target
        label = f"layers.{index}.{name}"
        module: SpikeLinear = getattr(block, MODULES[name])
        weight, bias = _on_grid(module)
        weights[name], sites[site] = quantize_projection(
            weight, bias, block.config.threshold, label, f"layers.{index}.{site}.bias", errors, clips.get(label)
        )
    count_unit = 1 << COUNT_SHIFT
    threshold_a, threshold_r = _numpy(block.log_threshold_a.exp()), _numpy(block.log_threshold_r.exp())
    for site, values in (("a", threshold_a), ("r", np.repeat(threshold_r, head_dim))):
        label = f"layers.{index}.{site}.threshold"
        threshold = _round(values, count_unit, np.int32, label, errors, low=1, high=SITE_LIMIT)
        sites[site] = Site(threshold, np.zeros_like(threshold), COUNT_SHIFT)
    gains = {}
    for name in ("gain_o", "gain_y"):
        label = f"layers.{index}.{name}"
        values = _numpy(getattr(block, name))
        gains[name] = _round(values, RESIDUAL_UNIT, np.int32, label, errors, low=-SITE_LIMIT, high=SITE_LIMIT)
    return Layer(**weights, **gains, sites={**sites, "x": residual, "h": residual})


def quantize_projection(
    weight: Array,
    bias: Array,
    threshold: float,
    label: str,
    bias_label: str,
    errors: list[TensorError],
    clip: Array | None = None,
) -> tuple[Array, Site]:
    """weight [out, in] and bias [out] to int8 [in, out] and the site that absorbs the scales."""
    largest = np.abs(weight).max(1).astype(np.float64)
    scale = largest / WEIGHT_MAX if clip is None else largest * clip / WEIGHT_MAX
    # Threshold and bias must fit the membrane: a neuron with tiny weights, or a huge bias, gets a coarser scale.
    floor = np.maximum(threshold, np.abs(bias)) * (1 << WEIGHT_SHIFT) / SITE_LIMIT
    adapted = int((scale < floor).sum())
    scale = np.maximum(scale, floor)
    columns = scale[:, None].astype(weight.dtype)
    exact = weight / columns
    rounded = np.clip(np.rint(exact), -WEIGHT_MAX, WEIGHT_MAX)
    unit = (1 << WEIGHT_SHIFT) / scale
    site = Site(
        np.maximum(1, np.rint(threshold * unit)).astype(np.int32), np.rint(bias * unit).astype(np.int32), WEIGHT_SHIFT
    )
    clipped = int((np.abs(exact) > WEIGHT_MAX + 0.5).sum())
    _note(errors, label, weight, rounded * columns, clipped, adapted)
    _note(errors, bias_label, bias, site.bias / unit)
    return np.ascontiguousarray(rounded.astype(np.int8).T), site


def _residual_site(threshold: float, size: int, errors: list[TensorError]) -> Site:
    values = np.full(size, threshold)
    integer = _round(values, RESIDUAL_UNIT, np.int32, "residual.threshold", errors, low=1, high=SITE_LIMIT)
    return Site(integer, np.zeros_like(integer), 0)


# --- embedding and head ----------------------------------------------------------------------------------------------


def _lower_embedding(model: BiSpikCLMForCausalLM, errors: list[TensorError]) -> tuple[Embedding, Array]:
    """The embedding, and the float scale of each table row (the head shares the table)."""
    core = model.model
    table, row_unit = _quantize_rows(_numpy(core.embed_tokens.weight), "embedding.table", errors)
    gain = _numpy(core.embed_gain).astype(np.float64)
    project_in = None
    if core.project_in is not None:
        columns, column_unit = _quantize_rows(_numpy(core.project_in.weight), "embedding.project_in", errors)
        project_in, gain = np.ascontiguousarray(columns.T), gain * column_unit
    row_scale, row_bits = _mantissas(row_unit)
    channel_gain, gain_bits = _mantissas(gain)
    shift = row_bits + gain_bits - RESIDUAL_FRACTION_BITS
    if not 0 <= shift <= 62:
        raise InputError("checkpoint: embed_gain times the token table is outside the integer range of the current")
    _note(errors, "embedding.row_scale", row_unit, row_scale * 2.0**-row_bits)
    _note(errors, "embedding.channel_gain", gain, channel_gain * 2.0**-gain_bits)
    position = _numpy(core.embed_gain) * _numpy(core.embed_positions.weight[POSITION_OFFSET:]) + _numpy(core.embed_bias)
    limit = np.iinfo(np.int16).max
    position16 = _round(position, RESIDUAL_UNIT, np.int16, "embedding.position", errors, low=-limit, high=limit)
    return Embedding(table, row_scale, channel_gain, shift, position16, project_in), row_unit


def _lower_head(model: BiSpikCLMForCausalLM, row_unit: Array, errors: list[TensorError]) -> Head:
    core, norm = model.model, model.model.final_layer_norm
    scale = math.exp(float(core.logit_scale))
    gamma, beta = _numpy(norm.weight).astype(np.float64), _numpy(norm.bias).astype(np.float64)
    bias = _numpy(model.lm_head.bias).astype(np.float64)
    if core.project_out is None:
        # gamma's width keeps the sum over all channels within 32 bits, so any backend can accumulate it.
        steps, d = model.config.num_steps, model.config.hidden_size
        widest = min(np.iinfo(np.int16).max, (2**31 - 1) // (steps * WEIGHT_MAX * d))
        unit = max(float(np.abs(gamma).max()), 1e-12) / widest
        gamma16 = np.rint(gamma / unit).astype(np.int16)
        _note(errors, "head.gamma", gamma, gamma16 * unit)
        shift = scale * (_numpy(core.embed_tokens.weight) @ beta.astype(np.float32)).astype(np.float64)
        return Head(scale * row_unit * unit, bias + shift, norm.eps, gamma=gamma16)
    out = _numpy(core.project_out.weight).astype(np.float64)  # [w, d]
    folded = out * gamma
    rows, unit_k = _quantize_rows(folded, "head.project_out", errors)
    offset = out @ beta
    reach = float((HEAD_SIGMAS * np.sqrt((folded**2).sum(1)) + np.abs(offset)).max())
    y_scale = ((1 << (LOGIT_INPUT_BITS - 1)) - 1) / max(reach, 1e-12)
    return Head(
        row_scale=scale * row_unit / y_scale,
        bias=bias,
        epsilon=norm.eps,
        project_out=np.ascontiguousarray(rows.T),
        out_scale=unit_k * y_scale,
        out_bias=offset * y_scale,
    )


def _quantize_rows(values: Array, label: str, errors: list[TensorError]) -> tuple[Array, Array]:
    """int8 rows and the float64 scale of each; a row of zeros gets the largest row's scale."""
    largest = np.abs(values).max(1).astype(np.float64)
    unit = np.where(largest > 0, largest, max(float(largest.max()), 1.0)) / WEIGHT_MAX
    table = np.empty(values.shape, np.int8)
    squared = total = worst = 0.0
    for start in range(0, len(values), 4096):  # in slices: a vocabulary in float64 would double the model's memory
        part, scale = values[start : start + 4096], unit[start : start + 4096, None]
        rounded = np.rint(part / scale)
        table[start : start + 4096] = rounded
        difference = rounded * scale - part
        squared, total = squared + float((difference**2).sum()), total + float((part.astype(np.float64) ** 2).sum())
        worst = max(worst, float(np.abs(difference).max()))
    errors.append(TensorError(label, values.size, math.sqrt(squared / total) if total else 0.0, worst))
    return table, unit


def _mantissas(values: Array) -> tuple[Array, int]:
    """(m, bits) with values = m * 2**-bits, the largest mantissa MANTISSA_BITS wide."""
    bits = MANTISSA_BITS - math.frexp(max(float(np.abs(values).max()), 1e-12))[1]
    return np.rint(values * 2.0**bits).astype(np.int32), bits


# --- float32 ---------------------------------------------------------------------------------------------------------


def _lower_float(model: BiSpikCLMForCausalLM) -> SpikeModel:
    config, core, norm = model.config, model.model, model.model.final_layer_norm
    d, shape = config.hidden_size, model_shape(model)
    head_dim = d // config.num_attention_heads

    def flat(values: Array, site: str, bias: Array | None = None) -> Site:
        values = values.astype(np.float32)
        return Site(values, np.zeros_like(values) if bias is None else bias, site_shift(site, "float32"))

    residual = flat(np.full(d, config.threshold), "x")

    def layer(block: BiSpikCLMBlock) -> Layer:
        weights, sites = {}, {}
        for connection in projections(shape):
            name, site = connection.name, connection.target
            weight, bias = _on_grid(getattr(block, MODULES[name]))
            weights[name] = np.ascontiguousarray(weight.T)
            sites[site] = flat(np.full(len(bias), config.threshold), site, bias)
        sites["a"] = flat(_numpy(block.log_threshold_a.exp()), "a")
        sites["r"] = flat(np.repeat(_numpy(block.log_threshold_r.exp()), head_dim), "r")
        gains = {"gain_o": _numpy(block.gain_o), "gain_y": _numpy(block.gain_y)}
        return Layer(**weights, **gains, sites={**sites, "x": residual, "h": residual})

    gain = core.embed_gain
    position = _numpy(gain * core.embed_positions.weight[POSITION_OFFSET:] + core.embed_bias)
    table = _numpy(core.embed_tokens.weight)
    embedding = Embedding(
        table=table,
        row_scale=np.ones(config.vocab_size, np.float32),
        channel_gain=_numpy(gain),
        shift=0,
        position=position,
        project_in=None if core.project_in is None else np.ascontiguousarray(_numpy(core.project_in.weight).T),
    )
    scale = math.exp(float(core.logit_scale))
    beta = _numpy(norm.bias).astype(np.float64)
    bias = _numpy(model.lm_head.bias).astype(np.float64)
    rows = np.full(config.vocab_size, scale)
    if core.project_out is None:
        head = Head(rows, bias + scale * (table @ beta), norm.eps, gamma=_numpy(norm.weight))
    else:
        out = core.project_out.weight
        head = Head(
            row_scale=rows,
            bias=bias,
            epsilon=norm.eps,
            project_out=np.ascontiguousarray(_numpy(out * norm.weight).T),
            out_scale=np.ones(config.word_embed_proj_dim),
            out_bias=_numpy(out).astype(np.float64) @ beta,
        )
    layers = tuple(layer(block) for block in core.layers)
    return SpikeModel(model_shape(model), "float32", config.alpha, embedding, residual, layers, head)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _round(
    values: Array, unit: float, dtype: Any, label: str, errors: list[TensorError], *, low: int, high: int
) -> Array:
    exact = np.rint(values.astype(np.float64) * unit)
    clipped = np.clip(exact, low, high)
    _note(errors, label, values, clipped / unit, int((clipped != exact).sum()))
    return clipped.astype(dtype)


def _note(
    errors: list[TensorError], name: str, values: Array, restored: Array, clipped: int = 0, adapted: int = 0
) -> None:
    norm = float(np.linalg.norm(values))
    difference = np.asarray(restored) - values
    relative = float(np.linalg.norm(difference)) / norm if norm else 0.0
    largest = float(np.abs(difference).max()) if difference.size else 0.0
    errors.append(TensorError(name, int(values.size), relative, largest, clipped, adapted))


def _on_grid(module: SpikeLinear) -> tuple[Array, Array]:
    """Weight and bias as they act. The module must not keep them: over all layers that is the model once more."""
    weight, bias = module.on_grid()
    module._snapped = None
    return _numpy(weight), _numpy(bias)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"checkpoint: parameter '{name}' holds values that are not finite; it cannot be exported")
