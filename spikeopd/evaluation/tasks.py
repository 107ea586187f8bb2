"""The paper's eight zero-shot benchmarks, as lm-evaluation-harness defines them; their data from the hub or from files.

Prompts, choices and metrics are those of the harness's packaged task files. For local data a small YAML file is
written that includes the packaged one and replaces only where the records come from.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spikeopd.errors import ConfigError, InputError, short
from spikeopd.files import parse_json, regular_size, write_text
from spikeopd.text.sources import LONGEST_ROW

ENDINGS = (".jsonl", ".jsonl.gz")
UNPACKED_LIMIT = 1 << 30  # bytes; the largest of the eight has some tens of millions


@dataclass(frozen=True)
class Benchmark:
    """name: the harness's task and the folder of its files; split: the one the stock task scores."""

    name: str
    label: str  # column of the paper's tables
    packaged: str  # below lm_eval/tasks
    split: str
    dataset: str  # on the hub, with its configuration
    fields: tuple[str, ...]  # that the prompts read

    @property
    def address(self) -> str:
        return f"https://huggingface.co/datasets/{self.dataset.partition(' ')[0]}"


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("arc_easy", "ARC-e", "arc/arc_easy.yaml", "test", "allenai/ai2_arc ARC-Easy",
                  ("question", "choices", "answerKey")),
        Benchmark("arc_challenge", "ARC-c", "arc/arc_challenge.yaml", "test", "allenai/ai2_arc ARC-Challenge",
                  ("question", "choices", "answerKey")),
        Benchmark("winogrande", "WG", "winogrande/default.yaml", "validation", "allenai/winogrande winogrande_xl",
                  ("sentence", "option1", "option2", "answer")),
        Benchmark("boolq", "BQ", "super_glue/boolq/default.yaml", "validation", "aps/super_glue boolq",
                  ("question", "passage", "label")),
        Benchmark("piqa", "PIQA", "piqa/piqa.yaml", "validation", "baber/piqa", ("goal", "sol1", "sol2", "label")),
        Benchmark("hellaswag", "HS", "hellaswag/hellaswag.yaml", "validation", "Rowan/hellaswag",
                  ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
        Benchmark("openbookqa", "OBQA", "openbookqa/openbookqa.yaml", "test", "allenai/openbookqa main",
                  ("question_stem", "choices", "answerKey")),
        Benchmark("headqa_en", "HQA", "headqa/headqa_en.yaml", "test", "EleutherAI/headqa en",
                  ("qtext", "ra", "answers")),
    )
}  # fmt: skip


def choose(names: Sequence[str] | None) -> list[Benchmark]:
    """The named benchmarks in the paper's order, or all eight. Names may be separated by commas or spaces."""
    if not names:
        return list(BENCHMARKS.values())
    wanted = [part for name in names for part in name.split(",") if part]
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown or not wanted:
        word = unknown[0] if unknown else ""
        raise ConfigError(f"--tasks: no benchmark '{word}'; there is {', '.join(BENCHMARKS)}")
    return [benchmark for name, benchmark in BENCHMARKS.items() if name in wanted]


def packaged_file(benchmark: Benchmark) -> Path:
    """The harness's own definition of a task."""
    import lm_eval.tasks

    path = Path(lm_eval.tasks.__file__).parent / benchmark.packaged
    if not path.is_file():
        raise InputError(f"{path}: this version of lm-eval has no such task file; install lm-eval 0.4.13 or later")
    return path


def data_files(data_dir: Path, benchmarks: Sequence[Benchmark]) -> dict[str, Path]:
    """The file of each benchmark. Those that are missing are all named at once, with where to get them."""
    if not data_dir.is_dir():
        raise InputError(f"--benchmarks {data_dir}: no such folder; it holds TASK/SPLIT.jsonl (docs/evaluation.md)")
    found: dict[str, Path] = {}
    missing: list[str] = []
    for benchmark in benchmarks:
        candidates = [data_dir / benchmark.name / f"{benchmark.split}{ending}" for ending in ENDINGS]
        existing = [path for path in candidates if path.is_file()]
        if existing:
            found[benchmark.name] = existing[0]
            continue
        looked = " and ".join(map(str, candidates))
        missing.append(f"{benchmark.name}: looked for {looked}; it is {benchmark.dataset} at {benchmark.address}")
    if missing:
        there = ",".join(found)
        instead = f", or evaluate only what is there: --tasks {there}" if there else ""
        raise InputError(
            f"--benchmarks {data_dir} lacks {len(missing)} of {len(benchmarks)} tasks. {'. '.join(missing)}. "
            f"Save the split as one JSON object per line with the dataset's field names{instead}"
        )
    for benchmark in benchmarks:
        check_records(benchmark, found[benchmark.name])
    return found


def check_records(benchmark: Benchmark, path: Path) -> None:
    """The first record must have the fields that the prompts read."""
    try:
        regular_size(path)
        with _opened(path) as file:
            line = file.readline(LONGEST_ROW)
        record = parse_json(line)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); fetch it again") from error
    except ValueError as error:
        raise InputError(f"{path}:1: not a JSON object ({short(error)}); one object per line is expected") from error
    lacking = [name for name in benchmark.fields if not isinstance(record, dict) or record.get(name) is None]
    if lacking:
        raise InputError(
            f"{path}:1: no field '{lacking[0]}'; {benchmark.name} needs {', '.join(benchmark.fields)}, "
            f"as {benchmark.dataset} names them"
        )


def local_task(benchmark: Benchmark, path: Path, folder: Path) -> Path:
    """Write FOLDER/NAME.yaml, the packaged task with local records.

    A task's other splits serve few-shot examples only, so they are taken out. A compressed file is unpacked into
    `folder`, where the dataset cache goes as well: nothing outside of it is written.
    """
    if path.suffix == ".gz":
        plain = folder / f"{benchmark.name}-{benchmark.split}.jsonl"
        try:
            with gzip.open(path, "rb") as source, open(plain, "wb") as target:
                while block := source.read(1 << 20):
                    if target.tell() > UNPACKED_LIMIT:
                        raise InputError(f"{path}: unpacks to more than {UNPACKED_LIMIT} bytes")
                    target.write(block)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip file ({error}); fetch it again") from error
        path = plain
    splits = {f"{split}_split": None for split in ("training", "validation", "test")}
    content: dict[str, Any] = {
        "include": str(packaged_file(benchmark)),
        "task": benchmark.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {benchmark.split: str(path.resolve())},
            "cache_dir": str(folder / "cache"),
        },
        **splits,
        f"{benchmark.split}_split": benchmark.split,
    }
    # JSON is YAML, and needs no quoting rules of its own.
    return write_text(folder / f"{benchmark.name}.yaml", json.dumps(content, indent=2) + "\n")


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
