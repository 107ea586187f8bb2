"""Checkpoints of a run: weights, optimizer, position, all in safetensors and JSON, written atomically. No pickle.

`update-000200/` holds `<name>.safetensors` for each module, `optimizer.safetensors` and `state.json`. Random numbers
need no state: batches and rollouts depend on (seed, update) alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from spikeopd.errors import InputError
from spikeopd.files import new_directory, write_json

# Works alike for a plain module, DDP and FSDP2: every rank takes part, rank 0 holds the whole.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save(
    folder: Path,
    update: int,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    main: bool = True,
    keep: int = 2,
) -> None:
    """Write `folder/update-NNNNNN` and drop all but the newest `keep`. Every rank must call it."""
    weights = whole_weights(objective)
    moments = get_optimizer_state_dict(objective, optimizer, options=_WHOLE)
    if not main:
        return
    tensors, groups = _flatten_optimizer(moments)
    with new_directory(folder / f"update-{update:06d}") as target:
        save_file(_contiguous(weights), target / "objective.safetensors")
        save_file(tensors, target / "optimizer.safetensors")
        write_json(target / "state.json", {"update": update, "param_groups": groups, **state})
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def whole_weights(objective: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers on the CPU of rank 0. Every rank must call it."""
    whole: dict[str, Any] = get_model_state_dict(objective, options=_WHOLE)
    return whole


def checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("update-*") if (path / "state.json").is_file())


def read_state(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((path / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"checkpoint {path}: state.json cannot be read ({error}); remove the folder") from error


def load(path: Path, objective: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Restore modules and optimizer in place; return the state."""
    state = read_state(path)
    try:
        weights: dict[str, Any] = load_file(path / "objective.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise InputError(f"checkpoint {path} is damaged ({error}); remove it to resume from an older one") from error
    set_model_state_dict(objective, weights, options=_spread())
    if optimizer is not None:
        whole = _unflatten_optimizer(moments, state["param_groups"])
        set_optimizer_state_dict(objective, optimizer, whole, options=_spread())
    return state


def _spread() -> StateDictOptions:
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _SPREAD if parallel else StateDictOptions(full_state_dict=True)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Tied tables share storage, which safetensors refuses; both names are stored.
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}


def _flatten_optimizer(whole: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    tensors = {}
    for parameter, entries in whole["state"].items():
        for entry, value in entries.items():
            tensors[f"{parameter}\n{entry}"] = torch.as_tensor(value).detach().clone().contiguous()
    groups = [
        {key: list(v) if isinstance(v, tuple) else v for key, v in group.items()} for group in whole["param_groups"]
    ]
    return tensors, groups


def _unflatten_optimizer(tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, entry = name.split("\n")
        state.setdefault(parameter, {})[entry] = value
    restored = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in groups]
    return {"state": state, "param_groups": restored}
