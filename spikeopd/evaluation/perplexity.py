r"""Perplexity of any text source with a sliding window.

The text is the stream `</s> document </s> document </s>`. Each window holds up to `window` tokens and moves on by
`stride`; a window scores only the tokens that no earlier one did, so every token but the first is scored once, with at
least window - stride tokens before it (where the text has them).

    perplexity    = exp(total nats / scored tokens)
    bits per byte = total nats / ln 2 / UTF-8 bytes of the documents (separators add nats, but no bytes)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spikeopd import quality
from spikeopd.errors import ConfigError, InputError
from spikeopd.evaluation.models import Model
from spikeopd.evaluation.scoring import Item, Limits, score
from spikeopd.text.sources import Split, open_source
from spikeopd.text.tokens import prepare

DEFINITIONS = {
    "version": 1,
    "perplexity": "exp(nats / scored tokens), natural logarithms, every token but the first, separators included",
    "bits_per_byte": "nats / ln 2 / UTF-8 bytes of the documents, separators not counted as bytes",
    "byte_perplexity": "2 ** bits_per_byte",
}


def windows(tokens: Sequence[int] | NDArray[Any], window: int, stride: int) -> list[Item]:
    """Items that score every token but the first exactly once."""
    if not 1 <= stride <= window:
        raise ConfigError(f"--stride {stride} must lie between 1 and the window of {window} tokens")
    count = len(tokens)
    if count < 2:
        raise InputError(f"{count} tokens leave nothing to predict; give more text")
    items, done = [], 1  # tokens[:done] are scored, or cannot be
    end = min(window, count - 1)  # inputs end here; the token at `end` is the last target
    while done < count:
        inputs = tuple(int(token) for token in tokens[max(0, end - window) : end])
        items.append(Item(inputs, tuple(int(token) for token in tokens[done : end + 1])))
        done = end + 1
        end = min(end + stride, count - 1)
    return items


def perplexity(
    model: Model,
    source: str,
    *,
    split: Split = "validation",
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    limits: Limits | None = None,
    progress: Any = None,
) -> dict[str, Any]:
    """Perplexity per token and per byte of one part of a text source."""
    scorer = model.scorer
    window = scorer.max_length if window is None else window
    if not 1 <= window <= scorer.max_length:
        raise ConfigError(f"--window {window} must lie between 1 and the model's {scorer.max_length} positions")
    stride = max(1, window // 2) if stride is None else stride
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(f"--max-tokens {max_tokens} leaves nothing to predict; give at least 2")
    data = prepare(open_source(source), model.tokenizer, split, max_tokens=max_tokens)
    tokens = np.asarray(data.tokens if max_tokens is None else data.tokens[:max_tokens])
    text_bytes = data.text_bytes
    if len(tokens) < len(data.tokens):
        text_bytes = _bytes(model, tokens)
    items = windows(tokens, window, stride)
    advance: Callable[[int], None] | None = None
    if progress is None:
        results = score(scorer, items, limits)
    else:
        with progress("perplexity", len(items)) as shown:
            advance = shown.advance
            results = score(scorer, items, limits, advance)
    nats = -math.fsum(result.total for result in results)
    scored = sum(len(item.targets) for item in items)
    bits = nats / math.log(2) / text_bytes if text_bytes else None
    return {
        "source": source,
        "split": split,
        "text_fingerprint": data.fingerprint,
        "tokens": scored,
        "bytes": text_bytes,
        "documents": data.documents,
        "window": window,
        "stride": stride,
        "windows": len(items),
        "nats": nats,
        "nats_per_token": nats / scored,
        "perplexity": quality.perplexity(nats, scored),
        "bits_per_byte": bits,
        "byte_perplexity": None if bits is None else 2.0**bits,
    }


def _bytes(model: Model, tokens: NDArray[Any]) -> int:
    """UTF-8 length of a cut text; the cut may fall inside a character, which then does not count."""
    return len(model.tokenizer.decode(tokens.tolist()).rstrip("\ufffd").encode("utf-8"))
