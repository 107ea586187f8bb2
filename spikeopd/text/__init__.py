"""Text to tokens: sources of documents, tokenizers, and cached token streams that windows are cut from. No torch.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spikeopd.text.sources import Source as Source
    from spikeopd.text.sources import Split as Split
    from spikeopd.text.sources import open_source as open_source
    from spikeopd.text.tokenizer import Tokenizer as Tokenizer
    from spikeopd.text.tokenizer import load_tokenizer as load_tokenizer
    from spikeopd.text.tokenizer import train_tokenizer as train_tokenizer
    from spikeopd.text.tokens import TokenData as TokenData
    from spikeopd.text.tokens import batch as batch
    from spikeopd.text.tokens import prepare as prepare
    from spikeopd.text.tokens import sequential_windows as sequential_windows

_HOMES = {
    **dict.fromkeys(("Source", "Split", "open_source"), "sources"),
    **dict.fromkeys(("Tokenizer", "load_tokenizer", "train_tokenizer"), "tokenizer"),
    **dict.fromkeys(("TokenData", "batch", "prepare", "sequential_windows"), "tokens"),
}
__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'spikeopd.text' has no attribute {name!r}")
    return getattr(import_module(f"spikeopd.text.{_HOMES[name]}"), name)
