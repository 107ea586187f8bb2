r"""A student from an exported bundle: the integers as weights again, so that training can go on from what is deployed.

A student trained in integers lies on dyadic grids (models/grid.py), which its bundle holds whole: scales, thresholds
and tables can be read off, and lowering the student that is built here gives the bundle's integers and logits again,
bit for bit. What left no trace is chosen: weights lie on their grid points, and a power of two between token table,
gains and final norm is the one that gives the table a usual size.

Two numbers hide in products. With K = 127 and unit_v = largest_v / K, all in float64,

    T_n = round(64 V / sigma_n)                     sigma_n is the power of two that gives the stored threshold
    row_scale_v = e^s unit_v / s_y                  s and largest_v are float32: only the true s makes every
                                                    K row_scale_v / e^s a float32 times a power of two
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spikeopd.contracts import DECAY_BITS, WEIGHT_SHIFT, Head, Layer, Site, SpikeModel, load_bundle
from spikeopd.contracts.bundle import manifest_shape, read_manifest
from spikeopd.errors import InputError
from spikeopd.models.bispikclm import BEHIND, POSITION_OFFSET, BiSpikCLMBlock, BiSpikCLMConfig, BiSpikCLMForCausalLM
from spikeopd.models.grid import COUNT_UNIT, RESIDUAL_UNIT, WEIGHT_MAX

Array = NDArray[Any]
TABLE_RMS = 0.1
WEIGHTS = {"q_proj": "w_q", "k_proj": "w_k", "v_proj": "w_v", "fc1": "w_1"}
WRITES = {"out_proj": ("w_o", "shift_o", "bias_o"), "fc2": ("w_2", "shift_y", "bias_y")}


@torch.no_grad()
def student_of_bundle(path: Path | str) -> BiSpikCLMForCausalLM:
    """The student whose integers the bundle holds, in evaluation mode. Only of bundles of students trained in int8."""
    manifest = read_manifest(path)
    where, shape = f"bundle {path}", manifest_shape(manifest)
    if manifest["precision"] != "int8" or shape.graded or shape.factorised or shape.readout != "residual":
        raise InputError(f"{where}: only the int8 bundle of a student trained in integers can become a student again")
    if shape.residual_write != "current":
        raise InputError(f"{where}: a residual stream written by spikes is not read back")
    model = load_bundle(path)
    tokens = manifest.get("tokens", {})
    config = BiSpikCLMConfig(
        **{name: getattr(shape, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "ffn_dim",
           "num_attention_heads", "max_position_embeddings", "num_steps", "residual_write", "readout", "distances",
           "attention")},
        alpha=shortest_fraction(model.decay), neurons="own", scaled_surrogate=True, deploy_precision="int8",
        bos_token_id=tokens.get("bos"), eos_token_id=tokens.get("eos"), pad_token_id=tokens.get("pad"),
    )  # fmt: skip
    student = BiSpikCLMForCausalLM(config)
    core = student.model
    fill_outside(student, model, where)
    set_site(core, "embed", model.embed_site, RESIDUAL_UNIT)
    for block, layer in zip(core.layers, model.layers, strict=True):
        fill_block(block, layer, where)
    student.eval()
    return student


def shortest_fraction(decay: float) -> float:
    """alpha with the fewest digits that rounds to this 12-bit decay."""
    share = decay / (1 << DECAY_BITS)
    return next(a for a in (round(share, digits) for digits in range(1, 9)) if round(a * (1 << DECAY_BITS)) == decay)


def fill_block(block: BiSpikCLMBlock, layer: Layer, where: str) -> None:
    behind = {module: site for site, module in BEHIND.items()}
    for module, name in WEIGHTS.items():
        site = layer.sites[behind[module]]
        sigma = scales_of(site.threshold, block.config.threshold, f"{where}: {module} of layer {block.index + 1}")
        projection = getattr(block, module)
        put(projection.weight, getattr(layer, name).T * sigma[:, None])
        put(projection.bias, site.bias * (sigma / (1 << WEIGHT_SHIFT)))
    for module, (name, shift, bias) in WRITES.items():
        projection = getattr(block, module)
        put(projection.weight, getattr(layer, name).T * (2.0 ** getattr(layer, shift) * RESIDUAL_UNIT)[:, None])
        put(projection.bias, getattr(layer, bias) * RESIDUAL_UNIT)
    if block.inhibition is not None:
        assert layer.inhibition is not None
        put(block.inhibition, -layer.inhibition * COUNT_UNIT)
    for site_name in ("a", "r", "x", "h"):
        unit = COUNT_UNIT if site_name in ("a", "r") else RESIDUAL_UNIT
        set_site(block, site_name, layer.sites[site_name], unit)


def set_site(holder: Any, name: str, site: Site, unit: float) -> None:
    """Threshold and bias of neurons behind no projection."""
    put(getattr(holder, f"log_threshold_{name}"), np.log(site.threshold * unit))
    bias = getattr(holder, f"bias_{name}")
    if bias is not None:
        put(bias, site.bias * unit)


def scales_of(threshold: Array, v: float, what: str) -> Array:
    """sigma_n, float64 [out]: the power of two under which V has this integer threshold."""
    wanted = v * (1 << WEIGHT_SHIFT)
    sigma = 2.0 ** np.rint(np.log2(wanted / threshold))
    if not np.array_equal(np.rint(wanted / sigma), threshold):
        raise InputError(
            f"{what}: its scales are not powers of two with a threshold of {v}; only a bundle of a student trained in "
            "integers (stage1.deploy_updates) can become a student again"
        )
    return np.asarray(sigma)


def fill_outside(student: BiSpikCLMForCausalLM, model: SpikeModel, where: str) -> None:
    """Embedding and head, which share the token table."""
    core, embedding, head = student.model, model.embedding, model.head
    assert head.out_scale is not None and head.out_bias is not None
    s, largest = logit_scale_of(head, embedding.row_scale, where)
    deviation = np.sqrt(np.mean((embedding.table * (largest / WEIGHT_MAX)[:, None]) ** 2))
    usual = 2.0 ** np.rint(np.log2(TABLE_RMS / deviation))
    largest = largest * usual
    # row_scale m_v = unit_v 2**row_bits: what remains of the shift belongs to the channel gains.
    used = embedding.table.any(1)
    row_bits = int(np.rint(np.log2(embedding.row_scale[used] / (largest[used] / WEIGHT_MAX))).mean())
    gain_bits = embedding.shift + round(-math.log2(RESIDUAL_UNIT)) - row_bits
    gain = embedding.channel_gain * 2.0**-gain_bits
    put(core.embed_gain, gain)
    core.embed_bias.zero_()
    put(core.embed_tokens.weight, embedding.table * (largest / WEIGHT_MAX)[:, None])
    core.embed_positions.weight.zero_()
    put(core.embed_positions.weight[POSITION_OFFSET:], embedding.position * RESIDUAL_UNIT / gain)
    s_y = head_unit(head) * usual
    put(core.final_layer_norm.weight, head.out_scale / s_y)
    put(core.final_layer_norm.bias, head.out_bias / s_y)
    core.final_layer_norm.eps = head.epsilon
    core.logit_scale.fill_(s)
    put(student.lm_head.bias, head.bias)


def head_unit(head: Head) -> float:
    """s_y up to a power of two: the one that brings the norm's largest gain to 1 up to 2."""
    assert head.out_scale is not None
    return float(2.0 ** math.floor(math.log2(np.abs(head.out_scale).max())))


def logit_scale_of(head: Head, mantissas: Array, where: str) -> tuple[float, Array]:
    """(s, largest |entry| of each row of the token table): the float32 numbers whose products are `row_scale`."""
    scaled = head.row_scale * head_unit(head) * WEIGHT_MAX
    rows = mantissas > 0
    # mantissa_v is unit_v, but for a power of two and rounding: every row leaves s an interval, and few numbers in all.
    ratio = scaled[rows] / WEIGHT_MAX
    low = float(np.log(ratio / (mantissas[rows] + 0.5)).max())
    high = float(np.log(ratio / (mantissas[rows] - 0.5)).min())
    for octave in sorted(range(-64, 64), key=abs):
        shift = octave * math.log(2)
        for s in (0.0, *floats_between(low + shift, high + shift)):
            if is_single(scaled[:8] / math.exp(s)) and is_single(values := scaled / math.exp(s)):
                return s, values.astype(np.float32).astype(np.float64)
    raise InputError(f"{where}: the head's scales are not those of a student trained in integers")


def floats_between(low: float, high: float, most: int = 1 << 15) -> Iterator[float]:
    """The float32 numbers from low to high, a little beyond both."""
    value = np.nextafter(np.float32(low), np.float32(-np.inf))
    for _ in range(most):
        yield float(value)
        if value > high:
            return
        value = np.nextafter(value, np.float32(np.inf))


def is_single(values: Array) -> bool:
    """Whether every value is a float32 number, but for the rounding of two float64 operations."""
    return bool(np.allclose(values.astype(np.float32), values, rtol=1e-15, atol=0))


def put(parameter: Tensor, values: Array) -> None:
    parameter.copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(parameter.dtype))
