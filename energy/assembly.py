"""Assemble one report: counted beside analytical, student beside teacher, and everything that was left out.

A report is a plain dictionary (schema `spikeopd.energy/1`) so that every renderer, and every reader of the JSON, sees
the same numbers. Units are in the keys: `_pj`, `_bytes`, `tokens`; plain names are counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from energy.chip import chip_section
from energy.costs import COSTS, EVENTS, MEMORY, MEMORY_CITATION, PLACEMENTS, CostTable, MemoryLevel
from energy.flops import keys_of_sequence, opt_bytes, opt_macs, opt_parameters
from energy.memory import CONVENTIONS, Work, counted_work, estimated_work, student_tally, twin_bits, twin_tally
from energy.memory import total as billed
from energy.models import (
    NO_HOPS,
    Check,
    Hops,
    Line,
    Rates,
    break_even_rate,
    compare_counts,
    count,
    driven_rates,
    estimated_lines,
    group,
    mean_rate,
    measured_lines,
    measured_rates,
    measured_site_rates,
    operation,
    site_cells,
    site_spikes,
    token_energies,
    total,
)
from spikeopd.contracts import LAYER_COMPONENTS, ModelShape
from spikeopd.contracts.run import PHASES, Run
from spikeopd.errors import CheckFailed

SCHEMA = "spikeopd.energy/1"
COMPONENTS = ("embed", *LAYER_COMPONENTS, "head", "neurons", "routing")
RATE_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
STEP_CHOICES = (1, 2, 4, 6, 8)
CONTEXT_CHOICES = (16, 64, 128, 256, 512, 1024, 2048)

# What no cost table here prices, said in every report.
NOT_COSTED = (
    "static power, leakage, clock trees and idle time",
    "input, output and links between chips",
    "bias additions, final LayerNorm and the affine map of the logits",
    "token and position lookup in the embedding table (its factorised projection is costed)",
    "sampling of the next token and tokenisation",
    "teacher: LayerNorm, softmax, activation functions, biases and residual additions",
)


@dataclass(frozen=True)
class Options:
    """What a report is computed with."""

    costs: CostTable
    memory: MemoryLevel
    teacher: ModelShape
    teacher_name: str
    hops: Hops = NO_HOPS


@dataclass(frozen=True)
class Scope:
    """One part of the work (prompt, generation, all): what happened and what it would cost by rates alone."""

    name: str
    tokens: int
    keys: int
    rate: float
    spikes: float
    lines: list[Line]
    analytical: list[Line]
    comparisons: list[Check]
    bytes: dict[str, int] | None


def report_run(run: Run, options: Options) -> dict[str, Any]:
    """The report of a run whose events were counted."""
    scopes = []
    for phase in (*PHASES, None):
        activity, keys, pricing = run.activity(phase), run.keys(phase), (options.costs, options.hops)
        rates, site_rates = measured_rates(run.shape, activity), measured_site_rates(activity)
        scopes.append(
            Scope(
                name=phase or "all",
                tokens=activity.tokens,
                keys=keys,
                rate=mean_rate(activity),
                spikes=sum(int(table.sum()) for table in activity.spikes.values()),
                lines=measured_lines(activity, *pricing, operation(run.shape)),
                analytical=estimated_lines(run.shape, rates, activity.tokens, keys, *pricing, site_rates),
                comparisons=compare_counts(run, phase),
                bytes=activity.bytes,
            )
        )
    source = {name: getattr(run, name) for name in ("name", "backend", "precision", "complete", "bundle")}
    source = {"kind": "run"} | source
    report = _assemble(run.shape, run.num_sequences, scopes, rates, options, source, site_rates)
    report["alternatives"] = _alternatives(run, options)
    report["chip"] = chip_section(run)
    report["twin"] = _own_bills(counted_work(run)) if run.shape.graded else _twin(counted_work(run))
    energies = token_energies(run.shape, run.per_token, options.costs, options.hops)
    columns = {name: np.asarray(values).tolist() for name, values in vars(run.per_token).items()}
    columns["energy_pj"] = energies.tolist()
    report["tokens"] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return report


def report_rates(
    shape: ModelShape, rates: Rates, prompt: int, generated: int, options: Options, name: str
) -> dict[str, Any]:
    """The report of firing rates alone: one sequence of `prompt` + `generated` fed tokens, nothing counted."""
    scopes = []
    spans = {
        "prompt": (prompt, keys_of_sequence(prompt)),
        "generation": (generated, keys_of_sequence(generated, prompt)),
        "all": (prompt + generated, keys_of_sequence(prompt + generated)),
    }
    for scope, (tokens, keys) in spans.items():
        lines = estimated_lines(shape, rates, tokens, keys, options.costs, options.hops)
        cells = site_cells(shape, tokens, keys)
        spikes = site_spikes(cells, driven_rates(shape, rates))
        # The attention map is reported apart from the fixed-size sites, as in a counted run.
        fired, slots = (sum(sum(row) for site, row in table.items() if site != "a") for table in (spikes, cells))
        rate = fired / slots if slots else 0.0
        scopes.append(Scope(scope, tokens, keys, rate, count(lines, "neuron_active"), lines, lines, [], None))
    source = {"kind": "rates", "name": name, "backend": "none", "precision": "none", "complete": True, "bundle": {}}
    report, whole = _assemble(shape, 1, scopes, rates, options, source), scopes[-1]
    report["alternatives"], report["tokens"], report["chip"] = [], [], None
    report["twin"] = _twin(estimated_work(shape, rates, whole.tokens, whole.keys))
    return report


def _assemble(
    shape: ModelShape,
    sequences: int,
    scopes: Sequence[Scope],
    rates: Rates,
    options: Options,
    source: dict[str, Any],
    site_rates: Rates | None = None,
) -> dict[str, Any]:
    whole = scopes[-1]
    _assert_equal(scopes, str(source["name"]))
    teacher = options.teacher
    teacher_pj = _teacher_pj(options, whole.tokens, whole.keys)
    break_even = break_even_rate(shape, whole.tokens, whole.keys, options.costs, teacher_pj, options.hops)
    return {
        "schema": SCHEMA,
        "source": source,
        "model": shape.to_dict(),
        "sequences": sequences,
        "costs": asdict(options.costs)
        | {"prices_pj": dict(options.costs.prices_pj), "price_notes": dict(options.costs.price_notes)},
        "hops_per_spike": asdict(options.hops),
        "teacher": {
            "name": options.teacher_name,
            "model": teacher.to_dict(),
            "parameters": opt_parameters(teacher),
            "macs": opt_macs(teacher, whole.tokens, whole.keys),
        },
        "summary": [_summary(scope, sequences, options) for scope in scopes],
        "prices": _prices(whole, options),
        "components": [row for scope in scopes for row in _components(scope, options)],
        "layers": _layers(shape, whole),
        "lines": [
            {"scope": scope.name} | asdict(line) | {"price_pj": options.costs.prices_pj.get(line.event)}
            for scope in scopes
            for line in scope.lines
        ],
        "matrix": [{"scope": scope.name} | asdict(row) for scope in scopes for row in scope.comparisons],
        "checks": _checks(whole),
        "rates": {name: [float(rate) for rate in rates[name]] for name in shape.layer_components},
        "memory": _memory(scopes, options),
        "break_even": {
            "rate": break_even,
            "measured_rate": whole.rate,
            "headroom": break_even / whole.rate if break_even is not None and whole.rate else None,
            "meaning": _break_even_meaning(break_even),
        },
        "sensitivity": _sensitivity(shape, rates, site_rates, whole, options),
        "not_costed": _not_costed(shape, whole, options),
    }


def _summary(scope: Scope, sequences: int, options: Options) -> dict[str, Any]:
    energy, analytical = total(scope.lines), total(scope.analytical)
    teacher_pj = _teacher_pj(options, scope.tokens, scope.keys)
    return {
        "scope": scope.name,
        "tokens": scope.tokens,
        "sequences": sequences,
        "spikes": scope.spikes,
        "rate": scope.rate,
        "sops": count(scope.lines, "ac"),
        "macs": count(scope.lines, "mac"),  # of a quantised twin those of its blocks too: inputs that are not zero
        "ops": count(scope.lines, "ac", "mac"),
        "energy_pj": energy,
        "energy_per_token_pj": _per(energy, scope.tokens),
        "energy_per_sequence_pj": _per(energy, sequences),
        "analytical_ops": count(scope.analytical, "ac", "mac"),
        "analytical_energy_pj": analytical,
        "analytical_difference": _per(analytical - energy, energy),
        "teacher_macs": sum(opt_macs(options.teacher, scope.tokens, scope.keys).values()),
        "teacher_energy_pj": teacher_pj,
        "teacher_energy_per_token_pj": _per(teacher_pj, scope.tokens),
        "teacher_over_student": _per(teacher_pj, energy),
    }


def _prices(scope: Scope, options: Options) -> list[dict[str, Any]]:
    """The same events under every table: which of the two is cheaper depends on the hardware."""
    macs = sum(opt_macs(options.teacher, scope.tokens, scope.keys).values())
    rows = []
    for table in {**COSTS, options.costs.name: options.costs}.values():
        energy = sum(line.count * table.price(line.event) for line in scope.lines)
        dense = macs * table.price("mac")
        rows.append(
            {
                "table": table.name,
                "title": table.title,
                "node_nm": table.node_nm,
                "energy_per_token_pj": _per(energy, scope.tokens),
                "teacher_energy_per_token_pj": _per(dense, scope.tokens),
                "teacher_over_student": _per(dense, energy),
                "chosen": table.name == options.costs.name,
            }
        )
    return rows


def _components(scope: Scope, options: Options) -> list[dict[str, Any]]:
    energies, estimates = (group(lines, lambda line: line.component) for lines in (scope.lines, scope.analytical))
    whole = total(scope.lines)
    rows = []
    for name in COMPONENTS:
        chosen = [line for line in scope.lines if line.component == name]
        estimated = [line for line in scope.analytical if line.component == name]
        events = sum(line.count for line in chosen)
        if not chosen or (not events and name in ("embed", "routing")):
            continue
        priced = any(options.costs.price(line.event) for line in chosen)
        matched = [row for row in scope.comparisons if row.component == name]
        rows.append(
            {
                "scope": scope.name,
                "component": name,
                "events": sorted({line.event for line in chosen}),
                "count": events,
                "analytical_count": sum(line.count for line in estimated),
                "energy_pj": energies.get(name, 0.0),
                "analytical_energy_pj": estimates.get(name, 0.0),
                "energy_per_token_pj": _per(energies.get(name, 0.0), scope.tokens),
                "share": _per(energies.get(name, 0.0), whole),
                "relation": _relation(name, matched, priced),
            }
        )
    return rows


def _relation(name: str, rows: Sequence[Check], priced: bool) -> str:
    if name in ("embed", "head"):
        return "dense, same count"
    if not rows:
        return "by site rates" if priced else "no price"
    if all(row.must_equal for row in rows):
        return "equal" if all(row.equal for row in rows) else "DIFFERS"
    return "rate varies with position"


def _layers(shape: ModelShape, scope: Scope) -> list[dict[str, Any]]:
    sums = group(scope.lines, lambda line: (line.layer, line.component))
    rows = []
    for layer in range(shape.num_hidden_layers):
        parts = {name: sums[layer, name] for name in COMPONENTS if (layer, name) in sums}
        sops = sum(line.count for line in scope.lines if line.layer == layer and line.event in ("ac", "mac"))
        energy = sum(parts.values())
        rows.append(
            {
                "layer": layer,
                "sops": sops,
                "energy_pj": energy,
                "energy_per_token_pj": _per(energy, scope.tokens),
                "components_pj": parts,
            }
        )
    return rows


def _checks(scope: Scope) -> list[dict[str, Any]]:
    """Counted beside estimated, summed over the layers."""
    parts: dict[str, list[Check]] = {}
    for row in scope.comparisons:
        parts.setdefault(row.component, []).append(row)
    return [
        {
            "component": name,
            "measured_sops": sum(row.measured for row in part),
            "analytical_sops": sum(row.analytical for row in part),
            "dense_macs": sum(row.dense_macs for row in part),
            "must_equal": all(row.must_equal for row in part),
            "equal": all(row.equal for row in part),
        }
        for name, part in parts.items()
    ]


def _assert_equal(scopes: Sequence[Scope], name: str) -> None:
    for scope in scopes:
        for row in scope.comparisons:
            if row.must_equal and not row.equal:
                raise CheckFailed(
                    f"{name}: {scope.name}, {row.component}, layer {row.layer}: {row.measured} counted operations are "
                    f"not f_r T_s FLOPs = {row.analytical}; the run's counts and shape do not belong together"
                )


def _alternatives(run: Run, options: Options) -> list[dict[str, Any]]:
    """The same run under other ways of counting, so that nobody has to guess which one a figure used."""
    activity, costs = run.activity(), options.costs
    base = total(measured_lines(activity, costs, options.hops, operation(run.shape)))
    ac, mac = costs.price(operation(run.shape)), costs.price("mac")
    square = int(activity.sops_unmasked.sum()) - int(activity.sops["coincidence"].sum())
    skipped = sum(int((sops - activity.additions[name]).sum()) for name, sops in activity.sops.items())
    head = activity.macs["head"] - activity.macs["head_active"]
    added = "only accumulations that change a sum: both spikes of a coincidence, set bits of a value"
    rows = [
        ("unmasked", "coincidences over the whole sequence, as a square product counts them", square * ac),
        ("additions", added, -skipped * ac),
    ]
    if run.shape.readout == "rate":  # a head that reads the residual stream has no silent rows
        rows.append(("active_head", "head rows of neurons that never fired are skipped", -head * mac))
    return [
        {"name": name, "meaning": meaning, "energy_pj": base + change, "change_pj": change}
        for name, meaning, change in rows
    ]


def _twin(work: Work) -> dict[str, Any]:
    """The fair ratio beside the one against the float teacher: with memory, against a quantised twin of as many levels.

    Everything else about it is in `energy.twin`; the prices are its own, whatever table the report is under.
    """
    placement = PLACEMENTS["cores"]
    students = {name: billed(student_tally(work, name), placement) for name in CONVENTIONS}
    twins = {"dense": {name: billed(twin_tally(work), placement) for name in CONVENTIONS}}
    twins["zeros_skipped"] = {name: billed(twin_tally(work, name), placement) for name in CONVENTIONS}
    return {
        "placement": placement.name,
        "weight_bits": 8,
        "activation_bits": twin_bits(work.shape.num_steps),
        "basis": "computed from shapes, not trained",
        "over_student": {
            kind: {name: _per(energy, students[name]) for name, energy in energies.items()}
            for kind, energies in twins.items()
        },
    }


def _own_bills(work: Work) -> dict[str, Any]:
    """Of a run of a quantised twin itself: its energy per token with memory, dense and with its own zeros skipped."""
    placement = PLACEMENTS["cores"]
    tallies = {"dense": twin_tally(work)} | {name: twin_tally(work, name) for name in CONVENTIONS}
    return {
        "placement": placement.name,
        "weight_bits": 8,
        "activation_bits": twin_bits(work.shape.num_steps),
        "basis": "counted",
        "energy_per_token_pj": {name: _per(billed(tally, placement), work.tokens) for name, tally in tallies.items()},
    }


def _memory(scopes: Sequence[Scope], options: Options) -> dict[str, Any]:
    whole = scopes[-1]
    dense = opt_bytes(options.teacher, whole.tokens, whole.keys)
    student = sum(whole.bytes.values()) if whole.bytes is not None else None
    levels = [
        {
            "level": level.name,
            "title": level.title,
            "pj_per_byte": level.pj_per_byte,
            "energy_pj": None if student is None else student * level.pj_per_byte,
            "energy_per_token_pj": None if student is None else _per(student * level.pj_per_byte, whole.tokens),
            "teacher_energy_pj": sum(dense.values()) * level.pj_per_byte,
            "chosen": level.name == options.memory.name,
        }
        for level in MEMORY.values()
    ]
    return {
        "level": options.memory.name,
        "citation": MEMORY_CITATION,
        "included_in_energy": False,
        "bytes": whole.bytes,
        "total_bytes": student,
        "teacher_bytes": dense,
        "teacher_total_bytes": sum(dense.values()),
        "levels": levels,
        "meaning": "weight rows of active inputs once per token, and the key/value spike cache; "
        "teacher: every float16 weight once per token, and its cache",
    }


def _sensitivity(
    shape: ModelShape, rates: Rates, site_rates: Rates | None, scope: Scope, options: Options
) -> dict[str, Any]:
    """Energy per token when one thing changes and the firing rates stay as they are."""

    def row(changed: ModelShape, tokens: int, keys: int, factor: float = 1.0) -> dict[str, Any]:
        scaled = {name: [rate * factor for rate in rates[name]] for name in rates}
        sites = None if site_rates is None else {name: [r * factor for r in site_rates[name]] for name in site_rates}
        student = total(estimated_lines(changed, scaled, tokens, keys, options.costs, options.hops, sites))
        dense = _teacher_pj(options, tokens, keys)
        return {
            "energy_per_token_pj": _per(student, tokens),
            "teacher_energy_per_token_pj": _per(dense, tokens),
            "teacher_over_student": _per(dense, student),
        }

    highest = max(
        (rate for table in (rates, site_rates or {}) for layer in table.values() for rate in layer), default=0.0
    )
    by_rate = [
        {"factor": factor, "rate": scope.rate * factor} | row(shape, scope.tokens, scope.keys, factor)
        for factor in RATE_FACTORS
        if highest * factor <= 1
    ]
    by_steps = [
        {"num_steps": steps} | row(replace(shape, num_steps=steps), scope.tokens, scope.keys)
        for steps in ([] if shape.graded else sorted({*STEP_CHOICES, shape.num_steps}))
    ]
    by_context = [
        {"context": context} | row(shape, context, keys_of_sequence(context))
        for context in sorted({*CONTEXT_CHOICES, shape.max_position_embeddings})
        if context <= shape.max_position_embeddings
    ]
    return {"rate": by_rate, "num_steps": by_steps, "context": by_context}


def _not_costed(shape: ModelShape, scope: Scope, options: Options) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    hops = options.hops
    for event in options.costs.missing:
        # How many hops there are is known only when their mean was given.
        unknown = event.startswith("hop") and not hops.east_west and not hops.north_south
        number = None if unknown else count(scope.lines, event)
        rows.append({"what": f"{EVENTS[event]}: no price in this table", "count": number})
    priced = [event for event in ("hop_ew", "hop_ns") if event in options.costs.prices_pj]
    if priced and not hops.east_west and not hops.north_south:
        rows.append({"what": "hops between tiles: set --hops to cost them, placement is not known here", "count": None})
    if shape.residual_write == "current":
        writes = 2 * shape.hidden_size * shape.num_hidden_layers * shape.steps * scope.tokens
        rows.append({"what": "shift of a sublayer's sum and its addition to the residual stream", "count": writes})
    if shape.distances:
        pairs = shape.num_attention_heads * shape.num_hidden_layers * shape.steps * scope.keys
        rows.append({"what": "addition of the distance bias to a pair's current", "count": pairs})
    memory = f"memory traffic: reported on its own line ({options.memory.name}), not part of the energy above"
    return [*rows, {"what": memory, "count": None}, *({"what": what, "count": None} for what in NOT_COSTED)]


def _break_even_meaning(rate: float | None) -> str:
    if rate is None:
        return "no break-even: even a silent student costs more than the teacher under this table"
    if rate > 1:
        return "above 1: the student is cheaper than the teacher even if every neuron fires in every step"
    return "mean firing rate at which the student costs as much as its teacher"


def _teacher_pj(options: Options, tokens: int, keys: int) -> float:
    return options.costs.price("mac") * sum(opt_macs(options.teacher, tokens, keys).values())


def _per(amount: float, number: float) -> float | None:
    return amount / number if number else None
