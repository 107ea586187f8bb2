r"""Dense operation counts in closed form: MACs of OPT, of the dense equivalent of BiSpikCLM, and of SpikeGPT.

For the token at position i (it sees i + 1 keys), with hidden size d, FFN size f, vocabulary V and embedding width w
(w = d except in OPT-350M), one layer of OPT executes

    qkv 3 d^2     coincidence (Q K^T) d (i+1)     av d (i+1)     output d^2     ffn_in d f     ffn_out f d

and outside the layers `embed` w d (only if w != d; a table lookup multiplies nothing) and `head` d w (only if
w != d) + w V. BiSpikCLM has the same matrix products in the same places, so these are the FLOPs_c(l) of the paper's
Appendix E; where its sublayers write spikes there is also `residual`, the one-to-one gains g_O, g_2: 2 d. The counts
come from the table of the block's synapses, `spikeopd.contracts.topology`. One MAC is one of the paper's FLOPs.

Masked attention counts the keys causality allows; unmasked counts every key of the sequence, as a square product does.
Biases, LayerNorm, softmax and activation functions are no matrix products and are not counted (assembly.NOT_COSTED).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


def dense_shape(shape: ModelShape) -> ModelShape:
    """The OPT of a student's sizes: one step, and nothing of the student's form of the block."""
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
    path = Path(source)
    if path.is_dir():
        names = ("config.json", "manifest.json")
        folder = find_model(path, names)
        if folder is None:
            raise InputError(f"{path} holds neither config.json nor manifest.json, and is no run of spikeopd-train")
        path = next(folder / name for name in names if (folder / name).is_file())
    if path.suffix != ".json":
        shape = opt_shape(source)
        if num_steps is None:
            raise InputError(f"{source} names a dense model: say with --num-steps how many steps T_s its student takes")
        return parse_shape(shape.to_dict(), source, num_steps)
    try:
        raw = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model config {path}: {short(error)}") from error
    return parse_shape(raw, str(path), num_steps)


def keys_of_sequence(tokens: int, start: int = 0) -> int:
    """Keys causality allows `tokens` tokens from position `start` on: the one at position i sees i + 1."""
    return tokens * start + tokens * (tokens + 1) // 2


def opt_macs(shape: ModelShape, tokens: int, keys: int) -> dict[str, int]:
    """MACs of the whole dense transformer by component (all layers together). OPT's residual adds, so it has none."""
    one = layer_macs(shape, tokens, keys)
    inner = {name: shape.num_hidden_layers * macs for name, macs in one.items() if name != "residual"}
    return inner | outer_macs(shape, tokens)


def opt_parameters(shape: ModelShape) -> int:
    """Parameters of OPT: tied table, learned positions (two extra rows), LayerNorms and biases.

    A factorised OPT (350M) is the post-norm variant and has no final LayerNorm.
    """
    d, f, w = shape.hidden_size, shape.ffn_dim, shape.word_embed_proj_dim
    layer = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 4 * d
    table = shape.vocab_size * w + (shape.max_position_embeddings + 2) * d
    return table + shape.num_hidden_layers * layer + (2 * w * d if shape.factorised else 2 * d)


def opt_bytes(shape: ModelShape, tokens: int, keys: int, bytes_per_value: int = 2) -> dict[str, int]:
    """Bytes a dense decoder moves: every weight once per token, the key/value cache once per key. float16 by default.

    One token at a time, as the student is counted; a batched prompt would share the weights over its tokens.
    """
    weights = shape.num_hidden_layers * sum(matrix.macs(shape, 1, 0) for matrix in projections(shape))
    embed = shape.word_embed_proj_dim + shape.hidden_size + outer_macs(shape, 1)["embed"]
    cache = shape.num_hidden_layers * 2 * shape.hidden_size
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
