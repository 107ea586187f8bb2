"""Cut a teacher's vocabulary to the tokens a corpus uses: tokenizer, token table and head: `spikeopd-train vocabulary`.

The cut teacher is the old one with fewer words: on the corpus it reads the same tokens, and its distribution is the old
one given that no cut token comes. What that costs on text that was not counted is measured and written beside it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spikeopd.errors import InputError
from spikeopd.files import check_new_directory, new_directory, parse_json, write_json, write_text
from spikeopd.models.teacher import load_teacher
from spikeopd.students import find_bundle, no_bars
from spikeopd.text.backend import make_backend, read_backend
from spikeopd.text.sources import open_source
from spikeopd.text.tokenizer import Framing, Tokenizer, load_tokenizer
from spikeopd.text.vocabulary import cut

REPORT = "vocabulary.json"


def cut_vocabulary(
    teacher: str,
    source: str,
    output: str | Path,
    *,
    like: str | None = None,
    min_count: int = 1,
    multiple: int = 64,
    documents: int = 64,
    framing: Framing = "auto",
    threads: int | None = None,
) -> dict[str, Any]:
    """Write the teacher with the tokens that the training part of `source` uses at least `min_count` times.

    like: keep the tokens of this tokenizer or bundle instead, which was cut from the same teacher's: a student that
    goes on from it needs the same rows.
    multiple: rows are filled up to a multiple of it, which products with the head prefer. documents: how many of the
    validation part are scored by both teachers. Returns the report that vocabulary.json in `output` holds.
    """
    no_bars()
    if threads:
        torch.set_num_threads(threads)
    check_new_directory(output, "--output")
    old = load_tokenizer(teacher, framing)
    model = load_teacher(teacher, tokenizer_size=old.vocab_size, attentions=False)
    text = open_source(source)
    counts = count_tokens(old, text.documents("train"))
    content = parse_json(old.backend.to_str())
    if like is None:
        used = [token for token, times in counts.items() if times >= min_count]
        if not used:
            raise InputError(f"vocabulary: {source} gives no token at least {min_count} times")
        content, kept = cut(content, used, teacher, multiple)
    else:
        wanted = read_backend((find_bundle(like) or Path(like)) / "tokenizer.json").get_vocab()
        used = [token for piece, token in old.backend.get_vocab().items() if piece in wanted]
        content, kept = cut(content, used, teacher)
        if make_backend(content, Path(output)).get_vocab() != wanted:
            raise InputError(f"vocabulary: {like} was not cut from the tokenizer of {teacher}: it numbers other tokens")
    new = Tokenizer(make_backend(content, Path(output)), old.roles, str(output), old.framing)
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 1024)
    fitting = (t for t in text.documents("validation") if all(2 <= len(frame(r, t)) <= limit for r in (old, new)))
    held_out = list(itertools.islice(fitting, documents))
    before = score(model, old, held_out)
    keep_rows(model, kept)
    after = score(model, new, held_out)
    table: Any = model.get_input_embeddings()
    width = table.weight.shape[1]
    report = {
        "teacher": teacher,
        "source": source,
        "entries": {"before": old.vocab_size, "used": len(used), "after": len(kept)},
        "table_parameters": {"before": old.vocab_size * width, "after": len(kept) * width},
        "training_tokens": sum(counts.values()),
        "held_out": {"documents": len(held_out), "before": before, "after": after},
    }
    with new_directory(output) as folder:
        model.save_pretrained(folder)
        write_text(folder / "tokenizer.json", _dump(content) + "\n")
        settings = {**old.roles, "framing": old.framing, "tokenizer_class": "PreTrainedTokenizerFast"}
        write_json(folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})
        write_json(folder / REPORT, report)
    return report


def _dump(content: dict[str, Any]) -> str:
    import json

    return json.dumps(content, ensure_ascii=False)


def count_tokens(tokenizer: Tokenizer, documents: Iterable[str], at_once: int = 256) -> Counter[int]:
    """How often each token occurs."""
    counts: Counter[int] = Counter()
    stream = iter(documents)
    while part := list(itertools.islice(stream, at_once)):
        for ids in tokenizer.encode_batch(part, add_special_tokens=False):
            counts.update(ids)
    return counts


@torch.no_grad()
def keep_rows(model: PreTrainedModel, kept: list[int]) -> None:
    """Leave the model these rows of its token table and its head, and renumber the special tokens it names."""
    place = {old: new for new, old in enumerate(kept)}
    rows = torch.tensor(kept)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        kind = model.config.model_type
        raise InputError(f"vocabulary: a {kind} has no plain token table and head; their rows cannot be chosen")
    shared = head.weight.data_ptr() == table.weight.data_ptr()
    table.weight = nn.Parameter(table.weight[rows].clone(), requires_grad=False)
    table.num_embeddings = head.out_features = len(kept)
    if table.padding_idx is not None:
        table.padding_idx = place.get(table.padding_idx)
    head.weight = table.weight if shared else nn.Parameter(head.weight[rows].clone(), requires_grad=False)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[rows].clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        if config is None:
            continue
        if hasattr(config, "vocab_size"):
            config.vocab_size = len(kept)
        for role in ("bos", "eos", "pad", "unk"):
            old: Any = getattr(config, f"{role}_token_id", None)
            if isinstance(old, int):
                setattr(config, f"{role}_token_id", place.get(old))
            elif isinstance(old, list):
                setattr(config, f"{role}_token_id", [place[token] for token in old if token in place])


def frame(tokenizer: Tokenizer, text: str) -> list[int]:
    """A document's tokens after its begin token."""
    return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]


@torch.no_grad()
def score(model: PreTrainedModel, tokenizer: Tokenizer, documents: list[str]) -> dict[str, float]:
    """Tokens, perplexity per token and bits per character of documents, each after its begin token."""
    total, tokens, characters = 0.0, 0, 0
    for text in documents:
        row = torch.tensor([frame(tokenizer, text)])
        logits: Tensor = model(row, use_cache=False).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        tokens, characters = tokens + row.shape[1] - 1, characters + len(text)
    if not tokens:
        return {"tokens": 0}
    return {
        "tokens": tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_character": total / math.log(2) / characters,
    }
