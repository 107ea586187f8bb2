"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4), without a library."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class Metrics:
    """Kept by the event loop's thread alone, so nothing here is locked. Gauges are asked when somebody looks."""

    def __init__(self) -> None:
        self.counters: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.histograms: dict[str, list[float]] = {}  # counts by bucket, beyond the last one, sum
        self.gauges: dict[str, Callable[[], float]] = {}
        self.help: dict[str, str] = {}

    def about(self, **helps: str) -> None:
        """One line on each metric, under its name without the prefix."""
        self.help |= helps

    def add(self, name: str, value: float = 1, labels: str = "") -> None:
        self.counters[name, labels] += value

    def observe(self, name: str, seconds: float) -> None:
        values = self.histograms.setdefault(name, [0.0] * (len(SECONDS) + 2))
        values[bisect_left(SECONDS, seconds)] += 1
        values[-1] += seconds

    def render(self) -> str:
        lines: list[str] = []

        def begin(name: str, kind: str) -> str:
            full = f"spikeopd_{name}"
            if (head := f"# TYPE {full} {kind}") not in lines:
                lines.extend([f"# HELP {full} {self.help.get(name, name)}", head])
            return full

        for (name, labels), value in sorted(self.counters.items()):
            lines.append(f"{begin(name, 'counter')}{{{labels}}} {value:.15g}")
        for name, ask in self.gauges.items():
            lines.append(f"{begin(name, 'gauge')} {ask():.15g}")
        for name, values in self.histograms.items():
            full, total = begin(name, "histogram"), 0.0
            for limit, count in zip((*map(str, SECONDS), "+Inf"), values, strict=False):
                total += count
                lines.append(f'{full}_bucket{{le="{limit}"}} {total:.15g}')
            lines.extend([f"{full}_sum {values[-1]:.9g}", f"{full}_count {total:.15g}"])
        return "\n".join(lines).replace("{} ", " ") + "\n"
