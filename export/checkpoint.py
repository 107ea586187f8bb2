"""Open a trained student and the text it is measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts.bundle import SPECIAL_TOKENS
from spikeopd.errors import InputError
from spikeopd.files import find_model

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
    from spikeopd.text.tokenizer import Tokenizer


def find_checkpoint(path: Path | str) -> Path:
    """The folder with config.json: the path itself, or the student of a run folder."""
    folder = find_model(path)
    if folder is None:
        raise InputError(f"checkpoint {path}: no config.json here; give the folder that spikeopd-train wrote")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a student, checked as far as it goes without loading the model."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"checkpoint {folder}: config.json cannot be read ({error})") from None
    if kind != "bispikclm":
        raise InputError(
            f"checkpoint {folder}: model_type is {kind!r}, only a trained student ('bispikclm') is exported"
        )
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"checkpoint {folder}: no model.safetensors here; the folder is incomplete")
    return config


def check_context(config: Mapping[str, Any], context: int) -> None:
    """`build_graph` asks the same of the model; this asks before it is loaded."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and context > positions:
        raise InputError(f"--context {context}: the unrolled profile takes 1 to {positions} tokens")


def load_student(folder: Path) -> BiSpikCLMForCausalLM:
    """The student of a folder, in float32 on the CPU. Only safetensors are read, never a pickle."""
    import torch
    from transformers.utils import logging as transformers_logging

    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

    transformers_logging.disable_progress_bar()
    try:
        model, info = BiSpikCLMForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many kinds; all mean a damaged folder
        raise InputError(f"checkpoint {folder}: cannot be loaded ({' '.join(str(error).split())[:200]})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"checkpoint {folder}: model.safetensors lacks {missing[0]} and {len(missing) - 1} more")
    return model.eval()


def find_tokenizer(checkpoint: Path, given: str | None) -> Path:
    """tokenizer.json of the bundle."""
    path = Path(given) if given else checkpoint
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no tokenizer; name the folder or tokenizer.json with --tokenizer")
    return file


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


def text_windows(source: str, tokenizer: Tokenizer, length: int, count: int, split: str = "validation") -> NDArray[Any]:
    """Up to `count` windows of `length` tokens of a text source: int64 [windows, length], spread over the text."""
    from spikeopd.text.tokens import prepare, sequential_windows

    limit = max(50_000, 4 * count * length)
    data = prepare(source, tokenizer, split, max_tokens=None if source == "python-docs" else limit)
    windows = sequential_windows(data, min(length, len(data)))
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return windows[np.unique(chosen)].astype(np.int64)


def check_tokens(windows: NDArray[Any], shape: Mapping[str, int] | Any) -> None:
    if windows.size and int(windows.max()) >= shape.vocab_size:
        raise InputError(
            f"tokenizer: produces token {int(windows.max())}, but the model has a vocabulary of {shape.vocab_size}; "
            "name the model's own tokenizer with --tokenizer"
        )
