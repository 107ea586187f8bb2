"""A training run from a configuration: both stages into one folder. `spikeopd-train` is this on the command line."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import OPTConfig, OPTForCausalLM

from spikeopd import registry
from spikeopd.card import write_cards
from spikeopd.config import (
    Config,
    ModelConfig,
    Overrides,
    config_difference,
    config_to_dict,
    load_config,
    to_yaml,
    with_overrides,
)
from spikeopd.errors import DISK_FULL, ConfigError, InputError
from spikeopd.methods import spad
from spikeopd.methods.pretrain import PretrainOptions, pretrain
from spikeopd.methods.setup import Setup, build, make_accelerator, token_data
from spikeopd.models.initialise import build_student
from spikeopd.models.teacher import freeze
from spikeopd.paths import check_paths
from spikeopd.runlog import RunLog, environment, read_metrics
from spikeopd.students import no_bars
from spikeopd.text.tokenizer import load_tokenizer
from spikeopd.text.tokens import TokenData, prepare


@dataclass(frozen=True)
class TrainingRun:
    """A finished run. summary: the numbers of summary.json; main: False on every process but the first."""

    folder: Path
    config: Config = field(repr=False)
    summary: dict[str, Any] = field(repr=False)
    main: bool = True

    @property
    def student(self) -> Path:
        """Folder of the student that the last stage left, as `load_student` and `spikeopd-export` take it."""
        return self.folder / ("stage1/final" if self.config.train.stage == "1" else "final")

    def metrics(self) -> list[dict[str, Any]]:
        """Every logged update."""
        return read_metrics(self.folder)


def train(
    recipe: str | Path | Config,
    output: str | Path,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    quiet: bool = False,
    check: bool = True,
) -> TrainingRun:
    """Run the configured stages into the folder `output`.

    recipe: a name (`spikeopd-train --list recipes`), a YAML file or a loaded `Config`
    overrides: {"stage1.updates": 50} or ["stage1.updates=50"]
    resume: continue the run in `output`, bit for bit on a CPU
    quiet: no progress on stderr
    check: a resumed run must have been begun with this configuration (a study knows it by the run's key)

    Raises ConfigError, InputError or CheckFailed (all SpikeOPDError) with a line that says what to do.
    """
    config = with_overrides(recipe, overrides) if isinstance(recipe, Config) else load_config(recipe, overrides)
    folder = Path(output)
    if resume and check:
        _same_config(config, folder)
    check_paths(config, folder, resume)
    no_bars()
    accelerator = make_accelerator(config)
    main = accelerator.is_main_process
    with (
        _full_disk(folder),
        RunLog(folder, active=main, quiet=quiet, tensorboard=config.train.tensorboard) as log,
    ):
        log.hold()
        setup = build(config, accelerator)
        seeds = {"train": config.train.seed}
        log.start(to_yaml(config), environment(device=str(accelerator.device), seeds=seeds), resume=resume)
        summary: dict[str, Any] = {"output": str(folder), "recipe": config.model.preset}
        if config.train.stage != "2":
            summary["stage1"] = spad.run(setup, log, resume=resume)
        if config.train.stage != "1":
            start = config.stage2.model_name_or_path or str(folder / "stage1" / "final")
            summary["stage2"] = method(config)(setup, log, start, resume=resume)
        log.summary(summary)
        if main:
            write_cards(folder, config, summary)
    return TrainingRun(folder, config, summary, main)


def prepare_tokens(
    recipe: str | Path | Config, overrides: Overrides = (), *, quiet: bool = False
) -> dict[str, dict[str, Any]]:
    """Tokenise the text of a recipe into the token cache; returns tokens and documents of each part.

    Several gigabytes of text take long, and under a launcher all processes would wait. Cut short, it goes on.
    """
    config = with_overrides(recipe, overrides) if isinstance(recipe, Config) else load_config(recipe, overrides)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.framing)
    with contextlib.nullcontext() if quiet else _lines():
        found = token_data(config, tokenizer)
    return {
        name: {"source": data.source, "tokens": len(data), "documents": data.documents}
        for name, data in found.items()
        if data is not None
    }


@contextmanager
def _lines() -> Iterator[None]:
    """What the token cache reports, as lines on stderr."""
    logger, handler = logging.getLogger("spikeopd"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise InputError(
            f"{folder}: cannot be written ({error.strerror}); everything up to the last checkpoint is there: make "
            "room, then continue with --resume"
        ) from error


def method(config: Config) -> Callable[..., dict[str, Any]]:
    """The chosen method of Stage 2, see `registry.Method`."""
    chosen: Callable[..., dict[str, Any]] = registry.load(registry.METHODS[config.stage2.method].target)
    return chosen


def _same_config(config: Config, output: Path) -> None:
    """A resumed run must be the same run: refuse every difference that could change its result."""
    path = output / "config.yaml"
    if not path.is_file():
        raise InputError(f"{output} holds no run to resume (no config.yaml); leave --resume out to begin one")
    changed = config_difference(load_config(path), config, harmless=False)
    if changed:
        more = [f"and {len(changed) - 8} more"] if len(changed) > 8 else []
        raise ConfigError(
            f"{output} was begun with another configuration and cannot be resumed with this one: "
            + "; ".join(changed[:8] + more)
        )


def dry_run(config: Config, note: Callable[[str], None] | None = None) -> dict[str, Any]:
    """One small update of each stage with random weights on random tokens, and the recipe's sizes.

    A large recipe is tried with the same parts at the sizes of `toy`; whether the real ones fit a machine is for `plan`
    to say. note: called before each step, since together they may take a minute.
    """
    note = note or (lambda line: None)
    stage2 = replace(
        config.stage2,
        updates=1,
        batch_size=2,
        micro_batch_size=1,
        prompt_length=min(8, config.stage2.prompt_length),
        max_completion_length=min(4, config.stage2.max_completion_length),
    )
    stage1 = replace(config.stage1, updates=1, micro_batch_size=1, gradient_accumulation_steps=2, checkpoint_updates=())
    model = toy(config.model)
    layers = model.num_hidden_layers or 1
    small = replace(
        config,
        model=model,
        stage1=stage1,
        stage2=replace(stage2, spike_layers=tuple(n for n in stage2.spike_layers if n <= layers) or (layers,)),
        data=replace(config.data, sequence_length=min(16, config.data.sequence_length)),
        train=replace(config.train, tensorboard=False),
    )
    no_bars()
    with torch.device("meta"):
        whole = build_student(config.model)
    parameters = sum(p.numel() for p in whole.parameters())
    blocks = sum(p.numel() for p in whole.model.layers.parameters())
    sizes = {name: f"{value} for {config.model.sizes()[name]}" for name, value in model.sizes().items()}
    smaller = {name: text for name, text in sizes.items() if text.split()[0] != text.split()[-1]}
    note("a random teacher and student" + (", smaller than the recipe's" if smaller else ""))
    setup = random_setup(small, make_accelerator(small))
    with tempfile.TemporaryDirectory() as folder, RunLog(folder, quiet=True) as log:
        losses: dict[str, Any] = {}
        if config.train.stage != "2":
            note("Stage 1: one update on random tokens")
            losses["stage1"] = spad.run(setup, log)["final"]
        else:
            spad.initial_student(setup).save_pretrained(Path(folder) / "stage1" / "final")
        if config.train.stage != "1":
            note("Stage 2: one update on the student's own tokens")
            losses["stage2"] = method(small)(setup, log, str(Path(folder) / "stage1" / "final"))["final"]
    return {
        "dry_run": True,
        "parameters": parameters,
        "block_parameters": blocks,
        "training_gib": round(16 * parameters / 2**30, 2),  # weights, gradients and two moments in float32
        **({"tried_with": smaller} if smaller else {}),
        "after_one_update": losses,
        "config": config_to_dict(config),
    }


def toy(model: ModelConfig) -> ModelConfig:
    """A model of the same parts that builds in seconds: no more than four heads and layers, and 2,048 tokens."""
    heads, width = model.num_attention_heads or 1, model.hidden_size or 1
    few = min(heads, 4)
    narrow = few * min(width // heads, 32) if width > 256 else width
    return replace(
        model,
        hidden_size=narrow,
        num_attention_heads=few if width > 256 else heads,
        ffn_dim=max(1, (model.ffn_dim or 1) * narrow // width),
        word_embed_proj_dim=max(1, (model.word_embed_proj_dim or width) * narrow // width),
        num_hidden_layers=min(model.num_hidden_layers or 1, 4),
        vocab_size=min(model.vocab_size or 1, 2048),
        max_position_embeddings=min(model.max_position_embeddings or 1, 512),
    )


def random_setup(config: Config, accelerator: Accelerator) -> Setup:
    """A teacher of the student's sizes with random weights, and random tokens."""
    model = config.model
    torch.manual_seed(0)
    named: dict[str, Any] = {**model.sizes(), "attn_implementation": "eager"}
    shape = OPTConfig(**named, do_layer_norm_before=model.word_embed_proj_dim == model.hidden_size)
    teacher = freeze(OPTForCausalLM(shape)).to(accelerator.device)  # type: ignore[no-untyped-call]
    tokens = np.random.default_rng(0).integers(4, shape.vocab_size, 4096).astype(np.uint32)
    data = TokenData(tokens, "random", "random", "train", 1, 4 * len(tokens))
    return Setup(config, accelerator, load_tokenizer("tiny"), teacher, data, data, data)


def train_teacher(
    output: str | Path,
    *,
    source: str = "python-docs",
    tokenizer: str = "tiny",
    updates: int | None = None,
    hidden_size: int | None = None,
    layers: int | None = None,
    seed: int | None = None,
    rule_runs: float = 0.0,
    start: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a small OPT teacher on the text `source` into the folder `output`; returns its summary.

    What is None is as in the shipped teacher. rule_runs: share of rows that end in a run of one character (the
    constructed stress test); start: continue from this teacher.
    """
    no_bars()
    if threads:
        torch.set_num_threads(threads)
    sizes = {"hidden_size": hidden_size, "ffn_dim": 4 * hidden_size} if hidden_size else {}
    given = {"updates": updates, "num_hidden_layers": layers, "seed": seed}
    chosen = {name: value for name, value in given.items() if value is not None}
    options = PretrainOptions(**sizes, **chosen, rule_runs=rule_runs, start=start)
    reader = load_tokenizer(tokenizer)
    train, validation = prepare(source, reader, "train"), prepare(source, reader, "validation")
    with _full_disk(Path(output)), RunLog(output, quiet=quiet) as log:
        return pretrain(options, reader, train, validation, Path(output), log.note)
