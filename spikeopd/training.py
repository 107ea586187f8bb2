"""A training run from a configuration: both stages into one folder. What `spikeopd-train` calls, and Python may too."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

from spikeopd.config import Config, config_difference, load_config, to_yaml
from spikeopd.errors import ConfigError, InputError
from spikeopd.methods import spad
from spikeopd.methods.baselines import METHODS
from spikeopd.methods.setup import Setup, build, make_accelerator
from spikeopd.models.teacher import freeze
from spikeopd.runlog import RunLog, environment
from spikeopd.text.tokenizer import load_tokenizer
from spikeopd.text.tokens import TokenData, prepare


def train(
    config: Config, output: Path, *, resume: bool = False, quiet: bool = False, check: bool = True
) -> dict[str, Any] | None:
    """Run the configured stages into `output`; returns the summary on the main process, None on the others.

    check: a resumed run must have been begun with this configuration. A study knows it by the run's key.
    """
    if resume and check:
        _same_config(config, output)
    elif not resume and (output / "config.yaml").exists():
        raise InputError(f"{output} already holds a run; continue it with --resume, or give another --output")
    accelerator = make_accelerator(config.train)
    main = accelerator.is_main_process
    setup = build(config, accelerator)
    log = RunLog(output, active=main, quiet=quiet, tensorboard=config.train.tensorboard)
    with log:
        seeds = {"train": config.train.seed}
        log.start(to_yaml(config), environment(device=str(accelerator.device), seeds=seeds), resume=resume)
        summary: dict[str, Any] = {"output": str(output), "recipe": config.model.preset}
        if config.train.stage != "2":
            summary["stage1"] = run_stage1(setup, log, resume)
        if config.train.stage != "1":
            start = config.stage2.model_name_or_path or str(output / "stage1" / "final")
            summary["stage2"] = METHODS[config.stage2.method](setup, log, start, resume=resume)
        log.summary(summary)
    return summary if main else None


def run_stage1(setup: Setup, log: RunLog, resume: bool) -> dict[str, Any]:
    return spad.run(setup, log, resume=resume)


def _same_config(config: Config, output: Path) -> None:
    """A resumed run must be the same run: refuse every difference that could change its result."""
    path = output / "config.yaml"
    if not path.is_file():
        raise InputError(f"{output} holds no run to resume (no config.yaml); leave --resume out to begin one")
    changed = config_difference(load_config(path), config, harmless=False)
    if changed:
        raise ConfigError(
            f"{output} was begun with another configuration and cannot be resumed with this one: " + "; ".join(changed)
        )


def dry_run(config: Config) -> dict[str, Any]:
    """Build the recipe's model with random weights, take one small update of each stage on random tokens."""
    stage2 = replace(
        config.stage2,
        updates=1,
        batch_size=2,
        micro_batch_size=1,
        prompt_length=min(8, config.stage2.prompt_length),
        max_completion_length=min(4, config.stage2.max_completion_length),
    )
    stage1 = replace(config.stage1, updates=1, micro_batch_size=1, gradient_accumulation_steps=2, checkpoint_updates=())
    small = replace(
        config,
        stage1=stage1,
        stage2=stage2,
        data=replace(config.data, sequence_length=min(16, config.data.sequence_length)),
        train=replace(config.train, tensorboard=False),
    )
    accelerator = make_accelerator(small.train)
    setup = _random_setup(small, accelerator)
    student = spad.initial_student(setup)
    parameters = sum(p.numel() for p in student.parameters())
    blocks = sum(p.numel() for p in student.model.layers.parameters())
    with tempfile.TemporaryDirectory() as folder, RunLog(folder, quiet=True) as log:
        losses: dict[str, Any] = {}
        if config.train.stage != "2":
            losses["stage1"] = spad.run(setup, log)["final"]
        else:
            student.save_pretrained(Path(folder) / "stage1" / "final")
        if config.train.stage != "1":
            run = METHODS[config.stage2.method]
            losses["stage2"] = run(setup, log, str(Path(folder) / "stage1" / "final"), resume=False)["final"]
    from spikeopd.config import config_to_dict

    return {
        "dry_run": True,
        "parameters": parameters,
        "block_parameters": blocks,
        "training_gib": round(16 * parameters / 2**30, 2),  # weights, gradients and two moments in float32
        "after_one_update": losses,
        "config": config_to_dict(config),
    }


def _random_setup(config: Config, accelerator: Any) -> Setup:
    model = config.model
    torch.manual_seed(0)
    teacher = freeze(
        OPTForCausalLM(
            OPTConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                num_hidden_layers=model.num_hidden_layers,
                num_attention_heads=model.num_attention_heads,
                ffn_dim=model.ffn_dim,
                max_position_embeddings=model.max_position_embeddings,
                word_embed_proj_dim=model.word_embed_proj_dim,
                do_layer_norm_before=model.word_embed_proj_dim == model.hidden_size,
                attn_implementation="eager",
            )
        )
    )
    tokens = np.random.default_rng(0).integers(4, model.vocab_size, 4096).astype(np.uint32)
    data = TokenData(tokens, "random", "random", "train", 1, 4 * len(tokens))
    return Setup(config, accelerator, load_tokenizer("tiny"), teacher.to(accelerator.device), data, data, data)


def train_teacher(arguments: Any) -> dict[str, Any]:
    """`spikeopd-train teacher`."""
    from spikeopd.methods.pretrain import PretrainOptions, pretrain

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    given = {
        "updates": arguments.updates,
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.layers,
        "seed": arguments.seed,
    }
    options = PretrainOptions(
        **{name: value for name, value in given.items() if value is not None},
        rule_runs=arguments.rule_runs,
        start=arguments.start,
    )
    if arguments.hidden_size:
        options = replace(options, ffn_dim=4 * arguments.hidden_size)
    tokenizer = load_tokenizer(arguments.tokenizer)
    data = [prepare(arguments.source, tokenizer, split) for split in ("train", "validation")]
    with RunLog(Path(arguments.output)) as log:
        return pretrain(options, tokenizer, *data, Path(arguments.output), log.note)
