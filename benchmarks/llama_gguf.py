"""A random model of OPT-125M shape as a GGUF file for llama.cpp: its GPT-2 graph, every matrix in one format."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

D, LAYERS, HEADS, FFN, VOCAB, POSITIONS = 768, 12, 12, 3072, 50272, 2048


def write_gguf(path: Path, kind: str) -> None:
    """kind: a type of ggml such as Q8_0 or Q4_0. The table is tied and in the same format, so nothing is read wider."""
    rng = np.random.default_rng(0)
    form = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")  # tokens go in and come out as numbers

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, form), raw_dtype=form)

    def vector(name: str, size: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd", VOCAB, D)
    writer.add_tensor("position_embd.weight", rng.standard_normal((POSITIONS, D), np.float32) * np.float32(0.02))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"{block}.{norm}.weight", D, 1.0)
            vector(f"{block}.{norm}.bias", D)
        for name, rows, columns in (
            ("attn_qkv", 3 * D, D),
            ("attn_output", D, D),
            ("ffn_up", FFN, D),
            ("ffn_down", D, FFN),
        ):
            matrix(f"{block}.{name}", rows, columns)
            vector(f"{block}.{name}.bias", rows)
    vector("output_norm.weight", D, 1.0)
    vector("output_norm.bias", D)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
