"""llama2.c's model file to a Hugging Face directory: `spikeopd-train llama2c`.

The file (version 0): seven int32 (width, feed-forward width, layers, heads, key-value heads, vocabulary, positions; a
negative vocabulary means a head of its own), then float32: token table; per layer, each kind for all layers in turn:
attention norm, W_q, W_k, W_v, W_o, feed-forward norm, W_1, W_2, W_3; final norm; rotation tables; the head if it is
separate. The tokenizer follows (some distributions put it behind the weights) or is a file of its own: int32 length of
the longest token, then for each token float32 score, int32 length, bytes. Its scores order the merges.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spikeopd.errors import InputError
from spikeopd.files import check_new_directory, machine_memory, new_directory, regular_size, write_json, write_text

HEADER = struct.Struct("<7i")
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "max_position_embeddings")  # fmt: skip
LIMITS = (1 << 16, 1 << 18, 1 << 10, 1 << 10, 1 << 10, 1 << 20, 1 << 20)
LONGEST = 256  # bytes of a token
SPECIAL = 3  # tokens in front: unknown, begin, end
REST = 8 << 20  # bytes of all tokens


def convert_llama2c(model: str | Path, output: str | Path, tokenizer: str | Path | None = None) -> dict[str, Any]:
    """Write a Hugging Face Llama with its tokenizer from `model`, and `tokenizer` if that is a file of its own."""
    check_new_directory(output, "--output")
    path = Path(model)
    sizes, separate_head, data = _read(path)
    weights, rest = _weights(path, sizes, separate_head, data)
    if tokenizer is not None:
        try:
            regular_size(Path(tokenizer))
            with open(tokenizer, "rb") as file:
                rest = file.read(REST + 1)
        except (OSError, ValueError) as error:
            raise InputError(f"llama2c: {tokenizer}: {error}") from error
    if len(rest) > REST:
        raise InputError(f"llama2c: {tokenizer or path}: more than {REST} bytes of tokens")
    if not rest:
        raise InputError(f"llama2c: {path} ends with its weights; give the tokenizer: --tokenizer tokenizer.bin")
    pieces = _pieces(rest, sizes["vocab_size"], str(tokenizer or path))
    named: dict[str, Any] = {
        **sizes, "rms_norm_eps": 1e-5, "tie_word_embeddings": not separate_head, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": None, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(**named))
    llama.load_state_dict(weights, strict=separate_head)
    llama.tie_weights()
    with new_directory(output) as folder:
        llama.save_pretrained(folder)
        write_text(folder / "tokenizer.json", json.dumps(tokenizer_content(pieces), ensure_ascii=False) + "\n")
        write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "model_max_length": sizes["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        })  # fmt: skip
    return {**sizes, "parameters": sum(p.numel() for p in llama.parameters()), "tied": not separate_head}


def _read(path: Path) -> tuple[dict[str, int], bool, np.ndarray]:
    try:
        size = regular_size(path)
        if size < HEADER.size:
            raise ValueError("too short for a header")
        data = np.memmap(path, np.uint8, "r")  # a file of holes takes no memory
    except (OSError, ValueError) as error:
        raise InputError(f"llama2c: {path}: {error}") from error
    values = HEADER.unpack(data[: HEADER.size].tobytes())
    found = dict(zip(NAMES, values, strict=True))
    separate, found["vocab_size"] = found["vocab_size"] < 0, abs(found["vocab_size"])
    fits = all(1 <= found[name] <= most for name, most in zip(NAMES, LIMITS, strict=True))
    if (
        not fits
        or found["hidden_size"] % found["num_attention_heads"]
        or (found["num_attention_heads"] % found["num_key_value_heads"])
        or found["hidden_size"] // found["num_attention_heads"] % 2  # pairs are rotated
    ):
        raise InputError(f"llama2c: {path}: not a model file of llama2.c (version 0); its header says {found}")
    if found["vocab_size"] < SPECIAL:
        raise InputError(f"llama2c: {path}: vocab_size is {found['vocab_size']}; <unk>, <s> and </s> need {SPECIAL}")
    if size > machine_memory():
        raise InputError(f"llama2c: {path}: {size} bytes of weights, this machine has {machine_memory()} of memory")
    return found, separate, data


def _weights(
    path: Path, sizes: dict[str, int], separate_head: bool, data: np.ndarray
) -> tuple[dict[str, torch.Tensor], bytes]:
    """The state of a Hugging Face Llama, and the bytes behind it."""
    d, ffn, layers, vocabulary = (sizes[name] for name in
                                  ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))  # fmt: skip
    width = d // sizes["num_attention_heads"]
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    place = HEADER.size

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        end = place + 4 * int(np.prod(shape, dtype=np.int64))
        if end > len(data):
            raise InputError(f"llama2c: {path}: ends after {len(data)} bytes, in the middle of the weights")
        values = data[place:end].copy().view("<f4").reshape(shape)
        place = end
        return torch.from_numpy(values)

    state = {"model.embed_tokens.weight": take(vocabulary, d)}
    for name, shape in (
        ("input_layernorm", (d,)), ("self_attn.q_proj", (d, d)), ("self_attn.k_proj", (groups * width, d)),
        ("self_attn.v_proj", (groups * width, d)), ("self_attn.o_proj", (d, d)), ("post_attention_layernorm", (d,)),
        ("mlp.gate_proj", (ffn, d)), ("mlp.down_proj", (d, ffn)), ("mlp.up_proj", (ffn, d)),
    ):  # fmt: skip
        whole = take(layers, *shape)
        for layer in range(layers):
            part = whole[layer]
            if name.endswith(("q_proj", "k_proj")):
                part = _half_rotation(part, heads if name.endswith("q_proj") else groups)
            state[f"model.layers.{layer}.{name}.weight"] = part
    state["model.norm.weight"] = take(d)
    take(2, sizes["max_position_embeddings"], width // 2)  # cosines and sines, which Hugging Face computes
    if separate_head:
        state["lm_head.weight"] = take(vocabulary, d)
    return state, data[place : place + REST + 1].tobytes()


def _half_rotation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows for rotations of (i, i + width/2), as Hugging Face pairs them, from rows for (2i, 2i + 1)."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _pieces(data: bytes, count: int, where: str) -> list[tuple[bytes, float]]:
    """(bytes, score) of every token."""
    found: list[tuple[bytes, float]] = []
    place = 4
    for _ in range(count):
        if place + 8 > len(data):
            raise InputError(f"llama2c: {where}: {len(found)} tokens where the model has {count}")
        score, length = struct.unpack_from("<fi", data, place)
        if not 0 <= length <= LONGEST or place + 8 + length > len(data):
            raise InputError(f"llama2c: {where}: token {len(found)} has a length of {length} bytes")
        found.append((data[place + 8 : place + 8 + length], score))
        place += 8 + length
    return found


def tokenizer_content(pieces: list[tuple[bytes, float]]) -> dict[str, Any]:
    """tokenizer.json of SentencePiece's BPE with byte fallback: of all pairs that make a token, the token of highest
    score is merged first.
    """
    names: list[str] = []
    for number, (raw, _score) in enumerate(pieces):
        text = raw.decode("utf-8", "replace")
        if number < SPECIAL:
            names.append(("<unk>", "<s>", "</s>")[number])
        elif number < 259:
            names.append(f"<0x{number - 3:02X}>")
        else:
            names.append(text.replace(" ", "\u2581"))
    vocabulary: dict[str, int] = {}
    for number, name in enumerate(names):
        vocabulary.setdefault(name, number)
    merges = []
    for number, name in enumerate(names[259:], 259):
        pairs = [(name[:i], name[i:]) for i in range(1, len(name))]
        pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-pieces[number][1], number, list(pair)) for pair in pairs]
    merges.sort(key=lambda entry: entry[:2])
    special = [{"id": number, "content": names[number], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for number in range(SPECIAL)]  # fmt: skip
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, begin, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocabulary, "merges": [pair for _score, _number, pair in merges],
        },
    }  # fmt: skip
