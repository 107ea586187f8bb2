"""Whose number is it? Which conventions give an energy that a publication prints from what else it prints.

A case is a printed table: energies, and whatever stands beside them (operations, or their split into MACs and
accumulations, or dense FLOPs with rate and steps). Every convention turns those into an energy, and *reproduces* a row
if the printed energy lies in the interval that rounding of the printed figures leaves. Nothing is fitted: where only
operations that are not printed could explain a row, the verdict says how many it would take.

    {"title": "...", "citation": "where it is printed", "rows": [{"model": "...", "ops_g": 27.5, "rate": 0.17,
     "num_steps": 4, "dense": false, "energy_mj": 9.2}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from energy.costs import COSTS
from energy.render.document import Document
from energy.render.table import DASH, Column, Table, significant
from spikeopd.errors import InputError

FIGURES = ("ops_g", "macs_g", "acs_g", "flops_g", "rate", "num_steps", "energy_mj")
_SHIPPED = ("spikingformer", "fwformer")  # data/audit_NAME.json; `paper` is made of energy.paper
_MAC, _AC = (Decimal(str(COSTS["horowitz45"].price(event))) for event in ("mac", "ac"))
_INT_MAC, _INT_AC = (Decimal(str(COSTS["horowitz45-int8"].price(event))) for event in ("mac", "ac"))
Interval = tuple[Decimal, Decimal]
Rule = Callable[[Mapping[str, Any]], Interval | None]


@dataclass(frozen=True)
class Case:
    """A printed table. Figures are decimals, because their last digit says how they were rounded."""

    name: str
    title: str
    citation: str
    rows: tuple[Mapping[str, Any], ...]
    path: Path | None = None


def printed(value: Decimal) -> Interval:
    """What a printed figure can stand for: half a unit of its last digit either way."""
    exponent = value.as_tuple().exponent
    half = Decimal(5).scaleb(exponent - 1) if isinstance(exponent, int) else Decimal(0)
    return value - half, value + half


def _times(price: Decimal, *keys: str) -> Rule:
    def energy(row: Mapping[str, Any]) -> Interval | None:
        low = high = price
        for key in keys:
            if row.get(key) is None:
                return None
            # steps are whole: nothing was rounded
            left, right = (row[key], row[key]) if key == "num_steps" else printed(row[key])
            low, high = low * left, high * right
        return low, high

    return energy


def _split(row: Mapping[str, Any]) -> Interval | None:
    parts = [_times(_MAC, "macs_g")(row), _times(_AC, "acs_g")(row)]
    if parts[0] is None or parts[1] is None:
        return None
    return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]


def _dense_only(rule: Rule) -> Rule:
    return lambda row: rule(row) if row.get("dense") else None


def _spiking_only(
    rule: Rule,
) -> Rule:
    return lambda row: None if row.get("dense") else rule(row)


def _per_step(row: Mapping[str, Any]) -> Interval | None:
    whole = _times(_AC, "ops_g")(row)
    if whole is None or not row.get("num_steps") or row.get("dense") or row["num_steps"] == 1:
        return None
    return whole[0] / row["num_steps"], whole[1] / row["num_steps"]


# name -> (what it takes the printed figures to mean, the energy in mJ: G operations times pJ)
CONVENTIONS: dict[str, tuple[str, Rule]] = {
    "split": ("MACs × 4.6 pJ + accumulations × 0.9 pJ, as printed", _split),
    "all_mac": ("every operation a MAC at 4.6 pJ", _times(_MAC, "ops_g")),
    "all_ac": ("every operation an accumulation at 0.9 pJ", _spiking_only(_times(_AC, "ops_g"))),
    "two_per_mac": ("operations count a MAC twice: half of them at 4.6 pJ", _dense_only(_times(_MAC / 2, "ops_g"))),
    "int8": ("every operation an 8-bit MAC at 0.3 pJ", _dense_only(_times(_INT_MAC, "ops_g"))),
    "int_ac": ("every operation a 32-bit integer addition at 0.1 pJ", _spiking_only(_times(_INT_AC, "ops_g"))),
    "rate_steps": ("rate × T_s × FLOPs accumulations at 0.9 pJ", _times(_AC, "rate", "num_steps", "flops_g")),
    "rate_no_steps": ("rate × FLOPs accumulations at 0.9 pJ, T_s left out", _times(_AC, "rate", "flops_g")),
    "rate_twice": (
        "rate applied to operations that hold it already: rate × operations × 0.9 pJ",
        _spiking_only(_times(_AC, "rate", "ops_g")),
    ),
    "per_step": (
        "operations of all T_s steps, energy of one: operations / T_s × 0.9 pJ",
        _per_step,
    ),
}  # fmt: skip


def audit_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Every convention that applies to one printed row, those that reproduce it, and what is left otherwise."""
    low, high = printed(row["energy_mj"])
    tried = {name: interval for name, (_, rule) in CONVENTIONS.items() if (interval := rule(row)) is not None}
    matches = [name for name, (least, most) in tried.items() if least <= high and low <= most]
    return {
        "model": str(row["model"]),
        **{key: None if row.get(key) is None else float(row[key]) for key in FIGURES},
        "printed": {key: str(row[key]) for key in FIGURES if row.get(key) is not None},
        "dense": bool(row.get("dense")),
        "implied_pj": float(row["energy_mj"] / row["ops_g"]) if row.get("ops_g") else None,
        "tried": {name: [float(least), float(most)] for name, (least, most) in tried.items()},
        "reproduced_by": matches,
        "not_by": [name for name in tried if name not in matches],
        "verdict": _verdict(row, matches),
    }


def _verdict(row: Mapping[str, Any], matches: Sequence[str]) -> str:
    if matches:
        return "reproduced by " + "; ".join(CONVENTIONS[name][0] for name in matches)
    ops, energy = row.get("ops_g"), row["energy_mj"]
    if ops is None:
        return "by none of the conventions tried"
    least, most = printed(ops)[0] * _AC, printed(ops)[1] * _MAC
    low, high = printed(energy)
    if row.get("dense"):
        side = "below" if high < printed(ops)[0] * _MAC else "above"
        return f"by none: {side} operations × 4.6 pJ"
    if high < least:
        return "by none, and by no mix: below operations × 0.9 pJ, the least that accumulations cost"
    if low > most:
        return "by none, and by no mix: above operations × 4.6 pJ"
    inside, beside = (energy - ops * _AC) / (_MAC - _AC), (energy - ops * _AC) / _MAC
    return (
        f"possible: {significant(float(inside), 3)} G of the operations are MACs, or "
        f"{significant(float(beside), 3)} G MACs come on top of them; neither is printed"
    )


def load_case(name: str | Path) -> Case:
    """A shipped case by its name, or a file."""
    if name == "paper":
        return paper_case()
    if name in _SHIPPED:
        text = resources.files("energy").joinpath(f"data/audit_{name}.json").read_text(encoding="utf-8")
        return parse_case(text, str(name))
    path = Path(name)
    if path.suffix != ".json":
        raise InputError(f"unknown case {str(name)!r}: choose one of {', '.join(case_names())}, or give a .json file")
    try:
        return parse_case(path.read_text(encoding="utf-8"), str(path), path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def case_names() -> tuple[str, ...]:
    return ("paper", *_SHIPPED)


def paper_case() -> Case:
    """The efficiency columns of the paper that this project builds: `energy.paper` holds them."""
    from energy.paper import NUM_STEPS, PRINTED

    rows = tuple(
        {
            "model": f"{row.model}, {row.scale}",
            "ops_g": Decimal(str(row.ops_g)),
            "rate": None if row.rate is None else Decimal(str(row.rate)),
            "num_steps": None if row.rate is None else Decimal(1 if row.scale.startswith("spikegpt") else NUM_STEPS),
            "dense": row.rate is None,
            "energy_mj": Decimal(str(row.energy_mj)),
        }
        for row in PRINTED
    )
    return Case("paper", "The paper's main table", "the paper's main table and Appendix E", rows)


def parse_case(text: str, where: str, path: Path | None = None) -> Case:
    """A checked case. Numbers are kept as they are written, because 126.0 and 126 are rounded differently."""
    try:
        raw = json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{where}: expected a JSON object with title, citation and rows")
    for key in ("title", "citation"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise InputError(f"{where}: field {key!r} must say where the table is printed")
    rows = raw.get("rows")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{where}: field 'rows' must be a list of printed rows")
    checked = tuple(_row(row, f"{where}: rows[{index}]") for index, row in enumerate(rows))
    return Case(path.stem if path else where, raw["title"], raw["citation"], checked, path)


def _row(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object")
    unknown = [key for key in row if key not in (*FIGURES, "model", "dense")]
    if unknown:
        raise InputError(f"{where}: unknown field {unknown[0]!r}; known: model, dense, {', '.join(FIGURES)}")
    if not isinstance(row.get("model"), str):
        raise InputError(f"{where}: field 'model' must name the row")
    if not isinstance(row.get("dense", False), bool):
        raise InputError(f"{where}: field 'dense' must be true or false")
    for key in FIGURES:
        value = row.get(key)
        if value is not None and (not isinstance(value, Decimal) or not 0 <= value < Decimal("1e15")):
            raise InputError(f"{where}: field {key!r} must be a number from 0, got {value!r}")
    if row.get("energy_mj") is None:
        raise InputError(f"{where}: field 'energy_mj' is missing: there is nothing to audit")
    steps = row.get("num_steps")
    if steps is not None and (steps != steps.to_integral_value() or steps < 1):
        raise InputError(f"{where}: field 'num_steps' must be a whole number from 1, got {steps}")
    if all(row.get(key) is None for key in ("ops_g", "macs_g", "acs_g", "flops_g")):
        raise InputError(f"{where}: give at least one of ops_g, macs_g and acs_g, flops_g")
    return row


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def audit_document(cases: Sequence[str | Path] = ()) -> Document:
    """Each case as a table; the conventions last."""
    chosen = [load_case(name) for name in cases or case_names()]
    tables, head = [], []
    for case in chosen:
        rows = [audit_row(row) for row in case.rows]
        told = sum(bool(row["reproduced_by"]) for row in rows)
        impossible = sum(row["verdict"].startswith("by none") for row in rows)
        rest = len(rows) - told - impossible
        line = (
            f"{case.name}: {told} of {len(rows)} printed energies are reproduced by a convention, {impossible} by none"
        )
        head.append(line + (f", {rest} only with operations that are not printed" if rest else ""))
        tables.append(_table(case, rows))
    conventions = [{"name": name, "meaning": meaning} for name, (meaning, _) in CONVENTIONS.items()]
    columns = (Column("name", "Convention"), Column("meaning", "Takes the printed figures to mean"))
    note = "A row is reproduced if its printed energy lies in the interval that rounding leaves. Prices: Horowitz 2014."
    tables.append(Table("conventions", "Conventions tried", columns, conventions, note))
    inputs = tuple(case.path for case in chosen if case.path is not None)
    return Document(("Which conventions give the printed energies", *head), tuple(tables), "", inputs)


def _table(case: Case, rows: Sequence[dict[str, Any]]) -> Table:
    shown = [key for key in FIGURES if any(row[key] is not None for row in rows)]
    labels = {
        "ops_g": ("Operations", "G"), "macs_g": ("MACs", "G"), "acs_g": ("Accumulations", "G"),
        "flops_g": ("FLOPs", "G"), "rate": ("Rate", "1"), "num_steps": ("T_s", "steps"), "energy_mj": ("Energy", "mJ"),
    }  # fmt: skip
    columns = (
        Column("model", "Model"),
        *(Column(f"{key}_printed", labels[key][0], "text", labels[key][1]) for key in shown),
        Column("implied_pj", "Implied price", "number", "pJ/op"),
        Column("by", "Reproduced by"),
        Column("verdict", "Verdict"),
    )
    rows = [
        row
        | {"by": ", ".join(row["reproduced_by"]) or DASH}
        | {f"{key}_printed": row["printed"].get(key, DASH) for key in shown}  # with the digits of the print
        for row in rows
    ]
    return Table(f"audit_{case.name}", case.title, columns, rows, f"Printed in: {case.citation}.")
