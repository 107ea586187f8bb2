"""Statistics of generated continuations (App. B, diagnostic definitions) and the collapse detector. numpy only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def adjacent_repetition(y: Tokens) -> float:
    """R_adj: share of positions that repeat their predecessor. y [K]."""
    return float((y[1:] == y[:-1]).mean()) if len(y) > 1 else 0.0


def maximum_run(y: Tokens) -> int:
    """Length of the longest stretch of one identical token."""
    breaks = np.flatnonzero(np.diff(y)) + 1
    return int(np.diff(np.concatenate(([0], breaks, [len(y)]))).max())


def _four_grams(y: Tokens) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.lib.stride_tricks.sliding_window_view(y, 4)] if len(y) >= 4 else []


def distinct_4(y: Tokens) -> float:
    """Unique contiguous 4-grams over their number K - 3; 1 for fewer than four tokens."""
    grams = _four_grams(y)
    return len(set(grams)) / len(grams) if grams else 1.0


def repeated_4(y: Tokens) -> float:
    """Share of positions whose 4-gram already appeared earlier in the continuation: 1 - Dist-4 by definition."""
    return 1.0 - distinct_4(y)


def rollout_statistics(continuations: Tokens) -> dict[str, float]:
    """Means over continuations [rows, K]."""
    rows = list(continuations)
    return {
        "adj": float(np.mean([adjacent_repetition(y) for y in rows])),
        "dist4": float(np.mean([distinct_4(y) for y in rows])),
        "run": float(np.mean([maximum_run(y) for y in rows])),
        "rep4": float(np.mean([repeated_4(y) for y in rows])),
    }


@dataclass
class CollapseDetector:
    """Rollout-feedback collapse: the `window`-update means of Adj and 1 - Dist-4 exceed both limits (Tab. 1)."""

    window: int = 20
    adj_limit: float = 0.10
    dist4_limit: float = 0.05
    history: deque[tuple[float, float]] = field(default_factory=deque)
    onset: int | None = None

    def update(self, step: int, adj: float, dist4: float) -> bool:
        """Add one update's statistics; True from the update on at which collapse began."""
        self.history.append((adj, 1.0 - dist4))
        while len(self.history) > self.window:
            self.history.popleft()
        if self.onset is None and len(self.history) == self.window:
            means = np.mean(self.history, axis=0)
            if means[0] > self.adj_limit and means[1] > self.dist4_limit:
                self.onset = step
        return self.onset is not None

    def state(self) -> dict[str, object]:
        return {"history": [list(pair) for pair in self.history], "onset": self.onset}

    def restore(self, state: dict) -> None:
        self.history = deque((float(a), float(b)) for a, b in state["history"])
        self.onset = state["onset"]
