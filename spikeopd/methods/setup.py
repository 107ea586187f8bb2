"""What both stages need before the first update: tokenizer, data, teacher, student, and the process they run in."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor
from transformers import PreTrainedModel

from spikeopd import quality
from spikeopd.allocation import keep_freed_memory
from spikeopd.config import Config
from spikeopd.errors import CheckFailed, ConfigError, InputError
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.teacher import check_fit, fingerprint, load_teacher, load_teacher_config
from spikeopd.planning import needed
from spikeopd.registry import METHODS
from spikeopd.students import load_student
from spikeopd.text.tokenizer import Tokenizer, load_tokenizer
from spikeopd.text.tokens import TokenData, prepare, sequential_windows


@dataclass
class Setup:
    """Everything a stage reads and nothing it changes."""

    config: Config
    accelerator: Accelerator
    tokenizer: Tokenizer
    teacher: PreTrainedModel
    train: TokenData
    prompts: TokenData
    validation: TokenData
    held_out: TokenData | None = None  # of the prompts' own source, where that is another one

    @property
    def evaluation_prompts(self) -> TokenData:
        """Where prompts that only measure come from: the validation part of what Stage 2's prompts come from."""
        return self.validation if self.held_out is None else self.held_out

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def rows(self, whole: Tensor) -> Tensor:
        """This process's share of a batch: consecutive rows, the same number on each (`check_shares`)."""
        share: Tensor = whole.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        return share.to(self.device)

    def micro_batches(self, whole: Tensor, size: int) -> tuple[Tensor, ...]:
        """This process's share of a batch in parts of `size` rows."""
        return torch.split(self.rows(whole), size)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Fingerprints that a resumed run must find unchanged. Taken once: a large teacher takes seconds to hash."""
        return {
            "teacher": fingerprint(self.teacher),
            "tokenizer": self.tokenizer.fingerprint,
            "train data": self.train.fingerprint,
            "prompt data": self.prompts.fingerprint,
        }


def make_accelerator(config: Config) -> Accelerator:
    train = config.train
    keep_freed_memory(needed(config))
    if train.threads:
        torch.set_num_threads(train.threads)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise ConfigError("FSDP: version 2 is needed; start with accelerate launch --use_fsdp --fsdp_version 2")
        # The launcher's default loads weights on the first process alone and shares out those that train. The frozen
        # models are not among them: they would be zeros everywhere else.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # accelerate keeps its settings for the life of the process; a second run in it may ask for another precision.
    AcceleratorState._reset_state()
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=1))  # for text that the first process tokenises
    made = Accelerator(mixed_precision="bf16" if train.precision == "bf16" else "no", kwargs_handlers=[patience])
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if made.num_processes != started:
        raise ConfigError(
            f"the launcher started {started} processes, and this one sees {made.num_processes}: each would train "
            "alone. Without a GPU start them by torchrun with ACCELERATE_USE_CPU=true"
        )
    return made


def check_shares(config: Config, processes: int) -> None:
    """Every process takes the same number of forward passes: FSDP2 would wait for one that another does not make."""
    rows = config.stage2.batch_size
    if config.train.stage != "1" and rows % processes:
        fitting = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ConfigError(
            f"stage2.batch_size: {rows} trajectories cannot be shared equally by {processes} processes; start "
            f"{fitting} of them, or take a multiple of {processes}"
        )


def check_alike(accelerator: Accelerator, marks: Mapping[str, str]) -> None:
    """Every process must hold the same frozen models and data: `marks` are their fingerprints. All must call it."""
    if accelerator.num_processes == 1:
        return
    mine = torch.tensor([list(hashlib.sha256(mark.encode()).digest()) for mark in marks.values()])
    every = accelerator.gather(mine[None].to(accelerator.device)).cpu()
    differ = [name for name, column in zip(marks, (every != every[0]).any(-1).any(0).tolist(), strict=True) if column]
    if differ:
        raise CheckFailed(f"the processes do not hold the same {' and '.join(differ)}; give every node the same files")


def build(config: Config, accelerator: Accelerator) -> Setup:
    """Load and check everything. The main process tokenises first, so that the others find the cache."""
    check_shares(config, accelerator.num_processes)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.framing)
    options = config.teacher
    check_fit(config, load_teacher_config(options.teacher_model_name_or_path), tokenizer.vocab_size)
    teacher = load_teacher(
        options.teacher_model_name_or_path,
        attentions=(config.train.stage != "2" and config.stage1.maps) or METHODS[config.stage2.method].internals,
        dtype=torch.bfloat16 if options.teacher_precision == "bf16" else torch.float32,
    )
    with accelerator.main_process_first():
        data = token_data(config, tokenizer)
    teacher.to(accelerator.device)
    return Setup(config, accelerator, tokenizer, teacher, **data)


def token_data(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Every text of a run as tokens, by its name in `Setup`, from the cache or tokenised now."""
    data = config.data
    prompts, folder, few = data.prompt_source or data.source, data.cache_dir, data.max_validation_tokens
    held_out = prompts if prompts != data.source else None
    return {
        "train": prepare(data.source, tokenizer, "train", folder, data.max_tokens),
        "prompts": prepare(prompts, tokenizer, "train", folder, data.max_prompt_tokens or data.max_tokens),
        "validation": prepare(data.validation_source or data.source, tokenizer, "validation", folder, few),
        "held_out": None if held_out is None else prepare(held_out, tokenizer, "validation", folder, few),
    }


def configured_student(path: str | Path, config: Config) -> BiSpikCLMForCausalLM:
    """A trained student that must have the sizes of the configuration."""
    student, asked = load_student(path), config.model.sizes()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        mine, theirs = getattr(student.config, name), asked[name]
        if mine != theirs:
            raise InputError(
                f"student {path} has {name} {mine}, the configuration {theirs}; set model.preset or model.{name} to "
                "the student's"
            )
    return student


def cosine_with_warmup(update: int, updates: int, warmup_ratio: float) -> float:
    """Factor on the peak learning rate at `update` (0-based): linear rise, then a cosine to zero."""
    warmup = warmup_ratio * updates
    if update < warmup:
        return (update + 1) / max(warmup, 1.0)
    return 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(updates - warmup, 1.0)))


def validate(
    setup: Setup, sums: Callable[[Tensor, Tensor], Tensor], length: int, windows: int = 64
) -> dict[str, float]:
    """Perplexity of the student and KL(teacher || student) per token, on the first windows of the validation text.

    sums: (ids, teacher features) -> `Objective.token_sums`.
    """
    ids = torch.from_numpy(sequential_windows(setup.validation, length)[:windows].astype("int64"))
    return quality.on_text(sums, setup.teacher, ids.to(setup.device))
