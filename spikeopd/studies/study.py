"""Carry out a study: Stage 1 if no student is given, the missing single runs, then table, figure and raw JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikeopd.config import Config, config_to_dict
from spikeopd.errors import ConfigError, InputError
from spikeopd.files import write_json, write_text
from spikeopd.runlog import environment
from spikeopd.students import find_bundle, no_bars, place
from spikeopd.studies.definitions import Row, Study, base_of
from spikeopd.studies.runs import (
    Note,
    Run,
    Spending,
    Zeroshot,
    benchmark_hashes,
    execute,
    read_result,
    stage1_run,
    stage2_run,
)
from spikeopd.studies.values import make_table, of_row


@dataclass(frozen=True)
class Request:
    """What a user asks for. teacher: of Stage 2 only; Stage 1 keeps the recipe's, so that studies share it.

    start: the student all rows start from, or where rows have different sizes one for each: size -> folder, the size as
    the rows' labels end with it.
    """

    study: Study
    config: Config
    output: Path
    seeds: tuple[int, ...]  # with `asked`: given by the user, so every row that depends on a seed runs with all of them
    jobs: int = 1
    start: str | Mapping[str, str] | None = None
    teacher: str | None = None
    overrides: tuple[str, ...] = ()  # as given; rows with a recipe of their own apply them to it
    benchmarks: str | None = None
    tasks: tuple[str, ...] = ()  # of the benchmarks; all eight if none is named
    limit: int | None = None
    asked: bool = False
    only: tuple[str, ...] = ()  # texts; rows whose label holds none of them are left out
    processes: int = 1  # that share the work of one training run

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"--jobs {self.jobs}: give at least 1")
        if self.processes < 1:
            raise ConfigError(f"--processes {self.processes}: give at least 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: give at least one question")
        if not self.benchmarks and (self.limit is not None or self.tasks):
            raise ConfigError(
                "--tasks and --limit choose among zero-shot questions: give their folder with --benchmarks DIR"
            )

    @property
    def pool(self) -> Path:
        return self.output / "runs"

    @property
    def folder(self) -> Path:
        return self.output / (
            self.study.name if self.teacher is None else f"{self.study.name}-{Path(self.teacher).name}"
        )


def rows_of(request: Request) -> list[Row]:
    """The rows of the study; with `only`, those whose label holds one of its texts."""
    rows = request.study.rows(request.config)
    chosen = [row for row in rows if not request.only or any(text in row.label for text in request.only)]
    if not chosen:
        labels = ", ".join(row.label for row in rows)
        raise ConfigError(
            f"--rows {' '.join(request.only)}: no row of {request.study.name} is called so; it has {labels}"
        )
    return chosen


def stage1_of(request: Request, row: Row) -> Run:
    return stage1_run(base_of(row, request.config, request.overrides), processes=request.processes)


def student_of(request: Request, row: Row) -> Path:
    """Where a row starts. Needs Stage 1 to be finished, or `start`."""
    if request.start is not None:
        given = given_student(request.start, row, request.study.name)
        found = given if row.start == "final" else given.parent / row.start
        if not (found / "model.safetensors").is_file():
            if found == given and find_bundle(given):
                raise InputError(
                    f"--start {given}: a bundle; make it a student first, spikeopd.load_student({str(given)!r})"
                    ".save_pretrained(DIR), and give DIR"
                )
            raise InputError(
                f"--start {given}: this study also needs the student {found}; keep it with "
                "stage1.checkpoint_updates, or leave --start out and let the study run Stage 1"
            )
        return found
    return stage1_of(request, row).folder(request.pool) / "stage1" / row.start


def given_student(start: str | Mapping[str, str], row: Row, study: str) -> Path:
    """The folder that `--start` names for a row."""
    sized = bool(row.base or row.recipe)
    if isinstance(start, str):
        if sized:
            raise InputError(
                f"--start {start}: the rows of {study} are students of different sizes; give --start SIZE=DIR for "
                "each, or leave it out and let the study run Stage 1 of each"
            )
        return Path(start)
    for size, folder in start.items():
        if row.label.endswith(f" {size}"):
            return Path(folder)
    if not sized and row.kind == "teacher":
        return Path(next(iter(start.values())))  # any will do: the teacher is what is measured
    raise InputError(
        f"--start: no student for the row {row.label!r}; give --start SIZE=DIR with the end of its label, or choose "
        "rows with --rows"
    )


def seeds_of(request: Request, row: Row) -> tuple[int, ...]:
    """The seeds of a row: one if it does not depend on it, or if the paper has one and nobody asked for more."""
    if row.kind == "paper":
        return ()
    once = row.one_seed or (row.papers_one_seed and not request.asked)
    return request.seeds[:1] if once else request.seeds


def runs_of(request: Request, row: Row) -> list[Run]:
    """One run for each seed of the row; none where the paper alone has values."""
    if row.kind == "stage1":
        if request.start is not None:
            raise InputError(f"--start {request.start}: {request.study.name} trains Stage 1 itself; leave --start out")
        base = base_of(row, request.config, request.overrides)
        if row.one_seed:
            return [stage1_run(base, processes=request.processes)]
        return [stage1_run(base, (f"train.seed={seed}",), request.processes) for seed in request.seeds]
    base = base_of(row, request.config, request.overrides)
    teacher = (f"teacher.teacher_model_name_or_path={request.teacher}",) if request.teacher else ()
    seeds = seeds_of(request, row)
    kind: Any = {"processes": request.processes}
    if row.kind in ("evaluate", "teacher"):
        kind, seeds = {"kind": row.kind}, (0,)  # an evaluation has no seed; one key for all studies
    return [
        stage2_run(base, student_of(request, row), (*row.overrides, *teacher, f"train.seed={seed}"), **kind)
        for seed in seeds
    ]


def needed_stage1(request: Request) -> list[tuple[str, Run]]:
    if request.start is not None:
        return []
    found: dict[str, tuple[str, Run]] = {}
    for row in rows_of(request):
        if row.kind not in ("stage1", "paper"):
            run = stage1_of(request, row)
            size = f" of {row.label}" if row.base or row.recipe else ""
            found.setdefault(run.key, (f"Stage 1{size}", run))
    return list(found.values())


def plan(request: Request) -> list[dict[str, Any]]:
    """What would be done: one entry per single run. Runs that wait for Stage 1 have no key yet."""
    entries = [_entry(request, label, run) for label, run in needed_stage1(request)]
    blocked = any(not entry["finished"] for entry in entries)
    for row in rows_of(request):
        if blocked and row.kind != "stage1":
            if count := len(seeds_of(request, row)):
                entries.append({"run": row.label, "runs": count, "finished": False, "waits_for": "Stage 1"})
        else:
            entries += [
                _entry(request, _label(request, row, index), run) for index, run in enumerate(runs_of(request, row))
            ]
    return entries


def _entry(request: Request, label: str, run: Run) -> dict[str, Any]:
    return {"run": label, "key": run.key[:20], "finished": read_result(run, request.pool) is not None}


def _label(request: Request, row: Row, index: int) -> str:
    seeds = seeds_of(request, row)
    return row.label if len(seeds) == 1 else f"{row.label}, seed {seeds[index]}"


def carry_out(request: Request, note: Note) -> dict[str, Any]:
    """The whole study; returns what is written to result.json."""
    if request.benchmarks:
        benchmark_hashes(request.benchmarks, request.tasks)  # missing data shows now, not after hours of training
    execute(needed_stage1(request), request.pool, request.jobs, note)
    rows = rows_of(request)
    runs = [runs_of(request, row) for row in rows]
    flat = [
        (_label(request, row, index), run)
        for row, group in zip(rows, runs, strict=True)
        for index, run in enumerate(group)
    ]
    found = iter(execute(flat, request.pool, request.jobs, note))
    results = [[next(found) for _ in group] for group in runs]
    if request.benchmarks:
        add_zeroshot(request, flat, results, note)
    if request.study.figure == "pareto":
        add_spending(request, flat, results, note)
    if request.study.figure == "diagnostics":
        diagnose(request, rows, runs, results, note)
    return write(request, rows, runs, results)


def add_zeroshot(
    request: Request, labelled: Sequence[tuple[str, Run]], results: list[list[dict[str, Any]]], note: Note
) -> None:
    """Accuracy of every row's students. In `stability` that of a collapsed run is of the last student before the onset
    (Tab. 1); everywhere else of the final one (Tab. 3)."""
    assert request.benchmarks is not None
    flat = [result for group in results for result in group]
    before = request.study.name == "stability"
    students = [(before and result.get("pre_onset_student")) or result["student"] for result in flat]
    scored = execute(
        [
            (f"{label}, zero-shot", Zeroshot(student, request.benchmarks, request.tasks, request.limit))
            for (label, _), student in zip(labelled, students, strict=True)
        ],
        request.pool,
        request.jobs,
        note,
    )
    for result, found in zip(flat, scored, strict=True):
        result["zeroshot"] = found


def add_spending(
    request: Request, labelled: Sequence[tuple[str, Run]], results: list[list[dict[str, Any]]], note: Note
) -> None:
    """Counted events, energies and time of every row's exported students."""
    flat = [result for group in results for result in group]
    asked = [
        (f"{label}, spending", Spending(result["student"], run.config))
        for (label, run), result in zip(labelled, flat, strict=True)
    ]
    for result, found in zip(flat, execute(asked, request.pool, request.jobs, note), strict=True):
        result["spending"] = found


def diagnose(
    request: Request,
    rows: Sequence[Row],
    runs: Sequence[Sequence[Run]],
    results: list[list[dict[str, Any]]],
    note: Note,
) -> None:
    """Replay one bank, generated by the first row's student, through the student of every row and seed."""
    from spikeopd.diagnostics import dynamics, report
    from spikeopd.diagnostics.prefixes import BankOptions, describe, generate_bank, load_bank, save_bank
    from spikeopd.methods.setup import build, configured_student, make_accelerator

    no_bars()
    config = runs[0][0].config
    setup = build(config, make_accelerator(config))
    path, options = request.folder / "bank.npz", config.stage2

    def student(result: dict[str, Any]) -> Any:
        return place(configured_student(result["student"], config), setup.device)

    first = student(results[0][0])
    asked = BankOptions(256, options.prompt_length, options.max_completion_length, options.temperature)
    # A stored bank of the same origin is replayed as it is.
    bank = load_bank(path) if path.is_file() else None
    if bank is None or bank.about != describe(first, setup.evaluation_prompts, asked):
        bank = load_bank(save_bank(generate_bank(first, setup.evaluation_prompts, asked), path))
    flat = [result for group in results for result in group]
    names = [f"{row.label}, {index}" for row, group in zip(rows, results, strict=True) for index in range(len(group))]
    replayed = {
        name: dynamics.replay(student(result), setup.teacher, bank) for name, result in zip(names, flat, strict=True)
    }
    note(f"diagnostics: replayed the bank through {', '.join(row.label for row in rows)}")
    for result, curves in zip(flat, report.compare(replayed).values(), strict=True):
        numbers = {key: value for key, value in curves.items() if isinstance(value, float)}
        result["diagnostics"] = numbers | {"spike_drift_display": curves["mean_spike_drift"] * dynamics.DISPLAY}
        result["diagnostics_curves"] = curves


def write(
    request: Request, rows: Sequence[Row], runs: Sequence[Sequence[Run]], results: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """table.txt, table.csv, table.tex, table.md, figure.png, figure.svg and result.json in the study's folder."""
    from spikeopd.studies import figures

    values = [of_row(group) | dict(row.facts) for row, group in zip(rows, results, strict=True)]
    table = make_table(request.study, rows, values, [*notes(request), *references(rows, results)])
    folder = request.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.txt", table.text + "\n")
    write_text(folder / "table.csv", table.csv)
    write_text(folder / "table.tex", table.latex)
    write_text(folder / "table.md", table.markdown + "\n")
    teacher = request.teacher or request.config.teacher.teacher_model_name_or_path
    drawn = figures.draw(request.study, rows, values, results, folder, teacher)
    whole = {
        "schema_version": 1,
        "study": request.study.name,
        "title": request.study.title,
        "seeds": list(request.seeds),
        "teacher_of_stage2": teacher,
        "start": request.start,
        "config": config_to_dict(request.config),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform(), "threads_per_run": 1},
        "environment": environment(device="cpu", seeds={}, argv=[Path(sys.argv[0]).name, *sys.argv[1:]]),
        "run_seconds": round(sum(result["seconds"] for group in results for result in group), 1),
        "cpu_seconds": round(sum(result.get("cpu_seconds", 0.0) for group in results for result in group), 1),
        "rows": [
            {
                "label": row.label,
                "values": value,
                "paper": dict(row.paper),
                "runs": [_portable(run, result) for run, result in zip(group, found, strict=False)],
            }
            for row, value, group, found in zip(rows, values, runs, results, strict=True)
        ],
        "files": sorted({"table.txt", "table.csv", "table.tex", "table.md", *(path.name for path in drawn)}),
    }
    write_json(folder / "result.json", json.loads(json.dumps(whole)))
    return whole | {"text": table.text}


def _portable(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """A result without places of this machine."""
    kept = {name: value for name, value in result.items() if name not in ("student", "pre_onset_student", "key")}
    return {"folder": run.key[:20], "seed": run.config.train.seed, **kept}


def notes(request: Request) -> list[str]:
    said = []
    if request.config.model.preset == "tiny":
        said.append(
            "a tiny model on a small corpus; the paper's values are of OPT-125M to 1.3B: compare directions only"
        )
    if request.teacher == "tiny-rule":
        said.append("stress test: the teacher was constructed to fall into runs of one token (docs/studies.md)")
    if not request.benchmarks:
        said.append("no zero-shot average: give --benchmarks DIR; quality is perplexity on validation text")
        return said
    if request.tasks:
        said.append(f"Avg. is over {', '.join(request.tasks)} only; the paper's is over eight tasks")
    if request.limit:
        said.append(f"zero-shot accuracy over the first {request.limit} questions of each task only")
    return said


def references(rows: Sequence[Row], results: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """What the numbers are held against: the teacher on the same windows, and how far the first student uses its
    prefix, without which nothing can be said about prefixes.
    """
    for row, group in zip(rows, results, strict=True):
        for result in group:
            found = result.get("evaluation") or {}
            if "attention_off" in found:
                return [
                    f"the teacher's perplexity on the same windows is {found['teacher_perplexity']:.2f}; switching "
                    f"attention off (R = 0) costs {row.label} {found['attention_off']:.2f} nats a token"
                ]
    return []


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
