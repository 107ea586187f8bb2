"""Bundles for the tests of running them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from random_models import random_model, random_shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spikeopd.contracts import SpikeModel, bundle


@pytest.fixture(scope="session")
def model() -> SpikeModel:
    return random_model(random_shape(heads=2, head_dim=8, layers=2, ffn=24, vocab=257, positions=48), seed=5)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte level: token 0 begins and ends a text, every byte is one token."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    result = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(alphabet)}, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    return result


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[SpikeModel], None]:
    """Makes every bundle hold a model that is in memory."""

    def replace(held: SpikeModel) -> None:
        manifest = {"shape": held.shape.to_dict(), "precision": held.precision, "tokens": {"bos": 0, "eos": 0}}
        monkeypatch.setattr(bundle, "read_manifest", lambda path: manifest)
        monkeypatch.setattr(bundle, "load_bundle", lambda path, place: held)

    return replace


@pytest.fixture
def folder(tmp_path: Path, model: SpikeModel, tokenizer: Tokenizer, hold: Callable[[SpikeModel], None]) -> Path:
    """A bundle whose arrays come from memory."""
    path = tmp_path / "bundle"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "manifest.json").write_text("{}")
    hold(model)
    return path
