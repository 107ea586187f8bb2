r"""Dense operation counts in closed form: MACs of teachers, of BiSpikCLM's dense equivalent, and of SpikeGPT.

For the token at position i (it sees i + 1 keys), with hidden size d, FFN size f, vocabulary V and embedding width w
(w = d except in OPT-350M), one layer of OPT executes

    qkv 3 d^2     coincidence (Q K^T) d (i+1)     av d (i+1)     output d^2     ffn_in d f     ffn_out f d

and outside the layers `embed` w d (only if w != d; a table lookup multiplies nothing) and `head` d w (only if
w != d) + w V. BiSpikCLM has the same matrix products in the same places, so these are the FLOPs_c(l) of the paper's
Appendix E; where its sublayers write spikes there is also `residual`, the one-to-one gains g_O, g_2: 2 d. The counts
come from the table of the block's synapses, `spikeopd.contracts.topology`. One MAC is one of the paper's FLOPs.

A teacher of another family (`DenseShape`) has queries of width q = heads x head size, keys and values of width k =
key/value heads x head size, and where its feed-forward part is gated (SwiGLU) two matrices into it:

    qkv d (q + 2 k)     coincidence q (i+1)     av q (i+1)     output q d     ffn_in d f, gated 2 d f     ffn_out f d

Masked attention counts the keys causality allows; unmasked counts every key of the sequence, as a square product does.
Biases, norms, rotations of positions, gating products, softmax and activation functions are no matrix products and are
not counted (assembly.NOT_COSTED).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spikeopd.contracts import ModelShape, parse_shape, projections
from spikeopd.contracts.topology import SIZES, layer_macs, outer_macs
from spikeopd.errors import InputError, short
from spikeopd.files import find_model, read_json

OPT_POSITIONS = 2048
OPT_VOCABULARY = 50272

# hidden, layers, heads, ffn, embedding width; from the published OPTConfig of each checkpoint (Zhang et al. 2022).
_OPT_SIZES = {
    "opt-125m": (768, 12, 12, 3072, 768),
    "opt-350m": (1024, 24, 16, 4096, 512),
    "opt-1.3b": (2048, 24, 32, 8192, 2048),
}


def opt_shape(name: str) -> ModelShape:
    """The shape of a published OPT. num_steps is 1: a dense network computes once per token."""
    key = name.lower().removeprefix("facebook/")
    if key not in _OPT_SIZES:
        raise InputError(f"unknown teacher {name!r}: choose one of {', '.join(_OPT_SIZES)}, or give a config.json")
    hidden, layers, heads, ffn, width = _OPT_SIZES[key]
    return ModelShape(hidden, layers, heads, ffn, OPT_VOCABULARY, OPT_POSITIONS, 1, width)


@dataclass(frozen=True)
class DenseShape(ModelShape):
    """A dense teacher that is no OPT. Sizes beyond `ModelShape`'s:

    query_size, key_value_size  heads x head size; fewer key/value heads than heads are grouped-query attention
    gated                       a SwiGLU: two matrices into the feed-forward part
    tied                        the output table is the token table
    positions                   rows of a learned position table; 0: rotations, which have no weights
    other_parameters            norms and biases of one layer
    final_parameters            of the last norm
    """

    family: str = ""
    query_size: int = 0
    key_value_size: int = 0
    gated: bool = False
    tied: bool = False
    positions: int = 0
    other_parameters: int = 0
    final_parameters: int = 0

    @property
    def matrices(self) -> dict[str, int]:
        """Weights of one layer's matrices by component."""
        d, f = self.hidden_size, self.ffn_dim
        return {
            "qkv": d * (self.query_size + 2 * self.key_value_size),
            "output": self.query_size * d,
            "ffn_in": (1 + self.gated) * d * f,
            "ffn_out": f * d,
        }

    def to_dict(self) -> dict[str, Any]:
        own = set(asdict(self)) - set(ModelShape.__dataclass_fields__)
        return super().to_dict() | {name: getattr(self, name) for name in sorted(own)}


# Families counted by the closed form, by the `model_type` of their config.json, and whether their tables are tied
# unless the file says otherwise. Others have parts this form does not count (experts, windows, convolutions).
LLAMA_FAMILY = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "smollm3": True}
GPT_FAMILY = {"gpt2": True, "gpt_neox": False}


def parse_teacher(raw: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of a dense model from its config.json: OPT, the Llama family, GPT-2 or GPT-NeoX."""
    family = raw.get("model_type")
    if family is None or family in ("opt", "bispikclm"):
        return dense_shape(parse_shape(raw, where, 1))
    if not isinstance(family, str) or family not in LLAMA_FAMILY and family not in GPT_FAMILY:
        known = ", ".join(("opt", *LLAMA_FAMILY, *GPT_FAMILY))
        raise InputError(f"{where}: no closed form for a {short(repr(family))}; the teacher may be one of {known}")
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}  # fmt: skip
    values = {names.get(name, name): value for name, value in raw.items()}
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if family == "gpt2" and values.get("intermediate_size") is None and isinstance(width, int):
        values["intermediate_size"] = 4 * width
    sizes = {"ffn_dim": values.get("intermediate_size"), "num_steps": 1}
    # Heads need not divide the width in a family with a head size of its own; parse_shape would insist.
    shape = parse_shape({**values, **sizes, "num_attention_heads": 1, "word_embed_proj_dim": width}, where)
    d, f = shape.hidden_size, shape.ffn_dim
    groups, size = values.get("num_key_value_heads") or heads, values.get("head_dim")
    for name, value in (("num_attention_heads", heads), ("num_key_value_heads", groups), ("head_dim", size or 1)):
        if type(value) is not int or value < 1:
            raise InputError(f"{where}: field {name!r} must be a whole number from 1, got {value!r}")
    assert isinstance(heads, int) and isinstance(groups, int)
    size = size or d // heads
    q, k = heads * size, groups * size
    if family in LLAMA_FAMILY:
        qkv_bias = values.get("attention_bias", False) or family == "qwen2"
        other = 2 * d + (q + 2 * k) * bool(qkv_bias) + d * bool(values.get("attention_bias", False))
        other += (2 * f + d) * bool(values.get("mlp_bias", False)) + 2 * size * (family == "qwen3")
    else:
        attention = values.get("attention_bias", True)
        other = 4 * d + (4 * d if attention else 0) + f + d
    fields = {name: getattr(shape, name) for name in SIZES} | {"num_attention_heads": heads}
    return DenseShape(
        **fields,
        family=str(family),
        query_size=q,
        key_value_size=k,
        gated=family in LLAMA_FAMILY,
        tied=bool(values.get("tie_word_embeddings", {**LLAMA_FAMILY, **GPT_FAMILY}[family])),
        positions=shape.max_position_embeddings if family == "gpt2" else 0,
        other_parameters=other,
        final_parameters=d if family in LLAMA_FAMILY else 2 * d,
    )


def dense_shape(shape: ModelShape) -> ModelShape:
    """The OPT of a student's sizes: one step, and nothing of the student's form of the block. A teacher is itself."""
    if isinstance(shape, DenseShape):
        return shape
    sizes = {name: getattr(shape, name) for name in SIZES}
    return ModelShape(**sizes | {"num_steps": 1})


def published_name(shape: ModelShape) -> str | None:
    """The published OPT that has these sizes, if any."""
    return next((name for name in _OPT_SIZES if opt_shape(name) == dense_shape(shape)), None)


def load_shape(source: str, num_steps: int | None = None) -> ModelShape:
    """A shape from `opt-125m`, a config.json, a bundle's manifest.json, or a folder that holds one of them.

    A run folder of spikeopd-train stands for the student in it. The file says which form of the block it is; a dense
    model stands for the paper's. `num_steps` overrides the file's; a dense model has none of its own.
    """
    path = _config_file(source)
    if path is None:
        shape = opt_shape(source)
        if num_steps is None:
            raise InputError(f"{source} names a dense model: say with --num-steps how many steps T_s its student takes")
        return parse_shape(shape.to_dict(), source, num_steps)
    raw = _read(path)
    if isinstance(raw, dict) and raw.get("model_type") in (*LLAMA_FAMILY, *GPT_FAMILY):
        raise InputError(f"{path}: a {raw['model_type']} is no shape of a student; give it with --teacher")
    return parse_shape(raw, str(path), num_steps)


def load_teacher_shape(source: str) -> ModelShape:
    """The shape of a dense teacher, from the same names and files as `load_shape` and from every family's config.json.

    A student's file stands for the OPT of its sizes.
    """
    path = _config_file(source)
    if path is None:
        return opt_shape(source)
    raw = _read(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object")
    return parse_teacher(raw, str(path))


def _config_file(source: str) -> Path | None:
    """The JSON file behind a path; None for a name."""
    path = Path(source)
    if path.is_dir():
        names = ("config.json", "manifest.json")
        folder = find_model(path, names)
        if folder is None:
            raise InputError(f"{path} holds neither config.json nor manifest.json, and is no run of spikeopd-train")
        path = next(folder / name for name in names if (folder / name).is_file())
    return path if path.suffix == ".json" else None


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model config {path}: {short(error)}") from error


def keys_of_sequence(tokens: int, start: int = 0) -> int:
    """Keys causality allows `tokens` tokens from position `start` on: the one at position i sees i + 1."""
    return tokens * start + tokens * (tokens + 1) // 2


def opt_macs(shape: ModelShape, tokens: int, keys: int) -> dict[str, int]:
    """MACs of the whole dense transformer by component (all layers together). OPT's residual adds, so it has none."""
    if isinstance(shape, DenseShape):
        pairs = dict.fromkeys(("coincidence", "av"), shape.query_size * keys)
        layer = {name: weights * tokens for name, weights in shape.matrices.items()} | pairs
        order = ("qkv", "coincidence", "av", "output", "ffn_in", "ffn_out")
        inner = {name: shape.num_hidden_layers * layer[name] for name in order}
        return inner | outer_macs(shape, tokens)
    one = layer_macs(shape, tokens, keys)
    inner = {name: shape.num_hidden_layers * macs for name, macs in one.items() if name != "residual"}
    return inner | outer_macs(shape, tokens)


def opt_parameters(shape: ModelShape) -> int:
    """Parameters of OPT: tied table, learned positions (two extra rows), LayerNorms and biases; of a teacher its own.

    A factorised OPT (350M) is the post-norm variant and has no final LayerNorm.
    """
    if isinstance(shape, DenseShape):
        tables = shape.hidden_size * ((2 - shape.tied) * shape.vocab_size + shape.positions)
        layer = sum(shape.matrices.values()) + shape.other_parameters
        return tables + shape.num_hidden_layers * layer + shape.final_parameters
    d, f, w = shape.hidden_size, shape.ffn_dim, shape.word_embed_proj_dim
    layer = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 4 * d
    table = shape.vocab_size * w + (shape.max_position_embeddings + 2) * d
    return table + shape.num_hidden_layers * layer + (2 * w * d if shape.factorised else 2 * d)


def opt_bytes(shape: ModelShape, tokens: int, keys: int, bytes_per_value: int = 2) -> dict[str, int]:
    """Bytes a dense decoder moves: every weight once per token, the key/value cache once per key. float16 by default.

    One token at a time, as the student is counted; a batched prompt would share the weights over its tokens.
    """
    if isinstance(shape, DenseShape):
        layer, cached = sum(shape.matrices.values()), shape.key_value_size
        embed = shape.hidden_size * (2 if shape.positions else 1)
    else:
        layer, cached = sum(matrix.macs(shape, 1, 0) for matrix in projections(shape)), shape.hidden_size
        embed = shape.word_embed_proj_dim + shape.hidden_size + outer_macs(shape, 1)["embed"]
    weights, cache = shape.num_hidden_layers * layer, shape.num_hidden_layers * 2 * cached
    return {
        "weights": tokens * weights * bytes_per_value,
        "embed": tokens * embed * bytes_per_value,
        "head": outer_macs(shape, tokens)["head"] * bytes_per_value,
        "kv_read": cache * keys * bytes_per_value,
        "kv_write": cache * tokens * bytes_per_value,
    }


@dataclass(frozen=True)
class SpikeGPTShape:
    """SpikeGPT (Zhu et al. 2023): an RWKV of spiking blocks. One token is one step."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    source: str

    def macs(self, tokens: int) -> dict[str, int]:
        """Matrix products per component: time mix 4 d^2 (r, k, v, output), channel mix 9 d^2 (4 + 1 + 4), head d V."""
        d, layers = self.hidden_size, self.num_hidden_layers
        return {
            "time_mix": 4 * d * d * layers * tokens,
            "channel_mix": 9 * d * d * layers * tokens,
            "head": d * self.vocab_size * tokens,
        }

    @property
    def parameters(self) -> int:
        """Weights of the matrices and of the two (untied) vocabulary tables."""
        macs = self.macs(1)
        return macs["time_mix"] + macs["channel_mix"] + 2 * macs["head"]


SPIKEGPT: Mapping[str, SpikeGPTShape] = {
    "spikegpt-46m": SpikeGPTShape(
        "spikegpt-46m",
        512,
        12,
        5458,
        "12 layers of width 512 in the paper's enwik8 table (46.1 M); the 5458 characters are those of a public rerun "
        "of its enwik8 training, which counts 46,553,088 parameters",
    ),
    "spikegpt-216m": SpikeGPTShape(
        "spikegpt-216m",
        768,
        18,
        50277,
        "n_layer 18, n_embd 768 on the model card of SpikeGPT-OpenWebText-216M; the 20B tokenizer's 50277 entries",
    ),
}
