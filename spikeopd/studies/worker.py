"""One run of a study in its own process, `python -m spikeopd.studies.worker FOLDER`: train, evaluate, write result."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from spikeopd.config import Config, config_from_dict
from spikeopd.errors import CheckFailed, InputError, run_command, short
from spikeopd.files import read_json, write_json
from spikeopd.students import no_bars, place
from spikeopd.studies.runs import RESULT

PROMPTS = 256  # of the rollout statistics: the paper's diagnostic prompt count
WINDOWS = 64  # of the validation text, as during training


def main(argv: list[str] | None = None) -> int:
    return run_command("spikeopd-study worker", _main, argv)


def _main(argv: Any) -> int:
    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    with FileLock(folder / ".lock"):  # another study may be at this very run: wait, then find it finished
        tidy(folder)
        if not (folder / RESULT).is_file():
            work(folder)
            tidy(folder)
    return 0


def tidy(folder: Path) -> None:
    """Remove what a killed process left half-written, and from a finished run what it needs no more."""
    for pattern in ("stage*/.buffer.*", "stage*/checkpoints/.*", "stage*/.final.*", ".final.*", ".pre_onset.*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    if (folder / RESULT).is_file():
        for name in ("checkpoints", "buffer"):
            shutil.rmtree(folder / "stage2" / name, ignore_errors=True)


def work(folder: Path) -> None:
    no_bars()
    try:
        asked = dict(read_json(folder / "request.json"))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / 'request.json'}: damaged ({short(error)}); ask for the study again") from error
    began = time.monotonic()
    if asked["kind"] == "spending":
        from spikeopd.studies.spending import measure

        config = config_from_dict(asked["config"], str(folder / "request.json"))
        result = measure(config, Path(asked["student"]), folder)
    else:
        result = zeroshot(asked) if asked["kind"] == "zeroshot" else train_and_evaluate(folder, asked)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["cpu_seconds"] = round(time.process_time(), 1)  # what the run costs on a machine with nothing else to do
    write_json(folder / RESULT, result)


def train_and_evaluate(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    config = config_from_dict(asked["config"], str(folder / "request.json"))
    began = time.monotonic()
    summary: dict[str, Any] = {}
    if asked["kind"] == "train":
        count = asked.get("processes", 1)
        summary = train_here(config, folder) if count == 1 else train_together(folder, count)
    trained = time.monotonic() - began
    student = final_student(config, folder, asked["kind"])
    result = {
        "key": asked["key"],
        "kind": asked["kind"],
        "train_seconds": round(trained, 1),
        "student": os.path.relpath(student.resolve(), folder.resolve()),
    }
    result |= summary.get("stage1", {}) if config.train.stage == "1" else summary.get("stage2", {})
    if asked["kind"] == "teacher":
        result["evaluation"] = evaluate_teacher(config)
    elif config.train.stage != "1":
        result["evaluation"] = evaluate(config, student, asked["length"])
    if config.train.stage != "1" and asked["kind"] == "train":
        result["trace"] = trace(folder)
        result["pre_onset"] = pre_onset(result)
        if result["pre_onset"] is not None:
            before = student_at(folder, config, result["pre_onset"]["update"])
            result["pre_onset_student"] = os.path.relpath(before.resolve(), folder.resolve())
    return result


def train_here(config: Config, folder: Path) -> dict[str, Any]:
    from spikeopd.training import train

    # Unused options and places may differ from those the run was begun with; its key says that it is the same.
    return train(config, folder, resume=(folder / "config.yaml").is_file(), quiet=True, check=False).summary


SUMMARY = "summary.json"
RANK = "import sys; sys.path[:] = [p for p in sys.path if p]; from spikeopd.studies.worker import rank; rank()"


def train_together(folder: Path, count: int) -> dict[str, Any]:
    """The training by several processes of this machine; this one only waits, and evaluates afterwards."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with subprocess.Popen([*launcher, "--no-python", sys.executable, "-c", RANK, str(folder)]) as process:
        try:
            code = process.wait()
        finally:
            process.terminate()
    if code:
        raise CheckFailed(f"{folder}: {count} processes did not train together (exit {code}); see its log.txt")
    return dict(read_json(folder / SUMMARY))


def rank() -> None:
    """One of them."""
    import torch

    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    folder = Path(sys.argv[1])

    def run(_: Any) -> int:
        no_bars()
        summary = train_here(
            config_from_dict(read_json(folder / "request.json")["config"], str(folder / "request.json")), folder
        )
        if os.environ.get("RANK", "0") == "0":
            write_json(folder / SUMMARY, summary)
        return 0

    sys.exit(run_command("spikeopd-study worker", run, None))


def final_student(config: Config, folder: Path, kind: str) -> Path:
    if kind == "teacher":
        from spikeopd.models.teacher import resolve

        return Path(resolve(config.teacher.teacher_model_name_or_path))
    if kind == "evaluate":
        assert config.stage2.model_name_or_path is not None
        return Path(config.stage2.model_name_or_path)
    return folder / "stage1" / "final" if config.train.stage == "1" else folder / "final"


def evaluate_teacher(config: Config) -> dict[str, float]:
    """The teacher's perplexity on the windows that its students are judged by."""
    import torch

    from spikeopd import quality
    from spikeopd.methods.setup import build, make_accelerator
    from spikeopd.studies import efficiency
    from spikeopd.text.tokens import sequential_windows

    setup = build(config, make_accelerator(config))
    length = min(config.data.sequence_length, config.model.sizes()["max_position_embeddings"])
    ids = torch.from_numpy(sequential_windows(setup.validation, length)[:WINDOWS].astype("int64")).to(setup.device)
    spent = efficiency.of_teacher(config)
    return {"perplexity": quality.teacher_perplexity(setup.teacher, ids, config.train.kl_chunk_tokens)} | spent


def evaluate(config: Config, student: Path, k: int) -> dict[str, float]:
    """Perplexity, KL to the teacher on corpus and own prefixes, rollout statistics and firing rate; beside them the
    teacher's perplexity on the same windows, and what switching attention off costs in nats per token (R = 0).

    Always on the same validation windows and prompts and with the same random numbers, for every method and seed.
    """
    import torch

    from spikeopd import quality
    from spikeopd.methods.setup import build, configured_student, make_accelerator
    from spikeopd.models.teacher import output_table
    from spikeopd.rollout import rollout, uniforms
    from spikeopd.studies import efficiency
    from spikeopd.text.tokens import batch, sequential_windows

    setup = build(config, make_accelerator(config))
    model = place(configured_student(str(student), config), setup.device)
    options, shape, chunk = config.stage2, model.config, config.train.kl_chunk_tokens
    head, layers = output_table(setup.teacher), tuple(range(shape.num_hidden_layers))
    length = min(config.data.sequence_length, shape.max_position_embeddings)
    ids = torch.from_numpy(sequential_windows(setup.validation, length)[:WINDOWS].astype("int64")).to(setup.device)
    prompts = torch.from_numpy(
        batch(setup.evaluation_prompts, batch_size=PROMPTS, length=options.prompt_length, seed=0, step=0)
    ).to(setup.device)

    def on_text() -> dict[str, float]:
        return quality.on_text(
            lambda part, target: quality.token_sums(model, part, target, head, chunk), setup.teacher, ids
        )

    with setup.accelerator.autocast():  # as during training, where accelerate wraps the objective
        found = on_text()
        with quality.without_attention(model):
            found["attention_off"] = math.log(on_text()["perplexity"] / found["perplexity"])
        found["teacher_perplexity"] = quality.teacher_perplexity(setup.teacher, ids, chunk)
        own, spikes = quality.on_own_text(
            lambda part, uniform: rollout(model, part, uniform, options.temperature, layers, "all"),
            lambda sequences, target: quality.visited_kl(model, sequences, target, head, chunk),
            setup.teacher,
            prompts,
            uniforms(0, 0, PROMPTS, k),
        )
    rate = spikes.mean().item() / quality.rate_slots(shape, "all", PROMPTS * k)
    spent = efficiency.of_student(student, rate, options.prompt_length + k)
    return found | {"self_kl": own["self_kl"], "rate": rate} | own | {name: spent[name] for name in ("ops", "energy")}


def trace(folder: Path) -> dict[str, list[Any]]:
    """Adj and Dist-4 of the training rollouts by update (Fig. 3), and perplexity where it was taken."""
    from spikeopd.runlog import read_metrics

    lines = [line for line in read_metrics(folder) if line["stage"] == "stage2"]
    names = ("update", "stage2/adj", "stage2/dist4", "stage2/perplexity", "stage2/rate")
    return {name.removeprefix("stage2/"): [line.get(name) for line in lines] for name in names}


def pre_onset(result: dict[str, Any]) -> dict[str, Any] | None:
    """The last evaluation before the collapse showed; None when nothing collapsed.

    The detector sees a window's mean, so a collapse is dated to the end of its first window (Tab. 1: first update at
    which the means exceed the limits).
    """
    onset = result.get("onset")
    if onset is None:
        return None
    pairs = zip(result["trace"]["update"], result["trace"]["perplexity"], strict=True)
    before = [(update, value) for update, value in pairs if value is not None and update < onset]
    update, perplexity = before[-1] if before else (0, result["start"]["perplexity"])
    return {"update": update, "perplexity": perplexity}


def student_at(folder: Path, config: Config, update: int) -> Path:
    """The student of a stored checkpoint as a folder of its own; update 0 is where the run started."""
    if update == 0:
        assert config.stage2.model_name_or_path is not None
        return Path(config.stage2.model_name_or_path)
    from spikeopd.checkpoint import read_weights
    from spikeopd.files import new_directory
    from spikeopd.students import load_student

    student = load_student(folder / "final")
    weights = read_weights(folder / "stage2" / "checkpoints" / f"update-{update:06d}", student)
    student.load_state_dict({k.removeprefix("student."): v for k, v in weights.items() if k.startswith("student.")})
    shutil.rmtree(folder / "pre_onset", ignore_errors=True)  # of an evaluation that was stopped
    with new_directory(folder / "pre_onset") as target:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / "final" / name).is_file():
                shutil.copy(folder / "final" / name, target / name)
        student.save_pretrained(target)
    return folder / "pre_onset"


def zeroshot(asked: dict[str, Any]) -> dict[str, Any]:
    """Accuracy of each task and their mean, in percent."""
    from spikeopd.evaluation import zeroshot as harness
    from spikeopd.evaluation.models import offline, open_model
    from spikeopd.evaluation.scoring import Limits
    from spikeopd.evaluation.tasks import choose

    offline()
    found = harness.evaluate(
        open_model(asked["student"]),
        choose(asked["tasks"]),
        data_dir=Path(asked["benchmarks"]),
        limit=asked["limit"],
        limits=Limits(),
    )
    whole = harness.aggregate([found], "acc")
    tasks = {name: 100 * task["mean"] for name, task in whole["tasks"].items()}
    questions = {name: task["questions"] for name, task in found["tasks"].items()}
    return {"limit": asked["limit"], "questions": questions, "tasks": tasks, "average": 100 * whole["average"]["mean"]}


def start() -> None:
    """The process: it leaves through the blocks that clean up, also when it is ended from outside."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())


if __name__ == "__main__":
    start()
