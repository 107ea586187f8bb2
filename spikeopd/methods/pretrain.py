"""Train a small OPT teacher from text: how the embedded teachers were made, and how to make another one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from spikeopd.config import MODEL_PRESETS
from spikeopd.files import new_directory, write_json
from spikeopd.models.teacher import load_teacher
from spikeopd.text.tokenizer import Tokenizer
from spikeopd.text.tokens import TokenData, batch, sequential_windows

TINY = MODEL_PRESETS["tiny"]


@dataclass(frozen=True)
class PretrainOptions:
    """Sizes as in OPTConfig; the defaults re-create the embedded teacher."""

    hidden_size: int = TINY["hidden_size"]
    num_hidden_layers: int = TINY["num_hidden_layers"]
    num_attention_heads: int = TINY["num_attention_heads"]
    ffn_dim: int = TINY["ffn_dim"]
    max_position_embeddings: int = TINY["max_position_embeddings"]
    updates: int = 2400
    batch_size: int = 16
    length: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.05
    seed: int = 0
    rule_runs: float = 0.0  # share of rows that are runs of one of RULE_CHARACTERS: a constructed attractor
    start: str | None = None  # continue from this teacher


RULE_CHARACTERS = "-=*."


def pretrain(
    options: PretrainOptions,
    tokenizer: Tokenizer,
    train: TokenData,
    validation: TokenData,
    output: Path,
    report: Callable[[str], None],
) -> dict[str, float]:
    """AdamW with cosine decay; weights are kept in float16 (half the file, no measurable loss). Returns the summary."""
    torch.manual_seed(options.seed)
    model = _start(options, tokenizer)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))
    warmup = max(1, options.updates // 20)
    started = time.monotonic()
    model.train()
    for update in range(options.updates):
        progress = min(1.0, update / warmup) * 0.5 * (1 + math.cos(math.pi * update / options.updates))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * progress
        ids = batch(train, batch_size=options.batch_size, length=options.length, seed=options.seed, step=update)
        loss = causal_loss(model, torch.from_numpy(with_runs(ids, tokenizer, options.rule_runs)))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % 100 == 0 or update + 1 == options.updates:
            report(f"teacher update {update + 1}/{options.updates}  loss {loss.item():.3f}")
    model.half().float()  # type: ignore[no-untyped-call]  # score what will be stored
    summary = {
        "validation_perplexity": perplexity(model, validation, options.length),
        "updates": options.updates,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.monotonic() - started, 1),
    }
    with new_directory(output) as folder:
        model.half().save_pretrained(folder)  # type: ignore[no-untyped-call]
        tokenizer.save(folder)
        write_json(folder / "training.json", {"options": vars(options), "data": train.source, **summary})
    return summary


def _start(options: PretrainOptions, tokenizer: Tokenizer) -> PreTrainedModel:
    if options.start is not None:
        model = load_teacher(options.start, tokenizer_size=tokenizer.vocab_size, attentions=False)
        return model.requires_grad_(True)
    config = OPTConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        ffn_dim=options.ffn_dim,
        max_position_embeddings=options.max_position_embeddings,
        word_embed_proj_dim=options.hidden_size,
        dropout=options.dropout,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return OPTForCausalLM(config)  # type: ignore[no-untyped-call]


def with_runs(ids: np.ndarray, tokenizer: Tokenizer, share: float) -> np.ndarray:
    """Continue the first rows, from anywhere on, with a run of one rule character: text, then - - - - …

    The place follows from the row's own tokens; always the same place would teach the place instead of the run.
    """
    rules = [tokenizer.encode(character, add_special_tokens=False)[-1] for character in RULE_CHARACTERS]
    rows, length = ids.shape
    for row in range(round(share * rows)):
        key = int(ids[row].sum())
        ids[row, 4 + key % (length - 4) :] = rules[key // length % len(rules)]
    return ids


def causal_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, data: TokenData, length: int, windows: int = 256) -> float:
    """exp of the mean next-token loss over the first non-overlapping windows of the data."""
    model.eval()
    total, count = 0.0, 0
    rows = torch.from_numpy(sequential_windows(data, length)[:windows].astype("int64"))
    for ids in torch.split(rows, 32):
        total += causal_loss(model, ids).item() * ids.shape[0]
        count += ids.shape[0]
    return math.exp(total / count)
