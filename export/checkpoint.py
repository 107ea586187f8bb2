"""What an export asks of a student's folder beside the student itself: tokenizer, special tokens, text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spikeopd.contracts import Array, ModelShape
from spikeopd.contracts.bundle import SPECIAL_TOKENS
from spikeopd.errors import InputError, short
from spikeopd.files import read_json
from spikeopd.sampling import GENERATION
from spikeopd.text.sources import Split
from spikeopd.text.tokens import prepare, sequential_windows

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
    from spikeopd.text.tokenizer import Tokenizer


def check_context(config: Mapping[str, Any], context: int) -> None:
    """`build_graph` asks the same of the model; this asks before it is loaded."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and context > positions:
        raise InputError(f"--context {context}: the unrolled profile takes 1 to {positions} tokens")


def find_tokenizer(checkpoint: Path, given: Path | str | None) -> Path:
    """tokenizer.json of the bundle."""
    path = Path(given) if given else checkpoint
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no tokenizer; name the folder or tokenizer.json with --tokenizer")
    return file


def generation_values(folder: Path) -> dict[str, Any]:
    """What generation_config.json says about sampling, if there is one: a bundle's `generation`."""
    file = folder / "generation_config.json"
    try:
        config = dict(read_json(file)) if file.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: cannot be read ({short(error)})") from error
    known = ("do_sample", *GENERATION)
    return {name: config[name] for name in known if isinstance(config.get(name), int | float)}


def token_ids(model: BiSpikCLMForCausalLM) -> dict[str, int]:
    """Ids of the special tokens that the config names."""
    named = {role: getattr(model.config, f"{role}_token_id", None) for role in SPECIAL_TOKENS}
    found = {role: value for role, value in named.items() if isinstance(value, int)}
    for role, value in found.items():
        if not 0 <= value < model.config.vocab_size:
            raise InputError(
                f"checkpoint: {role}_token_id {value} in config.json is no token of a vocabulary of "
                f"{model.config.vocab_size}; correct it"
            )
    return found


def text_windows(source: str, tokenizer: Tokenizer, length: int, count: int, split: Split = "validation") -> Array:
    """Up to `count` windows of `length` tokens of a text source: int64 [windows, length], spread over the text."""
    limit = max(50_000, 4 * count * length)
    data = prepare(source, tokenizer, split, max_tokens=None if source == "python-docs" else limit)
    windows = sequential_windows(data, min(length, len(data)))
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return np.asarray(windows[np.unique(chosen)], dtype=np.int64)


def check_tokens(windows: Array, shape: ModelShape) -> None:
    if windows.size and int(windows.max()) >= shape.vocab_size:
        raise InputError(
            f"tokenizer: produces token {int(windows.max())}, but the model has a vocabulary of {shape.vocab_size}; "
            "name the model's own tokenizer with --tokenizer"
        )
