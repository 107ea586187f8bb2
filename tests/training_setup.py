"""A small training setup on random tokens with a random OPT teacher, for tests of the stages."""

from __future__ import annotations

from spikeopd.config import load_config
from spikeopd.methods.setup import make_accelerator
from spikeopd.training import _random_setup

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2", "model.ffn_dim=64",
    "model.vocab_size=1024", "model.max_position_embeddings=64", "model.word_embed_proj_dim=32",
    "data.sequence_length=16",
    "stage1.updates=4", "stage1.micro_batch_size=4", "stage1.gradient_accumulation_steps=1",
    "stage2.updates=4", "stage2.batch_size=4", "stage2.micro_batch_size=4", "stage2.prompt_length=10",
    "stage2.max_completion_length=6", "stage2.spike_layers=[1,2]", "stage2.learning_rate=1e-3",
    "train.save_every=2", "train.threads=1",
]  # fmt: skip


def small_config(*overrides: str):
    return load_config("tiny", [*SMALL, *overrides])


def small_setup(*overrides: str):
    config = small_config(*overrides)
    return _random_setup(config, make_accelerator(config.train))
