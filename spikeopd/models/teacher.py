"""The frozen teacher: OPT, or any Hugging Face causal language model that shares the student's tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spikeopd.errors import InputError
from spikeopd.students import SAFE, check_complete, check_weights, read_model_config

EMBEDDED = {"tiny": "assets/tiny", "tiny-rule": "assets/tiny-rule"}


@dataclass(frozen=True)
class TeacherOutput:
    """What Stage 1 aligns with. hidden[m] is the output of layer m (0-based), attentions[m] its post-softmax map.

    The last hidden state is the one Hugging Face reports: behind the final LayerNorm, where the teacher has one.
    """

    embeddings: Tensor  # [batch, token, d_T]: what enters the first layer
    hidden: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]  # [batch, head, query, key]
    features: Tensor  # [batch, token, w]: what meets the output table


def resolve(name_or_path: str) -> str:
    """An embedded teacher's folder for `tiny` and `tiny-rule`, else the name or path itself."""
    if name_or_path in EMBEDDED:
        return str(resources.files("spikeopd").joinpath(EMBEDDED[name_or_path]))
    return name_or_path


def load_teacher(
    name_or_path: str, *, tokenizer_size: int | None = None, attentions: bool = True, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load and freeze. Eager attention, because the fused kernels do not return attention maps.

    Safetensors, or a `.gguf` file through transformers' own reader; never a pickle.
    """
    where = resolve(name_or_path)
    path = Path(where)
    options: dict[str, object] = {"dtype": dtype, **SAFE}
    if attentions:
        options["attn_implementation"] = "eager"
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"teacher: no file {where}")
        options["gguf_file"], where = path.name, str(path.parent)
    elif path.exists() and not (path / "config.json").is_file():
        raise InputError(f"teacher: {where} has no config.json; give a Hugging Face model directory or a hub name")
    if path.is_dir():
        read_model_config(path, f"teacher: {name_or_path}")
        check_weights(path, f"teacher: {name_or_path}")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(where, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"teacher: cannot load {name_or_path!r} as a causal language model: {reason}") from error
    except Exception as error:  # safetensors raises its own type for a corrupt file
        if type(error).__name__ != "SafetensorError":
            raise
        raise InputError(f"teacher: the weights in {name_or_path!r} are corrupt ({error}); fetch them again") from error
    model: PreTrainedModel
    model, info = loaded
    check_complete(info, f"teacher: {name_or_path}")
    if tokenizer_size is not None:
        check_vocabulary(model.config.vocab_size, tokenizer_size, f"teacher {name_or_path!r}")
    return freeze(model)


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Evaluation mode, no gradients."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def check_vocabulary(rows: int, tokenizer_size: int, who: str) -> None:
    """A model may have more rows than the tokenizer has entries (padding: OPT 50272 for 50265), never fewer.

    More than 1024 rows too many is another vocabulary, not padding.
    """
    if rows < tokenizer_size or rows - tokenizer_size > 1024:
        raise InputError(
            f"{who} has a vocabulary of {rows} rows but the tokenizer has {tokenizer_size} entries; "
            "teacher and student must share one tokenizer"
        )


def check_pair(teacher: PreTrainedModel, student_vocab: int) -> None:
    """Logits are compared column by column, so the tables must have the same number of rows."""
    if teacher.config.vocab_size != student_vocab:
        raise InputError(
            f"the teacher has {teacher.config.vocab_size} vocabulary rows and the student {student_vocab}; "
            f"set model.vocab_size={teacher.config.vocab_size}"
        )


@torch.no_grad()
def run_teacher(teacher: PreTrainedModel, input_ids: Tensor, *, internals: bool) -> TeacherOutput:
    """One forward pass without the output table, so that the caller can take the logits in chunks."""
    base = teacher.get_decoder()
    with _last_layer_output(base) as last:
        output = base(input_ids, output_hidden_states=internals, output_attentions=internals, use_cache=False)
    if not internals:
        return TeacherOutput(output.last_hidden_state, (), (), output.last_hidden_state)
    hidden = list(output.hidden_states)
    if hidden[-1].shape != hidden[0].shape:
        hidden[-1] = last[0]  # OPT-350M reports its projection to the token table's width instead of the layer
    return TeacherOutput(hidden[0], tuple(hidden[1:]), tuple(output.attentions), output.last_hidden_state)


@contextmanager
def _last_layer_output(base: nn.Module) -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    hook = base.layers[-1].register_forward_hook(
        lambda module, arguments, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        yield kept
    finally:
        hook.remove()


def output_table(teacher: PreTrainedModel) -> nn.Module:
    """The head that turns `TeacherOutput.features` into logits."""
    return teacher.get_output_embeddings()


def fingerprint(model: nn.Module) -> str:
    """sha256 over every parameter and buffer, to prove that a frozen model did not change."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
