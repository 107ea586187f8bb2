"""The figure of a study: what was measured with the paper's values beside, or the collapse traces of Fig. 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.diagnostics.report import draw as draw_diagnostics
from spikeopd.diagnostics.report import pyplot, save
from spikeopd.studies.definitions import Row, Study
from spikeopd.studies.pareto import pareto

STYLES = ("-", "-.", "--", "-")  # a curve that lies on another stays visible


def points(study: Study, rows: Sequence[Row], values: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """One panel per measured column: a point for each row, its sample standard deviation over the seeds as whiskers.

    The paper's printed values are diamonds on an axis of their own at the top: other models, so other ranges.
    """
    columns = [column for column in study.columns if any(isinstance(row.get(column.key), dict) for row in values)]
    plot = pyplot()
    figure, axes = plot.subplots(
        1, len(columns), figsize=(2.3 * len(columns) + 1.2, 0.3 * len(rows) + 2.0), layout="constrained", squeeze=False
    )
    places = np.arange(len(rows))[::-1]
    for axis, column in zip(axes[0], columns, strict=True):
        seen = [row.get(column.key) for row in values]
        means = np.array([value["mean"] if value else np.nan for value in seen])
        spreads = [(value["sd"] or 0.0) if value else 0.0 for value in seen]
        axis.axvline(means[0], color="0.8", linewidth=1, zorder=0)
        axis.errorbar(means, places, xerr=spreads if any(spreads) else None, fmt="o", color="C0", capsize=3)
        for mean, place in zip(means, places, strict=True):
            if mean == mean:
                axis.annotate(
                    f"{mean:.{column.decimals}f}",
                    (mean, place),
                    (0, 5),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        axis.margins(x=0.22, y=0.12)
        arrow = {"low": "\n(lower is better)", "high": "\n(higher is better)", "": ""}[column.better]
        axis.set_xlabel(column.label + arrow, fontsize=9, color="C0")
        axis.tick_params(labelsize=8)
        axis.set_yticks(places, [row.label for row in rows] if axis is axes[0][0] else [""] * len(rows), fontsize=8)
        _papers(axis, [row.paper.get(column.key) for row in rows], places)
    figure.suptitle(study.title, fontsize=10)
    return save(figure, folder, "figure")


def _papers(axis: Any, printed: Sequence[float | str | None], places: Any) -> None:
    found = [(value, place) for value, place in zip(printed, places, strict=True) if isinstance(value, (int, float))]
    if not found:
        return
    above = axis.twiny()
    above.scatter(*zip(*found, strict=True), marker="D", facecolors="none", edgecolors="C1", s=22)
    above.margins(x=0.22, y=0.12)
    above.tick_params(labelsize=7, colors="C1")
    above.set_xlabel("paper", fontsize=8, color="C1")


def collapse(rows: Sequence[Row], results: Sequence[Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Adj and 1 - Dist-4 of the training rollouts by update, as the collapse detector sees them (20-update means).

    Thin: every seed. Bold: their mean. Triangles: the onsets. Dotted: the limits that together mean collapse.
    """
    plot = pyplot()
    figure, axes = plot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for index, (row, runs) in enumerate(zip(rows, results, strict=True)):
        traces = [run["trace"] for run in runs if any(v is not None for v in (run.get("trace") or {}).get("adj", []))]
        if not traces:
            continue
        updates = np.array(min((trace["update"] for trace in traces), key=len))
        onsets = [run["onset"] for run in runs if run.get("onset") is not None]
        collapsed = f" ({len(onsets)} of {len(traces)} collapsed)"
        for axis, name in ((axes[0], "adj"), (axes[1], "dist4")):
            seen = np.array([trace[name][: len(updates)] for trace in traces], float)
            curves = np.array([running_mean(curve, 20) for curve in (seen if name == "adj" else 1 - seen)])
            for curve in curves if len(curves) > 1 else ():
                axis.plot(updates, curve, color=f"C{index}", linewidth=0.5, alpha=0.35)
            mean, style = curves.mean(0), STYLES[index % len(STYLES)]
            axis.plot(updates, mean, style, color=f"C{index}", linewidth=1.8, label=row.label + collapsed)
            axis.plot(onsets, np.interp(onsets, updates, mean), "v", color=f"C{index}", markersize=5)
    for axis, title, limit in ((axes[0], "adjacent repetition", 0.10), (axes[1], "1 - Dist-4", 0.05)):
        axis.axhline(limit, color="0.5", linestyle=":", linewidth=1)
        axis.set_title(f"{title}, 20-update mean", fontsize=10)
        axis.set_xlabel("update")
        axis.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return save(figure, folder, "figure")


def running_mean(curve: NDArray[Any], window: int) -> NDArray[Any]:
    """Mean over the last `window` values, over fewer at the beginning."""
    total = np.cumsum(np.concatenate(([0.0], curve)))
    at = np.arange(1, len(curve) + 1)
    low = np.maximum(at - window, 0)
    means: NDArray[Any] = (total[at] - total[low]) / (at - low)
    return means


def draw(
    study: Study,
    rows: Sequence[Row],
    values: Sequence[Mapping[str, Any]],
    results: Sequence[Sequence[Mapping[str, Any]]],
    folder: Path,
) -> list[Path]:
    if study.figure == "collapse":
        return collapse(rows, results, folder)
    if study.figure == "diagnostics":
        curves = {row.label: runs[0]["diagnostics_curves"] for row, runs in zip(rows, results, strict=True)}
        return draw_diagnostics(curves, folder, "figure")
    if study.figure == "pareto":
        return pareto(rows, values, folder)
    return points(study, rows, values, folder)
