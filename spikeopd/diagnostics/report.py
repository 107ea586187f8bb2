"""Diagnostics of several checkpoints on one bank, as numbers, as text and as the paper's Figures 1 and 2."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spikeopd.diagnostics import dynamics
from spikeopd.diagnostics.dynamics import Paired
from spikeopd.errors import BackendMissing, install_command
from spikeopd.files import write_bytes

# Figures 1 and 2 and App. B of the paper; what is only drawn there is not repeated here.
PAPER = {
    "Offline-only": {"hidden_gap": 0.102, "membrane_drift": 3.46, "last_prefix_gap": 0.9},
    "Vanilla OPD": {"hidden_gap": 0.100, "membrane_drift": 3.30},
    "SpikeOPD": {"hidden_gap": 0.095, "membrane_drift": 2.67},
}
COLUMNS = (
    ("mean_kappa_self", "KL self", 1.0),
    ("mean_kappa_corp", "KL corpus", 1.0),
    ("mean_prefix_gap", "gap", 1.0),
    ("last_prefix_gap", "gap at K", 1.0),
    ("mean_spike_drift", "D_spk x1e4", dynamics.DISPLAY),
    ("hidden_gap", "G_H", 1.0),
    ("membrane_drift", "D_U", 1.0),
    ("rate_self", "rate", 1.0),
)


def compare(results: Mapping[str, Paired]) -> dict[str, Any]:
    """Summaries by name; against the first also Delta_spk and the change of the KLs, prompt by prompt on the same
    prefixes, which shows what the noise of two separate means would hide.
    """
    first = next(iter(results.values()))
    drift = dynamics.by_prompt(first)["spike_drift"]
    found = {}
    for name, paired in results.items():
        row: dict[str, Any] = dynamics.summary(paired)
        row["spike_improvement"] = dynamics.spike_improvement(first, paired).tolist()
        closed = drift - dynamics.by_prompt(paired)["spike_drift"]
        row["standard_errors"]["spike_improvement"] = dynamics.standard_error(closed).tolist()
        for source in ("kappa_self", "kappa_corp"):
            change = (getattr(paired, source) - getattr(first, source)).mean(1)
            row[f"{source}_change"] = float(change.mean())
            row["standard_errors"][f"{source}_change"] = float(dynamics.standard_error(change))
        found[name] = row
    return found


def mean_curves(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of every number and curve of `compare`. Standard errors over prompts are averaged too: the
    seeds share a bank, so their errors are not independent.
    """
    return {
        key: mean_curves([seed[key] for seed in seeds])
        if isinstance(value, Mapping)
        else np.mean([seed[key] for seed in seeds], 0).tolist()
        for key, value in seeds[0].items()
    }


def table(values: Mapping[str, Mapping[str, Any]], paper: Mapping[str, Mapping[str, float]] = PAPER) -> str:
    """One row per checkpoint, then the paper's rows (125M; raw units: compare within one model only)."""
    width = max(len(name) for name in (*values, *paper)) + 2
    lines = [f"{'':<{width}}" + "".join(f"{label:>12}" for _, label, _ in COLUMNS)]
    for name, row in values.items():
        lines.append(f"{name:<{width}}" + "".join(f"{row[key] * scale:>12.4f}" for key, _, scale in COLUMNS))
    first, *later = values
    if later:
        lines.append(f"KL against {first} on the same prefixes, ± standard error over prompts:")
    for name in later:
        row, errors = values[name], values[name]["standard_errors"]
        said = [
            f"{label} {row[f'{source}_change']:+.4f} ± {errors[f'{source}_change']:.4f}"
            for source, label in (("kappa_self", "self"), ("kappa_corp", "corpus"))
        ]
        lines.append(f"{name:<{width}}{', '.join(said)}")
    if paper:
        lines.append("paper, OPT-125M (native units of that model; not comparable across models):")
    for name, row in paper.items():
        cells = (f"{row[key]:>12g}" if key in row else f"{'-':>12}" for key, _, _ in COLUMNS)
        lines.append(f"{name:<{width}}" + "".join(cells))
    return "\n".join(lines)


def draw(
    values: Mapping[str, Mapping[str, Any]], folder: Path, name: str = "diagnostics", about: str = ""
) -> list[Path]:
    """Figure 1 (teacher KL, gap) and Figure 2 (spike rates, hidden, membrane) in one sheet, PNG and SVG.

    Bands and bars: two standard errors over the prompts of the bank. They say nothing of other seeds.
    """
    plot = pyplot()
    figure, axes = plot.subplots(2, 3, figsize=(10.5, 6.2), layout="constrained")
    (kl, gap, drift), (improvement, hidden, membrane) = axes
    colours = [f"C{index}" for index in range(len(values))]
    for (label, row), colour in zip(values.items(), colours, strict=True):
        errors = row.get("standard_errors", {})

        def curve(axis: Any, key: str, scale: float = 1.0, row: Any = row, errors: Any = errors, **style: Any) -> None:
            heights = np.array(row[key]) * scale
            axis.plot(range(1, len(heights) + 1), heights, **style)
            if key in errors:
                reach = 2 * scale * np.array(errors[key])
                low, high = heights - reach, heights + reach
                axis.fill_between(range(1, len(heights) + 1), low, high, color=style["color"], alpha=0.12, linewidth=0)

        curve(kl, "kappa_self", color=colour, label=label)
        curve(kl, "kappa_corp", color=colour, linestyle="--", linewidth=1)
        curve(gap, "prefix_gap", color=colour)
        curve(drift, "spike_drift", dynamics.DISPLAY, color=colour)
        curve(improvement, "spike_improvement", dynamics.DISPLAY, color=colour)
    first = next(iter(values))
    kl.set_title("teacher KL: self (solid), corpus (dashed)", fontsize=10)
    gap.set_title("self - corpus KL gap, G(t)", fontsize=10)
    drift.set_title(r"spike-rate gap, $D_{spk}(t) \times 10^4$", fontsize=10)
    improvement.set_title(rf"closed against {first}, $\Delta_{{spk}}(t) \times 10^4$", fontsize=10)
    for axis in (gap, improvement):
        axis.axhline(0, color="0.7", linewidth=0.8)
    for axis in (kl, gap, drift, improvement):
        axis.set_xlabel("rollout position t")
    for axis, key, title in (
        (hidden, "hidden_gap", "hidden-state gap $G_H$"),
        (membrane, "membrane_drift", "membrane gap $D_U$"),
    ):
        heights = [row[key] for row in values.values()]
        errors = [2 * row.get("standard_errors", {}).get(key, 0.0) for row in values.values()]
        drawn = axis.bar(range(len(values)), heights, yerr=errors if any(errors) else None, color=colours, capsize=4)
        axis.bar_label(drawn, fmt="%.4g", padding=2)
        axis.set_xticks(range(len(values)), list(values), fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
    figure.legend(loc="outside lower center", ncols=len(values), fontsize=9, frameon=False)
    said = "bands and whiskers: two standard errors over prompts"
    known = any("standard_errors" in row for row in values.values())
    figure.suptitle("; ".join(filter(None, [about, said if known else ""])), fontsize=9)
    return save(figure, folder, name)


def pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "spikeopd"  # the same figure is the same file
        import matplotlib.pyplot as plot
    except ImportError as error:
        raise BackendMissing(f"figures need matplotlib; install it with: {install_command('viz')}") from error
    return plot


def save(figure: Any, folder: Path, name: str, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    found = []
    for kind in kinds:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)
        found.append(write_bytes(folder / f"{name}.{kind}", buffer.getvalue()))
    pyplot().close(figure)
    return found
