"""Small models shared by the evaluation tests, and a network that cannot be used."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def student():
    import torch

    from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM

    torch.manual_seed(3)
    config = BiSpikCLMConfig(
        vocab_size=1024, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
        max_position_embeddings=128,
    )  # fmt: skip
    model = BiSpikCLMForCausalLM(config).eval()
    # A random student says nearly nothing; louder outputs make differences visible.
    model.model.logit_scale.data.fill_(1.5)
    return model


@pytest.fixture(scope="session")
def checkpoint(student, tmp_path_factory) -> Path:
    from spikeopd.text.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("student")
    student.save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError("an attempt to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
