"""MODEL on the command line: a student checkpoint, another Hugging Face model, or an exported bundle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spikeopd.arguments import PRECISIONS
from spikeopd.contracts.bundle import shipped_bundles
from spikeopd.errors import BackendMissing, InputError, install_command
from spikeopd.evaluation.scoring import Scorer
from spikeopd.files import find_model
from spikeopd.sampling import generators, row_generators
from spikeopd.students import is_student, load_student, no_bars, place
from spikeopd.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDED = ("tiny", "tiny-rule")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


@dataclass(frozen=True)
class Model:
    """A scorer, its tokenizer, and what a summary says of both."""

    name: str
    scorer: Scorer
    tokenizer: Tokenizer
    about: dict[str, Any]

    def streams(self, prompts: Sequence[Sequence[int]], seed: int) -> list[np.random.Generator]:
        """Random numbers of each prompt. A bundle's are those of `spikeopd-run-lava`: both give the same text."""
        return generators(prompts, seed) if self.about["kind"] == "bundle" else row_generators(seed, len(prompts))


def open_model(name: str, *, tokenizer: str | None = None, device: str | None = None, precision: str = "fp32") -> Model:
    """Find out what MODEL is and load it.

    A folder with manifest.json is a bundle; a folder with config.json is a Hugging Face model, and a run folder of
    spikeopd-train stands for the one in `final/`, else in `stage1/final/`; `tiny` and `tiny-rule` are the shipped
    teachers, `stories` a shipped bundle; anything else is a name on the hub.
    """
    path = _folder(name)
    if path is not None and (path / "manifest.json").is_file():
        from spikeopd.evaluation.bundle_model import open_bundle

        if device not in (None, "cpu"):
            raise InputError(f"--device {device}: a bundle runs on the CPU; leave --device out")
        scorer, text, about = open_bundle(path, tokenizer)
        model = Model(name, scorer, text, about)
    else:
        model = _open_torch(name, path, tokenizer, device, PRECISIONS[precision])
    _check_vocabulary(model)
    return model


def offline() -> None:
    """From here on, neither the hub nor a dataset server is asked. Call before transformers or datasets is imported."""
    for variable in OFFLINE:
        os.environ[variable] = "1"


def _folder(name: str) -> Path | None:
    """The folder a name stands for, or None for a name that is not a path."""
    path = Path(name).expanduser()
    if name in EMBEDDED and not path.exists():
        from importlib import resources

        return Path(str(resources.files("spikeopd").joinpath("assets", name)))
    if not path.exists() and name in shipped_bundles():
        return shipped_bundles()[name]
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        path = path.parent
    if not path.exists():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise InputError(
                f"model {name}: no such folder; give a checkpoint, a bundle, 'tiny' or the name of a model on the hub"
            )
        return None
    folder = find_model(path, ("manifest.json", "config.json"))
    if folder is not None:
        return folder
    raise InputError(
        f"model {path}: neither config.json (a checkpoint) nor manifest.json (a bundle) is here; "
        "give the folder that spikeopd-train or spikeopd-export wrote"
    )


def _open_torch(name: str, path: Path | None, tokenizer: str | None, device: str | None, dtype: str) -> Model:
    try:
        import torch

        from spikeopd.evaluation.torch_model import TorchScorer
        from spikeopd.models.teacher import fingerprint, load_teacher
    except ImportError as error:
        raise BackendMissing(
            f"model {name}: a checkpoint needs torch and transformers ({error}): {install_command('train')}"
        ) from error
    no_bars()
    where = str(path) if path is not None else name
    # A GGUF file is the model itself; its tokenizer lies beside it.
    own = path.parent if path is not None and path.is_file() else where
    text = load_tokenizer(tokenizer or own)
    model: PreTrainedModel
    if path is not None and is_student(path):
        model, text = load_student(path, dtype=getattr(torch, dtype)), text.framed()
    else:
        try:
            model = load_teacher(where, attentions=False, dtype=getattr(torch, dtype))
        except InputError as error:
            raise InputError(str(error).replace("teacher:", "model:", 1)) from error
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place(model, chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {chosen}: {str(error).splitlines()[0]}") from error
    about = {**_about(model, chosen, dtype, fingerprint(model)), "folder": str(path) if path is not None else None}
    return Model(name, TorchScorer(model), text, about)


def _about(model: PreTrainedModel, device: str, dtype: str, digest: str) -> dict[str, Any]:
    config = model.config.get_text_config()
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "num_steps")
    return {
        "kind": "student" if config.model_type == "bispikclm" else "huggingface",
        "model_type": config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_sha256": digest,
        "dtype": dtype,
        "device": device,
        "shape": {name: getattr(config, name) for name in fields if getattr(config, name, None) is not None},
    }


def _check_vocabulary(model: Model) -> None:
    entries, rows = len(model.tokenizer), model.scorer.vocab_size
    if entries > rows:
        raise InputError(
            f"model {model.name}: {rows} vocabulary rows, but the tokenizer ({model.tokenizer.origin}) has {entries} "
            "entries; name the model's own with --tokenizer"
        )
