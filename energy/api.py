"""What `import energy` offers: the report of a run, an estimate from firing rates, several runs side by side."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from energy.assembly import Options, report_rates, report_run
from energy.chip import measured_hops
from energy.comparison import compare_rows
from energy.costs import CostTable, Placement, load_costs, load_memory, load_placement
from energy.flops import dense_shape, keys_of_sequence, load_shape, load_teacher_shape, published_name
from energy.memory import Work, counted_work, estimated_work
from energy.models import Hops
from energy.rates import load_rates
from energy.render.document import Document
from energy.render.tables import compare_table, headline, report_csv, report_tables
from energy.twin import FairComparison, Subject, break_even_document, fair_document
from spikeopd.contracts import ModelShape, Run, load_run, parse_run
from spikeopd.errors import InputError


class HasRun(Protocol):
    """Anything that can say what it counted, such as the result of a generation."""

    def to_run(self) -> Mapping[str, Any]:
        """run.json as plain data."""
        ...


Source = str | os.PathLike[str] | Mapping[str, Any] | Run | HasRun


@dataclass(frozen=True, repr=False)
class Report(Document):
    """One energy report. Energies are in pJ, over every token that was fed.

    data    everything, as plain data (schema spikeopd.energy/1; docs/energy.md)
    run     the run it is of; None for an estimate
    """

    data: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None

    def _whole(self, key: str) -> Any:
        return self.data["summary"][-1][key]

    @property
    def tokens(self) -> int:
        return int(self._whole("tokens"))

    @property
    def total_pj(self) -> float:
        return float(self._whole("energy_pj"))

    @property
    def per_token_pj(self) -> float:
        """NaN if nothing was fed."""
        return self.total_pj / self.tokens if self.tokens else math.nan

    @property
    def teacher_pj(self) -> float:
        """The dense teacher over the same tokens."""
        return float(self._whole("teacher_energy_pj"))

    @property
    def teacher_over_student(self) -> float:
        """NaN if the student cost nothing."""
        return self.teacher_pj / self.total_pj if self.total_pj else math.nan

    @property
    def firing_rate(self) -> float:
        """Spikes per neuron and step, over every group of fixed size."""
        return float(self._whole("rate"))

    @property
    def components_pj(self) -> dict[str, float]:
        """Energy by component."""
        return {row["component"]: row["energy_pj"] for row in self.data["components"] if row["scope"] == "all"}

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def _html(self) -> str:
        from energy.render.page import report_page
        from energy.render.raster import raster_html

        raster = ""
        if self.run is not None and self.run.trace is not None:
            try:
                raster = raster_html(self.run.trace, self.run.shape, self.run.trace_sha256)
            except (InputError, OSError) as error:  # the numbers need no trace
                warnings.warn(f"no spike raster: {error}", stacklevel=4)
        return report_page(self, raster)

    def _csv(self) -> str:
        return report_csv(self.data)


@dataclass(frozen=True, repr=False)
class Comparison(Document):
    """Several models side by side. `rows` holds one dictionary for each, energies in pJ."""

    rows: Sequence[dict[str, Any]] = ()


def report(
    source: Source,
    *,
    costs: str | CostTable = "horowitz45",
    memory: str = "sram-1mb",
    teacher: str | ModelShape = "matched",
    hops: tuple[float, float] | Hops | None = None,
    name: str | None = None,
) -> Report:
    """Energy of one run: counted events times published prices, beside the estimate from rates and the dense teacher.

    source   a run.json, its data, a checked `Run`, or an object with `to_run()`
    costs    a table of `energy.costs.COSTS` by name, a JSON file like them, or a `CostTable`
    memory   the level of `energy.costs.MEMORY` at which the traffic line is priced
    teacher  opt-125m, opt-350m, opt-1.3b, the config.json of an OPT, Llama, Mistral, Qwen, GPT-2 or GPT-NeoX, a shape,
             or "matched": OPT of the student's sizes
    hops     mean tile hops of a spike, east-west and north-south; None: as a simulated chip measured them, else none
    name     what the report calls the run
    """
    run = as_run(source, name)
    options = make_options(run.shape, costs, memory, teacher, _hops(run, hops))
    return _report(report_run(run, options), _inputs(run, costs, teacher), run)


def estimate(
    config: str | os.PathLike[str] | ModelShape,
    rates: float | str | Mapping[str, Any],
    context: int,
    *,
    prompt: int | None = None,
    num_steps: int | None = None,
    costs: str | CostTable = "horowitz45",
    memory: str = "sram-1mb",
    teacher: str | ModelShape = "matched",
    hops: tuple[float, float] | Hops = (0.0, 0.0),
    name: str | None = None,
) -> Report:
    """Energy from firing rates alone (Appendix E): one sequence of `context` fed tokens, nothing counted.

    config     opt-125m, a checkpoint or bundle folder, its JSON, or a shape; it says which form the block has
    rates      one number, one per component (or per component and layer), a JSON file of them, or a report's data
    prompt     how many of the tokens are prompt; all of them unless said
    num_steps  T_s, where the config has none
    """
    shape = _student_shape(config, num_steps, context)
    prompt = context if prompt is None else prompt
    if not 0 <= prompt <= context:
        raise InputError(f"the prompt must lie between 0 and the context of {context} tokens: {prompt}")
    if name is None:
        name = "a shape" if isinstance(config, ModelShape) else Path(config).name
        name += " at given rates"
    options = make_options(shape, costs, memory, teacher, hops)
    data = report_rates(shape, load_rates(rates, shape), prompt, context - prompt, options, name)
    return _report(data, _files(config, rates, costs, teacher), None)


def compare(
    sources: Sequence[Source] | Mapping[str, Source],
    *,
    teacher: str | ModelShape | None = None,
    spikegpt: bool = False,
    costs: str | CostTable = "horowitz45",
    memory: str = "sram-1mb",
    hops: tuple[float, float] | Hops | None = None,
) -> Comparison:
    """Several runs side by side, per token: a list of sources as in `report`, or names and sources.

    teacher   adds a row for this teacher over the first run's tokens
    spikegpt  adds rows for the shapes of SpikeGPT 46M and 216M at the first run's rate
    """
    named = sources.items() if isinstance(sources, Mapping) else [(None, source) for source in sources]
    runs = [as_run(source, name) for name, source in named]
    if not runs:
        raise InputError("nothing to compare: give at least one run")
    all_options = [make_options(run.shape, costs, memory, "matched", _hops(run, hops)) for run in runs]
    reports = [report_run(run, options) for run, options in zip(runs, all_options, strict=True)]
    table = all_options[0].costs
    dense = None if teacher is None else find_teacher(teacher, runs[0].shape)
    rows = compare_rows(reports, table, dense, runs[0].keys(), spikegpt)
    head = ("Energy compared", f"costs: {table.name}, {table.node_nm:g} nm; {table.citation}")
    inputs = tuple(path for run in runs for path in _inputs(run, costs, teacher or ""))
    return Comparison(head, (compare_table(rows),), "", inputs, rows)


def compare_twins(
    sources: Sequence[Source] | Mapping[str, Source] = (),
    *,
    configs: Sequence[str | os.PathLike[str] | ModelShape] = (),
    rates: float | str | Mapping[str, Any] | None = None,
    context: int | None = None,
    num_steps: int | None = None,
    teacher: str | ModelShape | None = None,
    spikegpt: bool = False,
    placement: str | Placement = "cores",
    costs: str | CostTable = "horowitz45",
    memory: str = "sram-1mb",
    hops: tuple[float, float] | Hops | None = None,
) -> FairComparison:
    """Students beside their quantised twins and their teachers in int8 and fp32, memory inside the bill.

    sources    runs, as in `compare`, whose table stands first; a run of a trained twin stands beside the students of
               its shape
    configs    instead of runs, or beside them: shapes at `rates` over `context` tokens, as in `estimate`
    placement  where weights, cache and neurons lie: a name of `energy.costs.PLACEMENTS`
    """
    subjects, first, inputs = [], [], _files(*configs, rates, teacher)
    if sources:
        named = sources.items() if isinstance(sources, Mapping) else [(None, source) for source in sources]
        runs = [as_run(source, name) for name, source in named]
        told = compare(runs, teacher=teacher, spikegpt=spikegpt, costs=costs, memory=memory, hops=hops)
        first, inputs = list(told.tables), inputs + told.inputs
        twins = [run for run in runs if run.shape.graded]
        subjects = [
            replace(_counted(run, teacher or "matched"), trained=_trained(run, twins))
            for run in runs
            if not run.shape.graded
        ]
        _check_paired(twins, runs)
    for config in configs:
        if rates is None or context is None:
            raise InputError("a config needs rates and a context")
        subjects.append(_estimated(config, rates, context, num_steps, teacher or "matched"))
    if not subjects:
        raise InputError("nothing to compare: give at least one run or one config")
    return fair_document(subjects, load_placement(placement), spikegpt=spikegpt, first=first, inputs=inputs)


def break_even(
    source: Source | None = None,
    *,
    config: str | os.PathLike[str] | ModelShape | None = None,
    rates: float | str | Mapping[str, Any] | None = None,
    context: int | None = None,
    num_steps: int | None = None,
    teacher: str | ModelShape = "matched",
    placement: str | Placement = "cores",
) -> FairComparison:
    """The firing rates below which a student costs less than its twin and teachers, and where it stands.

    Of a run (`source` as in `report`), or of a shape at given rates (as in `estimate`).
    """
    place = load_placement(placement)
    if source is not None:
        run = as_run(source)
        if run.shape.graded:
            raise InputError(f"{run.name}: a quantised twin fires no spikes; give a run of its student")
        return break_even_document(_counted(run, teacher), place, _inputs(run, teacher))
    if config is None or rates is None or context is None:
        raise InputError("give a run, or a config with its rates and a context")
    subject = _estimated(config, rates, context, num_steps, teacher)
    return break_even_document(subject, place, _files(config, rates, teacher))


def _trained(student: Run, twins: Sequence[Run]) -> tuple[tuple[str, Work], ...]:
    """The runs of trained twins that have a student's shape."""
    return tuple((twin.name, counted_work(twin)) for twin in twins if _student_of(twin.shape) == student.shape)


def _student_of(twin: ModelShape) -> ModelShape:
    return replace(twin, neuron="lif")


def _check_paired(twins: Sequence[Run], runs: Sequence[Run]) -> None:
    shapes = [run.shape for run in runs]
    for twin in twins:
        if _student_of(twin.shape) not in shapes:
            raise InputError(
                f"{twin.name}: a quantised twin, but no run here is of a student of its shape; give that run too"
            )


def _counted(run: Run, teacher: str | ModelShape) -> Subject:
    return Subject(run.name, counted_work(run), "counted", *find_teacher(teacher, run.shape))


def _estimated(
    config: str | os.PathLike[str] | ModelShape,
    rates: float | str | Mapping[str, Any],
    context: int,
    num_steps: int | None,
    teacher: str | ModelShape,
) -> Subject:
    shape = _student_shape(config, num_steps, context)
    name = "a shape" if isinstance(config, ModelShape) else Path(config).name
    work = estimated_work(shape, load_rates(rates, shape), context, keys_of_sequence(context))
    return Subject(name, work, "rates", *find_teacher(teacher, shape))


def _student_shape(config: str | os.PathLike[str] | ModelShape, num_steps: int | None, context: int) -> ModelShape:
    shape = config if isinstance(config, ModelShape) else load_shape(os.fspath(config), num_steps)
    if not 1 <= context <= shape.max_position_embeddings:
        raise InputError(f"the context must lie between 1 and the model's {shape.max_position_embeddings}: {context}")
    return shape


def as_run(source: Source, name: str | None = None) -> Run:
    """A checked run from whatever stands for one."""
    if isinstance(source, Run):
        return source if name is None else replace(source, name=name)
    if isinstance(source, (str, os.PathLike)):
        return load_run(Path(source), name)
    raw = source if isinstance(source, Mapping) else getattr(source, "to_run", lambda: None)()
    if not isinstance(raw, Mapping):
        raise InputError(f"no run in a {type(source).__name__}: give a run.json, its data, or something with to_run()")
    bundle = raw.get("bundle")
    known = bundle.get("name") if isinstance(bundle, Mapping) else None
    return parse_run(dict(raw), "run data", name or str(known or "run"))


def _hops(run: Run, given: tuple[float, float] | Hops | None) -> tuple[float, float] | Hops:
    """What was given, what a simulated chip measured, or none."""
    return given if given is not None else measured_hops(run) or (0.0, 0.0)


def make_options(
    student: ModelShape,
    costs: str | CostTable,
    memory: str,
    teacher: str | ModelShape,
    hops: tuple[float, float] | Hops,
) -> Options:
    """Names resolved to tables, levels and shapes."""
    name, dense = find_teacher(teacher, student)
    distance = hops if isinstance(hops, Hops) else Hops(*hops)
    return Options(load_costs(costs), load_memory(memory), dense, name, distance)


def find_teacher(teacher: str | ModelShape, student: ModelShape) -> tuple[str, ModelShape]:
    """Name and dense shape of a teacher."""
    if teacher == "matched" or isinstance(teacher, ModelShape):
        shape = dense_shape(student if isinstance(teacher, str) else teacher)
        return published_name(shape) or f"OPT of {'the same' if isinstance(teacher, str) else 'the given'} shape", shape
    return Path(teacher).name, load_teacher_shape(teacher)


def _report(data: dict[str, Any], inputs: tuple[Path, ...], run: Run | None) -> Report:
    return Report(tuple(headline(data)), tuple(report_tables(data)), "", inputs, data, run)


def _inputs(run: Run, *others: object) -> tuple[Path, ...]:
    return tuple(path for path in (run.path, run.trace) if path is not None) + _files(*others)


def _files(*sources: object) -> tuple[Path, ...]:
    """Those of the sources that are files, or folders with a config."""
    paths = [Path(source) for source in sources if isinstance(source, (str, os.PathLike)) and str(source)]
    return tuple(path for path in paths if path.is_file())
