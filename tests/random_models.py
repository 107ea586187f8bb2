"""Random deployable models with controllable activity, for tests of everything behind the exporter. numpy only."""

from __future__ import annotations

import numpy as np

from spikeopd.contracts import (
    COUNT_SHIFT,
    WEIGHT_SHIFT,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Site,
    SpikeModel,
)


def random_shape(
    *,
    heads=2,
    head_dim=8,
    layers=2,
    ffn=24,
    vocab=40,
    positions=32,
    num_steps=4,
    width=None,
    write="spike",
    readout="rate",
    distances=0,
) -> ModelShape:
    d = heads * head_dim
    return ModelShape(d, layers, heads, ffn, vocab, positions, num_steps, width or d, write, readout, distances)


PLUS = {"write": "current", "readout": "residual", "distances": 5}  # every option away from the paper's block


def random_model(shape: ModelShape | None = None, *, seed: int = 0, drive: float = 1.0) -> SpikeModel:
    """int8 model with random weights. `drive` scales thresholds down: larger means more spikes."""
    shape = shape or random_shape()
    rng = np.random.default_rng(seed)
    d, ffn, heads, width = shape.hidden_size, shape.ffn_dim, shape.num_attention_heads, shape.word_embed_proj_dim

    def weight(fan_in: int, fan_out: int) -> np.ndarray:
        return rng.integers(-127, 128, (fan_in, fan_out), dtype=np.int8)

    def projection_site(n: int, fan_in: int) -> Site:
        # A third of the inputs active gives sums of this order; bias and threshold spread around it.
        spread = 73 * np.sqrt(max(1.0, fan_in / 3)) * 2**WEIGHT_SHIFT
        threshold = rng.uniform(0.4, 1.2, n) * spread / drive
        bias = rng.normal(0, 0.3, n) * spread
        return Site(np.maximum(1, threshold).astype(np.int32), bias.astype(np.int32), WEIGHT_SHIFT)

    def residual_site() -> Site:
        threshold = np.maximum(1, rng.uniform(0.5, 1.0, d) * 2867 / drive).astype(np.int32)
        return Site(threshold, small_bias(d, 500), 0)

    def small_bias(n: int, spread: float) -> np.ndarray:
        """Zero in the paper's block, whose files hold none here."""
        return np.zeros(n, np.int32) if shape.paper_block else rng.normal(0, spread, n).astype(np.int32)

    fans = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "1": (d, ffn), "2": (ffn, d)}

    def layer() -> Layer:
        a = np.maximum(1, rng.uniform(0.5, 1.2, heads) * np.sqrt(shape.head_dim) * 2**COUNT_SHIFT / drive)
        r = np.repeat(rng.uniform(1.0, 2.0, heads), shape.head_dim) * 2**COUNT_SHIFT / drive
        distance = rng.normal(0, 1500, (heads, shape.distances)) if shape.distances else np.zeros(heads)
        sites = {
            "q": projection_site(d, d),
            "k": projection_site(d, d),
            "v": projection_site(d, d),
            "a": Site(a.astype(np.int32), distance.astype(np.int32), COUNT_SHIFT),
            "r": Site(np.maximum(1, r).astype(np.int32), small_bias(d, 300), COUNT_SHIFT),
            "o": projection_site(d, d),
            "x": residual_site(),
            "f": projection_site(ffn, d),
            "y": projection_site(d, ffn),
            "h": residual_site(),
        }
        gain_o, gain_y = rng.normal(0, 1500, (2, d)).astype(np.int32)
        weights = {f"w_{name}": weight(*size) for name, size in fans.items()}
        if shape.residual_write == "spike":
            return Layer(**weights, sites=sites, gain_o=gain_o, gain_y=gain_y)
        del sites["o"], sites["y"]
        shifts = {name: rng.integers(0, 5, d).astype(np.uint8) for name in ("shift_o", "shift_y")}
        return Layer(**weights, sites=sites, bias_o=gain_o // 4, bias_y=gain_y // 4, **shifts)

    factorised = shape.factorised
    plain = not factorised and shape.readout == "rate"  # a head that multiplies gamma into the table
    embedding = Embedding(
        table=weight(shape.vocab_size, width),
        row_scale=rng.integers(8000, 1 << 14, shape.vocab_size).astype(np.int32),
        channel_gain=(rng.choice([-1, 1], d) * rng.integers(8000, 1 << 14, d)).astype(np.int32),
        shift=22 + (7 + width.bit_length() // 2 if factorised else 0),
        position=rng.normal(0, 800, (shape.max_position_embeddings, d)).astype(np.int16),
        project_in=weight(width, d) if factorised else None,
    )
    head = Head(
        row_scale=rng.uniform(0.5, 1.5, shape.vocab_size) / (127 * (1000 if plain else 500)),
        bias=rng.normal(0, 0.1, shape.vocab_size),
        epsilon=1e-5,
        gamma=rng.integers(200, 1000, d).astype(np.int16) if plain else None,
        project_out=weight(d, width) if factorised else None,
        out_scale=None if plain else rng.uniform(0.5, 1.5, width) * (1 if factorised else 300),
        out_bias=None if plain else rng.normal(0, 50, width),
    )
    return SpikeModel(
        shape, "int8", 3686, embedding, residual_site(), tuple(layer() for _ in range(shape.num_hidden_layers)), head
    )
