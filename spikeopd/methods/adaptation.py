"""What SpikeOPD shares with its controls: a student to start from, its frozen copy, and how a run of Stage 2 ends."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spikeopd import quality
from spikeopd.config import Stage2Config
from spikeopd.errors import CheckFailed
from spikeopd.methods.run import CollapseGuard, Objective, Run
from spikeopd.methods.setup import Setup, check_alike, configured_student
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.projection import SpikeLinear
from spikeopd.models.teacher import fingerprint, freeze, output_table
from spikeopd.rollout import Rollout, rollout, uniforms
from spikeopd.runlog import RunLog
from spikeopd.text.tokens import batch


class Policy(Objective):
    """The active student, as far as every method of Stage 2 uses it."""

    def rollout(
        self, prompts: Tensor, uniform: Tensor, temperature: float, layers: tuple[int, ...], scope: str
    ) -> Rollout:
        return rollout(self.student, prompts, uniform, temperature, layers, scope)

    def teacher_kl(self, sequences: Tensor, teacher: Tensor, teacher_head: nn.Module) -> Tensor:
        """Sum of KL(teacher || student) over the visited prefixes, whatever divergence the method trains with."""
        return quality.visited_kl(self.student, sequences, teacher, teacher_head, self.chunk)


Q = TypeVar("Q", bound=Policy)


def load_pair(setup: Setup, student_path: str) -> tuple[BiSpikCLMForCausalLM, BiSpikCLMForCausalLM]:
    """(theta, theta_0): the student to train and its frozen copy, the reference."""
    student = configured_student(student_path, setup.config)
    student.to(setup.device)  # type: ignore[arg-type]  # transformers wraps `to`
    reference = copy.deepcopy(student)
    freeze(reference)
    for module in reference.modules():
        if isinstance(module, SpikeLinear):
            module.keep_snapped = False  # used once an update: its weights on the grid need not lie there twice
    return student, reference


class Adaptation(Run[Q]):
    """A run of Stage 2. reference: the frozen student it started from, policy pi_ref."""

    options: Stage2Config

    def __init__(
        self, setup: Setup, log: RunLog, policy: Q, reference: BiSpikCLMForCausalLM, *, resume: bool = False
    ) -> None:
        guard = CollapseGuard(setup.config.stage2, log.note)
        show = ("loss", "opd", "adj", "dist4")
        super().__init__(setup, log, "stage2", policy, resume=resume, guard=guard, show=show)
        self.reference, self.watcher = reference, guard
        self.identity = {**self.identity, "student to start from": fingerprint(reference)}
        check_alike(setup.accelerator, self.identity)
        self._frozen = {
            "teacher": (setup.teacher, self.identity["teacher"]),
            "reference": (reference, self.identity["student to start from"]),
        }

    def measure(self) -> dict[str, float]:
        return self.validate() | self.self_generated()

    def announcement(self) -> str:
        return (
            f"stage 2 starts at perplexity {self.start['perplexity']:.1f}, KL to the teacher on its own prefixes "
            f"{self.start['self_kl']:.3f}"
        )

    def self_generated(self, rows: int = 32) -> dict[str, float]:
        """KL(teacher || student) on the student's own continuations of fixed validation prompts, their statistics."""
        setup, options, policy = self.setup, self.options, self.objective
        head = output_table(setup.teacher)
        prompts = torch.from_numpy(
            batch(setup.evaluation_prompts, batch_size=rows, length=options.prompt_length, seed=0, step=0)
        ).to(setup.device)
        found, _ = quality.on_own_text(
            lambda part, numbers: self.call(policy.rollout, part, numbers, options.temperature, (), options.rate_scope),
            lambda sequences, target: self.call(policy.teacher_kl, sequences, target, head),
            setup.teacher,
            prompts,
            uniforms(0, 0, rows, options.max_completion_length),
        )
        return {name: found[name] for name in ("self_kl", "adj", "dist4", "run")}

    def finish(self) -> dict[str, Any]:
        """Roll back if the guard asks for it, prove that nothing frozen moved, leave `final/`, return the summary."""
        guard = self.watcher
        rolled_back = {} if guard.rollback is None else {"rolled_back_to": self.roll_back(guard.rollback)}
        for name, (model, mark) in self._frozen.items():
            if fingerprint(model) != mark:
                raise CheckFailed(f"stage 2: the frozen {name} changed during training; this run must not be used")
        self.save_student(self.runlog.folder / "final")
        whole = self.summary()
        seconds = whole.pop("seconds")
        head = {"method": self.options.method, "updates": whole.pop("updates"), "onset": guard.detector.onset}
        return head | rolled_back | whole | {"last_rollouts": guard.means(), "seconds": seconds}

    def roll_back(self, healthy: int) -> int:
        """Return to the newest checkpoint from before the collapse showed; to the Stage-1 student if there is none."""
        found = self.return_to(healthy)
        if found is None:
            self.objective.student.load_state_dict(self.reference.state_dict())
        return found or 0


def with_stage2(setup: Setup, **changes: Any) -> Setup:
    """The same setup under other Stage-2 options: a control states what it leaves out."""
    return replace(setup, config=replace(setup.config, stage2=replace(setup.config.stage2, **changes)))


def prompt_rows(setup: Setup, update: int, length: int) -> Tensor:
    """The corpus windows of an update, [B, length]: every method of Stage 2 draws them alike."""
    options, seed = setup.config.stage2, setup.config.train.seed
    return torch.from_numpy(
        batch(setup.prompts, batch_size=options.batch_size, length=length, seed=seed + 1, step=update)
    )
