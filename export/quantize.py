r"""Lower a trained student to the deployable `SpikeModel`: int8 or int4 with exact integer semantics, or float32.

One scale per output neuron: with sigma_n = max_i |W_ni| / 127 (or less, if calibration clips; in int4 / 7, and less
where clipping the largest weights lowers the error),

    w = round(W / sigma)     threshold = round(V / sigma * 2**6)     bias = round(b / sigma * 2**6)

so sigma disappears into that neuron's membrane unit and no rescaling is left at run time. A projection that writes into
the residual stream has no neuron to absorb its scale: there sigma_n is a power of two, sigma_n = 2**(shift_n - 12).
Attention counts are integers already; thresholds and biases of `a` and `r` are rounded in units of 2**-10. Residual
stream, its sites, gains and embedding current are integers in units of 2**-12 of the float ones.

A student trained with the integer forward pass of this precision (`deploy_precision`, models/grid.py) has these
integers already: its own scales are taken, and nothing is left to round.
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
    EMBED_SITE,
    LOGIT_INPUT_BITS,
    RESIDUAL,
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
    weight_limit,
)
from spikeopd.contracts.bundle import WRITE_SHIFT_LIMIT
from spikeopd.contracts.topology import FORMS, SIZES
from spikeopd.errors import InputError
from spikeopd.models import grid
from spikeopd.models.bispikclm import POSITION_OFFSET, BiSpikCLMBlock, BiSpikCLMForCausalLM
from spikeopd.models.grid import HEAD_SIGMAS, MANTISSA_BITS, SITE_LIMIT, WEIGHT_MAX
from spikeopd.models.projection import Neurons, SpikeLinear

Array = NDArray[Any]

RESIDUAL_UNIT = 1 << RESIDUAL_FRACTION_BITS
MODULES = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj", "w_1": "fc1", "w_2": "fc2"}
RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)  # shares of max |W| at which clipping is tried
WRITTEN = {"w_o": "o", "w_2": "y"}  # the projections behind which a sublayer writes, and the name of what it writes


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
    return ModelShape(**{name: getattr(config, name) for name in (*SIZES, *FORMS, "distances")})


def trained_tables(model: BiSpikCLMForCausalLM) -> bool:
    """Whether its forward pass uses the integer tables and sites around the weights, which all precisions share."""
    return bool(model.config.deploy_precision != "none")


@torch.no_grad()
def lower(
    model: BiSpikCLMForCausalLM, precision: Precision = "int8", clips: Mapping[str, Array] | None = None
) -> Lowered:
    """The deployable model and the error of each tensor. clips: per projection, share of max |W| kept per neuron."""
    _check_finite(model)
    _check_biases(model)
    if precision == "float32":
        return Lowered(_lower_float(model), ())
    errors: list[TensorError] = []
    config, core, shape = model.config, model.model, model_shape(model)
    if not 0 <= config.alpha <= 1:
        raise InputError(f"checkpoint: alpha {config.alpha} is outside 0 to 1; the membrane would grow without input")
    # Rounding of the tables is part of a forward pass that was trained with it, and no error then.
    # The outer tables are the same in every integer precision.
    outer: list[TensorError] = [] if trained_tables(model) else errors
    embedding, row_unit = _lower_embedding(model, outer)
    shared = config.neurons == "shared"
    neurons = core.neurons()
    if shared and not trained_tables(model):  # the config's own number, which float32 would round
        neurons = Neurons(torch.tensor([config.threshold], dtype=torch.float64))
    embed_site = _lower_site(neurons, 0, config.hidden_size, "residual" if shared else EMBED_SITE, errors)
    layers = [
        _lower_block(block, index, shape, precision, embed_site if shared else None, clips or {}, errors)
        for index, block in enumerate(core.layers)
    ]
    spike_model = SpikeModel(
        shape=shape,
        precision=precision,
        decay=0 if shape.graded else round(config.alpha * (1 << DECAY_BITS)),
        embedding=embedding,
        embed_site=embed_site,
        layers=tuple(layers),
        head=_lower_head(model, row_unit, outer),
    )
    return Lowered(spike_model, tuple(errors))


# --- blocks ----------------------------------------------------------------------------------------------------------


def _lower_block(
    block: BiSpikCLMBlock,
    index: int,
    shape: ModelShape,
    precision: Precision,
    residual: Site | None,
    clips: Mapping[str, Array],
    errors: list[TensorError],
) -> Layer:
    """residual: the site that x and h share with the embedding, if they do."""
    weights: dict[str, Array] = {}
    sites: dict[str, Site] = {}
    writes: dict[str, Array] = {}
    trained, limit = block.config.deploy_precision == precision, weight_limit(precision)
    for connection in projections(shape):
        name, label = connection.name, f"layers.{index}.{connection.name}"
        module: SpikeLinear = getattr(block, MODULES[name])
        weight, bias = _on_grid(module)
        if connection.target == RESIDUAL:
            weights[name], shift, integer_bias = quantize_write(weight, bias, label, errors, limit)
            writes |= {f"shift_{WRITTEN[name]}": shift, f"bias_{WRITTEN[name]}": integer_bias}
            continue
        bias_label = f"layers.{index}.{connection.target}.bias"
        if trained:
            threshold, scale = _numpy(module.neurons().threshold), module.scale().numpy()
            weights[name], sites[connection.target] = _on_scale(
                weight, bias, threshold, scale, label, bias_label, errors, limit=limit
            )
        else:
            weights[name], sites[connection.target] = quantize_projection(
                weight, bias, block.config.threshold, label, bias_label, errors, clips.get(label), limit
            )
    for site in ("a", "r"):
        size = shape.num_attention_heads if site == "a" else shape.hidden_size
        sites[site] = _lower_site(block.neurons(site), COUNT_SHIFT, size, f"layers.{index}.{site}", errors)
    if (withheld := block.withheld()) is not None:
        label, limit = f"layers.{index}.inhibition", grid.INHIBITION_LIMIT
        writes["inhibition"] = _round(
            -_numpy(withheld), 1 << COUNT_SHIFT, np.int32, label, errors, low=-limit, high=limit
        )
    for site in ("x", "h"):
        label = f"layers.{index}.{site}"
        sites[site] = residual or _lower_site(block.neurons(site), 0, shape.hidden_size, label, errors)
    for site in WRITTEN.values() if shape.residual_write == "spike" else ():
        gain, label = _numpy(block.gain(site)), f"layers.{index}.gain_{site}"
        integers = _round(gain, RESIDUAL_UNIT, np.int32, label, errors, low=-SITE_LIMIT, high=SITE_LIMIT)
        writes[f"gain_{site}"] = integers
    return Layer(**weights, **writes, sites={site: sites[site] for site in shape.layer_sites})


def _lower_site(neurons: Neurons, shift: int, size: int, label: str, errors: list[TensorError]) -> Site:
    """Neurons behind no projection. A site without biases gets zeros and no line in the report."""
    unit = 1 << shift if shift else RESIDUAL_UNIT
    values = np.broadcast_to(neurons.threshold.detach().cpu().numpy().reshape(-1), size)
    threshold = _round(values, unit, np.int32, f"{label}.threshold", errors, low=1, high=SITE_LIMIT)
    if neurons.bias is None:
        return Site(threshold, np.zeros_like(threshold), shift)
    bias = _numpy(neurons.bias)
    return Site(
        threshold, _round(bias, unit, np.int32, f"{label}.bias", errors, low=-SITE_LIMIT, high=SITE_LIMIT), shift
    )


def quantize_write(
    weight: Array, bias: Array, label: str, errors: list[TensorError], limit: int = WEIGHT_MAX
) -> tuple[Array, Array, Array]:
    """weight [out, in] and bias [out] to int8 [in, out], uint8 shifts [out] and int32 biases in residual units."""
    scale = grid.write_scale(torch.from_numpy(weight), limit).numpy()
    shift = np.rint(np.log2(scale * RESIDUAL_UNIT)).astype(np.int64)
    if shift.max(initial=0) > WRITE_SHIFT_LIMIT:
        raise InputError(
            f"checkpoint: {label} has weights up to {np.abs(weight).max():.3g}; a write into the residual stream "
            f"takes {limit * 2.0 ** (WRITE_SHIFT_LIMIT - RESIDUAL_FRACTION_BITS):g} at most"
        )
    exact = np.rint(weight / scale[:, None])
    integers = np.clip(exact, -limit, limit)
    _note(errors, label, weight, integers * scale[:, None], int((integers != exact).sum()))
    name, _, leaf = label.rpartition(".")
    bias_label = f"{name}.bias_{WRITTEN[leaf]}"
    integer_bias = _round(bias, RESIDUAL_UNIT, np.int32, bias_label, errors, low=-SITE_LIMIT, high=SITE_LIMIT)
    return np.ascontiguousarray(integers.astype(np.int8).T), shift.astype(np.uint8), integer_bias


def quantize_projection(
    weight: Array,
    bias: Array,
    threshold: float,
    label: str,
    bias_label: str,
    errors: list[TensorError],
    clip: Array | None = None,
    limit: int = WEIGHT_MAX,
) -> tuple[Array, Site]:
    """weight [out, in] and bias [out] to int8 [in, out] and the site that absorbs the scales."""
    largest = np.abs(weight).max(1).astype(np.float64)
    if clip is None and limit <= grid.FEW_LEVELS:
        clip = best_ratios(torch.from_numpy(weight), None, limit).numpy()
    scale = largest / limit if clip is None else largest * clip / limit
    # Threshold and bias must fit the membrane: a neuron with tiny weights, or a huge bias, gets a coarser scale.
    floor = np.maximum(threshold, np.abs(bias)) * (1 << WEIGHT_SHIFT) / SITE_LIMIT
    adapted = int((scale < floor).sum())
    scale = np.maximum(scale, floor)
    return _on_scale(weight, bias, np.full(len(bias), threshold), scale, label, bias_label, errors, adapted, limit)


def best_ratios(weight: Tensor, moment: Tensor | None, limit: int = WEIGHT_MAX) -> Tensor:
    """weight [out, in] -> the best of RATIOS for each output neuron; moment [in, in] of its inputs, None: all alike."""
    largest = weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
    errors = []
    ratios = RATIOS if limit > grid.FEW_LEVELS else (*RATIOS, 0.5, 0.4)
    for ratio in ratios:
        scale = largest * ratio / limit
        difference = weight - (weight / scale).round().clamp(-limit, limit) * scale
        errors.append(((difference if moment is None else difference @ moment) * difference).sum(1))
    return torch.tensor(ratios, dtype=torch.float64)[torch.stack(errors).argmin(0)]


def _on_scale(
    weight: Array,
    bias: Array,
    threshold: Array,
    scale: Array,
    label: str,
    bias_label: str,
    errors: list[TensorError],
    adapted: int = 0,
    limit: int = WEIGHT_MAX,
) -> tuple[Array, Site]:
    """Weight and site in units of each neuron's scale."""
    columns = scale[:, None].astype(weight.dtype)
    exact = weight / columns
    rounded = np.clip(np.rint(exact), -limit, limit)
    unit = (1 << WEIGHT_SHIFT) / scale
    site = Site(
        np.maximum(1, np.rint(threshold * unit)).astype(np.int32), np.rint(bias * unit).astype(np.int32), WEIGHT_SHIFT
    )
    clipped = int((np.abs(exact) > limit + 0.5).sum())
    _note(errors, label, weight, rounded * columns, clipped, adapted)
    _note(errors, bias_label, bias, site.bias / unit)
    return np.ascontiguousarray(rounded.astype(np.int8).T), site


# --- embedding and head ----------------------------------------------------------------------------------------------


def _lower_embedding(model: BiSpikCLMForCausalLM, errors: list[TensorError]) -> tuple[Embedding, Array]:
    """The embedding, and the float scale of each table row (the head shares the table)."""
    core = model.model
    # The two ways to scale differ for rows of zeros alone.
    trained = grid.row_units(core.embed_tokens.weight).numpy() if trained_tables(model) else None
    table, row_unit = _quantize_rows(_numpy(core.embed_tokens.weight), "embedding.table", errors, trained)
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
    if core.project_out is None and model.config.readout == "residual":
        y_unit = grid.head_scale(norm)
        return Head(scale * row_unit / y_unit, bias, norm.eps, out_scale=gamma * y_unit, out_bias=beta * y_unit)
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


def _quantize_rows(
    values: Array, label: str, errors: list[TensorError], unit: Array | None = None
) -> tuple[Array, Array]:
    """int8 rows and the float64 scale of each; a row of zeros gets the largest row's scale."""
    if unit is None:
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
    shape = model_shape(model)

    def flat(site: str, size: int, threshold: Array, bias: Array | None) -> Site:
        values = np.broadcast_to(threshold.reshape(-1), size).astype(np.float32)
        return Site(values, np.zeros_like(values) if bias is None else bias, site_shift(site, "float32"))

    def site(name: str, neurons: Neurons) -> Site:
        size = shape.num_attention_heads if name == "a" else shape.hidden_size
        return flat(name, size, _numpy(neurons.threshold), None if neurons.bias is None else _numpy(neurons.bias))

    def layer(block: BiSpikCLMBlock) -> Layer:
        weights, sites, writes = {}, {name: site(name, block.neurons(name)) for name in ("a", "r", "x", "h")}, {}
        for connection in projections(shape):
            name, target = connection.name, connection.target
            weight, bias = _on_grid(getattr(block, MODULES[name]))
            weights[name] = np.ascontiguousarray(weight.T)
            if target == RESIDUAL:
                writes[f"bias_{WRITTEN[name]}"] = bias
            else:
                sites[target] = flat(target, len(bias), _numpy(block.neurons(target).threshold), bias)
        if (withheld := block.withheld()) is not None:
            writes["inhibition"] = -_numpy(withheld)
        if shape.residual_write == "spike":
            writes |= {f"gain_{name}": _numpy(block.gain(name)) for name in WRITTEN.values()}
        return Layer(**weights, **writes, sites={name: sites[name] for name in shape.layer_sites})

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
    if core.project_out is None and shape.readout == "residual":
        head = Head(rows, bias, norm.eps, out_scale=_numpy(norm.weight).astype(np.float64), out_bias=beta)
    elif core.project_out is None:
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
    return SpikeModel(shape, "float32", config.alpha, embedding, site(EMBED_SITE, core.neurons()), layers, head)


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
    keep, module.keep_snapped = module.keep_snapped, False
    weight, bias = module.on_grid()
    module.keep_snapped = keep
    return _numpy(weight), _numpy(bias)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(f"checkpoint: parameter '{name}' holds values that are not finite; it cannot be exported")


def _check_biases(model: BiSpikCLMForCausalLM) -> None:
    """The paper's block has no biases at embed, r, x and h, and neither have the files that hold it."""
    sites = [model.model.neurons(), *(block.neurons(site) for block in model.model.layers for site in ("r", "x", "h"))]
    if model_shape(model).paper_block and any(site.bias is not None and bool(site.bias.any()) for site in sites):
        raise InputError(
            "checkpoint: neurons 'own' in the paper's form of the block have biases that no bundle holds; "
            "train with residual_write=current, readout=residual or a distance bias, or with neurons=shared"
        )
