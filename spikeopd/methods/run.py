"""A stage under way: `Run` owns Adam, resuming, logging, saving and stopping, so that a stage is one plain loop:

for update in run.updates(options.updates):
    for part in run.micro_batches(parts):
        run.backward(loss of the part)
    norm = run.step(loss, learning_rate)
    run.log(update, {"loss": loss, "grad_norm": norm})
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from spikeopd import checkpoint, quality
from spikeopd.config import Stage2Config
from spikeopd.errors import CheckFailed, InputError
from spikeopd.files import new_directory
from spikeopd.methods.setup import Setup, check_alike, validate
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, use_gradients
from spikeopd.models.projection import SpikeLinear
from spikeopd.models.teacher import output_table
from spikeopd.quality import CollapseDetector
from spikeopd.runlog import Progress, RunLog
from spikeopd.sampling import USUAL

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
P = ParamSpec("P")
T = TypeVar("T")
O = TypeVar("O", bound="Objective")  # noqa: E741 - the objective of a run


class Objective(nn.Module):
    """A student and what trains with it. chunk: tokens per chunk of the full-vocabulary losses.

    Its methods are called as `run.call(objective.method, ...)`, which goes through `forward`, also for generation: so
    a parallel wrapper (DDP, FSDP2) sees each use.
    """

    _no_split_modules = ("BiSpikCLMBlock",)  # what FSDP2 shards as a unit, unless the launcher is told otherwise

    def __init__(self, student: BiSpikCLMForCausalLM, chunk: int) -> None:
        super().__init__()
        self.student, self.chunk = student, chunk

    def forward(self, method: Callable[..., T], *arguments: Any) -> T:
        return method(*arguments)

    def token_sums(self, ids: Tensor, teacher: Tensor, teacher_head: nn.Module) -> Tensor:
        """(sum of - log q(next token), sum of KL(teacher || student)) over ids, for validation."""
        return quality.token_sums(self.student, ids, teacher, teacher_head, self.chunk)


class CollapseGuard:
    """Sees the rollout statistics of every update; says when they have collapsed and whether the run ends there."""

    def __init__(self, options: Stage2Config, note: Callable[[str], None]) -> None:
        self.options, self.note = options, note
        self.detector = CollapseDetector(options.collapse_window, options.collapse_adj, options.collapse_dist4)
        self.recent: list[dict[str, float]] = []  # the last window of statistics

    def watch(self, update: int, values: dict[str, Any]) -> bool:
        """Add the values of an update; True if the run must end. A method without rollouts has nothing to see."""
        if "adj" not in values:
            return False
        options = self.options
        self.recent = [*self.recent, {key: values[key] for key in ("adj", "dist4", "run")}][-options.collapse_window :]
        collapsed = self.detector.update(update, values["adj"], values["dist4"])
        values["collapsed"] = float(collapsed)
        if collapsed and self.detector.onset == update:
            self.note(
                f"stage 2: rollouts collapsed at update {update} ({options.collapse_window}-update means: adjacent "
                f"repetition above {options.collapse_adj}, 1 - Dist-4 above {options.collapse_dist4}); "
                f"on_collapse={options.on_collapse}"
            )
        return collapsed and options.on_collapse != "log"

    @property
    def rollback(self) -> int | None:
        """The last update from before the collapse showed, if the run is to return there."""
        onset = self.detector.onset
        return None if onset is None or self.options.on_collapse != "rollback" else onset - self.options.collapse_window

    def checkpoints(self, save_every: int) -> int:
        """A rollback needs a checkpoint older than the window in which the collapse showed."""
        return self.options.collapse_window // save_every + 2 if self.options.on_collapse == "rollback" else 0

    def means(self) -> dict[str, float]:
        """Statistics of the last window of rollouts."""
        seen = self.recent
        return {key: sum(values[key] for values in seen) / len(seen) for key in seen[0]} if seen else {}

    def state(self) -> dict[str, Any]:
        return self.detector.state() | {"recent": self.recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.detector.restore(dict(state))
        self.recent = list(state["recent"])


class Run(Generic[O]):
    """One stage of a training run, see the head of this file. Every process has one and makes the same calls."""

    def __init__(
        self,
        setup: Setup,
        log: RunLog,
        stage: Literal["stage1", "stage2"],
        objective: O,
        *,
        resume: bool = False,
        guard: CollapseGuard | None = None,
        show: tuple[str, ...] = ("loss",),
    ) -> None:
        self.setup, self.runlog, self.stage, self.objective = setup, log, stage, objective
        self.options = setup.config.stage1 if stage == "stage1" else setup.config.stage2
        self.resume, self.guard, self.show = resume, guard, show
        self.identity = setup.identity  # now: what changes during the run must not pass as what it began with
        check_alike(setup.accelerator, self.identity)
        self.done = self.total = 0
        self.stopped = False
        self.start: dict[str, float] = {}
        self._began = time.monotonic()
        self._bar = Progress(stage, 0, 0)
        self.parallel, self.optimizer = self._prepare()

    def _prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Adam, and both wrapped for DDP or FSDP2 if `accelerate launch` or `torchrun` asked for it."""
        train, accelerator, objective = self.setup.config.train, self.setup.accelerator, self.objective
        if train.gradient_checkpointing:
            student = objective.student  # transformers renamed it in version 5
            getattr(student, "activation_checkpointing_enable", student.gradient_checkpointing_enable)()
        use_gradients(objective.student, train.gradients)
        for module in objective.modules():
            if isinstance(module, SpikeLinear) and accelerator.distributed_type.value == "FSDP":
                module.keep_snapped = False  # gathered weights live only during a forward pass
        objective.to(accelerator.device)
        # Not the fused one: its step leaves a parameter's version as it was, by which projections know that it changed.
        optimizer = torch.optim.Adam(
            (p for p in objective.parameters() if p.requires_grad),
            lr=self.options.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
        )
        parallel, optimizer = accelerator.prepare(objective, optimizer)
        return parallel, optimizer

    # --- the loop ---

    def updates(self, total: int) -> Iterator[int]:
        """The updates that are missing, counted from 0; a checkpoint is written as configured when one is over."""
        train = self.setup.config.train
        self.total, self.start = total, self.measure()
        self.runlog.note(self.announcement())
        if self.resume:
            self.done = self._load_newest()
        self.runlog.truncate(self.stage, self.done)
        with self.runlog.progress(self.stage, total, self.done) as self._bar:
            while self.done < total and not self.stopped:
                update = self.done
                yield update
                assert self.done == update + 1, "an update ends with run.log()"
                if not self.stopped and (self.done % train.save_every == 0 or self.done == total):
                    self._save()

    def call(self, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """A method of the objective, called through the parallel wrapper."""
        assert not named
        result: T = self.parallel(method, *arguments)
        return result

    def micro_batches(self, parts: Sequence[T]) -> Iterator[T]:
        """Each part in turn. Gradients are exchanged once per optimizer step, with the last one."""
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            with contextlib.nullcontext() if last else self.setup.accelerator.no_sync(self.parallel):
                yield part

    def backward(self, loss: Tensor) -> None:
        # Data parallelism averages gradients over processes; ours are shares of one sum.
        self.setup.accelerator.backward(loss * self.setup.accelerator.num_processes)

    def reduce(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        total: Tensor = self.setup.accelerator.reduce(values, "sum")
        return total

    def step(self, loss: float, learning_rate: float) -> float:
        """Clip, refuse anything that is not finite, take the Adam step. Returns the gradient norm before clipping."""
        parameters = [p for p in self.parallel.parameters() if p.grad is not None]
        # An infinite limit measures the norm and clips nothing.
        found = self.setup.accelerator.clip_grad_norm_(parameters, self.options.max_grad_norm or math.inf)
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise CheckFailed(
                f"{self.stage}: update {self.done + 1} gave loss {loss} and gradient norm {norm}; begin a new run with "
                f"a lower {self.stage}.learning_rate or with {self.stage}.max_grad_norm"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def log(self, update: int, values: Mapping[str, Any]) -> None:
        """End an update: validate if it is time, ask the guard, write the line. The guard may end the loop."""
        train, values = self.setup.config.train, dict(values)
        self.done = update + 1
        if train.eval_every and self.done % train.eval_every == 0:
            values |= self.validate()
        self.stopped = self.guard is not None and self.guard.watch(self.done, values)
        if self.done % train.log_every == 0 or self.done == self.total or self.stopped:
            self.runlog.metrics(self.stage, self.done, values)
        self._bar.advance(**{name: values[name] for name in self.show if name in values})

    # --- what it measures and leaves ---

    def validate(self) -> dict[str, float]:
        """Perplexity and KL(teacher || student) per token on the first windows of the validation text."""
        setup, head = self.setup, output_table(self.setup.teacher)
        length = min(setup.config.data.sequence_length, self.objective.student.config.max_position_embeddings)
        training = self.parallel.training
        self.parallel.eval()
        found = validate(setup, lambda ids, target: self.call(self.objective.token_sums, ids, target, head), length)
        self.parallel.train(training)
        return found

    def measure(self) -> dict[str, float]:
        """What the summary says of the student before the first update and after the last."""
        return self.validate()

    def announcement(self) -> str:
        return (
            f"stage 1 starts at perplexity {self.start['perplexity']:.1f}, KL to the teacher "
            f"{self.start['teacher_kl']:.3f}"
        )

    def save_student(self, target: Path) -> None:
        """The student alone as a plain Hugging Face directory with its tokenizer. Every process must call it."""
        weights = checkpoint.whole_weights(self.parallel)
        if not self.setup.accelerator.is_main_process:
            return
        student, prefix = BiSpikCLMForCausalLM(self.objective.student.config), "student."
        student.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
        with new_directory(target) as folder:
            # What `generate` and the exported bundle do unless told otherwise; greedy decoding mostly repeats itself.
            usual = {"do_sample": True, "temperature": USUAL.temperature, "top_p": USUAL.top_p}
            tokens = {name: getattr(student.config, name) for name in SPECIAL if hasattr(student.config, name)}
            student.generation_config = GenerationConfig(**usual, **tokens)  # type: ignore[no-untyped-call]
            student.save_pretrained(folder)
            self.setup.tokenizer.save(folder)

    def summary(self) -> dict[str, Any]:
        final = self.measure()
        return {
            "updates": self.done,
            "start": self.start,
            "final": final,
            "seconds": round(time.monotonic() - self._began, 1),
        }

    # --- checkpoints ---

    @property
    def checkpoints(self) -> Path:
        return self.runlog.folder / self.stage / "checkpoints"

    def _save(self) -> None:
        train, guard = self.setup.config.train, self.guard
        extra = guard.state() if guard else {}
        keep = max(guard.checkpoints(train.save_every) if guard else 0, train.keep_checkpoints)
        record = {"stage": self.stage, "identity": self.identity, "extra": extra}
        main = self.setup.accelerator.is_main_process
        onset = guard.detector.onset if guard else None  # the last healthy student is kept whatever follows
        checkpoint.save(
            self.checkpoints, self.done, self.parallel, self.optimizer, record, main=main, keep=keep, before=onset
        )

    def _load_newest(self) -> int:
        """Load the newest good checkpoint, if there is one; refuse it when teacher, tokenizer or data have changed."""
        found = checkpoint.newest_good(self.checkpoints, self.parallel, self.runlog.warn)
        if found is None:
            return 0
        record = checkpoint.read_state(found)
        before = record.get("identity")
        before = before if isinstance(before, dict) else {}
        changed = [name for name, value in self.identity.items() if before.get(name) != value]
        if changed:
            raise InputError(
                f"{self.stage}: cannot resume from {found}: the {' and the '.join(changed)} differ from the run's; "
                "restore them, or begin a new run with another --output"
            )
        checkpoint.load(found, self.parallel, self.optimizer)
        if self.guard:
            try:
                self.guard.restore(record["extra"])
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"checkpoint {found} does not fit: it says nothing of the collapse guard") from error
        return int(record["update"])

    def return_to(self, update: int) -> int | None:
        """Load the newest checkpoint of at most this update; returns its update, None if there is none."""
        found = checkpoint.newest_good(self.checkpoints, self.parallel, self.runlog.warn, at_most=update)
        return None if found is None else int(checkpoint.load(found, self.parallel, None)["update"])
