"""The frozen teacher: a Hugging Face causal language model that shares the student's tokenizer.

Tested families: OPT, Llama (with Mistral, Qwen, SmolLM), GPT-2, GPT-NeoX (Pythia). From each come the output of every
layer, the attention maps and the features that meet the output table; see `TeacherOutput`.
"""

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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spikeopd.config import Config
from spikeopd.errors import InputError, short
from spikeopd.students import SAFE, check_complete, check_sizes, read_model_config, silence

EMBEDDED = {"tiny": "assets/tiny", "tiny-rule": "assets/tiny-rule"}
PADDING_ROWS = 1024
# Families whose blocks add attention, then behind this norm the feed-forward layer.
MIDDLE_NORMS = {"opt": "final_layer_norm"} | dict.fromkeys(("llama", "mistral", "qwen2"), "post_attention_layernorm")


@dataclass(frozen=True)
class TeacherOutput:
    """What Stage 1 aligns with. hidden[m] is the output of layer m (0-based), attentions[m] its post-softmax map.

    The last hidden state is the one Hugging Face reports: behind the final LayerNorm, where the teacher has one; `last`
    is what enters that norm.
    """

    embeddings: Tensor  # [batch, token, d_T]: what enters the first layer
    hidden: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]  # [batch, head, query, key]
    features: Tensor  # [batch, token, w]: what meets the output table
    last: Tensor | None = None
    middle: tuple[Tensor, ...] = ()  # middle[m]: the residual stream between attention and feed-forward layer

    def stream(self, layer: int) -> Tensor:
        """The residual stream behind a layer, [batch, token, d_T]."""
        return self.hidden[layer] if self.last is None or layer < len(self.hidden) - 1 else self.last


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
    options: dict[str, object] = {"dtype": dtype, **SAFE}
    if attentions:
        options["attn_implementation"] = "eager"
    model, info = _from_pretrained(AutoModelForCausalLM, name_or_path, options, weights=True)
    check_complete(info, f"teacher: {name_or_path}")
    if tokenizer_size is not None:
        check_vocabulary(model.config.vocab_size, tokenizer_size, f"teacher {name_or_path!r}")
    return freeze(model)


def load_teacher_config(name_or_path: str) -> Any:
    """The teacher's configuration alone: what must fit can be checked before the weights are read."""
    return _from_pretrained(AutoConfig, name_or_path, {}).get_text_config()


def _from_pretrained(kind: Any, name_or_path: str, options: dict[str, object], *, weights: bool = False) -> Any:
    where = resolve(name_or_path)
    path = Path(where).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"teacher: no file {where}")
        options["gguf_file"], where = path.name, str(path.parent)
    elif path.exists() and not (path / "config.json").is_file():
        raise InputError(f"teacher: {where} has no config.json; give a Hugging Face model directory or a hub name")
    elif not path.exists() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
        raise InputError(f"teacher: no such directory {where}; give a Hugging Face model directory or a hub name")
    if path.is_dir():
        content = read_model_config(path, f"teacher: {name_or_path}")
        if weights:
            check_sizes(path, content, f"teacher: {name_or_path}")
    try:
        with silence():
            return kind.from_pretrained(str(path) if path.is_dir() else where, **options)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a configuration can be wrong in as many ways as transformers has lines
        kind = "" if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: "
        reason = short(f"{kind}{error}", 300)
        raise InputError(f"teacher: cannot load {name_or_path!r} as a causal language model: {reason}") from error


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Evaluation mode, no gradients."""
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def check_vocabulary(rows: int, tokenizer_size: int, who: str) -> None:
    """A model may have more rows than the tokenizer has entries (padding: OPT 50272 for 50265), never fewer.

    More than PADDING_ROWS too many is another vocabulary, not padding.
    """
    if rows < tokenizer_size or rows - tokenizer_size > PADDING_ROWS:
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


def check_fit(config: Config, teacher: Any, tokenizer_size: int) -> None:
    """All in which student, teacher (its configuration) and tokenizer do not fit, with the overrides that mend it."""
    name, model, rows = config.teacher.teacher_model_name_or_path, config.model, int(teacher.vocab_size)
    problems: list[str] = []
    mends: list[str] = []
    if rows < tokenizer_size or rows - tokenizer_size > PADDING_ROWS:
        problems.append(
            f"the teacher has {rows} vocabulary rows but the tokenizer ({config.data.tokenizer}) has {tokenizer_size} "
            "entries; teacher and student must share one tokenizer"
        )
        mends += [f"data.tokenizer={name}"] if config.data.tokenizer != name else []
    if model.vocab_size != rows:
        problems.append(f"the teacher has {rows} vocabulary rows and the student {model.vocab_size}")
        mends.append(f"model.vocab_size={rows}")
    positions = int(getattr(teacher, "max_position_embeddings", 0) or 0)
    if positions and config.train.stage != "2" and config.data.sequence_length > positions:
        problems.append(
            f"the teacher reads {positions} positions, data.sequence_length is {config.data.sequence_length}"
        )
        mends.append(f"data.sequence_length={positions}")
    prompt, completion = config.stage2.prompt_length, config.stage2.max_completion_length
    if positions and config.train.stage != "1" and prompt + completion > positions:
        problems.append(
            f"the teacher reads {positions} positions, prompts and completions take {prompt} + {completion}"
        )
        mends += [f"stage2.prompt_length={max(1, positions - completion)}"]
        mends += [f"stage2.max_completion_length={positions - 1}"] if completion >= positions else []
    if model.init == "teacher" and config.train.stage != "2":
        sizes = block_sizes(teacher)
        if sizes is None:
            problems.append(
                f"model.init=teacher copies the blocks of an OPT or a Llama, and the teacher is {teacher.model_type}"
            )
            mends.append("model.init=random")
        elif any(getattr(model, part) not in fitting for part, fitting in sizes.items()):
            fit = " and ".join(f"{part} {' or '.join(map(str, fitting))}" for part, fitting in sizes.items())
            problems.append(f"model.init=teacher copies blocks, and those of this teacher fit {fit}")
            mends.append("model.init=random")
    width = getattr(teacher, "hidden_size", model.hidden_size)
    if config.stage1.lambda_middle and config.train.stage != "2" and middle_norm(teacher) is None:
        known = ", ".join(MIDDLE_NORMS)
        problems.append(
            f"stage1.lambda_middle knows blocks of {known} with a norm before each part, and the teacher is "
            f"{'one with norms behind them' if teacher.model_type in MIDDLE_NORMS else teacher.model_type}"
        )
        mends.append("stage1.lambda_middle=0")
    for option in ("lambda_stream", "lambda_middle"):
        if getattr(config.stage1, option) and config.train.stage != "2" and width != model.hidden_size:
            problems.append(
                f"stage1.{option} compares residual streams of one width, the teacher's is {width} and the student's "
                f"{model.hidden_size}"
            )
            mends.append(f"stage1.{option}=0")
    if problems:
        what = f" {problems[0]}" if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        mend = f"\n  add: {' '.join(mends)}" if len(problems) > 1 else f"; add {' '.join(mends)}"
        raise InputError(f"teacher {name}:{what}{mend if mends else ''}")


def middle_norm(teacher: Any) -> str | None:
    """The module of a block that sees the residual stream between attention and feed-forward layer (the teacher's
    configuration); None if there is none such.
    """
    if not getattr(teacher, "do_layer_norm_before", True):  # OPT-350M's norms come behind
        return None
    return MIDDLE_NORMS.get(teacher.model_type)


def block_sizes(teacher: Any) -> dict[str, tuple[int, ...]] | None:
    """Sizes that a student may have to take over the blocks of this teacher (its configuration); None if none can.

    A Llama's gated neurons become one neuron of the student each, or a pair (`initialise._copy_llama_block`).
    """
    if teacher.model_type == "opt":
        return {"hidden_size": (teacher.hidden_size,), "ffn_dim": (teacher.ffn_dim,)}
    if teacher.model_type == "llama" and teacher.num_key_value_heads == teacher.num_attention_heads:
        gated = teacher.intermediate_size
        return {"hidden_size": (teacher.hidden_size,), "ffn_dim": (gated, 2 * gated)}
    return None


@torch.no_grad()
def run_teacher(
    teacher: PreTrainedModel, input_ids: Tensor, *, internals: bool, maps: bool | None = None, middle: bool = False
) -> TeacherOutput:
    """One forward pass without the output table, so that the caller can take the logits in chunks.

    internals: with the output of every layer; maps: and the attention maps, unless told otherwise; middle: and the
    residual stream inside every layer
    """
    maps = internals if maps is None else maps
    base = teacher.get_decoder()
    with _last_layer_output(base) as last, _middles(base if middle else None) as middles:
        output = base(input_ids, output_hidden_states=internals, output_attentions=maps, use_cache=False)
    if not internals:
        return TeacherOutput(output.last_hidden_state, (), (), output.last_hidden_state)
    attentions = tuple(getattr(output, "attentions", None) or ()) if maps else ()
    if maps and (not attentions or any(found is None or found.ndim != 4 for found in attentions)):
        raise InputError(
            f"teacher: a {teacher.config.model_type} gives no attention map for every layer, which Stage 1 aligns "
            "with; use a teacher with plain attention"
        )
    hidden = list(output.hidden_states)
    if hidden[-1].shape != hidden[0].shape:
        hidden[-1] = last[0]  # OPT-350M reports its projection to the token table's width instead of the layer
    behind = tuple(found.view_as(hidden[0]) for found in middles)  # OPT's feed-forward layer sees a list of tokens
    features = output.last_hidden_state
    return TeacherOutput(hidden[0], tuple(hidden[1:]), attentions, features, last[0] if last else None, behind)


@contextmanager
def _middles(base: Any) -> Iterator[list[Tensor]]:
    """What enters the norm before each feed-forward layer."""
    kept: list[Tensor] = []
    hooks = []
    if base is not None:
        norm = middle_norm(base.config)
        if norm is None:
            raise InputError(
                f"teacher: no stream inside the layers of this {base.config.model_type}; set stage1.lambda_middle=0"
            )
        hooks = [
            getattr(layer, norm).register_forward_pre_hook(lambda module, arguments: kept.append(arguments[0]))
            for layer in base.layers
        ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def eager_attention(teacher: PreTrainedModel) -> Iterator[None]:
    """Attention that returns its maps, for a while: the fused kernels do not."""
    usual = teacher.config._attn_implementation
    teacher.set_attn_implementation("eager")
    try:
        yield
    finally:
        teacher.set_attn_implementation(usual)


@contextmanager
def _last_layer_output(base: Any) -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    if not hasattr(base, "layers"):  # GPT-2 calls them h, and reports them whole
        yield kept
        return
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
