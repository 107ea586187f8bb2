"""A small training setup on random tokens with a random OPT teacher, for tests of the stages."""

from __future__ import annotations

from spikeopd.config import load_config
from spikeopd.methods.run import Run
from spikeopd.methods.setup import make_accelerator
from spikeopd.training import random_setup

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
    return random_setup(config, make_accelerator(config))


class Killed(BaseException):
    """Stands for a process that ends at once."""


def kill_at(monkeypatch, stage, update):
    """The run dies in this update of the stage, counted from 0, with its gradient there and its Adam step not taken."""
    original = Run.step

    def step(self, loss, learning_rate):
        if (self.stage, self.done) == (stage, update):
            raise Killed
        return original(self, loss, learning_rate)

    monkeypatch.setattr(Run, "step", step)


def gradients(objective):
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def keep_gradient(monkeypatch):
    """Every update keeps its loss and gradient here instead of stepping."""
    kept = {}

    def step(self, loss, learning_rate):
        kept.update(loss=loss, gradient=gradients(self.objective))
        self.parallel.zero_grad(set_to_none=True)
        return 0.0

    monkeypatch.setattr(Run, "step", step)
    return kept


def worst(a, b):
    assert a.keys() == b.keys() and a
    return max((a[name] - b[name]).abs().max().item() for name in a)
