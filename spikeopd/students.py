"""A trained student from disk: found, checked, loaded. Safetensors only; nothing is asked of the network."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.errors import BackendMissing, InputError
from spikeopd.files import find_model

if TYPE_CHECKING:
    import torch

    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

MODEL_TYPE = "bispikclm"


def find_student(path: Path | str) -> Path:
    """The folder with the student's config.json: the path itself, or the place of the student in a run folder."""
    folder = find_model(path)
    if folder is None:
        raise InputError(f"student {path}: no config.json there; give the folder that spikeopd-train wrote")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a student's folder, checked as far as it goes without loading the model. No torch."""
    try:
        config = dict(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"student {folder}: config.json cannot be read ({error})") from error
    kind = config.get("model_type")
    if kind != MODEL_TYPE:
        raise InputError(f"student {folder}: model_type is {kind!r}, only a trained student ({MODEL_TYPE!r}) is read")
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"student {folder}: no model.safetensors there; the folder is incomplete")
    return config


def is_student(folder: Path) -> bool:
    """Whether a Hugging Face directory says that it holds a student; damaged ones do not."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return bool(json.loads((folder / "config.json").read_text("utf-8")).get("model_type") == MODEL_TYPE)
    return False


def load_student(path: Path | str, *, dtype: torch.dtype | None = None) -> BiSpikCLMForCausalLM:
    """The student of a run folder or of a Hugging Face directory, in evaluation mode on the CPU.

    dtype: of the weights; float32 if None.
    """
    folder = find_student(path)
    read_config(folder)
    try:
        import torch
        from transformers.utils import logging

        from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
    except ImportError as error:
        raise BackendMissing(
            f"student {folder}: needs torch and transformers ({error}): pip install 'spikeopd[train]'"
        ) from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no types for it
    try:
        loaded: Any = BiSpikCLMForCausalLM.from_pretrained(
            folder, dtype=dtype or torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except InputError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds; all mean a damaged folder
        raise InputError(f"student {folder}: cannot be loaded ({' '.join(str(error).split())[:200]})") from error
    student: BiSpikCLMForCausalLM
    student, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"student {folder}: model.safetensors lacks {missing[0]} and {len(missing) - 1} more")
    return student  # transformers leaves it in evaluation mode
