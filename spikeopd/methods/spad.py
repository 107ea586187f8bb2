r"""Stage 1, SpAD: distil the frozen teacher into the spiking student on corpus text (App. F.5).

One update:  batch from (seed, update) -> for each micro-batch: teacher forward without gradients, student forward,
sums of the targets (`alignment.py`) and, if asked for, a target for the firing rates (`sparsity.py`), backward ->
clip the global norm -> Adam at the cosine schedule's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from spikeopd.config import Stage1Config
from spikeopd.methods.alignment import SpADObjective, TeacherShape, branch_sizes, branch_weights, logged_branches
from spikeopd.methods.run import Run
from spikeopd.methods.setup import Setup, configured_student, cosine_with_warmup
from spikeopd.methods.sparsity import Pull, RateTarget
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM
from spikeopd.models.initialise import (
    attention_by_distance,
    build_student,
    calibrate,
    start_from_teacher,
    temper,
    widen,
)
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.runlog import RunLog
from spikeopd.text.tokens import batch

CALIBRATION_SEED = 0xCA11B


def run(setup: Setup, log: RunLog, *, resume: bool = False) -> dict[str, Any]:
    """Train for stage1.updates; leaves `stage1/final/` and returns the summary."""
    config, options, device = setup.config, setup.config.stage1, setup.device
    student, transferred = start_student(setup)
    objective, folder = make_objective(setup, student), log.folder / "stage1"
    log.note(describe_start(setup, transferred))
    run = Run(setup, log, "stage1", objective, resume=resume)
    length, head = config.data.sequence_length, output_table(setup.teacher)
    rows = options.micro_batch_size * options.gradient_accumulation_steps * setup.accelerator.num_processes
    shape = TeacherShape.of(setup.teacher.config)
    sizes = branch_sizes(objective.student.config, shape, rows, length).to(device)
    weights = branch_weights(options).to(device)
    scale = (weights / sizes).tolist()
    seen = dict(internals=options.internals, maps=options.maps, middle=options.lambda_middle > 0)
    dial = RateTarget.of(options, objective.student.config, rows * length)
    for update in run.updates(options.updates):
        objective.student.config.deploy_precision = forward_precision(options, update)
        whole = batch(setup.train, batch_size=rows, length=length, seed=config.train.seed, step=update)
        total = torch.zeros_like(sizes)
        parts = setup.micro_batches(torch.from_numpy(whole), options.micro_batch_size)
        pull = None if dial is None else whole_pull(run, dial, parts, update)
        for ids in run.micro_batches(parts):
            target = run_teacher(setup.teacher, ids, **seen)
            if dial is None:
                share, sums = run.call(objective.sums, ids, target, head, scale)
            else:
                share, sums, spikes = run.call(objective.sums_and_spikes, ids, target, head, scale, dial)
                pull = pull or dial.at(update, spikes)
                share = share + pull(spikes)
            run.backward(share)
            total += sums.double()
        means = run.reduce(total) / sizes
        loss = (means * weights).sum().item() + (pull.loss if pull else 0.0)
        rate = options.learning_rate * cosine_with_warmup(update, options.updates, options.warmup_ratio)
        norm = run.step(loss, rate)
        branches = logged_branches(means, weights)
        if pull:
            branches |= {"rate_loss": pull.loss, "network_rate": pull.rate}
        run.log(update, {"loss": loss, **branches, "grad_norm": norm, "learning_rate": rate})
        if run.done in options.checkpoint_updates:
            run.save_student(folder / f"update-{run.done:06d}")
    # A run that resumes behind its last update takes no step that would set it.
    objective.student.config.deploy_precision = forward_precision(options, run.done)
    run.save_student(folder / "final")
    return {**run.summary(), "from_teacher": {"family": setup.teacher.config.model_type, **transferred}}


def whole_pull(run: Run[SpADObjective], dial: RateTarget, parts: Sequence[torch.Tensor], update: int) -> Pull | None:
    """The rate target's term from the spikes of the whole batch, counted before any part of it goes backward; None
    where the batch is one part, whose own forward pass counts them.
    """
    if len(parts) == 1 and run.setup.accelerator.num_processes == 1:
        return None
    counted = [run.call(run.objective.count_spikes, ids, dial) for ids in parts]
    return dial.at(update, run.reduce(torch.stack(counted).sum(0)))


def describe_start(setup: Setup, transferred: dict[str, str]) -> str:
    """What of the teacher the student starts with, and how documents are framed, in a line each."""
    tokenizer = setup.tokenizer
    begin, end = (tokenizer.roles[role] for role in ("bos_token", "eos_token"))
    copied = ", ".join(part for part, what in transferred.items() if what == "copied") or "nothing"
    others = [
        what if part == "nothing" else f"{part}: {what}" for part, what in transferred.items() if what != "copied"
    ]
    options, processes = setup.config.stage1, setup.accelerator.num_processes
    rows = options.micro_batch_size * options.gradient_accumulation_steps * processes
    tokens = f"{end} separates documents" if begin == end else f"documents begin with {begin} and end with {end}"
    shares = f"{processes} x {options.micro_batch_size} x {options.gradient_accumulation_steps}"
    lines = [
        f"the teacher ({setup.teacher.config.model_type}) gives {copied}",
        *others,
        tokens,
        f"{rows} sequences per update ({shares})",
    ]
    return "\n".join(f"stage 1: {line}" for line in lines)


def forward_precision(options: Stage1Config, update: int) -> Literal["none", "int8"]:
    """The last updates train what will be deployed, and the student stays so."""
    return "int8" if options.deploy_updates and update >= options.updates - options.deploy_updates else "none"


def initial_student(setup: Setup) -> BiSpikCLMForCausalLM:
    """The student before the first update; the same on every process."""
    return start_student(setup)[0]


def start_student(setup: Setup) -> tuple[BiSpikCLMForCausalLM, dict[str, str]]:
    """The student before the first update, and what of it came from the teacher."""
    config, tokenizer = setup.config, setup.tokenizer
    if config.stage1.model_name_or_path:
        return earlier_student(setup, config.stage1.model_name_or_path)
    torch.manual_seed(config.train.seed)
    student = build_student(
        config.model,
        # Without one of its own: the end token must not take its place, the table's padding row is not trained.
        pad_token_id=tokenizer.pad_token_id if "pad_token" in tokenizer.roles else None,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transferred = start_from_teacher(student, setup.teacher, blocks=config.model.init == "teacher")
    student.to(setup.device)  # type: ignore[arg-type]  # transformers wraps `to`; a launcher leaves a process one thread
    windows, attention = calibration_windows(setup, student), []
    if config.model.distance_start == "teacher":
        attention = attention_by_distance(setup.teacher, windows, student.config)
        transferred["distances"] = "copied"
    calibrate(student, windows, attention=attention)
    if setup.teacher.config.model_type != "opt":  # an OPT's students start close enough, and as they always did
        temper(student, windows)
    return student, transferred


def earlier_student(setup: Setup, path: str) -> tuple[BiSpikCLMForCausalLM, dict[str, str]]:
    """A student to go on from, with the neurons and distances that the configuration asks for beyond those it has."""
    config = setup.config
    student = configured_student(path, config)
    student.to(setup.device)  # type: ignore[arg-type]
    had = {part: getattr(student.config, part) for part in ("ffn_dim", "distances")}
    grown = {
        part: getattr(config.model, part) for part, count in had.items() if 0 < count < getattr(config.model, part)
    }
    if config.model.attention != student.config.attention and config.model.attention == "inhibiting":
        had["attention"], grown["attention"] = student.config.attention, "inhibiting"  # begins with nothing withheld
    if not grown:
        return student, {"nothing": f"it goes on from {path}"}
    torch.manual_seed(config.train.seed)
    wide = BiSpikCLMForCausalLM(BiSpikCLMConfig(**student.config.to_dict() | grown))
    start_from_teacher(wide, setup.teacher, blocks=config.model.init == "teacher")
    wide.to(setup.device)  # type: ignore[arg-type]
    widen(wide, student, calibration_windows(setup, wide))
    changes = " and ".join(f"{part} {count} instead of {had[part]}" for part, count in grown.items())
    return wide, {"nothing": f"it goes on from {path} with {changes}"}


def calibration_windows(setup: Setup, student: BiSpikCLMForCausalLM) -> torch.Tensor:
    """Text on which thresholds are chosen, twice as long as heads tell distances apart."""
    config = setup.config
    length = min(config.data.sequence_length, max(128, 2 * student.config.distances))
    rows = max(1, 16 * 128 // max(length, 128))
    ids = batch(setup.train, batch_size=rows, length=length, seed=config.train.seed ^ CALIBRATION_SEED, step=0)
    return torch.from_numpy(ids).to(setup.device)


def make_objective(setup: Setup, student: BiSpikCLMForCausalLM) -> SpADObjective:
    config = setup.config
    torch.manual_seed(config.train.seed + 1)  # the alignment maps, the same on every process
    shape = TeacherShape.of(setup.teacher.config)
    return SpADObjective(student, config.train.kl_chunk_tokens, shape, config.stage1.kd_temperature)
