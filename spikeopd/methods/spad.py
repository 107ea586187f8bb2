r"""Stage 1, SpAD: distil the frozen teacher into the spiking student on corpus text (App. F.5). Readable alone.

One update:  batch from (seed, update) -> for each micro-batch: teacher forward without gradients, student forward,
sums of the five targets, backward -> clip the global norm -> Adam at the cosine schedule's rate.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from spikeopd.config import Stage1Config
from spikeopd.data import batch
from spikeopd.methods.alignment import BRANCHES, SpADObjective, TeacherShape, branch_sizes, branch_weights
from spikeopd.methods.loop import finish_update, local_gradients, make_optimizer, run_updates, save_student
from spikeopd.methods.setup import Setup, cosine_with_warmup, validate
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.initialise import build_student, calibrate, start_from_teacher
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.runlog import RunLog

STAGE = "stage1"
CALIBRATION_SEED = 0xCA11B


def run(setup: Setup, log: RunLog, *, resume: bool = False) -> dict[str, Any]:
    """Train for stage1.updates; leaves `stage1/final/` and returns the summary."""
    config, options = setup.config, setup.config.stage1
    started = time.monotonic()
    objective, optimizer = make_objective(setup, initial_student(setup))
    length = config.data.sequence_length
    before = validate(setup, objective, length)
    log.note(f"stage 1 starts at perplexity {before['perplexity']:.1f}, KL to the teacher {before['teacher_kl']:.3f}")

    def after(update: int, values: dict[str, float]) -> None:
        if config.train.eval_every and update % config.train.eval_every == 0:
            values.update(validate(setup, objective, length))
        if update in options.checkpoint_updates:
            save_student(setup, objective, log.folder / STAGE / f"update-{update:06d}")

    done = run_updates(
        setup, log, STAGE, objective, optimizer, options.updates,
        lambda update: update_step(setup, objective, optimizer, update), resume=resume, after=after,
    )  # fmt: skip
    # A run that resumes behind its last update takes no step that would set it.
    setup.accelerator.unwrap_model(objective).student.config.deploy_precision = forward_precision(options, done)
    save_student(setup, objective, log.folder / STAGE / "final")
    result = validate(setup, objective, length)
    return {
        "updates": done,
        "start": before,
        "final": result,
        "seconds": round(time.monotonic() - started, 1),
    }


def initial_student(setup: Setup) -> BiSpikCLMForCausalLM:
    """The student before the first update; the same on every process."""
    config, tokenizer = setup.config, setup.tokenizer
    torch.manual_seed(config.train.seed)
    student = build_student(
        config.model,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    start_from_teacher(student, setup.teacher, blocks=config.model.init == "teacher")
    length = min(config.data.sequence_length, 128)
    ids = batch(setup.train, batch_size=16, length=length, seed=config.train.seed ^ CALIBRATION_SEED, step=0)
    calibrate(student, torch.from_numpy(ids))
    return student


def make_objective(setup: Setup, student: BiSpikCLMForCausalLM) -> tuple[Any, torch.optim.Optimizer]:
    config = setup.config
    torch.manual_seed(config.train.seed + 1)  # the alignment maps, the same on every process
    objective = SpADObjective(
        student, TeacherShape.of(setup.teacher.config), config.stage1, config.train.kl_chunk_tokens
    )
    return make_optimizer(setup, objective, config.stage1.learning_rate)


def forward_precision(options: Stage1Config, update: int) -> str:
    """The last updates train what will be deployed, and the student stays so."""
    return "int8" if options.deploy_updates and update >= options.updates - options.deploy_updates else "none"


def update_step(setup: Setup, objective: Any, optimizer: torch.optim.Optimizer, update: int) -> dict[str, float]:
    """One optimizer step: the mean of each branch, the weighted loss, the gradient norm and the learning rate."""
    config, accelerator = setup.config, setup.accelerator
    options, length = config.stage1, config.data.sequence_length
    rows = options.micro_batch_size * options.gradient_accumulation_steps * accelerator.num_processes
    whole = torch.from_numpy(batch(setup.train, batch_size=rows, length=length, seed=config.train.seed, step=update))
    student = accelerator.unwrap_model(objective).student
    student.config.deploy_precision = forward_precision(options, update)
    sizes = branch_sizes(student.config, TeacherShape.of(setup.teacher.config), rows, length).to(setup.device)
    weights = branch_weights(options).to(setup.device)
    scale = (weights / sizes).float()
    head, total = output_table(setup.teacher), torch.zeros_like(sizes)
    micro_batches = setup.rows(whole).split(options.micro_batch_size)
    for index, ids in enumerate(micro_batches):
        target = run_teacher(setup.teacher, ids, internals=True)
        with local_gradients(accelerator, objective, last=index == len(micro_batches) - 1):
            sums = objective("sums", ids, target, head)
            # Data parallelism averages gradients over processes; ours are shares of one sum.
            accelerator.backward((sums * scale).sum() * accelerator.num_processes)
        total += sums.detach().double()
    means = accelerator.reduce(total, "sum") / sizes
    loss = (means * weights).sum().item()
    rate = options.learning_rate * cosine_with_warmup(update, options.updates, options.warmup_ratio)
    norm = finish_update(setup, objective, optimizer, STAGE, update, loss, options.max_grad_norm, rate)
    return {"loss": loss, **dict(zip(BRANCHES, means.tolist(), strict=True)), "grad_norm": norm, "learning_rate": rate}
