r"""Softmax-free causal spiking attention (paper Eq. app_sfsa_detailed), and the spike cache it decodes with.

    C = M * (Q K^T)   integer coincidence counts        A = M * S_A(C)    V_A = sqrt(d_h) * 0.7, learned per head
    Z = A V                                             R = S_AV(Z)       V_AV = 2, learned per head

Spike tensors here are [time, batch, head, token, d_h].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from spikeopd.models.quantised import pack_counts, unpack_counts


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[time, batch, token, d] -> [time, batch, head, token, d_h]"""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(-2)


def coincidences(q: Tensor, k: Tensor) -> Tensor:
    """C[i, j] = Q_i . K_j for every pair of tokens, [time, batch, head, query, key]."""
    return _matmul(q, k.transpose(-1, -2))


def weighted_values(a: Tensor, v: Tensor) -> Tensor:
    """Z = A V, [time, batch, head, query, d_h]."""
    return _matmul(a, v)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y. From a cache, y lies batch first in memory: multiplied in that order it need not be copied."""
    if y.stride(0) < y.stride(1):
        return (x.transpose(0, 1) @ y.transpose(0, 1)).transpose(0, 1)
    return x @ y


def causal_mask(
    attention_mask: Tensor | None, batch: int, queries: int, keys: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """M[b, i, j] = m_i m_j 1[j <= i]; the queries are the last of the keys. attention_mask [batch, keys]."""
    position = torch.arange(keys, device=device)
    mask = (position[None, :] <= position[keys - queries :, None]).to(dtype)[None, None].expand(batch, 1, -1, -1)
    if attention_mask is None:
        return mask
    valid = attention_mask.to(dtype)
    return mask * valid[:, None, None, :] * valid[:, None, keys - queries :, None]


def key_distance(
    attention_mask: Tensor | None, queries: int, keys: int, distances: int, device: torch.device
) -> Tensor:
    """min(i - j, distances - 1) of every pair, [query, key], or [batch, query, key] where the mask hides tokens:
    distances count real tokens, as positions do. Pairs that causality forbids get 0.
    """
    position = torch.arange(keys, device=device) if attention_mask is None else attention_mask.long().cumsum(1)
    return (position[..., keys - queries :, None] - position[..., None, :]).clamp(0, distances - 1)


class Pairs(NamedTuple):
    """Which tokens see each other: mask [batch, 1, query, key], and their distance where the block asks for it."""

    mask: Tensor
    distance: Tensor | None


def causal_pairs(
    attention_mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    distances: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Pairs:
    distance = key_distance(attention_mask, queries, keys, distances, device) if distances else None
    return Pairs(causal_mask(attention_mask, batch, queries, keys, device, dtype), distance)


def pack_spikes(x: Tensor) -> Tensor:
    """[time, batch, head, token, d_h] -> uint8 [batch, time * head, token, ceil(d_h / 8)]: one bit per spike."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = (1 << torch.arange(8, device=x.device)).to(x.dtype)  # a sum of them is exact in every float type
    return (x @ weights).to(torch.uint8).transpose(0, 1).flatten(1, 2)


def unpack_spikes(packed: Tensor, num_steps: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_spikes`. Eight bits are looked up at a time: one pass over memory instead of three."""
    byte = torch.arange(256, device=packed.device)
    table = ((byte[:, None] >> torch.arange(8, device=packed.device)) & 1).to(dtype)
    bits = torch.nn.functional.embedding(packed.int(), table)
    return bits.flatten(-2)[..., :head_dim].unflatten(1, (num_steps, -1)).transpose(0, 1)


def update_cache(cache: Cache, layer: int, k: Tensor, v: Tensor, levels: int | None = None) -> tuple[Tensor, Tensor]:
    """Append the new spikes to the cache, bit-packed, and return all of them. levels: counts so high, a byte each.

    The packed form has the layout [batch, heads, token, bytes] of any key/value cache (every step a head), so the stock
    Hugging Face cache holds it, and with it beams, cropping and offloading work unchanged.
    """
    if levels is not None:
        found = cache.update(pack_counts(k, levels), pack_counts(v, levels), layer)
        return unpack_counts(found[0], levels, k.dtype), unpack_counts(found[1], levels, v.dtype)
    packed = cache.update(pack_spikes(k), pack_spikes(v), layer)
    if packed[0].shape[2] == k.shape[3]:
        return k, v  # the cache was empty: all spikes are the new ones
    steps, head_dim = k.shape[0], k.shape[-1]
    return (
        unpack_spikes(packed[0], steps, head_dim, k.dtype),
        unpack_spikes(packed[1], steps, head_dim, v.dtype),
    )
