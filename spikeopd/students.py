"""A trained student from disk: found, checked, loaded. Safetensors only; nothing is asked of the network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spikeopd.contracts.bundle import MANIFEST, bundle_folder
from spikeopd.contracts.topology import FORMS, SIZES, parse_shape
from spikeopd.errors import BackendMissing, InputError, install_command, short
from spikeopd.files import find_model, read_json, regular_size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from spikeopd.models.bispikclm import BiSpikCLMForCausalLM

M = TypeVar("M", bound="PreTrainedModel")
MODEL_TYPE = "bispikclm"
# How any model is loaded: no pickle, no code of strangers, nothing filled in for what the file lacks.
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
# Names of sizes in the configurations of transformers, and what no model exceeds.
LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_steps"), 1 << 12),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "ffn_dim", "intermediate_size", "n_inner"), 1 << 24),
    **dict.fromkeys(
        ("word_embed_proj_dim", "vocab_size", "max_position_embeddings", "n_positions", "head_dim"), 1 << 24
    ),
}
# Fields by which transformers fetches compiled code from the hub ("owner/kernel").
KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def find_bundle(path: Path | str) -> Path | None:
    """The folder of the bundle that this is, a shipped one's by its name; None if it is none."""
    folder = bundle_folder(path)
    return folder if (folder / MANIFEST).is_file() and find_model(folder) is None else None


def find_student(path: Path | str) -> Path:
    """The folder with the student's config.json: the path itself, or the place of the student in a run folder."""
    folder = find_model(path)
    if folder is None:
        raise InputError(f"student {path}: no config.json there; give the folder that spikeopd-train wrote")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a student's folder, checked as far as it goes without loading the model. No torch."""
    where = f"student {folder}"
    config = read_model_config(folder, where)
    kind = config.get("model_type")
    if kind != MODEL_TYPE:
        raise InputError(f"{where}: model_type is {short(repr(kind))}, only a trained student ({MODEL_TYPE!r}) is read")
    if "hidden_size" in config:
        # A neuron that was added here is no form of a deployable model yet: the model itself refuses what nobody knows.
        form = {name: value for name, value in config.items() if name != "neuron" or value in FORMS["neuron"]}
        parse_shape({name: config.get(name, 1) for name in SIZES} | form, f"{where}: config.json")
    for name, above, most in (("alpha", -1e-9, 1.0), ("threshold", 0.0, 1e6), ("xi", 0.0, 1e6)):
        value = config.get(name, 1.0)
        if type(value) not in (int, float) or not (math.isfinite(value) and above < value <= most):
            raise InputError(f"{where}: config.json: {name} is {short(repr(value))}, which no student has")
    check_weights(folder, where)
    return config


def read_model_config(folder: Path, where: str) -> dict[str, Any]:
    """config.json of any model's folder: an object whose sizes are whole numbers that some model could have."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: config.json cannot be read ({short(error)})") from error
    if not isinstance(config, dict):
        raise InputError(f"{where}: config.json: expected an object, got {type(config).__name__}")
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for name in KERNELS:
            if "/" in str(part.get(name)):
                raise InputError(f"{where}: config.json: {name} names a kernel to fetch and run; that is not done")
        for name, most in LIMITS.items():
            value = part.get(name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise InputError(
                    f"{where}: config.json: {name} should be a whole number from 1 to {most}, found "
                    f"{short(repr(value))}"
                )
    return config


def check_weights(folder: Path, where: str) -> list[str]:
    """Weights in safetensors, inside the folder: their files. Pickles can run code when they are read, so none are."""
    sampling = folder / "generation_config.json"
    if sampling.exists():  # transformers reads it whole, whatever it is
        try:
            if not isinstance(read_json(sampling), dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            raise InputError(f"{where}: {sampling.name} cannot be read ({short(error)})") from error
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{where}: adapter_config.json makes it a part of another model; merge the two and save it")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif index.exists():
        try:
            content = read_json(index)
            names = sorted(set(content["weight_map"].values()), key=str)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{where}: {index.name} cannot be read ({short(error)})") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise InputError(f"{where}: {index.name} names {short(repr(name))}, which is no file of this folder")
    elif pickled := sorted(path.name for kind in PICKLES for path in folder.glob(kind)):
        raise InputError(
            f"{where}: {pickled[0]} is a pickle, which can run code when it is read; only safetensors are. Convert it "
            f'where you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder.name}-safetensors')\""
        )
    else:
        raise InputError(f"{where}: no model.safetensors there; the folder is incomplete")
    for name in names:
        try:
            regular_size(folder / name)
        except (OSError, ValueError) as error:
            raise InputError(f"{where}: {name} cannot be read ({short(error)})") from error
    return names


def check_sizes(folder: Path, config: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that the weights cannot fill: transformers would allocate the model and only then miss them."""
    from safetensors import SafetensorError, safe_open

    stored = 0
    for name in check_weights(folder, where):
        try:
            with safe_open(folder / name, "numpy") as file:
                stored += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError, MemoryError) as error:  # the last one of a file of holes
            raise InputError(f"{where}: {name} is corrupt ({short(error)}); fetch it again") from error
    inner = config.get("text_config")
    sizes = {**config, **(inner if isinstance(inner, dict) else {})}
    hidden = sizes.get("hidden_size") or sizes.get("n_embd") or 1
    layers = sizes.get("num_hidden_layers") or sizes.get("n_layer") or 1
    width = sizes.get("word_embed_proj_dim") or hidden
    inside = sizes.get("intermediate_size") or sizes.get("ffn_dim") or sizes.get("n_inner") or 1
    heads = sum(sizes.get(name) or 0 for name in ("num_attention_heads", "num_key_value_heads"))
    # The token table, an eighth of one matrix of each kind a layer, and the position table of who has one.
    due = (sizes.get("vocab_size") or 1) * width
    due += layers * hidden * (hidden + inside + heads * (sizes.get("head_dim") or 0)) // 8
    if config.get("model_type") in (MODEL_TYPE, "opt", "gpt2"):
        due += (sizes.get("max_position_embeddings") or sizes.get("n_positions") or 1) * hidden
    if stored < due:
        raise InputError(f"{where}: the weights hold {stored} numbers; config.json speaks of {due} or more")


def check_complete(info: Mapping[str, Any], where: str) -> None:
    """transformers fills in what a file lacks or has in another shape with random numbers; that is no model."""
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{where}: the weights lack {short(missing[0])} ({len(missing)} missing)")
    if odd := sorted(str(name[0]) for name in info.get("mismatched_keys", ())):
        raise InputError(f"{where}: {short(odd[0])} has another shape than config.json says ({len(odd)} of them)")


def no_bars() -> None:
    """Saving says nothing: transformers' own bars off, from now on."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no types for it


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Loading says nothing: no bars, and none of transformers' lists of tensors, named as a stranger's file does."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    no_bars()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def place(model: M, device: torch.device | str) -> M:
    """The model, moved to a device."""
    model.to(device)  # type: ignore[arg-type] # transformers wraps `to` in a way that hides its type
    return model


def is_student(folder: Path) -> bool:
    """Whether a Hugging Face directory says that it holds a student; damaged ones do not."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(read_json(folder / "config.json").get("model_type") == MODEL_TYPE)
    return False


@contextlib.contextmanager
def _training_installed(where: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise BackendMissing(f"{where}: needs torch and transformers ({error}): {install_command('train')}") from error


def load_student(path: Path | str, *, dtype: torch.dtype | None = None) -> BiSpikCLMForCausalLM:
    """The student of a run folder, a Hugging Face directory or an int8 bundle, in evaluation mode on the CPU.

    dtype: of the weights; float32 if None.
    """
    if bundle := find_bundle(path):
        with _training_installed(f"bundle {path}"):
            from spikeopd.models.bundled import student_of_bundle
        return student_of_bundle(bundle).to(dtype)  # type: ignore[arg-type]  # transformers wraps `to`
    folder = find_student(path)
    config = read_config(folder)
    with _training_installed(f"student {folder}"):
        import torch

        from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
    check_sizes(folder, config, f"student {folder}")
    try:
        with silence():
            loaded: Any = BiSpikCLMForCausalLM.from_pretrained(
                folder, dtype=dtype or torch.float32, local_files_only=True, **SAFE
            )
    except InputError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds; all mean a damaged folder
        raise InputError(f"student {folder}: cannot be loaded ({short(error)})") from error
    student: BiSpikCLMForCausalLM
    student, info = loaded
    check_complete(info, f"student {folder}")
    return student  # transformers leaves it in evaluation mode
