"""Open a trained student and the text it is measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spikeopd.errors import InputError

if TYPE_CHECKING:
    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM


def find_checkpoint(path: Path | str) -> Path:
    """The folder with config.json: the path itself, or `final/` inside a run folder."""
    path = Path(path)
    for folder in (path, path / "final"):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"checkpoint {path}: no config.json here; give the folder that spikeopd-train wrote")


def load_student(path: Path | str) -> BiSpikCLMForCausalLM:
    """The student of a Hugging Face folder, in float32 on the CPU. Only safetensors are read, never a pickle."""
    folder = find_checkpoint(path)
    try:
        kind = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"checkpoint {folder}: config.json cannot be read ({error})") from None
    if kind != "bispikclm":
        raise InputError(
            f"checkpoint {folder}: model_type is {kind!r}, only a trained student ('bispikclm') is exported"
        )
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"checkpoint {folder}: no model.safetensors here; the folder is incomplete")
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
    named = {role: getattr(model.config, f"{role}_token_id", None) for role in ("bos", "eos", "pad")}
    return {role: int(value) for role, value in named.items() if isinstance(value, int)}


def text_windows(source: str, tokenizer: Path, length: int, count: int, split: str = "validation") -> NDArray[Any]:
    """Up to `count` windows of `length` tokens of a text source: int64 [windows, length], spread over the text."""
    from spikeopd.data import prepare, sequential_windows
    from spikeopd.tokenizer import load_tokenizer

    limit = max(50_000, 4 * count * length)
    data = prepare(source, load_tokenizer(tokenizer), split, max_tokens=None if source == "python-docs" else limit)
    windows = sequential_windows(data, min(length, len(data)))
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return windows[np.unique(chosen)].astype(np.int64)


def check_tokens(windows: NDArray[Any], shape: Mapping[str, int] | Any) -> None:
    if windows.size and int(windows.max()) >= shape.vocab_size:
        raise InputError(
            f"tokenizer: produces token {int(windows.max())}, but the model has a vocabulary of {shape.vocab_size}; "
            "name the model's own tokenizer with --tokenizer"
        )
