"""Draws docs/pictures/*.svg: the neuron and attention with the package's own integer arithmetic, prefixes as a sketch.

python docs/pictures/draw.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

from neuro_sim.fixed_point import run_site, step_integer
from spikeopd.contracts import COUNT_SHIFT, Site

HERE = Path(__file__).parent
INK, SPIKE, HOT, SOFT = "#1d2430", "#1f4e9c", "#c2410c", "#8a93a1"
DECAY = 3686  # 0.9 of 4096
pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "spikeopd", "font.size": 10, "axes.edgecolor": SOFT})


def save(figure: Any, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    pyplot.close(figure)


def neuron() -> None:
    """One neuron over three tokens of four steps: rest at each token's start, leak, threshold, subtraction."""
    currents = np.array([[9, 14, 6, 20], [22, 25, 18, 24], [3, 8, 2, 5]])
    threshold, bias = np.array([2400]), np.array([0])
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(7, 4), sharex=True, height_ratios=[1, 2, 0.5], layout="constrained"
    )
    for token, row in enumerate(currents):
        membrane, spikes = np.zeros(1, np.int64), np.zeros(1, bool)
        heights = [0]
        for place, current in enumerate(row):
            membrane, spikes, _ = step_integer(membrane, spikes, np.array([current]), threshold, bias, 6, DECAY)
            heights.append(int(membrane[0]))
            time = 4 * token + place
            top.bar(time + 0.5, current, color=SOFT, width=0.8)
            if spikes[0]:
                bottom.vlines(time + 0.5, 0, 1, color=HOT, linewidth=3)
        times = 4 * token + np.arange(5) - 0.5 + 0.5
        middle.plot(times[:1].tolist() + (times[1:] - 0.5).tolist(), heights, marker="o", color=SPIKE)
        for axis in (top, middle, bottom):
            axis.axvline(4 * token, color=SOFT, linewidth=0.6)
    middle.axhline(threshold[0], color=HOT, linestyle="--", linewidth=1)
    middle.text(11.95, threshold[0] * 1.03, "threshold", color=HOT, ha="right", va="bottom")
    top.set_ylabel("current")
    middle.set_ylabel("membrane")
    bottom.set_ylabel("spikes", rotation=0, ha="right", va="center")
    bottom.set_yticks([])
    bottom.set_xticks([2, 6, 10], ["token 1", "token 2", "token 3"])
    bottom.set_xlim(0, 12)
    save(figure, "neuron.svg")


def attention() -> None:
    """Query and key bits of one head at one step; the AND; the count as a current; the spikes of the map."""
    rng = np.random.default_rng(3)
    query, keys = rng.random(16) < 0.45, rng.random((5, 16)) < 0.4
    both = keys & query
    counts = both.sum(1)
    fired, _ = run_site(counts[None], Site(np.full(5, 4 << COUNT_SHIFT), np.zeros(5, np.int64), COUNT_SHIFT), DECAY)
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.6), width_ratios=[2, 2, 1.3], layout="constrained")
    for axis, title, rows, colour in (
        (axes[0], "query (top) and keys", np.vstack([query, keys]), SPIKE),
        (axes[1], "AND with the query", np.vstack([np.zeros(16, bool), both]), HOT),
    ):
        for y, row in enumerate(rows):
            if not row.any():
                continue
            axis.scatter(
                np.arange(16), np.full(16, -y), s=26, marker="s", color=[colour if bit else "#e6e8ec" for bit in row]
            )
        axis.set_title(title, fontsize=10)
        axis.axis("off")
    axes[0].text(-1, 0, "q", ha="right", va="center")
    for y in range(5):
        axes[0].text(-1, -y - 1, f"k{y + 1}", ha="right", va="center")
        axes[2].text(5.6, y, "fires" if fired[0, y] else "silent", va="center", fontsize=9)
    axes[2].barh(range(5), counts, color=[HOT if one else SOFT for one in fired[0]])
    axes[2].axvline(4, color=INK, linestyle="--", linewidth=1)
    axes[2].invert_yaxis()
    axes[2].set_xlim(0, 9)
    axes[2].set_yticks([])
    axes[2].set_xticks([0, 2, 4, 6])
    axes[2].set_title("count against threshold 4", fontsize=10)
    save(figure, "attention.svg")


def prefixes() -> None:
    """Two rows of boxes: a given prefix and one's own."""
    figure, axis = pyplot.subplots(figsize=(8, 2.4), layout="constrained")
    rows = (
        ("training on text", ["the", "cat", "sat", "on"], "the", [False] * 4, "predicts the next word of the corpus"),
        (
            "generating",
            ["the", "cat", "ran", "ran"],
            "?",
            [False, False, True, True],
            "its own words, never seen as a prefix",
        ),
        (
            "on-policy",
            ["the", "cat", "ran", "ran"],
            "away",
            [False, False, True, True],
            "the teacher says what it would say here",
        ),
    )
    for y, (name, words, answer, own, note) in enumerate(rows):
        axis.text(-0.2, -y, name, ha="right", va="center", weight="bold")
        for x, (word, mine) in enumerate(zip(words, own, strict=True)):
            box = {"boxstyle": "round,pad=0.35", "facecolor": "#f3e2cf" if mine else "#e6edf8", "edgecolor": SOFT}
            axis.text(x + 0.4, -y, word, ha="center", va="center", bbox=box)
        axis.text(4.3, -y, f"→ {answer}", va="center", color=HOT, weight="bold")
        axis.text(5.3, -y, note, va="center", color=INK, fontsize=9)
    axis.set_xlim(-1.8, 9.2)
    axis.set_ylim(-2.6, 0.6)
    axis.axis("off")
    save(figure, "prefixes.svg")


if __name__ == "__main__":
    neuron()
    attention()
    prefixes()
