r"""The student one token at a time on the CPU, compiled: what `BiSpikCLMForCausalLM` computes, bit for bit.

Weights, thresholds and tables are put on their grids once for a whole rollout, in `Decoder`; a step then is four int8
products a block with a compiled function after each, on buffers that stay. K and V are kept as bits, one word for up
to 64 features, so a coincidence count is `popcount(q & k)`. Nothing here has a gradient.

Arrays are [time, row, feature]; a row is a sequence. `Decoder.of` says None where the student's own forward must serve:
no int8 product, no grid, another neuron, sharded parameters, hooks, autocast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from spikeopd.contracts import EMBED_SITE
from spikeopd.jit import can_cache
from spikeopd.models import grid, lif_cpu, products
from spikeopd.models.attention_cpu import WORD, pack, popcount
from spikeopd.models.bispikclm import POSITION_OFFSET, BiSpikCLMBlock, BiSpikCLMForCausalLM
from spikeopd.models.projection import Neurons, SpikeLinear

_CACHE = can_cache(__file__)
Array = NDArray[Any]
Counts = dict[str, Array]  # spikes of a site's rows


class Site(NamedTuple):
    """Neurons as the kernels read them. unit empty: membranes on no grid. repeat 0: a threshold and a bias for each
    feature; otherwise a threshold for each of so many rows in turn (`a`: for each head).
    """

    threshold: Array
    unit: Array
    bias: Array
    repeat: int = 0


class Dense(NamedTuple):
    """A projection: int8 planes [in, planes * out], and how the sums become a current."""

    integers: Tensor
    unit: Array
    bias: Array


class Work(NamedTuple):
    """Buffers for neurons of one width, [time, row, width]."""

    current: Array
    spikes: Array


class Block(NamedTuple):
    """One block, lowered. distances [head, D] (D may be 0); gains empty where a projection writes its current."""

    qkv: Dense
    out: Dense
    fc1: Dense
    fc2: Dense
    sites: dict[str, Site]
    distances: Array
    gains: dict[str, Array]
    withheld: Array  # m [d], or none


class Decoder:
    """A student lowered for `rows` sequences of up to `longest` tokens.

    counts[layer + 1, site, row]: spikes of the last step.
    """

    SITES = (EMBED_SITE, "q", "k", "v", "r", "o", "x", "f", "y", "h")

    @classmethod
    def of(cls, student: BiSpikCLMForCausalLM, rows: int, longest: int) -> Decoder | None:
        """None where only the student's own forward gives the answer."""
        config = student.config
        parameters = list(student.parameters())
        plain = (
            config.neuron == "lif"
            and lif_cpu.ENABLED
            and products.fast()
            and min(config.hidden_size, config.ffn_dim) >= products.FAN_IN
            and not torch.is_autocast_enabled("cpu")
            and all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in parameters)
            and all(p.dtype == torch.float32 for p in parameters)
            and not any(m._forward_hooks or m._forward_pre_hooks for m in student.modules())
            and not any(layer.calibrate for layer in student.model.layers)
        )
        if not plain:
            return None
        with torch.no_grad():
            blocks = [_lower(layer) for layer in student.model.layers]
        found = [block for block in blocks if block is not None]
        return cls(student, found, rows, longest) if len(found) == len(blocks) else None

    @torch.no_grad()
    def __init__(self, student: BiSpikCLMForCausalLM, blocks: list[Block], rows: int, longest: int) -> None:
        config = student.config
        self.student, self.blocks, self.rows, self.length = student, blocks, rows, 0
        self.integer = config.deploy_precision != "none"
        steps, d, ffn, heads = config.steps, config.hidden_size, config.ffn_dim, config.num_attention_heads
        self.embedding = student.model.embedding_grid() if self.integer else None
        self.head = student.lm_head.grid() if self.integer else None
        self.start = _site(student.model.neurons(), d)
        self.decay = (np.float32(config.alpha), lif_cpu.integer_decay(config.alpha))
        words = -(-(d // heads) // WORD)
        self.cache = np.zeros((len(blocks), 2, rows, steps, heads, longest, words), np.uint64)
        self.work = {width: _work(steps, rows, width) for width in (3 * d, d, ffn)}
        self.map = tuple(np.empty(steps * rows * heads * longest, np.float32) for _ in range(2))
        self.h = torch.empty(steps, rows, d)
        self.fired = {width: torch.empty(steps * rows, width, dtype=torch.int8) for width in (d, ffn)}
        widths = {dense.integers.shape[1] for block in blocks for dense in block[:4]}
        self.sums = {width: torch.empty(steps * rows, width, dtype=torch.int32) for width in widths}
        self.counts = np.zeros((len(blocks) + 1, len(self.SITES), rows), np.int64)

    def read_prefix(self, cache: Cache) -> None:
        """Take over the spikes of a prefix from the cache of the student's forward (`attention.pack_spikes`)."""
        _, _, rows, steps, heads, _, words = self.cache.shape
        for index, layer in enumerate(cache.layers):
            for side, name in enumerate(("keys", "values")):
                packed: Tensor = getattr(layer, name)
                found = torch.nn.functional.pad(packed, (0, 8 * words - packed.shape[-1])).contiguous().numpy()
                self.length = found.shape[2]
                self.cache[index, side, :, :, :, : self.length] = found.view(np.uint64).reshape(
                    rows, steps, heads, self.length, words
                )

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [row, vocab] after one more token of each row, tokens [row, 1]."""
        model, h = self.student.model, self.h.numpy()
        position = torch.full_like(tokens, self.length)
        if self.embedding is not None:
            start = self.embedding(tokens, position + POSITION_OFFSET)
        else:
            start = model.embedding_current(tokens, position)
        self.h[:] = start[:, 0]
        d = h.shape[-1]
        work, x = self.work[d], self.fired[d]
        spikes = x.numpy().reshape(h.shape)
        self._run(_rise, h.size, h, self.start, *self.decay, work, spikes, self.counts[0, 0])
        for index, block in enumerate(self.blocks):
            self._block(index, block, h, spikes)
        self.length += 1
        if self.head is not None:
            features = grid.head_features(self.h[:, :, None], model.final_layer_norm)
            return self.head(features)[:, -1]
        features = model.read(torch.from_numpy(work.spikes)[:, :, None], self.h[:, :, None])
        logits: Tensor = self.student.lm_head(features)[:, -1]
        return logits

    def spikes(self, layers: tuple[int, ...], sites: tuple[str, ...]) -> Tensor:
        """Spikes of the last step at these sites of each layer, [layers]; layer -1 is the embedding."""
        places = [self.SITES.index(site) for site in (EMBED_SITE, *sites)]
        return torch.from_numpy(self.counts[[layer + 1 for layer in layers]][:, places].sum((1, 2))).float()

    def _block(self, index: int, block: Block, h: Array, spikes: Array) -> None:
        counts = dict(zip(self.SITES, self.counts[index + 1], strict=True))
        d, ffn = h.shape[-1], block.fc1.bias.size
        sites, work, wide, x, f = block.sites, self.work[d], self.work[ffn], self.fired[d], self.fired[ffn]
        _, _, rows, _, heads, _, _ = self.cache.shape
        keys = self.length + 1
        found = tuple(part[: h.shape[0] * rows * heads * keys].reshape(-1, rows * heads, keys) for part in self.map)
        self._run(
            _attend, h.size * keys, self._multiply(x, block.qkv), block.qkv.unit, block.qkv.bias, sites["qkv"],
            sites["a"], sites["r"], block.distances, block.withheld, self.cache[index, 0], self.cache[index, 1],
            self.length, *self.decay, self.work[3 * d], Work(*found), work, spikes, self.counts[index + 1, 1:5],
        )  # fmt: skip
        self._write(block, "o", block.out, x, "x", h, spikes, counts)
        self._run(
            _project_and_fire, wide.current.size, self._multiply(x, block.fc1), block.fc1.unit, block.fc1.bias,
            sites["f"], *self.decay, wide, f.numpy().reshape(wide.current.shape), counts["f"],
        )  # fmt: skip
        self._write(block, "y", block.fc2, f, "h", h, spikes, counts)

    def _write(
        self, block: Block, site: str, dense: Dense, x: Tensor, after: str, h: Array, spikes: Array, counts: Counts
    ) -> None:
        self._run(
            _write, h.size, self._multiply(x, dense), dense.unit, dense.bias, block.sites[site], block.gains[site],
            block.sites[after], h, *self.decay, self.work[h.shape[-1]], spikes, counts[site], counts[after],
        )  # fmt: skip

    def _multiply(self, x: Tensor, dense: Dense) -> Array:
        sums = self.sums[dense.integers.shape[1]]
        torch._int_mm(x, dense.integers, out=sums)
        found: Array = sums.numpy().reshape(-1, self.rows, sums.shape[1])
        return found

    def _run(self, kernel: Any, elements: int, *arguments: Any) -> None:
        lif_cpu.share(kernel, self.rows, elements, *arguments)


def _work(steps: int, rows: int, width: int) -> Work:
    return Work(*(np.zeros((steps, rows, width), np.float32) for _ in range(2)))


def _site(neurons: Neurons, size: int) -> Site:
    threshold, bias, unit = neurons

    def expand(values: Tensor | None, kind: type) -> Array:
        if values is None:
            return np.zeros(size if kind is np.float32 else 0, kind)
        return np.ascontiguousarray(values.reshape(-1).expand(size).numpy().astype(kind))

    return Site(expand(threshold, np.float32), expand(unit, np.float64), expand(bias, np.float32))


def _dense(*parts: SpikeLinear) -> Dense | None:
    """Projections of the same spikes side by side; None if their integers need more than sixteen bits."""
    units = [part.unit() for part in parts]
    if any(unit is None for unit in units):
        return None
    weights, biases = zip(*(part.on_grid() for part in parts), strict=True)
    unit = torch.cat([torch.as_tensor(u).expand(len(w)) for u, w in zip(units, weights, strict=True)])
    found = products.planes(torch.cat(weights), unit)
    return None if found is None else Dense(found.integers.t(), unit.numpy(), torch.cat(biases).detach().numpy())


def _lower(layer: BiSpikCLMBlock) -> Block | None:
    config = layer.config
    d, heads = config.hidden_size, config.num_attention_heads
    qkv, out, fc1, fc2 = (
        _dense(*parts)
        for parts in ((layer.q_proj, layer.k_proj, layer.v_proj), (layer.out_proj,), (layer.fc1,), (layer.fc2,))
    )
    if qkv is None or out is None or fc1 is None or fc2 is None:
        return None
    found = {site: layer.neurons(site) for site in config.layer_sites}
    size = {"a": heads, "f": config.ffn_dim}
    empty = np.zeros(0, np.float32)
    nothing = Site(empty, np.zeros(0), empty)
    sites = {"o": nothing, "y": nothing}
    distances = found["a"].bias
    found["a"] = found["a"]._replace(bias=None)
    sites |= {site: _site(neurons, size.get(site, d)) for site, neurons in found.items()}
    sites["a"] = sites["a"]._replace(repeat=heads)
    side = [sites[site] for site in "qkv"]
    sites["qkv"] = Site(
        np.concatenate([site.threshold for site in side]),
        np.concatenate([site.unit for site in side]),
        np.concatenate([site.bias for site in side]),
    )
    gains = {s: layer.gain(s).numpy() if s in found else empty for s in ("o", "y")}
    bias = np.zeros((heads, 0), np.float32) if distances is None else distances.numpy()
    withheld = layer.withheld()
    return Block(qkv, out, fc1, fc2, sites, bias, gains, empty if withheld is None else withheld.numpy())


# --- kernels, each over a range of rows ------------------------------------------------------------------------------


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _fire(first, last, site, alpha, decay, work):  # type: ignore[no-untyped-def]
    lif_cpu.fire_rows(first, last, work.current, site.threshold, site.unit, site.repeat, alpha, decay, work.spikes)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _project(first, last, sums, unit, bias, current):  # type: ignore[no-untyped-def]
    steps, _, width = current.shape
    high = np.int32(256 if sums.shape[2] > width else 0)
    low = sums.shape[2] - width
    for t in range(steps):
        for b in range(first, last):
            upper, lower, target = sums[t, b, :width], sums[t, b, low:], current[t, b]
            for i in range(width):
                target[i] = np.float32(lower[i] + high * upper[i]) * unit[i] + bias[i]


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _count(first, last, spikes, fired, counts):  # type: ignore[no-untyped-def]
    """Spikes as bytes, and how many each row has."""
    steps, _, width = spikes.shape
    for b in range(first, last):
        total = np.int64(0)
        for t in range(steps):
            source, target = spikes[t, b], fired[t, b]
            for i in range(width):
                target[i] = np.int8(source[i])
            for i in range(width):
                total += np.int64(target[i])
        counts[b] = total


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _project_and_fire(first, last, sums, unit, bias, site, alpha, decay, work, fired, counts):  # type: ignore[no-untyped-def]
    _project(first, last, sums, unit, bias, work.current)
    _fire(first, last, site, alpha, decay, work)
    _count(first, last, work.spikes, fired, counts)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _rise(first, last, h, site, alpha, decay, work, fired, counts):  # type: ignore[no-untyped-def]
    """The neurons that see the residual stream."""
    steps, _, width = h.shape
    for t in range(steps):
        for b in range(first, last):
            for i in range(width):
                work.current[t, b, i] = h[t, b, i] + site.bias[i]
    _fire(first, last, site, alpha, decay, work)
    _count(first, last, work.spikes, fired, counts)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _write(first, last, sums, unit, bias, site, gain, after, h, alpha, decay, work, fired, counts, counts_after):  # type: ignore[no-untyped-def] # noqa: E501
    """A projection into the residual stream, directly or through neurons, then the neurons that see the stream."""
    steps, _, width = h.shape
    _project(first, last, sums, unit, bias, work.current)
    if gain.size:
        _fire(first, last, site, alpha, decay, work)
        _count(first, last, work.spikes, fired, counts)
    for t in range(steps):
        for b in range(first, last):
            for i in range(width):
                h[t, b, i] += gain[i] * work.spikes[t, b, i] if gain.size else work.current[t, b, i]
    _rise(first, last, h, after, alpha, decay, work, fired, counts_after)


@njit(cache=_CACHE, nogil=True, error_model="numpy")
def _attend(first, last, sums, unit, bias, qkv, a, r, distances, m, keys, values, now, alpha, decay, three, pairs, mixed, fired, counts):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    """Q, K, V, their place in the cache, the map of the newest token, and what it reads."""
    steps, _, width = mixed.current.shape
    heads, words = keys.shape[2], keys.shape[4]
    size = width // heads
    _project(first, last, sums, unit, bias, three.current)
    _fire(first, last, qkv, alpha, decay, three)
    query = np.empty(words, np.uint64)
    for b in range(first, last):
        counts[0, b] = counts[1, b] = counts[2, b] = 0
        for t in range(steps):
            for head in range(heads):
                lo = head * size
                counts[0, b] += pack(three.spikes[t, b, lo : lo + size], query)
                lo += width
                counts[1, b] += pack(three.spikes[t, b, lo : lo + size], keys[b, t, head, now])
                lo += width
                counts[2, b] += pack(three.spikes[t, b, lo : lo + size], values[b, t, head, now])
                target = pairs.current[t, b * heads + head]
                for j in range(now + 1):
                    total = np.uint64(0)
                    for w in range(words):
                        total += popcount(query[w] & keys[b, t, head, j, w])
                    target[j] = np.float32(total)
                if distances.shape[1]:
                    for j in range(now + 1):
                        target[j] += distances[head, min(now - j, distances.shape[1] - 1)]
    _fire(first * heads, last * heads, a, alpha, decay, pairs)
    for b in range(first, last):
        for t in range(steps):
            mixed.current[t, b] = 0
            for head in range(heads):
                chosen, total = pairs.spikes[t, b * heads + head], mixed.current[t, b, head * size : (head + 1) * size]
                among = np.float32(0)
                for j in range(now + 1):
                    if chosen[j]:
                        among += np.float32(1)
                        for c in range(size):
                            word = values[b, t, head, j, c // WORD]
                            total[c] += np.float32((word >> np.uint64(c % WORD)) & np.uint64(1))
                if m.size:
                    for c in range(size):
                        total[c] -= m[head * size + c] * among
            for i in range(width):
                mixed.current[t, b, i] += r.bias[i]
    _fire(first, last, r, alpha, decay, mixed)
    _count(first, last, mixed.spikes, fired, counts[3])
