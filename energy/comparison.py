"""Several models side by side, in the columns of the paper's efficiency table: OPs, firing rate, energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energy.costs import CostTable
from energy.flops import SPIKEGPT, SpikeGPTShape, opt_macs, opt_parameters
from spikeopd.contracts import ModelShape, parse_shape


def student_row(report: dict[str, Any]) -> dict[str, Any]:
    """A student from its report; `parameters` are those of the OPT of its shape."""
    whole = report["summary"][-1]
    shape = parse_shape(report["model"], "report")
    basis = "counted" if report["source"]["kind"] == "run" else "rates"
    name, parameters = report["source"]["name"], opt_parameters(shape)
    row = _row(name, parameters, whole["tokens"], whole["ops"], whole["rate"], whole["energy_pj"], basis)
    if chip := report.get("chip"):
        row |= {f"chip_{key}": chip[key] for key in ("energy_per_token_pj", "energy_error_pj")}
        row |= {"chip_us_per_token": chip["seconds_per_token"] * 1e6, "chip_us_error": chip["seconds_error"] * 1e6}
    return row


def teacher_row(name: str, shape: ModelShape, tokens: int, keys: int, costs: CostTable) -> dict[str, Any]:
    """The dense teacher over the same tokens: every MAC at the price of a MAC."""
    macs = sum(opt_macs(shape, tokens, keys).values())
    return _row(name, opt_parameters(shape), tokens, macs, None, macs * costs.price("mac"), "closed form")


def spikegpt_row(shape: SpikeGPTShape, tokens: int, rate: float, costs: CostTable) -> dict[str, Any]:
    """SpikeGPT's shape under the same protocol: blocks spike-driven (one step per token), head dense."""
    macs = shape.macs(tokens)
    sops, head = rate * (macs["time_mix"] + macs["channel_mix"]), macs["head"]
    energy = sops * costs.price("ac") + head * costs.price("mac")
    return _row(shape.name, shape.parameters, tokens, sops + head, rate, energy, "shape × rate")


def compare_rows(
    reports: Sequence[dict[str, Any]],
    costs: CostTable,
    teacher: tuple[str, ModelShape] | None = None,
    keys: int = 0,
    spikegpt: bool = False,
) -> list[dict[str, Any]]:
    """Rows for a teacher (if asked for), every run, and the SpikeGPT shapes at the first run's rate and tokens."""
    first = reports[0]["summary"][-1]
    rows = [teacher_row(*teacher, first["tokens"], keys, costs)] if teacher else []
    rows += [student_row(report) for report in reports]
    if spikegpt:
        rows += [spikegpt_row(shape, first["tokens"], first["rate"], costs) for shape in SPIKEGPT.values()]
    base = rows[0]["energy_per_token_pj"]
    for row in rows:
        row["relative"] = row["energy_per_token_pj"] / base if base and row["energy_per_token_pj"] is not None else None
    return rows


def _row(
    name: str, parameters: int, tokens: int, ops: float, rate: float | None, energy: float, basis: str
) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": parameters,
        "tokens": tokens,
        "ops": ops,
        "rate": rate,
        "energy_pj": energy,
        "ops_per_token": ops / tokens if tokens else None,
        "energy_per_token_pj": energy / tokens if tokens else None,
        "basis": basis,
    }
