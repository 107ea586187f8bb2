"""How a process tells the host what it did: one message per token with every spike and every saturation.

A message is uint8 [T_s, width]. Row tau holds the spikes of the process's sites at step tau, packed eight to a byte,
then one little-endian uint32 per site: how many of its membranes saturated. Counting events from these messages counts
what the Lava run really did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ReportLayout:
    """Where the sites of one process lie in its report. sizes: neurons per site."""

    def __init__(self, sizes: Sequence[int], num_steps: int) -> None:
        self.sizes = tuple(sizes)
        self.edges = np.cumsum((0, *self.sizes)).tolist()
        self._bit_bytes = (self.edges[-1] + 7) // 8
        self.shape = (max(1, num_steps), self._bit_bytes + 4 * len(self.sizes))

    def row(self, spikes: Sequence[Array], saturations: Sequence[int]) -> Array:
        """One step's row from the spikes (bool, any shape of the right size) and saturation counts of each site."""
        bits = np.packbits(np.concatenate([s.ravel() for s in spikes]))
        return np.concatenate([bits, np.array(saturations, "<u4").view(np.uint8)])

    def unpack(self, message: Array) -> list[tuple[Array, Array]]:
        """Per site: spikes bool [T_s, n] and saturations int64 [T_s]."""
        bits = np.unpackbits(message[:, : self._bit_bytes], axis=1, count=self.edges[-1]).view(bool)
        saturations = np.ascontiguousarray(message[:, self._bit_bytes :]).view("<u4").astype(np.int64)
        spans = zip(self.edges[:-1], self.edges[1:], strict=True)
        return [(bits[:, start:stop], saturations[:, i]) for i, (start, stop) in enumerate(spans)]
