"""The conversion report: what is exact, what is not, what could not be expressed, and what it all measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from export.quantize import TensorError
from spikeopd.contracts import SpikeModel, is_integer, projections, row_bytes
from spikeopd.contracts.bundle import array_specs, is_weight

REPORT_SCHEMA = "spikeopd.export-report/1"


def parameter_count(model: SpikeModel) -> int:
    """Trained numbers of the model: weights, biases, gains, thresholds, tables, norm. Scales are not."""
    shape = model.shape
    d, heads, width = shape.hidden_size, shape.num_attention_heads, shape.word_embed_proj_dim
    weights = sum((c.fan_in or 0) * (c.fan_out or 0) + (c.fan_out or 0) for c in projections(shape))
    if replace(shape, neuron="lif").paper_block:  # one threshold per head at a and r
        neurons, embed = 2 * heads, 0
    else:  # threshold and bias per neuron at r, x, h, embed; thresholds and distance biases per head at a
        neurons, embed = heads * (1 + shape.distances) + 6 * d, 2 * d
    neurons += d if shape.inhibiting else 0
    gains = 2 * d if shape.residual_write == "spike" else 0
    tables = shape.vocab_size * (width + 1) + shape.max_position_embeddings * d + embed
    factors = 2 * width * d if shape.factorised else 0
    return shape.num_hidden_layers * (weights + neurons + gains) + tables + factors + 4 * d + 1


def model_bytes(model: SpikeModel) -> int:
    """Bytes of the model's arrays as the simulators hold them."""
    return sum(
        size[0] * row_bytes(size[1], model.precision) if is_weight(name) else np.dtype(dtype).itemsize * math.prod(size)
        for name, (dtype, size) in array_specs(model.shape, model.precision).items()
    )


def support(target: str, neuron: str, profile: str, precision: str) -> list[dict[str, str]]:
    """Every part of the model in this file: exact, lossy for a literal reader, or on the host."""
    rows = [
        ("bundle read by load_bundle", "exact", "same arrays, same spikes; verified above"),
        ("embedding and head", "host", "arrays in the file; the head's LayerNorm is no neuron and no NIR node"),
    ]
    if target == "arrays":
        return _rows([*rows, ("block", "exact", "arrays in the file; docs/formats.md says what they mean")])
    if target == "lava":
        rows += [
            ("projections, neurons, residual", "exact", "processes of neuro_sim.lava in graph.json"),
            ("attention and K/V cache", "exact", "as above; no stock Lava process has it"),
        ]
        return _rows(rows)
    truncation = "lossy" if is_integer(precision) else "exact"
    why = (
        "the truncating 12-bit decay and 24-bit saturation are not NIR; metadata has them"
        if is_integer(precision)
        else ""
    )
    rows.append(("neurons executed literally", truncation if neuron == "exact" else "lossy", why))
    if neuron == "lif":
        rows[-1] = (
            "neurons executed literally",
            "lossy",
            "nir.LIF resets hard and at once; metadata has the convention",
        )
    if profile == "cell":
        rows.append(("attention executed literally", "lossy", "one pair only: replicate as the metadata says"))
    else:
        rows.append(("attention executed literally", "exact", "every causal pair has its nodes"))
    return _rows(rows)


def tensor_table(errors: Sequence[TensorError]) -> list[dict[str, Any]]:
    return [error.to_dict() for error in errors]


def _rows(rows: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [{"part": part, "status": status, "note": note} for part, status, note in rows]
