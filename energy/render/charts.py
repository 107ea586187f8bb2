"""Charts of a report: bars in HTML, the others as inline SVG; colours from the page's variables, tooltips on marks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from energy.render.table import Unit, significant
from energy.render.tables import COMPONENT_TITLES, report_unit

_COLOURS = {name: f"var(--c{index})" for index, name in enumerate(COMPONENT_TITLES)}
_MOST_POINTS = 600


def component_bars(report: dict[str, Any]) -> str:
    """Energy per token of every component, student above its teacher's. HTML, so that it fits any width."""
    tokens = report["summary"][-1]["tokens"] or 1
    price = report["costs"]["prices_pj"]["mac"]
    teacher = {name: macs * price / tokens for name, macs in report["teacher"]["macs"].items()}
    rows = [
        (row["component"], row["energy_pj"] / tokens, teacher.get(row["component"]))
        for row in report["components"]
        if row["scope"] == "all" and (row["energy_pj"] or teacher.get(row["component"]))
    ]
    largest = max((max(student, dense or 0.0) for _, student, dense in rows), default=1.0) or 1.0
    scale, unit = report_unit(report)
    parts = []
    for name, student, dense in rows:
        bars = ""
        # Where the teacher has no such component, the student's bar stands alone beside its name.
        for who, value in (("student", student), ("teacher", dense)):
            if value is not None:
                label = f"{significant(value / scale)} {unit}"
                bars += (
                    f'<div class="bar" title="{_title(name)}, {who}: {label} per token">'
                    f'<i style="background:var(--{who});flex-basis:{80 * value / largest:.3f}%"></i>{label}</div>'
                )
        parts.append(f"<dt>{_title(name)}</dt><dd>{bars}</dd>")
    legend = _legend([("student", "var(--student)"), (report["teacher"]["name"], "var(--teacher)")])
    return f'<dl class="bars">{"".join(parts)}</dl>{legend}'


def layer_columns(report: dict[str, Any]) -> str:
    """Energy per token of every layer, stacked by component."""
    tokens = report["summary"][-1]["tokens"] or 1
    layers = report["layers"]
    largest = max((row["energy_pj"] for row in layers), default=0.0) / tokens or 1.0
    names = [name for name in COMPONENT_TITLES if any(row["components_pj"].get(name) for row in layers)]
    frame = _Frame(520, 270, largest, report_unit(report))
    room = frame.inner_width / max(len(layers), 1)
    parts = frame.axes("layer", "per token")
    for row in layers:
        x, top = frame.left + room * row["layer"], 0.0
        for name in names:
            value = row["components_pj"].get(name, 0.0) / tokens
            y0, y1 = frame.y(top + value), frame.y(top)
            top += value
            label = f"layer {row['layer']}, {_title(name)}: {frame.label(value)} per token"
            parts.append(
                f'<rect x="{x + room * 0.12:.2f}" y="{y0:.2f}" width="{room * 0.76:.2f}" height="{y1 - y0:.2f}" '
                f'fill="{_COLOURS[name]}"><title>{label}</title></rect>'
            )
        if len(layers) <= 12 or row["layer"] % 4 == 0:
            parts.append(
                f'<text x="{x + room / 2:.1f}" y="{frame.bottom + 16}" text-anchor="middle">{row["layer"]}</text>'
            )
    return _svg(frame.width, frame.height, parts, "Energy per token by layer") + _legend(
        [(_title(name), _COLOURS[name]) for name in names]
    )


def token_line(report: dict[str, Any]) -> str:
    """Energy of every fed token in the order of feeding; generated tokens lie on a band."""
    tokens = report["tokens"]
    size = -(-len(tokens) // _MOST_POINTS)
    bins = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    values = [sum(token["energy_pj"] for token in part) / len(part) for part in bins]
    frame = _Frame(520, 270, max(values, default=1.0) or 1.0, report_unit(report))
    room = frame.inner_width / max(len(bins), 1)
    parts = []
    for index, part in enumerate(bins):
        x = frame.left + room * index
        if part[0]["phase"] == "generation":
            parts.append(
                f'<rect x="{x:.2f}" y="{frame.top}" width="{room:.2f}" height="{frame.bottom - frame.top}" '
                'fill="var(--band)"/>'
            )
        if index and part[0]["sequence"] != bins[index - 1][0]["sequence"]:
            ends = f'x1="{x:.2f}" x2="{x:.2f}" y1="{frame.top}" y2="{frame.bottom}"'
            parts.append(f'<line class="axis" stroke-dasharray="3 3" {ends}/>')
    parts += frame.axes("token, in the order of feeding", "")
    points = [(frame.left + room * (i + 0.5), frame.y(value)) for i, value in enumerate(values)]
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="var(--student)" stroke-width="2" stroke-linejoin="round"/>'
    )
    for (x, y), part, value in zip(points, bins, values, strict=True):
        first = part[0]
        label = f"sequence {first['sequence']}, position {first['position']}, {first['phase']}: {frame.label(value)}"
        radius = f"{min(3.5, room / 2 + 0.6):.2f}"
        circle = f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="var(--student)">'
        parts.append(f"{circle}<title>{label}</title></circle>")
    legend = _legend([("energy per token", "var(--student)"), ("generated tokens", "var(--band)")])
    note = f'<p class="soft">Each point is the mean of {size} tokens.</p>' if size > 1 else ""
    return _svg(frame.width, frame.height, parts, "Energy over tokens") + legend + note


def sensitivity_lines(report: dict[str, Any], key: str, axis: str, here: float | None, log: bool) -> str:
    """Student and teacher energy per token against one changed quantity; `here` marks this report."""
    rows = report["sensitivity"]["rate" if key == "factor" else key]
    series = {
        "student": [row["energy_per_token_pj"] or 0.0 for row in rows],
        "teacher": [row["teacher_energy_per_token_pj"] or 0.0 for row in rows],
    }
    largest = max((max(values) for values in series.values() if values), default=1.0) or 1.0
    frame = _Frame(340, 220, largest, report_unit(report))
    at = [math.log2(row[key]) if log else float(row[key]) for row in rows]
    low, high = (min(at), max(at)) if at else (0.0, 1.0)

    def x(value: float) -> float:
        return frame.left + 10 + (value - low) / ((high - low) or 1.0) * (frame.inner_width - 20)

    parts = frame.axes(axis, "per token")
    if here is not None and rows and low <= (mark := math.log2(here) if log else here) <= high:
        parts.append(
            f'<line class="axis" stroke-dasharray="3 3" x1="{x(mark):.1f}" x2="{x(mark):.1f}" '
            f'y1="{frame.top}" y2="{frame.bottom}"><title>this report: {here:g}</title></line>'
        )
    for who, values in series.items():
        points = [(x(position), frame.y(value)) for position, value in zip(at, values, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="var(--{who})" stroke-width="2"/>')
        for (px, py), row, value in zip(points, rows, values, strict=True):
            label = f"{who}, {axis} {row[key]:g}: {frame.label(value)} per token"
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="var(--{who})"><title>{label}</title></circle>'
            )
    step = max(1, -(-len(rows) // 6))
    for position, row in list(zip(at, rows, strict=True))[::step]:
        parts.append(f'<text x="{x(position):.1f}" y="{frame.bottom + 16}" text-anchor="middle">{row[key]:g}</text>')
    return _svg(frame.width, frame.height, parts, f"Energy per token against {axis}")


PART_COLOURS = {"operations": "var(--c1)", "memory": "var(--c0)", "addressing": "var(--c2)"}
_CURVES = {
    "student": ("student", "var(--student)", ""),
    "twin": ("quantised twin, dense", "var(--analytical)", ""),
    "twin_graded": ("quantised twin, zeros skipped", "var(--analytical)", "5 4"),
    "teacher_int8": ("int8 teacher", "var(--soft)", "2 4"),
}


def fair_bars(rows: Sequence[dict[str, Any]], unit: Unit) -> str:
    """Energy per token of every model, split into operations, memory and addressing."""
    scale, name = unit
    largest = max((row["energy_per_token_pj"] or 0.0 for row in rows), default=1.0) or 1.0
    parts = []
    for row in rows:
        title = row["model"] if row["convention"] == "any" else f"{row['model']}, per {row['convention']}"
        whole = row["energy_per_token_pj"] or 0.0
        pieces = ""
        for part, colour in PART_COLOURS.items():
            value = row[f"{part}_per_token_pj"] or 0.0
            hint = html.escape(f"{title}, {part}: {significant(value / scale)} {name} per token")
            pieces += f'<i style="background:{colour};flex-basis:{75 * value / largest:.3f}%" title="{hint}"></i>'
        label = f"{significant(whole / scale)} {name}"
        parts.append(f'<dt>{html.escape(title)}</dt><dd><div class="bar stacked">{pieces}<b>{label}</b></div></dd>')
    return f'<dl class="bars">{"".join(parts)}</dl>{_legend(list(PART_COLOURS.items()))}'


def break_even_lines(
    rows: Sequence[dict[str, Any]], convention: str, here: float, energies: dict[str, float], unit: Unit
) -> str:
    """Energy per token against a uniform rate under one convention; the rates at which the student is cheaper than its
    dense twin lie on a band; a dashed line marks the student's own rate, dots what it and its rivals cost there."""
    chosen = {
        key: [row for row in rows if row["key"] == key and row["convention"] in (convention, "any")] for key in _CURVES
    }
    rates = [row["rate"] for row in chosen["student"]]
    twin = [row["energy_per_token_pj"] for row in chosen["twin"]]
    student = [row["energy_per_token_pj"] for row in chosen["student"]]
    drawn = [row["energy_per_token_pj"] for lines in chosen.values() for row in lines]
    frame = _Frame(520, 300, max([*drawn, *(energies[key] for key in _CURVES)]), unit)
    last = rates[-1] if rates else 1.0

    def x(rate: float) -> float:
        return frame.left + 6 + rate / last * (frame.inner_width - 12)

    parts = []
    for left, right, costs, rivals in zip(rates, rates[1:], zip(student, student[1:], strict=False),
                                          zip(twin, twin[1:], strict=False), strict=False):  # fmt: skip
        before, after = (cost - rival for cost, rival in zip(costs, rivals, strict=True))
        if before > 0:
            continue
        end = right if after <= 0 else left + (right - left) * before / (before - after)
        parts.append(f'<rect x="{x(left):.1f}" y="{frame.top}" width="{x(end) - x(left):.1f}" '
                     f'height="{frame.bottom - frame.top}" fill="var(--band)"/>')  # fmt: skip
    parts += frame.axes("firing rate of every neuron [spikes/neuron/step]", "per token")
    for tick in range(6):
        rate = last * tick / 5
        parts.append(f'<text x="{x(rate):.1f}" y="{frame.bottom + 16}" text-anchor="middle">{rate:g}</text>')
    for key, (name, colour, dash) in _CURVES.items():
        path = " ".join(f"{x(row['rate']):.1f},{frame.y(row['energy_per_token_pj']):.1f}" for row in chosen[key])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                     f'stroke-dasharray="{dash or "none"}"><title>{html.escape(name)}</title></polyline>')  # fmt: skip
    if 0 <= here <= last:
        parts.append(
            f'<line class="axis" stroke-dasharray="3 3" x1="{x(here):.1f}" x2="{x(here):.1f}" y1="{frame.top}" '
            f'y2="{frame.bottom}"><title>this student: {here:.4g}</title></line>'
            f'<text class="strong" x="{x(here) + 5:.1f}" y="{frame.top + 12}">{significant(here, 3)}</text>'
        )
        for key, (name, colour, _) in _CURVES.items():
            label = html.escape(f"{name} at the rates of this report: {frame.label(energies[key])} per token")
            parts.append(
                f'<circle cx="{x(here):.1f}" cy="{frame.y(energies[key]):.1f}" r="4" fill="{colour}">'
                f"<title>{label}</title></circle>"
            )
    legend = "".join(
        f'<span><i class="line" style="border-top:3px {"dashed" if dash else "solid"} {colour}"></i>'
        f"{html.escape(name)}</span>"
        for name, colour, dash in _CURVES.values()
    )
    legend += '<span><i style="background:var(--band)"></i>student cheaper than its dense twin</span>'
    title = f"Energy per token against the firing rate, per {convention}"
    return _svg(frame.width, frame.height, parts, title) + f'<div class="legend">{legend}</div>'


class _Frame:
    """A plot area with a zero-based energy axis of round ticks."""

    def __init__(self, width: int, height: int, largest: float, unit: Unit) -> None:
        self.width, self.height = width, height
        self.left, self.top, self.bottom = 58, 22, height - 42
        self.inner_width = width - self.left - 8
        self.scale, self.unit = unit
        step = _round_step(largest / self.scale / 4)
        self.ticks = [step * i for i in range(int(largest / self.scale / step) + 2)]
        self.limit = self.ticks[-1] * self.scale

    def y(self, value: float) -> float:
        return self.bottom - value / self.limit * (self.bottom - self.top)

    def label(self, value: float) -> str:
        return f"{significant(value / self.scale)} {self.unit}"

    def axes(self, below: str, beside: str) -> list[str]:
        parts = []
        for tick in self.ticks:
            y = self.y(tick * self.scale)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
        parts.append(f'<text x="{self.left}" y="12">{f"{self.unit} {beside}".strip()}</text>')
        middle = self.left + self.inner_width / 2
        parts.append(f'<text x="{middle:.1f}" y="{self.height - 6}" text-anchor="middle">{html.escape(below)}</text>')
        return parts


def _tick(value: float) -> str:
    return f"{value:,.10g}" if value < 1e7 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">{body}</svg>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{items}</div>'


def _title(name: str) -> str:
    return html.escape(COMPONENT_TITLES[name])
