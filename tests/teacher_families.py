"""Random teachers of every tested family, a few thousand parameters each, with a tokenizer as that family has it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, PreTrainedModel
from transformers.models.qwen3 import Qwen3Config

from spikeopd.models.teacher import freeze, resolve

VOCABULARY = 1024  # of the shipped tokenizer, which all of them borrow
LAYERS, HEADS, POSITIONS = 3, 4, 48
SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
             max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=2, pad_token_id=None)  # fmt: skip
GROUPED = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}
CONFIGS = {
    "opt": OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=24, word_embed_proj_dim=16),
    "llama": LlamaConfig(**GROUPED),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),  # heads wider than hidden_size / heads
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=POSITIONS,
        bos_token_id=2,
        eos_token_id=2,
    ),  # fmt: skip
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=24),
}
# template around a text, tokenizer_config.json
TOKENIZERS: dict[str, tuple[list[str] | None, dict[str, str]]] = {
    "opt": (["</s>", "$A"], {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}),
    "llama": (["<s>", "$A"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "qwen3": (None, {"eos_token": "</s>"}),
    "gpt2": (None, {}),  # GPT-2's names no roles
    "gpt_neox": (None, {"bos_token": "</s>", "eos_token": "</s>"}),
}


def random_teacher(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return freeze(AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager"))


def save_teacher(family: str, folder: Path) -> Path:
    """A Hugging Face directory of this family."""
    random_teacher(family).save_pretrained(folder)
    backend = Backend.from_file(f"{resolve('tiny')}/tokenizer.json")
    template, settings = TOKENIZERS[family.partition("-")[0]]
    if template is None:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        ids = [(token, backend.token_to_id(token)) for token in template if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
