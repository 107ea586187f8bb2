"""Random models whose every neuron group fires at an asked rate, so that the real kernels can be timed unmodified.

Weights are random; thresholds are found neuron by neuron. A few calibration tokens go through the network as if they
stood at the end of a context of the asked length (the keys and values before them are random spikes of the same rate),
and each neuron's threshold is bisected until it fires at the rate over those tokens. Only thresholds are chosen: the
patterns over tokens, neurons and steps are what the integer neuron makes of the currents.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from neuro_sim.fixed_point import run_site
from spikeopd.contracts import (
    COUNT_SHIFT,
    MEMBRANE_MAX,
    WEIGHT_SHIFT,
    Activity,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Precision,
    Site,
    SpikeModel,
    weight_limit,
)

Array = NDArray[Any]
DECAY = 3686  # round(4096 * 0.9)
TOKENS = 24  # calibration tokens
BISECTIONS = 14

OPT_SHAPES = {
    "125m": ModelShape(768, 12, 12, 3072, 50272, 2048, 4, 768),
    "350m": ModelShape(1024, 24, 16, 4096, 50272, 2048, 4, 512),
    "1.3b": ModelShape(2048, 24, 32, 8192, 50272, 2048, 4, 2048),
    "tiny": ModelShape(128, 2, 2, 512, 1000, 2048, 4, 128),
}


def spikes_at(currents: Array, threshold: Array, shift: int) -> Array:
    """Spikes [tokens, T_s, n] of neurons with these currents."""
    tokens, steps, n = currents.shape
    flat = currents.transpose(1, 0, 2).reshape(steps, tokens * n)
    wide = np.tile(threshold, tokens)
    fired, _ = run_site(flat, Site(wide, np.zeros_like(wide), shift), DECAY)
    return fired.reshape(steps, tokens, n).transpose(1, 0, 2)


def calibrate(currents: Array, shift: int, rate: float) -> tuple[Array, Array]:
    """Thresholds [n] at which each neuron fires at `rate`, and its spikes."""
    low = np.ones(currents.shape[2])
    high = np.full(currents.shape[2], float(MEMBRANE_MAX))
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        fires = spikes_at(currents, middle.astype(np.int32), shift).mean((0, 1)) > rate
        low, high = np.where(fires, middle, low), np.where(fires, high, middle)
    threshold = np.maximum(1, np.sqrt(low * high)).astype(np.int32)
    return threshold, spikes_at(currents, threshold, shift)


def calibrated_model(
    shape: ModelShape, rate: float, context: int, seed: int = 0, precision: Precision = "int8"
) -> SpikeModel:
    """A random integer model that fires at about `rate` everywhere when decoding at about `context` tokens."""
    rng = np.random.default_rng(seed)
    d, f, width, steps = shape.hidden_size, shape.ffn_dim, shape.word_embed_proj_dim, shape.num_steps
    tokens = min(TOKENS, context)
    limit = weight_limit(precision)

    def weight(rows: int, columns: int, limit: int = 127) -> Array:
        return rng.integers(-limit, limit + 1, (rows, columns), dtype=np.int8)

    def site(currents: Array, shift: int) -> tuple[Site, Array]:
        threshold, spikes = calibrate(currents, shift, rate)
        return Site(threshold, np.zeros_like(threshold), shift), spikes

    def project(spikes: Array, matrix: Array) -> Array:
        # float32 sums of at most 2**16 products below 2**8 are exact
        rows = spikes.reshape(tokens * steps, -1).astype(np.float32)
        return np.concatenate(
            [rows @ matrix[:, c : c + 1024].astype(np.float32) for c in range(0, matrix.shape[1], 1024)], 1
        ).reshape(tokens, steps, -1).astype(np.int64)  # fmt: skip

    residual = np.repeat(rng.normal(0, 3000, (tokens, 1, d)).astype(np.int64), steps, 1)
    embed_site, x = site(residual, 0)
    layers = []
    for _ in range(shape.num_hidden_layers):
        w_q, w_k, w_v, w_o = (weight(d, d, limit) for _ in range(4))
        w_1, w_2 = weight(d, f, limit), weight(f, d, limit)
        gain_o, gain_y = rng.normal(0, 2000, (2, d)).astype(np.int32)
        sites = {}
        sites["q"], q = site(project(x, w_q), WEIGHT_SHIFT)
        sites["k"], _ = site(project(x, w_k), WEIGHT_SHIFT)
        sites["v"], _ = site(project(x, w_v), WEIGHT_SHIFT)
        sites["a"], sites["r"], r = _calibrate_attention(rng, shape, rate, context, q)
        sites["o"], o = site(project(r, w_o), WEIGHT_SHIFT)
        residual = residual + o * gain_o
        sites["x"], x = site(residual, 0)
        sites["f"], fired = site(project(x, w_1), WEIGHT_SHIFT)
        sites["y"], y = site(project(fired, w_2), WEIGHT_SHIFT)
        residual = residual + y * gain_y
        sites["h"], x = site(residual, 0)
        layers.append(Layer(w_q, w_k, w_v, w_o, w_1, w_2, sites, gain_o, gain_y))
    factorised = shape.factorised
    # Residual units of a token: about N(0, 3000), as calibrated above.
    spread = 73.0 * (73.0 * np.sqrt(width) if factorised else 1.0)
    embedding = Embedding(
        table=weight(shape.vocab_size, width),
        row_scale=np.full(shape.vocab_size, 1 << 12, np.int32),
        channel_gain=np.full(d, round(3000 / spread * (1 << 12)), np.int32),
        shift=24,
        position=np.zeros((shape.max_position_embeddings, d), np.int16),
        project_in=weight(width, d) if factorised else None,
    )
    head = Head(
        row_scale=np.full(shape.vocab_size, 1e-5),
        bias=np.zeros(shape.vocab_size),
        epsilon=1e-5,
        gamma=None if factorised else rng.integers(200, 1000, d).astype(np.int16),
        project_out=weight(d, width) if factorised else None,
        out_scale=np.full(width, 1.0) if factorised else None,
        out_bias=np.zeros(width) if factorised else None,
    )
    return SpikeModel(shape, precision, DECAY, embedding, embed_site, tuple(layers), head)


def _calibrate_attention(
    rng: np.random.Generator, shape: ModelShape, rate: float, context: int, q: Array
) -> tuple[Site, Site, Array]:
    """Thresholds of the map (one per head) and of R, with `context` random keys and values of the rate."""
    heads, size, steps, tokens = shape.num_attention_heads, shape.head_dim, shape.num_steps, q.shape[0]
    map_threshold, r_threshold, r_spikes = np.zeros(heads, np.int32), [], []
    for head in range(heads):
        keys, values = rng.random((2, steps, context, size), np.float32) < rate
        queries = q[:, :, head * size : (head + 1) * size].astype(np.float32)
        counts = np.einsum("bth,tch->btc", queries, keys.astype(np.float32), optimize=True).astype(np.int64)
        low, high = 1.0, float(MEMBRANE_MAX)
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            fires = spikes_at(counts, np.full(context, middle, np.int32), COUNT_SHIFT).mean() > rate
            low, high = (middle, high) if fires else (low, middle)
        map_threshold[head] = int(np.sqrt(low * high))
        chosen = spikes_at(counts, np.full(context, map_threshold[head], np.int32), COUNT_SHIFT)
        sums = np.einsum("btc,tch->bth", chosen.astype(np.float32), values.astype(np.float32), optimize=True)
        threshold, spikes = calibrate(sums.astype(np.int64), COUNT_SHIFT, rate)
        r_threshold.append(threshold)
        r_spikes.append(spikes)
    r_site = Site(np.concatenate(r_threshold), np.zeros(heads * size, np.int32), COUNT_SHIFT)
    assert len(r_spikes) == heads and r_spikes[0].shape[0] == tokens
    return Site(map_threshold, np.zeros(heads, np.int32), COUNT_SHIFT), r_site, np.concatenate(r_spikes, -1)


def refine(model: SpikeModel, rate: float, context: int, rounds: int = 8) -> SpikeModel:
    """Move the thresholds of whole groups until the engine itself, on its own keys and values, shows the rate.

    What one group does moves all behind it, so the corrections grow smaller; of all rounds the model whose worst group
    is nearest to the rate is returned.
    """
    from neuro_sim.event.engine import EventDecoder

    rng = np.random.default_rng(2)
    fed = rng.integers(0, model.shape.vocab_size, context - 1).tolist()
    best, least = model, np.inf
    for turn in range(rounds + 1):
        decoder = EventDecoder(model)
        model = decoder.model
        decoder.prefill(fed[:-16])
        _, activities = decoder.prefill(fed[-16:])
        decoder.close()

        def found(name: str, index: int, counted: list[Activity] = activities) -> float:
            """The rate of a group over the one that is asked for."""
            spikes = sum(int(a.spikes[name][index].sum()) for a in counted)
            return max(spikes, 1) / sum(int(a.cells[name][index].sum()) for a in counted) / rate

        sites = [("embed", 0)] + [(name, i) for i, layer in enumerate(model.layers) for name in layer.sites]
        by_site: dict[str, list[float]] = {}
        for name, index in sites:
            by_site.setdefault(name, []).append(found(name, index))
        error = max(abs(float(np.log(np.mean(ratios)))) for ratios in by_site.values())
        if error < least:
            best, least = model, error
        power = max(0.8 * 0.8**turn, 0.3)

        def moved(old: Site, ratio: float, power: float = power) -> Site:
            factor = np.clip(ratio**power, 0.5, 2.0)
            return Site(np.clip(old.threshold * factor, 1, MEMBRANE_MAX).astype(np.int32), old.bias, old.shift)

        layers = tuple(
            replace(layer, sites={name: moved(old, found(name, index)) for name, old in layer.sites.items()})
            for index, layer in enumerate(model.layers)
        )
        model = replace(model, layers=layers, embed_site=moved(model.embed_site, found("embed", 0)))
    return best


def read_bandwidth(threads: int, megabytes: int = 256) -> float:
    """Bytes per second at which so many threads together read memory that is in no cache. Best of five.

    By the clock the decoders are measured with: CPU time for one thread, wall time for several.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    part = np.ones(megabytes * (1 << 20) // 8 // threads, np.int64)
    parts = [part] + [part.copy() for _ in range(threads - 1)]
    sum_all(part[:8])
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = clock()
            list(pool.map(sum_all, parts))
            best = max(best, sum(p.nbytes for p in parts) / (clock() - started))
    return best


@njit(nogil=True, cache=True)
def sum_all(values: Array) -> int:
    total = 0
    for i in range(values.size):
        total += values[i]
    return total
