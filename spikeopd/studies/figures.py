"""The figure of a study: what was measured with the paper's values beside, or the collapse traces of Fig. 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.diagnostics.report import draw as draw_diagnostics
from spikeopd.diagnostics.report import mean_curves, pyplot, save
from spikeopd.quality import CollapseDetector
from spikeopd.studies.definitions import Row, Study
from spikeopd.studies.pareto import pareto

STYLES = ("-", "-.", "--", "-")  # a curve that lies on another stays visible
ABREAST = 4  # panels side by side: more make a figure wider than a page
CONSTRUCTED = ("tiny-rule",)  # teachers made to fail in a known way


def points(
    study: Study, rows: Sequence[Row], values: Sequence[Mapping[str, Any]], folder: Path, about: str = ""
) -> list[Path]:
    """One panel per measured column: a point for each row, its sample standard deviation over the seeds as whiskers.

    The grey band is the first row and the noise of the study: the standard deviation over seeds, pooled over the rows.
    The paper's printed values stand beside as numbers: other models, so other ranges.
    """
    columns = [column for column in study.columns if any(isinstance(row.get(column.key), dict) for row in values)]
    across = min(len(columns), ABREAST)
    down = -(-len(columns) // across)
    plot = pyplot()
    size = (2.25 * across + 1.4, down * (0.27 * len(rows) + 1.1) + 0.5)
    figure, axes = plot.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    places = np.arange(len(rows))[::-1]
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    for index, (axis, column) in enumerate(zip(axes.flat, columns, strict=False)):
        seen = [row.get(column.key) for row in values]
        means = np.array([value["mean"] if value else np.nan for value in seen])
        spreads = [(value["sd"] or 0.0) if value else 0.0 for value in seen]
        axis.axvline(means[0], color="0.8", linewidth=1, zorder=0)
        noise = pooled(seen)
        if noise:
            axis.axvspan(means[0] - noise, means[0] + noise, color="0.92", zorder=-1)
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
        axis.set_xlim(*span(means, spreads, noise))
        axis.margins(y=0.12)
        axis.locator_params(axis="x", nbins=4)
        arrow = {"low": "\n(lower is better)", "high": "\n(higher is better)", "": ""}[column.better]
        axis.set_xlabel(column.label + arrow, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_yticks(places, [row.label for row in rows] if index % across == 0 else [""] * len(rows), fontsize=8)
        _papers(axis, [row.paper.get(column.key) for row in rows], places, column.decimals)
    lone = all(value["n"] < 2 for row in values for value in row.values() if isinstance(value, dict) and "n" in value)
    noise_said = "one seed: differences may be noise" if lone else "grey: first row and noise over seeds"
    figure.suptitle("; ".join(filter(None, [study.title, about, noise_said])), fontsize=9)
    return save(figure, folder, "figure")


def pooled(seen: Sequence[Mapping[str, Any] | None]) -> float:
    """Standard deviation over seeds, over all rows that have several; 0 where none has."""
    found = [(value["sd"] ** 2, value["n"] - 1) for value in seen if value and value["n"] > 1 and value["sd"]]
    return float(np.sqrt(sum(v * n for v, n in found) / sum(n for _, n in found))) if found else 0.0


def span(means: NDArray[Any], spreads: Sequence[float], noise: float) -> tuple[float, float]:
    """Limits of a panel: all points, and never so narrow that noise, or a hundredth of the value, fills it."""
    known = means == means
    low, high = (means - spreads)[known].min(), (means + spreads)[known].max()
    least = max(6 * noise, 0.02 * float(np.abs(means[known]).max()), 1e-9)
    reach = max(high - low, least) * 0.72  # with a margin for the numbers
    return (low + high) / 2 - reach, (low + high) / 2 + reach


def _papers(axis: Any, printed: Sequence[float | str | None], places: Any, decimals: int) -> None:
    """The paper's values as numbers at the right edge: on an axis of their own they met ours by accident."""
    found = [(value, place) for value, place in zip(printed, places, strict=True) if value is not None]
    beside = axis.get_yaxis_transform()
    for value, place in found:
        text = value if isinstance(value, str) else f"{value:.{decimals}f}"
        axis.text(1.03, place, text, transform=beside, va="center", fontsize=7, color="C1")
    if found:
        axis.text(1.03, 1.02, "paper", transform=axis.transAxes, va="bottom", fontsize=7, color="C1")


def collapse(
    rows: Sequence[Row], results: Sequence[Sequence[Mapping[str, Any]]], folder: Path, about: str = ""
) -> list[Path]:
    """Adj and 1 - Dist-4 of the training rollouts by update, as the collapse detector sees them (20-update means).

    Thin: every seed. Bold: their mean. Dotted: the limits that together mean collapse; triangles on them: the update
    at which a seed exceeded both.
    """
    plot = pyplot()
    figure, axes = plot.subplots(1, 2, figsize=(10, 4.0), layout="constrained")
    detector = CollapseDetector()
    panels = (("adj", "adjacent repetition", detector.adj_limit), ("dist4", "1 - Dist-4", detector.dist4_limit))
    for index, (row, runs) in enumerate(zip(rows, results, strict=True)):
        traces = [run["trace"] for run in runs if any(v is not None for v in (run.get("trace") or {}).get("adj", []))]
        if not traces:
            continue
        updates = np.array(min((trace["update"] for trace in traces), key=len))
        onsets = [run["onset"] for run in runs if run.get("onset") is not None]
        collapsed = f" ({len(onsets)} of {len(traces)} collapsed)"
        for axis, (name, _, limit) in zip(axes, panels, strict=True):
            seen = np.array([trace[name][: len(updates)] for trace in traces], float)
            curves = np.array([running_mean(curve, 20) for curve in (seen if name == "adj" else 1 - seen)])
            for curve in curves if len(curves) > 1 else ():
                axis.plot(updates, curve, color=f"C{index}", linewidth=0.5, alpha=0.35)
            mean, style = curves.mean(0), STYLES[index % len(STYLES)]
            axis.plot(updates, mean, style, color=f"C{index}", linewidth=1.8, label=row.label + collapsed)
            # Rows that collapse at the same updates stay visible: each a little higher.
            heights = np.full(len(onsets), limit) * (1 + 0.06 * index)
            axis.plot(onsets, heights, "v", color=f"C{index}", markersize=5, alpha=0.8)
    for axis, (_, title, limit) in zip(axes, panels, strict=True):
        axis.axhline(limit, color="0.5", linestyle=":", linewidth=1)
        axis.set_title(f"{title}, {detector.window}-update mean", fontsize=10)
        axis.set_xlabel("update")
        axis.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    said = "triangles: a seed's onset, both means above their limits (dotted)"
    figure.suptitle("; ".join(filter(None, [about, said])), fontsize=9)
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
    teacher: str = "",
) -> list[Path]:
    about = f"{'constructed ' if teacher in CONSTRUCTED else ''}teacher {Path(teacher).name}" if teacher else ""
    if study.figure == "collapse":
        return collapse(rows, results, folder, about)
    if study.figure == "diagnostics":
        curves = {
            row.label: mean_curves([run["diagnostics_curves"] for run in runs])
            for row, runs in zip(rows, results, strict=True)
        }
        return draw_diagnostics(curves, folder, "figure", about)
    if study.figure == "pareto":
        return pareto(rows, values, folder)
    return points(study, rows, values, folder, about)
