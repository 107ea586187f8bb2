"""The figure of `sparsity`: perplexity against energy per token, student and twin, under each energy model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spikeopd.diagnostics.report import pyplot, save
from spikeopd.studies.definitions import Row

PANELS = {
    "appendix_nj": "Appendix E: arithmetic alone",
    "spike_nj": "with memory, a row fetched per spike",
    "token_nj": "with memory, a row fetched once per token",
}
ALLOWED = 1.05  # perplexity that the goal allows, over the student without a target


def pareto(rows: Sequence[Row], values: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Each point is a target, with its spread over the seeds; crosses are twins that read every weight."""
    plot = pyplot()
    figure, axes = plot.subplots(1, len(PANELS), figsize=(3.5 * len(PANELS), 3.9), layout="constrained", sharey=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        for index, name in enumerate(("student", "twin")):
            found = [
                (row.label.partition(", ")[2], value)
                for row, value in zip(rows, values, strict=True)
                if row.label.startswith(f"{name},") and key in value and "perplexity" in value
            ]
            if not found:
                continue
            color = f"C{index}"
            energies, losses = ([value[column] for _, value in found] for column in (key, "perplexity"))
            axis.errorbar(
                [e["mean"] for e in energies],
                [p["mean"] for p in losses],
                xerr=[e["sd"] or 0.0 for e in energies],
                yerr=[p["sd"] or 0.0 for p in losses],
                fmt="o-",
                color=color,
                capsize=2,
                markersize=4,
                linewidth=1,
                label=name if name == "student" else "twin, zeros skipped",
            )
            places = [(e["mean"], p["mean"]) for e, p in zip(energies, losses, strict=True)]
            for place, text in together(places, [short(label) for label, _ in found]):
                axis.annotate(text, place, (4, 4), textcoords="offset points", fontsize=7, color=color)
            if name == "twin" and key != "appendix_nj":
                dense = [value["twin_dense_nj"]["mean"] for _, value in found]
                axis.plot(dense, [p["mean"] for p in losses], "x", color=color, markersize=5, label="twin, dense")
        free = next((v for r, v in zip(rows, values, strict=True) if r.label == "student, no target"), None)
        if free is not None and "perplexity" in free:
            axis.axhline(ALLOWED * free["perplexity"]["mean"], color="0.6", linestyle=":", linewidth=1)
        axis.margins(x=0.3, y=0.1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("nJ per token", fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("perplexity", fontsize=9)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle("Perplexity against energy per token; dotted: 5 % above the student without a target", fontsize=10)
    return save(figure, folder, "figure")


def short(label: str) -> str:
    return "none" if label == "no target" else label.removeprefix("rate ")


def together(
    places: Sequence[tuple[float, float]], labels: Sequence[str], near: float = 0.17
) -> list[tuple[tuple[float, float], str]]:
    """Labels of points; those that lie close together, by their share of the range, have one between them."""
    reach = [near * ((max(axis) - min(axis)) or 1.0) for axis in zip(*places, strict=True)]
    found: list[tuple[tuple[float, float], str]] = []
    for place, label in zip(places, labels, strict=True):
        for index, (other, text) in enumerate(found):
            if all(abs(a - b) < r for a, b, r in zip(place, other, reach, strict=True)):
                found[index] = (other, f"{text}, {label}")
                break
        else:
            found.append((place, label))
    return found
