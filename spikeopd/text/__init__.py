"""Text to tokens: sources of documents, tokenizers, and cached token streams that windows are cut from. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spikeopd.text.sources import Source, Split, open_source
    from spikeopd.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
    from spikeopd.text.tokens import TokenData, batch, prepare, sequential_windows

__all__ = [
    "Source", "Split", "TokenData", "Tokenizer", "batch", "load_tokenizer", "open_source", "prepare",
    "sequential_windows", "train_tokenizer",
]  # fmt: skip
_HOMES = {
    "sources": ("Source", "Split", "open_source"),
    "tokenizer": ("Tokenizer", "load_tokenizer", "train_tokenizer"),
    "tokens": ("TokenData", "batch", "prepare", "sequential_windows"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"spikeopd.text.{module}"), name)
    raise AttributeError(f"module 'spikeopd.text' has no attribute '{name}'")
