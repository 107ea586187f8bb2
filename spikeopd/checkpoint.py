"""Checkpoints of a run: weights, optimizer, position, all in safetensors and JSON, written atomically. No pickle.

`update-000200/` holds `objective.safetensors`, `optimizer.safetensors`, `state.json` and `SHA256SUMS` over them, which
is checked before anything is believed. Random numbers need no state: batches and rollouts depend on (seed, update)
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from spikeopd.errors import InputError, short
from spikeopd.files import JSON_LIMIT, check_sums, new_directory, read_json, remove_tree, write_json, write_sums

# Works alike for a plain module, DDP and FSDP2: every rank takes part, rank 0 holds the whole.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True)  # every rank has read the file and takes its own part


def save(
    folder: Path,
    update: int,
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    main: bool = True,
    keep: int = 2,
    before: int | None = None,
) -> None:
    """Write `folder/update-NNNNNN` and drop all but the newest `keep`, and the newest from before the update `before`.

    Every rank must call it.
    """
    weights = whole_weights(objective)
    moments = get_optimizer_state_dict(objective, optimizer, options=_WHOLE)
    if not main:
        return
    tensors, groups = _flatten_optimizer(moments)
    record = {"update": update, "moments": len(tensors), "param_groups": groups, **state}
    with new_directory(folder / f"update-{update:06d}") as target:
        save_file(_contiguous(weights), target / "objective.safetensors")
        save_file(tensors, target / "optimizer.safetensors")
        write_json(target / "state.json", record)
        write_sums(target)
    found = checkpoints(folder)
    older = [path for path in found if before is not None and path.name < f"update-{before:06d}"]
    for old in set(found) - {*found[-keep:], *older[-1:]}:
        remove_tree(old)


def whole_weights(objective: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers on the CPU of rank 0. Every rank must call it."""
    whole: dict[str, Any] = get_model_state_dict(objective, options=_WHOLE)
    return whole


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first. `new_directory` gives a folder its name when it is complete."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


def newest_good(
    folder: Path, objective: nn.Module, note: Callable[[str], None], *, at_most: int | None = None
) -> Path | None:
    """The newest checkpoint whose files are what was written, of at most this update; None if there is none at all.

    Damaged ones are said and set aside (`damaged-update-NNNNNN`). If nothing else is left, that is an error: to begin
    again at update 0 would throw the rest away. Every rank must call it; the first one decides.
    """
    answer: list[Any] = [None, None]
    if not _parallel() or torch.distributed.get_rank() == 0:
        try:
            answer[0] = _newest_good(folder, note, at_most, _largest_file(objective))
        except InputError as error:
            answer[1] = str(error)
    if _parallel():
        torch.distributed.broadcast_object_list(answer)
    if answer[1]:
        raise InputError(answer[1])
    found: Path | None = answer[0]
    return found


def _newest_good(folder: Path, note: Callable[[str], None], at_most: int | None, most: int) -> Path | None:
    damaged: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(folder)):
        if at_most is not None and path.name > f"update-{at_most:06d}":
            continue
        if not (problem := check_sums(path, most) or _state_problem(path)):
            break
        damaged.append((path, problem))
    else:
        path = folder
    if not damaged:
        return path if path != folder else None
    first, problem = damaged[0]
    if path == folder:
        raise InputError(
            f"{folder}: no checkpoint can be used; the newest, {first.name}, is damaged ({problem}). Restore one, or "
            f"remove {folder} to begin the stage again"
        )
    for bad, why in damaged:
        aside = bad.with_name(f"damaged-{bad.name}")
        remove_tree(aside)
        bad.rename(aside)
        note(f"checkpoint {bad} is damaged ({why}); kept as {aside.name}, continuing from {path.name}")
    return path


def _largest_file(objective: nn.Module) -> int:
    """Bytes that no file of its checkpoints exceeds: Adam has two moments for each weight."""
    weights: int = sum(value.numel() * value.element_size() for value in objective.state_dict().values())
    return JSON_LIMIT + 2 * weights


def _state_problem(path: Path) -> str:
    try:
        update = read_state(path)["update"]
    except (InputError, KeyError) as error:
        return str(error)
    if type(update) is not int or path.name != f"update-{update:06d}":
        return f"state.json speaks of update {short(repr(update))}"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path / "state.json"))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"checkpoint {path}: state.json cannot be read ({short(error)})") from error


def read_weights(path: Path, objective: nn.Module) -> dict[str, Any]:
    """The weights of a checkpoint, if all its files are what was written. objective: what it belongs to, or a part."""
    if problem := check_sums(path, _largest_file(objective)):
        raise InputError(f"checkpoint {path} is damaged ({problem}); remove it to resume from an older one")
    return _read_tensors(path, "objective")


def _read_tensors(path: Path, name: str) -> dict[str, Any]:
    try:
        return dict(load_file(path / f"{name}.safetensors"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"checkpoint {path} is damaged ({short(error)}); remove it to resume from an older") from error


def load(path: Path, objective: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Restore modules and optimizer in place; return the state. Nothing is changed by a checkpoint that does not fit.

    torch fills missing keys of a whole state dict with what the module has, so every key is compared here.
    """
    weights = read_weights(path, objective)
    state = read_state(path)
    moments = _read_tensors(path, "optimizer")
    _check_tensors(path, weights, get_model_state_dict(objective))
    if optimizer is None:
        set_model_state_dict(objective, weights, options=_SPREAD)
        return state
    try:
        _check_moments(path, state, moments, weights)
        _check_options(path, state["param_groups"], optimizer)
        whole = _unflatten_optimizer(moments, state["param_groups"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # sealed, but by another hand
        raise InputError(
            f"checkpoint {path} does not fit: its optimizer state is none ({short(repr(error))})"
        ) from error
    set_model_state_dict(objective, weights, options=_SPREAD)
    set_optimizer_state_dict(objective, optimizer, whole, options=_SPREAD)
    return state


def _check_tensors(path: Path, stored: Mapping[str, Tensor], model: Mapping[str, Any]) -> None:
    if odd := sorted(stored.keys() ^ model.keys()):
        what = "is not a tensor of this model" if odd[0] in stored else "is missing"
        raise InputError(f"checkpoint {path} does not fit: {odd[0]} {what} ({len(odd)} names differ)")
    for name, value in stored.items():
        due = model[name]
        if value.shape != due.shape or value.dtype != due.dtype:
            raise InputError(
                f"checkpoint {path} does not fit: {name} is {value.dtype} {list(value.shape)}, the model has "
                f"{due.dtype} {list(due.shape)}"
            )


def _check_moments(
    path: Path, state: Mapping[str, Any], moments: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Adam's moments have the shape of their parameter; the state says how many there are."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or state.get("moments") != len(moments):
        raise InputError(f"checkpoint {path} does not fit: optimizer.safetensors holds {len(moments)} tensors")
    trained = {name for group in groups for name in group["params"]}
    for key, value in moments.items():
        parameter, _, entry = key.partition("\n")
        if parameter not in trained or entry != "step" and value.shape != weights[parameter].shape:
            raise InputError(f"checkpoint {path} does not fit: optimizer state {short(key)} belongs to no parameter")


def _check_options(path: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Adam's own constants follow from the configuration; a file that says otherwise would train another student."""
    if len(groups) != len(optimizer.param_groups):
        raise InputError(f"checkpoint {path} does not fit: {len(groups)} groups of parameters")
    for stored, own in zip(groups, optimizer.param_groups, strict=True):
        if odd := sorted((stored.keys() ^ own.keys()) - {"params", "initial_lr"}):
            raise InputError(f"checkpoint {path} does not fit: only one optimizer has {short(odd[0])}")
        if type(stored["lr"]) not in (int, float):
            raise InputError(f"checkpoint {path} does not fit: lr is {short(repr(stored['lr']))}")
        for name in own.keys() - {"params", "lr", "initial_lr"}:
            due = list(own[name]) if isinstance(own[name], tuple) else own[name]
            if stored[name] != due:
                raise InputError(f"checkpoint {path} does not fit: {name} is {short(stored[name])}, the run has {due}")


def _parallel() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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
