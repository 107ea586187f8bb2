"""Single runs of a study, named by content: studies that need the same run share it, a finished one is not repeated.

A run's folder `POOL/<key>/` is a training run's folder plus `request.json` (what is asked) and `result.json` (written
last: the run is finished). Each run is one process with one torch thread, or `processes` that train together;
killed at any time, it continues from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import spikeopd
from spikeopd import options
from spikeopd.config import SECTIONS, Config, config_to_dict, with_overrides
from spikeopd.errors import CheckFailed, InputError, short
from spikeopd.files import read_json, sha256, write_json
from spikeopd.registry import METHODS
from spikeopd.studies.values import of_row

Kind = Literal["train", "evaluate", "teacher"]
Note = Callable[[str], None]
RESULT = "result.json"
EVALUATION_VERSION = 2  # raise it when `worker.evaluate` measures something else
TRAINING_VERSION = 2  # raise it when a method trains otherwise
SPENDING_VERSION = 1  # raise it when `spending.measure` counts otherwise
VERSION = [spikeopd.__version__, TRAINING_VERSION, EVALUATION_VERSION]
# Options that came after the first keys: at these values a run is the one it was without them.
YOUNGER: dict[str, Any] = {
    "model.neuron": "lif",
    "stage2.divergence": "forward_kl",
    "data.max_prompt_tokens": None,
    "train.gradients": "fp32",
    **{
        f"{stage}.{name}": value
        for stage in ("stage1", "stage2")
        for name, value in (("rate_target", []), ("rate_coef", 30.0), ("rate_warmup", 0.5))
    },
}
OF_EVALUATION = ("stage2.model_name_or_path", "stage2.prompt_length", "stage2.temperature")


@dataclass(frozen=True)
class Run:
    """One training run with the evaluation of what it leaves, or only the evaluation of a given student."""

    config: Config
    kind: Kind = "train"
    length: int = 32  # tokens of the continuations that are evaluated, whatever K the run trained with
    processes: int = 1  # that train together; Stage 1 then takes as many times the sequences an update

    @property
    def key(self) -> str:
        return content_key(self)

    def folder(self, pool: Path) -> Path:
        return pool / self.key[:20]

    @property
    def cost(self) -> int:
        """For the order of runs: tokens trained on, about."""
        first, second = self.config.stage1, self.config.stage2
        if self.kind != "train":
            return 0
        if self.config.train.stage == "1":
            rows = first.micro_batch_size * first.gradient_accumulation_steps
            return first.updates * rows * self.config.data.sequence_length
        updates = second.updates * METHODS[second.method].update_factor
        # An update generates its tokens, then learns from them.
        return 2 * updates * second.batch_size * (second.prompt_length + second.max_completion_length)

    def asked(self) -> dict[str, Any]:
        whole = {"kind": self.kind, "config": config_to_dict(self.config), "length": self.length}
        return whole | ({"processes": self.processes} if self.processes > 1 else {})


@dataclass(frozen=True)
class Zeroshot:
    """Benchmark accuracy of one student: a run of its own, so that asking for it later repeats no training."""

    student: str
    benchmarks: str  # folder of zero-shot data
    tasks: tuple[str, ...] = ()  # of them; all eight if none is named
    limit: int | None = None  # questions of each task
    cost = 0

    @property
    def key(self) -> str:
        data = benchmark_hashes(self.benchmarks, self.tasks)
        values = ("zeroshot", student_hash(self.student), data, self.limit, VERSION)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    def folder(self, pool: Path) -> Path:
        return pool / self.key[:20]

    def asked(self) -> dict[str, Any]:
        places = {"student": self.student, "benchmarks": self.benchmarks}
        return {"kind": "zeroshot", "tasks": self.tasks, "limit": self.limit} | {
            name: str(Path(place).resolve()) for name, place in places.items()
        }


@dataclass(frozen=True)
class Spending:
    """What one student of Stage 1 spends when it is exported and fed validation text: a run of its own."""

    student: str
    config: Config  # whose validation text
    cost = 0

    @property
    def key(self) -> str:
        text = source_hash(self.config.data.validation_source or self.config.data.source)
        length = self.config.data.sequence_length
        values = ("spending", SPENDING_VERSION, student_hash(self.student), text, length, VERSION)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    def folder(self, pool: Path) -> Path:
        return pool / self.key[:20]

    def asked(self) -> dict[str, Any]:
        return {"kind": "spending", "student": str(Path(self.student).resolve()), "config": config_to_dict(self.config)}


def content_key(run: Run) -> str:
    """sha256 over everything that can change the result; files by their content, not by their path."""
    table = options.option_table(SECTIONS)
    stage = run.config.train.stage
    reads = METHODS[run.config.stage2.method].reads
    unused = {"1": "stage2", "2": "" if "stage1" in reads else "stage1"}.get(stage, "")
    values: dict[str, Any] = {
        f"{section}.{name}": value
        for section, entries in config_to_dict(run.config).items()
        for name, value in entries.items()
        if not table[f"{section}.{name}"].harmless
        and section != unused
        and (f"{section}.{name}", value) not in YOUNGER.items()
    }
    values["train.compile"] = False  # once an option: the keys of finished runs stay what they are
    if run.kind != "train":
        values = {
            name: value for name, value in values.items() if name in OF_EVALUATION or not name.startswith("stage2.")
        }
    if start := values.get("stage2.model_name_or_path"):
        values["stage2.model_name_or_path"] = student_hash(start)
    values["teacher.teacher_model_name_or_path"] = teacher_hash(run.config.teacher.teacher_model_name_or_path)
    values["data.tokenizer"] = tokenizer_hash(run.config.data.tokenizer)
    for name in ("source", "prompt_source", "validation_source"):
        if values[f"data.{name}"]:
            values[f"data.{name}"] = source_hash(values[f"data.{name}"])
    values |= {"kind": run.kind, "length": run.length if stage != "1" else None}
    values |= {"version": VERSION} | ({"processes": run.processes} if run.processes > 1 else {})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf", "tokenizer.json")


@cache
def student_hash(path: str) -> str:
    """Weights, shape and neuron (config.json), tokenizer."""
    if not (Path(path) / "model.safetensors").is_file():
        raise InputError(f"student {path}: no model.safetensors there; give the `final/` folder of a run")
    return _files_hash(Path(path), MODEL_FILES)


@cache
def teacher_hash(name: str) -> str:
    """Of a file or folder its content; of a name on the hub the name."""
    from spikeopd.models.teacher import resolve

    path = Path(resolve(name))
    if path.is_dir():
        return _files_hash(path, MODEL_FILES)
    return sha256(path) if path.is_file() else name


@cache
def tokenizer_hash(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        return _files_hash(path, ("tokenizer*.json", "vocab.json", "merges.txt"))
    return sha256(path) if path.is_file() else name


def _files_hash(folder: Path, patterns: Sequence[str]) -> str:
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return hashlib.sha256("".join(f"{path.name} {sha256(path)}\n" for path in files).encode()).hexdigest()


@cache
def benchmark_hashes(folder: str, tasks: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    from spikeopd.evaluation.tasks import choose, data_files

    files = data_files(Path(folder), choose(tasks))
    return tuple((name, sha256(path)) for name, path in files.items())


@cache
def source_hash(name: str) -> str:
    from spikeopd.text.sources import open_source

    return open_source(name).fingerprint()


# --- carrying out ----------------------------------------------------------------------------------------------------


Task = Run | Zeroshot | Spending
# Not `-m`, which looks for modules in the working folder first.
WORKER = "import sys; sys.path[:] = [p for p in sys.path if p]; from spikeopd.studies.worker import start; start()"


def read_result(run: Task, pool: Path) -> dict[str, Any] | None:
    """Students are named relative to the run's folder, so that a pool can be moved; here they are paths again."""
    path = run.folder(pool) / RESULT
    try:
        found = dict(read_json(path))
        for name in ("student", "pre_onset_student"):
            if found.get(name):
                found[name] = str(path.parent / found[name])
        of_row([found])  # what the table will ask
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{path}: damaged ({short(error)}); remove it to evaluate the run again") from error


def request(run: Task, pool: Path) -> Path:
    """The run's folder with its request in it."""
    folder = run.folder(pool)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "request.json", {"key": run.key, **run.asked()})
    return folder


def execute(runs: Sequence[tuple[str, Task]], pool: Path, jobs: int, note: Note) -> list[dict[str, Any]]:
    """Results in order. (label, run) pairs; at most `jobs` processes, long runs first, so that none is left over at the
    end; the first failure stops the rest."""
    waiting = {run.key: (label, run) for label, run in runs if read_result(run, pool) is None}
    total = len({run.key for _, run in runs})
    if waiting:
        note(f"{total - len(waiting)} of {total} runs are finished; {len(waiting)} to do, {jobs} at a time")
    # In this order: leaving ends the processes first, then the threads that wait for them.
    with ThreadPoolExecutor(jobs) as executor, processes(accelerators(os.environ)) as start:
        futures: dict[Future[float], str] = {
            executor.submit(start, request(run, pool), getattr(run, "processes", 1)): label
            for label, run in sorted(waiting.values(), key=lambda pair: -pair[1].cost)
        }
        left = set(futures)
        try:
            while left:
                finished, left = wait(left, return_when=FIRST_COMPLETED)
                for future in finished:
                    note(f"{futures[future]}: {future.result():.0f} s ({len(futures) - len(left)} of {len(futures)})")
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    results = []
    for label, run in runs:
        result = read_result(run, pool)
        if result is None:
            raise CheckFailed(f"{label}: {run.folder(pool)} has no {RESULT}")
        results.append(result)
    return results


def accelerators(environment: Mapping[str, str]) -> list[str]:
    """The GPUs a study may use, as CUDA names them."""
    if (named := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def processes(gpus: Sequence[str] = ()) -> Iterator[Callable[[Path, int], float]]:
    """Gives a function that carries out one requested run and returns its seconds; ends what is left at exit.

    A run sees one GPU for each of its processes: those with the fewest runs on them.
    """
    running: set[subprocess.Popen[bytes]] = set()
    load = dict.fromkeys(gpus, 0)
    guard = threading.Lock()
    closed = False

    def start(folder: Path, count: int = 1) -> float:
        began = time.monotonic()
        with open(folder / "log.txt", "ab") as log:
            with guard:
                if closed:
                    raise CheckFailed(f"{folder}: stopped before it began")
                mine = sorted(load, key=load.__getitem__)[:count]
                environment = one_thread(os.environ)
                if mine:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
                for gpu in mine:
                    load[gpu] += 1
                process = subprocess.Popen(
                    [sys.executable, "-c", WORKER, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
                running.add(process)
            code = process.wait()
        with guard:
            running.discard(process)
            for gpu in mine:
                load[gpu] -= 1
        if code:
            lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
            raise CheckFailed(f"{folder}: the run failed ({lines[-1] if lines else f'exit {code}'}); see its log.txt")
        return time.monotonic() - began

    try:
        yield start
    finally:
        with guard:
            closed = True
            for process in running:
                process.terminate()


def one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**environment, **dict.fromkeys(names, "1"), "TOKENIZERS_PARALLELISM": "false"}


# --- configurations --------------------------------------------------------------------------------------------------


def stage1_run(base: Config, overrides: Sequence[str] = (), processes: int = 1) -> Run:
    """Stage 1 of a study; students after a quarter and half of the updates are kept (the paper's 1k, 2k of 4k)."""
    updates = with_overrides(base, [*overrides, *_STAGE1]).stage1.updates
    kept = sorted({max(1, updates // 4), max(1, updates // 2)})
    config = with_overrides(base, [*overrides, *_STAGE1, f"stage1.checkpoint_updates={kept}"])
    return Run(config, processes=processes)


def stage2_run(base: Config, start: Path | str, overrides: Sequence[str] = (), **rest: Any) -> Run:
    """A method of Stage 2 from one student. Perplexity is taken eight times over the recipe's updates."""
    every = max(1, base.stage2.updates // 8)
    fixed = [
        "train.stage=2",
        f"stage2.model_name_or_path={Path(start).resolve()}",
        "stage2.on_collapse=log",
        f"train.eval_every={every}",
        f"train.save_every={every}",
        "train.threads=1",
        "train.log_every=1",
    ]
    # In one step: a recipe for both stages names no student to start from.
    config = with_overrides(base, [*fixed, *overrides])
    return Run(config, length=base.stage2.max_completion_length, **rest)


_STAGE1 = ("train.stage=1", "stage2.model_name_or_path=null", "train.threads=1", "train.keep_checkpoints=1")
