"""Rows of the paper's tables 'main' and 'controlled', to stand beside measured ones. Percentages, Run excepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spikeopd.evaluation.tasks import BENCHMARKS

COLUMNS = tuple(BENCHMARKS)


@dataclass(frozen=True)
class Row:
    """One printed row. average_sd: the sample standard deviation over three runs, where the text gives it."""

    table: str
    method: str
    scale: str
    accuracies: tuple[float, ...]  # in the order of COLUMNS
    average: float
    average_sd: float | None = None
    adj: float | None = None
    dist4: float | None = None
    run: float | None = None

    def to_dict(self) -> dict[str, Any]:
        rollouts = {"adj": self.adj, "dist4": self.dist4, "run": self.run} if self.run is not None else {}
        return {
            "table": self.table,
            "method": self.method,
            "scale": self.scale,
            "tasks": dict(zip(COLUMNS, self.accuracies, strict=True)),
            "average": self.average,
            "average_sd": self.average_sd,
            **rollouts,
        }


def _main(method: str, scale: str, *numbers: float, sd: float | None = None) -> Row:
    return Row("main", method, scale, numbers[:8], numbers[8], sd)


def _controlled(method: str, *numbers: float) -> Row:
    return Row("controlled", method, "0.125B", numbers[:8], numbers[8], None, *numbers[9:])


MAIN = (
    _main("OPT Teacher", "0.125B", 43.4, 19.3, 52.4, 54.2, 62.4, 31.9, 20.3, 23.5, 38.4),
    _main("KD", "0.125B", 37.1, 19.1, 51.2, 47.8, 53.8, 27.6, 18.4, 22.2, 34.7),
    _main("SpikeGPT", "0.046B", 32.3, 16.2, 50.2, 45.7, 54.6, 25.3, 15.7, 20.6, 32.6),
    _main("SpikeGPT", "0.216B", 35.2, 17.7, 50.7, 47.3, 55.1, 27.6, 17.3, 23.1, 34.3),
    _main("SpikeOPD", "0.125B", 39.1, 19.2, 51.9, 48.5, 55.3, 28.1, 19.0, 22.6, 35.5, sd=0.02),
    _main("OPT Teacher", "0.35B", 47.5, 22.2, 55.3, 57.2, 66.1, 40.7, 25.7, 26.6, 42.7),
    _main("KD", "0.35B", 42.1, 20.7, 50.8, 55.3, 60.5, 32.8, 21.8, 22.3, 38.3),
    _main("SpikeOPD", "0.35B", 44.2, 20.9, 56.1, 55.7, 62.2, 35.0, 21.8, 24.2, 40.0, sd=0.19),
    _main("OPT Teacher", "1.3B", 57.4, 30.6, 60.4, 60.5, 71.7, 52.8, 33.2, 30.7, 49.7),
    _main("KD", "1.3B", 44.5, 23.6, 55.2, 56.9, 62.8, 40.8, 25.2, 22.3, 41.4),
    _main("SpikeOPD", "1.3B", 48.9, 25.6, 58.3, 57.4, 65.5, 46.3, 27.6, 24.6, 44.3, sd=0.12),
)

CONTROLLED = (
    _controlled("KD", 37.1, 19.1, 51.2, 47.8, 53.8, 27.6, 18.4, 22.2, 34.7, 0.16, 99.83, 1.0433),
    _controlled("Continued SpAD", 37.3, 19.1, 49.6, 48.0, 54.2, 27.3, 18.4, 22.0, 34.5, 0.16, 99.77, 1.0457),
    _controlled("SFT", 36.8, 16.9, 50.6, 38.4, 49.1, 25.9, 20.0, 18.8, 32.1, 0.09, 7.28, 1.0275),
    _controlled("Vanilla OPD", 36.0, 17.0, 49.0, 38.4, 49.9, 26.1, 22.0, 20.3, 32.3, 39.09, 83.67, 6.9041),
    _controlled("EOPD", 37.3, 17.5, 51.3, 46.2, 54.1, 27.3, 21.2, 21.7, 34.6, 24.77, 87.21, 5.8413),
    _controlled("Lightning OPD", 37.1, 19.2, 50.1, 45.8, 51.5, 26.8, 21.1, 21.7, 34.2, 0.13, 99.23, 1.0513),
    _controlled("OPRD", 36.8, 18.7, 48.9, 46.2, 51.3, 26.7, 21.6, 22.0, 34.0, 0.16, 99.72, 1.0836),
    _controlled("SpikeOPD", 39.1, 19.2, 51.9, 48.5, 55.3, 28.1, 19.0, 22.6, 35.5, 0.11, 99.19, 1.0477),
)

SCALES = {(768, 12): "0.125B", (1024, 24): "0.35B", (2048, 24): "1.3B"}  # (hidden size, layers) of OPT's sizes


def scale_of(shape: Mapping[str, Any]) -> str | None:
    """The paper's name for a model of this shape, if it has one."""
    return SCALES.get((shape.get("hidden_size", 0), shape.get("num_hidden_layers", 0)))


def rows(choice: str, shape: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows asked for; `auto` takes those of the model's own scale, else the smallest."""
    if choice == "none":
        return ()
    if choice == "controlled":
        return CONTROLLED
    scale = (scale_of(shape) or "0.125B") if choice == "auto" else choice
    return tuple(row for row in MAIN if row.scale == scale)
