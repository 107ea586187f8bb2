"""llama.cpp for benchmarks/decode.py: a random GGUF file of OPT-125M shape, and its C interface.

The file is of its GPT-2 graph, every matrix in one format; the library is the one in the xllamacpp wheel.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

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


class _Settings(ctypes.Structure):
    """A struct of settings that is passed on as the library made it; larger than any of them."""

    _fields_ = (("words", ctypes.c_uint32 * 512),)


class _Batch(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("addresses", ctypes.c_void_p * 6))


class LlamaContext:
    """One sequence in llama.cpp, by token numbers."""

    def __init__(self, path: Path, threads: int) -> None:
        from xllamacpp import xllamacpp

        self._library = library = ctypes.CDLL(xllamacpp.__file__)

        def call(name: str, result: Any, *kinds: Any) -> Any:
            function = getattr(library, name)
            function.restype, function.argtypes = result, kinds
            return function

        pointer = ctypes.c_void_p
        library.llama_backend_init()
        model = call("llama_model_load_from_file", pointer, ctypes.c_char_p, _Settings)(
            str(path).encode(), call("llama_model_default_params", _Settings)()
        )
        settings = call("llama_context_default_params", _Settings)()
        settings.words[0] = 0  # n_ctx: the model's
        self._context = call("llama_init_from_model", pointer, pointer, _Settings)(model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        call("llama_set_n_threads", None, pointer, ctypes.c_int32, ctypes.c_int32)(self._context, threads, threads)
        self._memory = call("llama_get_memory", pointer, pointer)(self._context)
        self._get_one = call("llama_batch_get_one", _Batch, pointer, ctypes.c_int32)
        self._decode = call("llama_decode", ctypes.c_int32, pointer, _Batch)
        self._logits = call("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, ctypes.c_int32)
        self._cut = call("llama_memory_seq_rm", ctypes.c_bool, pointer, *[ctypes.c_int32] * 3)

    def feed(self, tokens: list[int]) -> NDArray[Any]:
        """Append tokens; logits of the last."""
        numbers = (ctypes.c_int32 * len(tokens))(*tokens)
        if self._decode(self._context, self._get_one(ctypes.addressof(numbers), len(tokens))):
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(self._logits(self._context, -1), (VOCAB,))

    def keep(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self._cut(self._memory, 0, tokens, -1)
