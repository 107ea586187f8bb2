"""What both stages do around an update: resume, log, save, stop. The mathematics is in the stages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from spikeopd import checkpoint, quality
from spikeopd.errors import CheckFailed, InputError
from spikeopd.files import new_directory
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, SpikeLinear
from spikeopd.runlog import RunLog

Step = Callable[[int], dict[str, float]]


class Objective(nn.Module):
    """A student and what trains with it. Everything goes through `forward`, also generation, so that a parallel
    wrapper (DDP, FSDP2) sees each use: `objective("rollout", prompts)` calls `self.rollout(prompts)`.
    """

    def __init__(self, student: BiSpikCLMForCausalLM) -> None:
        super().__init__()
        self.student = student

    def forward(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def token_sums(self, ids: Tensor, teacher: Tensor, teacher_head: nn.Module, chunk: int) -> Tensor:
        """(sum of - log q(next token), sum of KL(teacher || student)) over ids, for validation."""
        return quality.token_sums(self.student, ids, teacher, teacher_head, chunk)


def make_optimizer(setup: Setup, objective: Objective, learning_rate: float) -> tuple[Any, torch.optim.Optimizer]:
    """Adam, and both wrapped for DDP or FSDP2 if `accelerate launch` or `torchrun` asked for it."""
    train, accelerator = setup.config.train, setup.accelerator
    if train.gradient_checkpointing:
        objective.student.gradient_checkpointing_enable()
    if accelerator.distributed_type.value == "FSDP":
        for module in objective.modules():
            if isinstance(module, SpikeLinear):
                module.keep_snapped = False  # gathered weights live only during a forward pass
    objective.to(accelerator.device)
    optimizer = torch.optim.Adam(
        (p for p in objective.parameters() if p.requires_grad),
        lr=learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
    )
    return accelerator.prepare(objective, optimizer)


def local_gradients(accelerator: Accelerator, objective: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Gradients are exchanged once per optimizer step, with the last micro-batch."""
    return contextlib.nullcontext() if last else accelerator.no_sync(objective)


def finish_update(
    setup: Setup, objective: Any, optimizer: torch.optim.Optimizer, stage: str, update: int, loss: float,
    max_grad_norm: float | None, learning_rate: float,
) -> float:  # fmt: skip
    """Clip, refuse anything that is not finite, take the Adam step. Returns the gradient norm before clipping."""
    parameters = [p for p in objective.parameters() if p.grad is not None]
    # An infinite limit measures the norm and clips nothing.
    norm = setup.accelerator.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise CheckFailed(
            f"{stage}: update {update + 1} gave loss {loss} and gradient norm {norm}; begin a new run with a lower "
            f"{stage}.learning_rate or with {stage}.max_grad_norm"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def run_updates(
    setup: Setup,
    log: RunLog,
    stage: str,
    objective: Any,
    optimizer: torch.optim.Optimizer,
    updates: int,
    step: Step,
    *,
    resume: bool,
    state: Callable[[], Mapping[str, Any]] = dict,
    restore: Callable[[Mapping[str, Any]], None] = lambda state: None,
    after: Callable[[int, dict[str, float]], str | None] = lambda update, values: None,
    show: tuple[str, ...] = ("loss",),
    keep: int | None = None,
) -> int:
    """Run the updates that are missing; returns the number done. `after` may answer "stop"."""
    train, main = setup.config.train, setup.accelerator.is_main_process
    folder = log.folder / stage / "checkpoints"
    done = resume_from(setup, folder, objective, optimizer, stage, restore) if resume else 0
    log.truncate(stage, done)

    def save() -> None:
        record = {"stage": stage, "identity": setup.identity(), "extra": dict(state())}
        checkpoint.save(folder, done, objective, optimizer, record, main=main, keep=keep or train.keep_checkpoints)

    with log.progress(stage, updates, done) as bar:
        while done < updates:
            values = step(done)
            done += 1
            verdict = after(done, values)
            if done % train.log_every == 0 or done == updates or verdict:
                log.metrics(stage, done, values)
            bar.advance(**{name: values[name] for name in show if name in values})
            if verdict == "stop":
                break
            if done % train.save_every == 0 or done == updates:
                save()
    return done


def resume_from(
    setup: Setup,
    folder: Path,
    objective: Any,
    optimizer: torch.optim.Optimizer | None,
    stage: str,
    restore: Callable[[Mapping[str, Any]], None] = lambda state: None,
) -> int:
    """Load the newest checkpoint, if there is one; refuse it when teacher, tokenizer or data have changed."""
    found = checkpoint.checkpoints(folder)
    if not found:
        return 0
    record = checkpoint.read_state(found[-1])
    changed = [name for name, value in setup.identity().items() if record["identity"].get(name) != value]
    if changed:
        raise InputError(
            f"{stage}: cannot resume from {found[-1]}: the {' and the '.join(changed)} differ from the run's; "
            "restore them, or begin a new run with another --output"
        )
    checkpoint.load(found[-1], objective, optimizer)
    restore(record["extra"])
    return int(record["update"])


def save_student(setup: Setup, objective: Any, target: Path) -> None:
    """The student alone as a plain Hugging Face directory with its tokenizer. Every rank must call it."""
    config = setup.accelerator.unwrap_model(objective).student.config
    weights = checkpoint.whole_weights(objective)
    if not setup.accelerator.is_main_process:
        return
    student = BiSpikCLMForCausalLM(config)
    prefix = "student."
    student.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    with new_directory(target) as folder:
        student.save_pretrained(folder)
        setup.tokenizer.save(folder)
