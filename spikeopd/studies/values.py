"""From results of single runs to the numbers of a table row: means over seeds, sample standard deviations, onsets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spikeopd.studies.definitions import TASKS, Column, Row, Study
from spikeopd.studies.tables import Table

PERCENT = {"adj", "dist4"}
WINDOW = 20  # updates of the trace that are averaged, as the collapse detector does


def of_run(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Every number a column may ask for, of one run."""
    measured = dict(result.get("evaluation") or result.get("final") or {})
    found: dict[str, float | None] = {
        key: (100 * value if key in PERCENT else value) for key, value in measured.items()
    }
    found |= {f"task_{name}": value for name, value in ((result.get("zeroshot") or {}).get("tasks") or {}).items()}
    found["average"] = (result.get("zeroshot") or {}).get("average")
    found["onset"] = result.get("onset")
    before = result.get("pre_onset")
    found["pre_onset_perplexity"] = before["perplexity"] if before else found.get("perplexity")
    for name in ("adj", "dist4"):
        seen = [value for value in (result.get("trace") or {}).get(name, []) if value is not None][-WINDOW:]
        found[f"trace_{name}"] = 100 * statistics.fmean(seen) if seen else None
    found |= result.get("diagnostics", {})
    found |= {name: value for name, value in result.get("spending", {}).items() if isinstance(value, (int, float))}
    return found


def of_row(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{key: {mean, sd, n}}; `onset` over the collapsed runs only, `collapsed` as [collapsed, tested]."""
    runs = [of_run(result) for result in results]
    row: dict[str, Any] = {}
    for key in sorted(set().union(*runs)):
        seen = [value for run in runs if (value := run.get(key)) is not None]
        if seen:
            spread = statistics.stdev(seen) if len(seen) > 1 else None
            row[key] = {"mean": statistics.fmean(seen), "sd": spread, "n": len(seen)}
    row["collapsed"] = [sum(run["onset"] is not None for run in runs), len(runs)]
    return row


def cell(row: Mapping[str, Any], column: Column) -> str:
    if isinstance(row.get(column.key), str):
        return str(row[column.key])
    if column.key == "collapsed":
        return "{}/{}".format(*row["collapsed"]) if row["collapsed"][1] else "-"
    value = row.get(column.key)
    if value is None:
        return "-"
    shown = f"{value['mean']:.{column.decimals}f}"
    return shown if value["sd"] is None else f"{shown} ± {value['sd']:.{column.decimals}f}"


def make_table(study: Study, rows: Sequence[Row], values: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """Columns nothing was measured for are left out; the paper's columns are those it prints for some row, its tasks
    only where some task was measured.
    """
    mine = [column for column in study.columns if any(cell(row, column) != "-" for row in values)]
    tasks = any(column in TASKS for column in mine)
    printed = [
        column
        for column in study.columns
        if any(column.key in row.paper for row in rows) and (tasks or column not in TASKS)
    ]
    body = [
        (
            row.label,
            *(cell(value, column) for column in mine),
            *(str(row.paper.get(column.key, "-")) for column in printed),
        )
        for row, value in zip(rows, values, strict=True)
    ]
    head = ("", *(column.label for column in mine), *(f"paper {column.label}" for column in printed))
    return Table(study.title, head, tuple(body), 1 + len(mine), tuple(notes))
