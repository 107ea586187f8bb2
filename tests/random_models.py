"""Random deployable models with controllable activity, for tests of everything behind the exporter. numpy only."""

from __future__ import annotations

import dataclasses

import numpy as np

from spikeopd.contracts import (
    COUNT_SHIFT,
    WEIGHT_SHIFT,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Precision,
    Site,
    SpikeModel,
    weight_limit,
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
    neuron="lif",
    attention="sum",
) -> ModelShape:
    d = heads * head_dim
    form = (write, readout, distances, neuron, attention)
    return ModelShape(d, layers, heads, ffn, vocab, positions, num_steps, width or d, *form)


INHIBITING = {"write": "current", "readout": "residual", "distances": 5, "attention": "inhibiting"}
PLUS = {"write": "current", "readout": "residual", "distances": 5}  # every option away from the paper's block


def random_model(
    shape: ModelShape | None = None, *, seed: int = 0, drive: float = 1.0, precision: Precision = "int8"
) -> SpikeModel:
    """Integer model with random weights. `drive` scales thresholds down: larger means more spikes."""
    shape = shape or random_shape()
    rng = np.random.default_rng(seed)
    d, ffn, heads, width = shape.hidden_size, shape.ffn_dim, shape.num_attention_heads, shape.word_embed_proj_dim
    limit = weight_limit(precision)

    def weight(fan_in: int, fan_out: int, limit: int = 127) -> np.ndarray:
        return rng.integers(-limit, limit + 1, (fan_in, fan_out), dtype=np.int8)

    def projection_site(n: int, fan_in: int) -> Site:
        # A third of the inputs active gives sums of this order; bias and threshold spread around it.
        spread = 73 * (limit / 127) * np.sqrt(max(1.0, fan_in / 3)) * 2**WEIGHT_SHIFT
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
        weights = {f"w_{name}": weight(*size, limit) for name, size in fans.items()}
        if shape.inhibiting:
            weights["inhibition"] = rng.integers(-700, 100, d).astype(np.int32)
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
        shape, precision, 3686, embedding, residual_site(), tuple(layer() for _ in range(shape.num_hidden_layers)), head
    )


def real_valued(model: SpikeModel, alpha: float = 0.5) -> SpikeModel:
    """The same network in float32 with all shifts multiplied in, and a decay that does not truncate.

    Every number is an integer or a short binary fraction, so that sums are exact in any order.
    """

    def site(values: Site) -> Site:
        unit = np.float32(1 << values.shift)
        return Site(values.threshold.astype(np.float32) / unit, values.bias.astype(np.float32) / unit, 0)

    def layer(values: Layer) -> Layer:
        wide = {f"w_{name}": getattr(values, f"w_{name}").astype(np.float32) for name in "qkvo12"}
        if model.shape.residual_write == "current":
            wide["w_o"] = wide["w_o"] * 2.0 ** values.shift_o.astype(np.float32)
            wide["w_2"] = wide["w_2"] * 2.0 ** values.shift_y.astype(np.float32)
        names = ("gain_o", "gain_y") if model.shape.residual_write == "spike" else ("bias_o", "bias_y")
        if model.shape.inhibiting:
            wide["inhibition"] = values.inhibition.astype(np.float32) / np.float32(1 << COUNT_SHIFT)
        written = {name: getattr(values, name).astype(np.float32) for name in names}
        return Layer(**wide, **written, sites={name: site(values) for name, values in values.sites.items()})

    e, head = model.embedding, model.head
    rows = np.stack([e.current(token, 0) - e.position[0] for token in range(model.shape.vocab_size)])
    shape = dataclasses.replace(model.shape, word_embed_proj_dim=model.shape.hidden_size)
    ones = np.ones(model.shape.hidden_size)
    embedding = Embedding(
        table=rows.astype(np.float32),
        row_scale=np.ones(len(rows), np.float32),
        channel_gain=ones.astype(np.float32),
        shift=0,
        position=e.position.astype(np.float32),
    )
    scales = (
        {"gamma": ones.astype(np.float32)} if shape.readout == "rate" else {"out_scale": ones, "out_bias": 0 * ones}
    )
    head = Head(head.row_scale, head.bias, head.epsilon, **scales)
    layers = tuple(layer(values) for values in model.layers)
    return SpikeModel(shape, "float32", alpha, embedding, site(model.embed_site), layers, head)
