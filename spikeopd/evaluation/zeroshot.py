"""Zero-shot accuracy through lm-evaluation-harness: run the tasks, average, and set the paper's rows beside."""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spikeopd.errors import BackendMissing, ConfigError, InputError, install_command
from spikeopd.evaluation import paper
from spikeopd.evaluation.models import Model
from spikeopd.evaluation.scoring import Limits
from spikeopd.evaluation.tasks import BENCHMARKS, Benchmark, data_files, local_task, packaged_file
from spikeopd.reporting import Note, Progress, Report
from spikeopd.tables import aligned

METRICS = ("acc", "acc_norm")
DEFINITIONS = {
    "version": 1,
    "acc": "share of questions whose right choice has the largest log-likelihood (harness metric acc)",
    "acc_norm": "the same after dividing by the choice's length in characters (harness metric acc_norm)",
    "average": "unweighted mean over the tasks; a task without the metric counts with acc",
    "sd": "sample standard deviation over the seeds",
    "flips": "questions to which the two models give different answers (choice of the largest log-likelihood)",
}


def models_of(name: str, seeds: Sequence[int] | None) -> list[tuple[int | None, str]]:
    """(seed, model) for each run to evaluate: `{seed}` in the name stands for each of the seeds."""
    if not seeds:
        if "{seed}" in name:
            raise ConfigError(f"model {name}: {{seed}} needs --seeds, for example --seeds 0 1 2")
        return [(None, name)]
    if "{seed}" not in name:
        raise ConfigError(
            "--seeds: scoring is deterministic, so seeds mean trained runs; "
            f"write {{seed}} where their paths differ, for example '{name}-{{seed}}'"
        )
    return [(seed, name.replace("{seed}", str(seed))) for seed in seeds]


def evaluate(
    model: Model,
    benchmarks: Sequence[Benchmark],
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    answers: bool = False,
) -> dict[str, Any]:
    """Score one model. With `data_dir` nothing is asked of the network.

    answers: also which choice it took and whether that was right, for each question of each task.
    """
    files = data_files(data_dir, benchmarks) if data_dir else {}
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from spikeopd.evaluation.adapter import HarnessLM
    except ImportError as error:
        raise BackendMissing(
            f"zero-shot tasks need lm-evaluation-harness ({error}): {install_command('eval')}"
        ) from error
    lm = HarnessLM(model.scorer, model.tokenizer, limits, progress)
    with _silent(), tempfile.TemporaryDirectory(prefix="spikeopd-eval-") as folder:
        specs = [
            str(local_task(benchmark, files[benchmark.name], Path(folder)) if files else packaged_file(benchmark))
            for benchmark in benchmarks
        ]
        try:
            # The tasks are given as files, so the harness need not index its thousands of others.
            output = simple_evaluate(
                model=lm,
                tasks=specs,
                num_fewshot=0,
                limit=limit,
                log_samples=answers,
                task_manager=TaskManager(include_defaults=False),
            )
        except (ConnectionError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"the benchmarks could not be read ({type(error).__name__}: {reason}); "
                "check the network, or give local files with --benchmarks"
            ) from error
        except Exception as error:
            where = _data_error(error, files)
            if where is None:
                raise
            raise InputError(where) from error
    assert output is not None
    tasks = {benchmark.name: _numbers(output, benchmark.name) for benchmark in benchmarks}
    return {
        "tasks": tasks,
        "truncated_requests": lm.truncated,
        "bos": f"{lm._bos!r} in front of every text",
        "harness": {"lm_eval": _harness_version(), "tasks": {name: output["versions"][name] for name in tasks}},
        **({"answers": {name: _answers(output["samples"][name]) for name in tasks}} if answers else {}),
    }


def _answers(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, bool]]:
    """(choice of the largest log-likelihood, whether it is right) by question; of equal ones the first."""
    found = {}
    for sample in samples:
        likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
        found[sample["doc_id"]] = (likelihoods.index(max(likelihoods)), bool(sample["acc"]))
    return [found[question] for question in sorted(found)]


def flips(ours: Sequence[tuple[int, bool]], theirs: Sequence[tuple[int, bool]]) -> dict[str, int]:
    """How many answers of `theirs` are others in `ours`, and what that does to their being right."""
    pairs = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine[0] != other[0]]
    lost, won = (sum(mine[1] is right and other[1] is not right for mine, other in pairs) for right in (False, True))
    return {"questions": len(ours), "flips": len(pairs), "right_to_wrong": lost, "wrong_to_right": won}


def report(
    name: str,
    runs: Sequence[tuple[int | None, str]],
    load: Callable[[str], Model],
    benchmarks: Sequence[Benchmark],
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    metric: str = "acc",
    beside: str = "auto",
    batch_size: int | None = None,
    progress: Progress | None = None,
    note: Note = lambda line: None,
    against: str | None = None,
) -> Report:
    """Score the runs (`models_of`), each opened by `load`; mean and spread over them, the paper's rows beside.

    against: another model, as the student a bundle was exported from; answers that differ are counted.
    """
    results: list[dict[str, Any]] = []
    lines: list[str] = []
    for seed, run in runs:
        model = load(run)
        limits = Limits.on(model.about.get("device", "cpu"), batch_size)
        score = partial(evaluate, benchmarks=benchmarks, data_dir=data_dir, limit=limit, progress=progress)
        result = score(model, limits=limits, answers=against is not None)
        if result["truncated_requests"]:
            note(
                f"{run}: {result['truncated_requests']} requests were longer than the model's "
                f"{model.scorer.max_length} positions and lost their beginning"
            )
        if against is not None:
            name_of_other = against.replace("{seed}", str(seed))
            other = load(name_of_other)
            there = score(other, limits=Limits.on(other.about.get("device", "cpu"), batch_size), answers=True)
            result["against"] = _against(name_of_other, result, there, metric)
            lines.append(_flip_line(run, result["against"]))
        results.append({"model": run, "seed": seed, **model.about, **result})
    shape = results[0]["shape"]
    rows, scale = paper.rows(beside, shape), paper.scale_of(shape)
    summary = {
        "metric": metric,
        **aggregate(results, metric),
        "definitions": DEFINITIONS,
        "data": str(data_dir) if data_dir else "hub",
        "limit": limit,
        "batch_size": "auto" if batch_size is None else str(batch_size),
        "runs": results,
        "paper": {
            "scale_of_model": scale,
            "metric": "accuracy; the paper does not say whether any column is length-normalised",
            "rows": [row.to_dict() for row in rows],
        },
    }
    lines.insert(0, table(name, summary, rows))
    if limit is not None:
        lines.append(f"note: only the first {limit} questions of each task: not comparable with full results")
    if rows and scale is None:
        lines.append("note: this model has none of the paper's sizes; its rows are there for orientation")
    return Report(summary, "\n".join(lines))


def _against(name: str, here: dict[str, Any], there: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The comparison of a summary; single answers are not kept."""
    answers = here.pop("answers")
    tasks = {task: flips(answers[task], there["answers"][task]) for task in answers}
    counted = {key: sum(task[key] for task in tasks.values()) for key in next(iter(tasks.values()))}
    both = {"average": average(there["tasks"], metric), "average_here": average(here["tasks"], metric)}
    return {"model": name, "tasks": tasks, **counted, **both}


def _flip_line(run: str, found: Mapping[str, Any]) -> str:
    share = 100 * found["flips"] / found["questions"]
    return (
        f"{run} against {found['model']}: {found['flips']} of {found['questions']} answers flip ({share:.1f} %), "
        f"{found['right_to_wrong']} from right to wrong, {found['wrong_to_right']} from wrong to right; average "
        f"{100 * found['average_here']:.1f} against {100 * found['average']:.1f}"
    )


def _numbers(output: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The harness names a value `metric,filter`."""
    found = output["results"][name]
    numbers: dict[str, Any] = {"questions": output["n-samples"][name]["effective"]}
    for metric in METRICS:
        if f"{metric},none" in found:
            error = found.get(f"{metric}_stderr,none")
            numbers[metric] = float(found[f"{metric},none"])
            numbers[f"{metric}_stderr"] = float(error) if isinstance(error, (int, float)) else None
    return numbers


def value(task: Mapping[str, Any], metric: str) -> float:
    return float(task[metric] if metric in task else task["acc"])


def average(tasks: Mapping[str, Mapping[str, Any]], metric: str) -> float:
    return statistics.fmean(value(task, metric) for task in tasks.values())


def aggregate(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Mean and sample standard deviation over runs, for each task and for the average."""

    def over(values: list[float]) -> dict[str, float | None]:
        return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}

    names = list(runs[0]["tasks"])
    return {
        "tasks": {name: over([value(run["tasks"][name], metric) for run in runs]) for name in names},
        "average": over([average(run["tasks"], metric) for run in runs]),
    }


def table(name: str, summary: Mapping[str, Any], rows: Sequence[paper.Row]) -> str:
    """Accuracy in percent, as the paper prints it."""
    tasks: Mapping[str, Any] = summary["tasks"]
    head = ["", *(BENCHMARKS[task].label for task in tasks), "Avg."]
    lines = [[name, *(_percent(tasks[task]) for task in tasks), _percent(summary["average"])]]
    for row in rows:
        numbers = dict(zip(paper.COLUMNS, row.accuracies, strict=True))
        # The printed average is over eight tasks; beside fewer it would be another quantity.
        whole = len(tasks) == len(paper.COLUMNS)
        mean = row.average if whole else round(statistics.fmean(numbers[task] for task in tasks), 1)
        spread = f"±{row.average_sd:.2f}" if whole and row.average_sd is not None else ""
        lines.append(
            [f"paper: {row.method} {row.scale}", *(f"{numbers[task]:.1f}" for task in tasks), f"{mean:.1f}{spread}"]
        )
    return "\n".join(aligned([head, *lines]))


def _percent(entry: Mapping[str, float | None]) -> str:
    mean, sd = entry["mean"], entry["sd"]
    assert mean is not None
    return f"{100 * mean:.1f}" + (f"±{100 * sd:.2f}" if sd is not None else "")


def _harness_version() -> str:
    from importlib import metadata

    return metadata.version("lm_eval")


def _data_error(error: Exception, files: Mapping[str, Path]) -> str | None:
    """Errors of the dataset reader, which come in types of their own, as one line; None for other errors."""
    module = type(error).__module__.partition(".")[0]
    if module not in ("datasets", "pyarrow", "huggingface_hub", "httpx", "requests"):
        return None
    reason = " ".join(str(error.__cause__ or error).split())[:200]
    if files:
        return f"{', '.join(map(str, files.values()))}: not all are readable JSON lines ({reason})"
    return f"the benchmarks could not be read ({reason}); check the network, or give local files with --benchmarks"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The harness's own bars and remarks off: progress is ours, results go to stdout."""
    import datasets
    from lm_eval.api import task

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    bars, bar = datasets.utils.logging.is_progress_bar_enabled(), task.tqdm
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task.tqdm = partial(bar, disable=True)  # the harness has no switch for the bar of its requests
    try:
        yield
    finally:
        task.tqdm = bar
        if bars:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
