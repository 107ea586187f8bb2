"""Firing rates given by hand: one number for everything, or one per component, or one per component and layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energy.models import uniform_rates
from spikeopd.contracts import ModelShape
from spikeopd.errors import InputError, short
from spikeopd.files import read_json


def load_rates(source: float | str | Mapping[str, Any], shape: ModelShape) -> dict[str, list[float]]:
    """A number, `{component: number or [per layer]}` or a report with its `rates`; as data, or named as a JSON file."""
    if not isinstance(source, str):
        return parse_rates(dict(source) if isinstance(source, Mapping) else source, shape, "rates")
    try:
        return uniform_rates(shape, _rate(float(source), "--rates"))
    except ValueError:
        pass
    path = Path(source)
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise InputError(f"--rates {short(repr(source))} is neither a number nor a file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"rates file {short(path)} is not readable JSON: {short(error)}") from error
    return parse_rates(raw, shape, str(path))


def parse_rates(raw: Any, shape: ModelShape, where: str) -> dict[str, list[float]]:
    """Rates of every component and layer; refuses missing and unknown components, wrong lengths, rates above 1."""
    if isinstance(raw, dict) and isinstance(raw.get("rates"), dict):
        raw = raw["rates"]
    if not isinstance(raw, dict):
        return uniform_rates(shape, _rate(raw, where))
    known = shape.layer_components
    unknown = [name for name in raw if name not in known]
    if unknown:
        raise InputError(
            f"{where}: unknown component {short(repr(unknown[0]))}; this model's block has {', '.join(known)}"
        )
    rates = {}
    for name in known:
        if name not in raw:
            raise InputError(f"{where}: the rate of component {name!r} is missing")
        value = raw[name]
        if not isinstance(value, list):
            value = [value] * shape.num_hidden_layers
        if len(value) != shape.num_hidden_layers:
            raise InputError(f"{where}: {name!r} has {len(value)} rates for {shape.num_hidden_layers} layers")
        rates[name] = [_rate(rate, f"{where}: {name!r}") for rate in value]
    return rates


def _rate(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"{where}: a firing rate lies between 0 and 1, got {short(repr(value))}")
    return float(value)
