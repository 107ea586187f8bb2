"""The fair comparison: a student beside its quantised twin, its teacher in int8 and fp32, and SpikeGPT, memory inside.

The twin is computed from the student's shape (`energy.memory`): an activation is taken to be zero where the student's
neuron never fired. A run of a trained twin, if one is given, stands beside it with its own zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from energy.costs import MEMORY, OPERATIONS, OPERATIONS_VERIFIED, PLACEMENTS, Placement
from energy.flops import SPIKEGPT
from energy.memory import (
    CONVENTIONS,
    EVENTS,
    NOT_COSTED,
    PARTS,
    Tally,
    Work,
    bill,
    cheaper_bands,
    spikegpt_tally,
    student_tally,
    teacher_tally,
    total,
    twin_bits,
    twin_tally,
    uniform_curve,
)
from energy.render.document import Document
from energy.render.table import Column, Table, significant, unit_of
from spikeopd.contracts import ModelShape

CURVE_POINTS = tuple(index / 50 for index in range(26))  # rates 0 to 0.5, for the drawing
COMPUTED = "computed from shapes: it was not trained, and it has no perplexity to set beside the student's"
TRAINED = "trained: counted in a run of its own, with its own zeros"
PUBLISHED = (
    "published for other models: a rate below 5.7 % at T = 5 (arXiv:2409.08290v4, abstract), 6.4 % for T from 5 to 10 "
    "(v2 and v3)"
)


@dataclass(frozen=True)
class Subject:
    """A student to be compared. basis: `counted`, or `rates`; teacher: the dense model of its comparison.

    trained: names and counted work of twins of its shape that were trained.
    """

    name: str
    work: Work
    basis: str
    teacher_name: str
    teacher: ModelShape
    trained: tuple[tuple[str, Work], ...] = ()


@dataclass(frozen=True)
class Model:
    """One row of a comparison. `tally_of` makes its tally from a student's work, so that rates can be varied.

    fixed: counted in a run of its own, whatever the student does.
    """

    key: str
    title: str
    convention: str | None
    tally_of: Callable[[Work], Tally]
    fixed: bool = False


def models(subject: Subject, spikegpt: bool = False) -> list[Model]:
    """Student, twins and teachers; with `spikegpt` its two shapes at the student's rate."""
    bits, steps = twin_bits(subject.work.shape.num_steps), subject.work.shape.num_steps
    rows = [Model("student", f"student, T_s {steps}", c, partial(student_tally, convention=c)) for c in CONVENTIONS]
    rows.append(Model("twin", f"quantised twin, int8 × {bits} bit, dense", None, twin_tally))
    rows += [
        Model("twin_graded", f"quantised twin, int8 × {bits} bit, zeros skipped", c, partial(twin_tally, convention=c))
        for c in CONVENTIONS
    ]
    for name, own in subject.trained:
        for convention in (None, *CONVENTIONS):
            tally = twin_tally(own, convention)
            how = "dense" if convention is None else "zeros skipped"
            title = f"trained twin ({name}), int8 × {bits} bit, {how}"
            rows.append(Model("trained_twin", title, convention, partial(_same, tally), fixed=True))
    for precision in ("int8", "fp32"):
        title = f"teacher ({subject.teacher_name}), {precision}"

        def dense(work: Work, precision: str = precision, title: str = title) -> Tally:
            return teacher_tally(title, subject.teacher, work.tokens, work.keys, precision)

        rows.append(Model(f"teacher_{precision}", title, None, dense))
    if spikegpt:
        for shape in SPIKEGPT.values():
            for convention in CONVENTIONS:

                def other(work: Work, shape: Any = shape, convention: str = convention) -> Tally:
                    return spikegpt_tally(shape, work.tokens, work.rate, convention)

                rows.append(Model(shape.name, f"{shape.name} at this rate", convention, other))
    return rows


def _same(tally: Tally, work: Work) -> Tally:
    return tally


def fair_rows(subject: Subject, placement: Placement, spikegpt: bool = False) -> list[dict[str, Any]]:
    """Operations, memory, addressing and total of every model, per token, and over the student of each convention."""
    chosen = models(subject, spikegpt)
    tallies = [model.tally_of(subject.work) for model in chosen]
    base = {
        model.convention: _per(total(tally, placement), tally.tokens)
        for model, tally in zip(chosen, tallies, strict=True)
        if model.key == "student"
    }
    rows = []
    for model, tally in zip(chosen, tallies, strict=True):
        tokens = tally.tokens  # a trained twin has run over its own
        energy = _per(total(tally, placement), tokens)
        row = {
            "subject": subject.name,
            "key": model.key,
            "model": model.title,
            "convention": model.convention or "any",
            "energy_per_token_pj": energy,
            "head_per_token_pj": _per(total(tally, placement, place="head"), tokens),
        }
        row |= {f"{part}_per_token_pj": _per(total(tally, placement, part=part), tokens) for part in PARTS}
        row |= {
            f"over_student_{name}": _per(energy or 0.0, base[name] or 0.0) if model.convention in (None, name) else None
            for name in CONVENTIONS
        }
        rows.append(row)
    return rows


def entry_rows(subject: Subject, placement: Placement) -> list[dict[str, Any]]:
    """Every event of every bill."""
    return [
        {
            "subject": subject.name,
            "model": model.title,
            "convention": model.convention or "any",
            "place": entry.place,
            "part": entry.part,
            "event": entry.event,
            "what": EVENTS[entry.event][2],
            "count_per_token": _per(entry.count, tally.tokens),
            "bits": entry.bits,
            "price_pj": entry.price_pj,
            "energy_per_token_pj": _per(entry.energy_pj, tally.tokens),
        }
        for model in models(subject)
        for tally in [model.tally_of(subject.work)]
        for entry in bill(tally, placement)
    ]


def break_even_rows(subject: Subject) -> list[dict[str, Any]]:
    """Where the student is cheaper than each rival: under every placement and convention, for a uniform rate."""
    work, rows = subject.work, []
    chosen = models(subject)
    for placement in PLACEMENTS.values():
        for student in (model for model in chosen if model.key == "student"):
            here = _per(total(student.tally_of(work), placement), work.tokens) or 0.0
            for rival in chosen:
                if rival.key == "student" or rival.convention not in (None, student.convention):
                    continue
                curve = uniform_curve(work.shape, work.tokens, work.keys, placement, student.tally_of)
                counted = rival.tally_of(work)
                each = _per(total(counted, placement), counted.tokens)
                other: Callable[[float], float]
                if rival.fixed:
                    other = partial(_constant, (each or 0.0) * work.tokens)
                else:
                    other = uniform_curve(work.shape, work.tokens, work.keys, placement, rival.tally_of)
                bands = cheaper_bands(curve, other) if work.tokens else []
                ratio = _per(each or 0.0, here)
                rows.append(
                    {
                        "subject": subject.name,
                        "placement": placement.name,
                        "convention": student.convention,
                        "rival": rival.title,
                        "rival_key": rival.key,
                        "cheaper_from": bands[0][0] if bands else None,
                        "cheaper_to": bands[-1][1] if bands else None,
                        "bands": [list(band) for band in bands],
                        "rate": work.rate,
                        "rival_over_student": ratio,
                        "verdict": "–" if ratio is None else "student cheaper" if ratio >= 1 else "student dearer",
                    }
                )
    return rows


def _constant(value: float, rate: float) -> float:
    return value


def curve_rows(subject: Subject, placement: Placement) -> list[dict[str, Any]]:
    """Energy per token against a uniform rate, for the drawing."""
    work = subject.work
    rows: list[dict[str, Any]] = []
    if not work.tokens:
        return rows
    for model in models(subject):
        if model.key == "teacher_fp32" or model.fixed:
            continue
        curve = uniform_curve(work.shape, work.tokens, work.keys, placement, model.tally_of)
        rows += [
            {
                "subject": subject.name,
                "key": model.key,
                "model": model.title,
                "convention": model.convention or "any",
                "rate": rate,
                "energy_per_token_pj": curve(rate) / work.tokens,
            }
            for rate in CURVE_POINTS
        ]
    return rows


@dataclass(frozen=True, repr=False)
class FairComparison(Document):
    """Students beside their twins. The tables hold everything; `subjects` what they were made of."""

    subjects: Sequence[Subject] = field(default=())
    placement: Placement = PLACEMENTS["cores"]

    def to_dict(self) -> dict[str, Any]:
        curves = [row for subject in self.subjects for row in curve_rows(subject, self.placement)]
        return {"schema": "spikeopd.energy-twin/1", "placement": self.placement.name, "head": list(self.head)} | {
            **super().to_dict(),
            "curves": curves,
        }

    def _html(self) -> str:
        from energy.render.page import fair_page

        return fair_page(self)


def fair_document(
    subjects: Sequence[Subject],
    placement: Placement,
    *,
    spikegpt: bool = False,
    first: Sequence[Table] = (),
    inputs: Sequence[Any] = (),
) -> FairComparison:
    """The comparison of some students. `first`: tables that stand before, such as the paper's columns."""
    rows = [row for s in subjects for row in fair_rows(s, placement, spikegpt and s is subjects[0])]
    tables = [
        *first,
        fair_table(rows, placement),
        break_even_table([row for subject in subjects for row in break_even_rows(subject)]),
        _entries([row for subject in subjects for row in entry_rows(subject, placement)], placement),
        *boundary_tables(),
    ]
    head = (
        "Student, quantised twin and teacher, with memory",
        *(fact for s in subjects for fact in facts(s, placement)),
    )
    ground = _ground(placement, any(subject.trained for subject in subjects))
    return FairComparison((*head, *ground), tuple(tables), "", tuple(inputs), tuple(subjects), placement)


def break_even_document(subject: Subject, placement: Placement, inputs: Sequence[Any] = ()) -> FairComparison:
    """The break-even rates of one student."""
    tables = (
        break_even_table(break_even_rows(subject)),
        fair_table(fair_rows(subject, placement), placement),
        *boundary_tables(),
    )
    head = (f"Break-even rate of {subject.name}", *facts(subject, placement), PUBLISHED, *_ground(placement))
    return FairComparison(head, tables, "", tuple(inputs), (subject,), placement)


def facts(subject: Subject, placement: Placement) -> list[str]:
    """The student's place in a sentence for each convention."""
    lines = []
    for row in break_even_rows(subject):
        if row["placement"] == placement.name and row["rival_key"] == "twin" and row["rival_over_student"]:
            band = "at no rate" if row["cheaper_to"] is None else f"up to a rate of {significant(row['cheaper_to'], 3)}"
            ratio = significant(row["rival_over_student"], 3)
            lines.append(
                f"{subject.name}, per {row['convention']}: cheaper than its dense twin {band}; at its rate of "
                f"{significant(row['rate'], 3)} ({subject.basis}) the twin costs {ratio} × the student"
            )
    return lines


def _ground(placement: Placement, trained: bool = False) -> tuple[str, ...]:
    return (
        f"quantised twin: {COMPUTED}",
        *((f"trained twin: {TRAINED}",) if trained else ()),
        f"placement: {placement.name}, {placement.title}",
        *(f"per {name}: {meaning}" for name, meaning in CONVENTIONS.items()),
        "arithmetic on counts and published prices, 45 nm; no power was measured",
    )


def fair_table(rows: Sequence[dict[str, Any]], placement: Placement) -> Table:
    columns = (
        Column("subject", "Student"),
        Column("model", "Model"),
        Column("convention", "Fetched per"),
        Column("operations_per_token_pj", "Operations", "energy"),
        Column("memory_per_token_pj", "Memory", "energy"),
        Column("addressing_per_token_pj", "Addressing", "energy"),
        Column("energy_per_token_pj", "Total per token", "energy"),
        Column("head_per_token_pj", "of it head", "energy"),
        Column("over_student_spike", "Over student, per spike", "ratio"),
        Column("over_student_token", "Over student, per token", "ratio"),
    )
    smallest = min((row["energy_per_token_pj"] for row in rows if row["energy_per_token_pj"]), default=None)
    note = (
        f"Placement {placement.name}: {placement.title}. Over student: above 1 the student is cheaper. Zeros skipped: "
        "an activation of the computed twin is zero where the student's neuron never fired in a token. Embedding and "
        "head are the same dense work in student and twin. SpikeGPT: matrices alone."
    )
    title = "Operations, memory and total"
    return Table("fair", title, columns, rows, note, energy_unit=unit_of("energy", smallest))


def break_even_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("subject", "Student"),
        Column("placement", "Placement"),
        Column("convention", "Fetched per"),
        Column("rival", "Rival"),
        Column("cheaper_from", "Cheaper from", "rate"),
        Column("cheaper_to", "Cheaper to", "rate"),
        Column("rate", "Rate here", "rate"),
        Column("rival_over_student", "Rival/student here", "ratio"),
        Column("verdict", "Here"),
    )
    note = (
        "Cheaper from, to: uniform rates between which the student costs no more than the rival; – if there are none. "
        "A silent student still pays for its T_s updates, so a rival that skips its zeros too can win at low rates. "
        "Rival/student here: at the rates of this report, layer by layer."
    )
    return Table("break_even", "Break-even rates", columns, rows, note)


def _entries(rows: Sequence[dict[str, Any]], placement: Placement) -> Table:
    columns = (
        Column("subject", "Student"),
        Column("model", "Model"),
        Column("convention", "Fetched per"),
        Column("place", "Place"),
        Column("part", "Part"),
        Column("what", "Event"),
        Column("count_per_token", "Per token", "count"),
        Column("bits", "Width", "int", "bit"),
        Column("price_pj", "Price", "number", "pJ"),
        Column("energy_per_token_pj", "Energy per token", "energy"),
    )
    return Table("entries", f"Every event, placement {placement.name}", columns, rows)


def boundary_tables() -> list[Table]:
    """Prices with source, node and boundary; then what has none."""
    prices = [
        {"name": p.name, "what": p.what, "pj": p.pj, "unit": "operation", "node": p.node_nm, "boundary": p.boundary,
         "citation": p.citation}
        for p in OPERATIONS.values()
    ] + [
        {"name": m.name, "what": m.title, "pj": m.pj_per_byte, "unit": "byte", "node": m.node_nm,
         "boundary": m.boundary, "citation": m.citation}
        for m in MEMORY.values()
    ]  # fmt: skip
    columns = (
        Column("name", "Price"),
        Column("what", "What"),
        Column("pj", "pJ", "number", "pJ"),
        Column("unit", "Per"),
        Column("node", "Node", "number", "nm"),
        Column("boundary", "Boundary"),
        Column("citation", "Source"),
    )
    left_out = [{"what": what} for what in NOT_COSTED]
    return [
        Table("model_prices", "Prices of this model", columns, prices, OPERATIONS_VERIFIED),
        Table("not_costed", "Not costed", (Column("what", "In none of the bills above"),), left_out),
    ]


def _per(amount: float, number: float) -> float | None:
    return amount / number if number else None
