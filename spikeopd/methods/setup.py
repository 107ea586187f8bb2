"""What both stages need before the first update: tokenizer, data, teacher, student, and the process they run in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import PreTrainedModel

from spikeopd import quality, students
from spikeopd.config import Config, TrainConfig
from spikeopd.errors import InputError
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.teacher import check_pair, check_vocabulary, fingerprint, load_teacher, output_table
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

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def rows(self, whole: Tensor) -> Tensor:
        """This process's share of a batch: consecutive rows."""
        return whole.chunk(self.accelerator.num_processes)[self.accelerator.process_index].to(self.device)

    def identity(self) -> dict[str, str]:
        """Fingerprints that a resumed run must find unchanged."""
        return {
            "teacher": fingerprint(self.teacher),
            "tokenizer": self.tokenizer.fingerprint,
            "train data": self.train.fingerprint,
            "prompt data": self.prompts.fingerprint,
        }


def make_accelerator(train: TrainConfig) -> Accelerator:
    if train.threads:
        torch.set_num_threads(train.threads)
    # accelerate keeps its settings for the life of the process; a second run in it may ask for another precision.
    AcceleratorState._reset_state()
    return Accelerator(mixed_precision="bf16" if train.precision == "bf16" else "no")


def build(config: Config, accelerator: Accelerator) -> Setup:
    """Load and check everything. The main process tokenises first, so that the others find the cache."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config.model.vocab_size, tokenizer.vocab_size, "the student (model.vocab_size)")
    options = config.teacher
    teacher = load_teacher(
        options.teacher_model_name_or_path,
        tokenizer_size=tokenizer.vocab_size,
        attentions=config.train.stage != "2" or config.stage2.method in ("continued_spad", "oprd"),
        dtype=torch.bfloat16 if options.teacher_precision == "bf16" else torch.float32,
    )
    check_pair(teacher, config.model.vocab_size)
    data = config.data
    with accelerator.main_process_first():
        train = prepare(data.source, tokenizer, "train", data.cache_dir, data.max_tokens)
        prompts = prepare(data.prompt_source or data.source, tokenizer, "train", data.cache_dir, data.max_tokens)
        validation = prepare(
            data.validation_source or data.source, tokenizer, "validation", data.cache_dir, data.max_validation_tokens
        )
    teacher.to(accelerator.device)
    return Setup(config, accelerator, tokenizer, teacher, train, prompts, validation)


def load_student(path: str, config: Config) -> BiSpikCLMForCausalLM:
    """A trained student of the configured size."""
    student = students.load_student(path)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        mine, theirs = getattr(student.config, name), getattr(config.model, name)
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


def validate(setup: Setup, objective: Any, length: int, windows: int = 64) -> dict[str, float]:
    """Perplexity of the student and KL(teacher || student) per token, on the first windows of the validation text."""
    training = objective.training
    objective.eval()
    head, chunk = output_table(setup.teacher), setup.config.train.kl_chunk_tokens
    ids = torch.from_numpy(sequential_windows(setup.validation, length)[:windows].astype("int64")).to(setup.device)
    found = quality.on_text(lambda part, target: objective("token_sums", part, target, head, chunk), setup.teacher, ids)
    objective.train(training)
    return found
