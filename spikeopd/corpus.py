"""A corpus of a teacher's own documents, sampled from its full distribution: `spikeopd-train corpus`.

Documents begin with the token that the teacher's documents begin with and end with the one that ends them. They are
made in batches that share one preallocated cache; what has ended leaves the batch. Document i draws from the stream
(seed, i), and every batch is a file of its own, so a run that was stopped goes on with the next batch.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from spikeopd.errors import ConfigError, InputError, short
from spikeopd.files import parse_json, read_json, read_text, remove_tree, sha256, write_json, write_text
from spikeopd.models.teacher import fingerprint, load_teacher
from spikeopd.runlog import RunLog
from spikeopd.sampling import LARGEST_SEED, row_generators_from
from spikeopd.students import no_bars
from spikeopd.text.tokenizer import Framing, Tokenizer, load_tokenizer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK = 64  # tokens whose weights are summed first when one is drawn
SHRINK = 8  # a batch closes its gaps when this share of it (1/SHRINK) has ended
CORPUS, SETTINGS, PARTS = "corpus.jsonl", "settings.json", "parts"


@dataclass(frozen=True)
class CorpusOptions:
    """documents: how many; max_tokens: of a document, its first token counted; temperature 1 is the teacher itself;
    precision: of the teacher's weights and products.
    """

    documents: int = 1000
    batch_size: int = 128
    max_tokens: int | None = None  # None: as many as the teacher reads
    temperature: float = 1.0
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)}; at least 1" for name in ("documents", "batch_size")
                    if getattr(self, name) < 1]  # fmt: skip
        if self.max_tokens is not None and self.max_tokens < 2:
            problems.append(f"max_tokens is {self.max_tokens}; at least 2")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            problems.append(f"temperature is {self.temperature}; above 0")
        if self.precision not in PRECISIONS:
            problems.append(f"precision is {self.precision}; {' or '.join(PRECISIONS)}")
        if not 0 <= self.seed <= LARGEST_SEED:
            problems.append(f"seed is {self.seed}; from 0 to 2^63 - 1")
        if problems:
            raise ConfigError(f"corpus: {'; '.join(problems)}")


def sample_corpus(
    teacher: str,
    output: str | Path,
    *,
    tokenizer: str | None = None,
    framing: Framing = "auto",
    threads: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Sample documents of `teacher` into the folder `output` (`corpus.jsonl`); continues what an equal call began.

    options: the fields of `CorpusOptions`. Returns the summary: documents, tokens, seconds, and how many documents
    reached their end.
    """
    wanted = CorpusOptions(**options)
    no_bars()
    if threads:
        torch.set_num_threads(threads)
    reader = load_tokenizer(tokenizer or teacher, framing)
    kind = PRECISIONS[wanted.precision]
    model = load_teacher(teacher, tokenizer_size=reader.vocab_size, attentions=False, dtype=kind)
    limit = document_limit(model, wanted.max_tokens)
    with RunLog(output, quiet=quiet) as log:
        log.hold()
        folder = Path(output)
        _same_settings(folder, {"teacher": fingerprint(model), "tokenizer": reader.fingerprint, "framing": framing,
                                "max_tokens": limit, **asdict(wanted)})  # fmt: skip
        starts = range(0, wanted.documents, wanted.batch_size)
        began, made, found = time.monotonic(), 0, []
        with log.progress("corpus", wanted.documents, 0, unit="document") as bar:
            for start in starts:
                part = folder / PARTS / f"{start // wanted.batch_size:06d}.jsonl"
                rows = min(wanted.batch_size, wanted.documents - start)
                lines = _read_part(part, rows, log.warn)
                if lines is None:
                    lines = list(sample_batch(model, reader, start, rows, limit, wanted))
                    _write_part(part, lines)
                    made += sum(line["tokens"] for line in lines)
                found += lines
                seconds = max(time.monotonic() - began, 1e-9)
                bar.advance(rows, **({"tokens/s": made / seconds} if made else {}))
        write_text(folder / CORPUS, _spell(found))
        summary = {
            "corpus": str(folder / CORPUS),
            "documents": len(found),
            "complete": sum(line["complete"] for line in found),
            "tokens": sum(line["tokens"] for line in found),
            "sampled_now": made,
            "seconds": round(time.monotonic() - began, 1),
        }
        log.summary(summary)
    return summary


def document_limit(model: PreTrainedModel, asked: int | None) -> int:
    """Tokens of a document: what was asked for, at most what the teacher reads."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    if asked is not None and positions and asked > positions:
        raise ConfigError(f"corpus: max_tokens is {asked}, the teacher reads {positions}")
    if asked is None and not positions:
        raise ConfigError("corpus: the teacher does not say how many tokens it reads; give max_tokens")
    return asked or positions


def _same_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Batches of another teacher or seed must not end up in one corpus."""
    path = folder / SETTINGS
    if os.path.lexists(path):
        try:
            before = dict(read_json(path))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path}: damaged ({short(error)}); give another --output") from error
        # More documents of the same kind may be asked for later: whole batches stay what they are.
        before = {"precision": "fp32"} | before  # which older versions do not name
        changed = [key for key in settings if before.get(key) != settings[key] and key != "documents"]
        if changed:
            raise InputError(f"{folder}: was begun with another {' and '.join(changed)}; give another --output")
    write_json(path, settings)


def _spell(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _write_part(path: Path, lines: list[dict[str, Any]]) -> None:
    """A batch, with its checksum beside it, so that a stopped call goes on with what was sampled and nothing else."""
    write_text(path, _spell(lines))
    write_text(path.with_suffix(".sha256"), f"{sha256(path)}  {path.name}\n")


def _read_part(path: Path, rows: int, warn: Callable[[str], None]) -> list[dict[str, Any]] | None:
    """The documents of a batch; None if it is still to be sampled: missing, of another size, or damaged."""
    if not os.path.lexists(path):
        return None
    seal = path.with_suffix(".sha256")
    try:
        # Stopped between the two files, or of an older version: the batch alone is whole, because it was renamed.
        if seal.is_file() and read_text(seal, 1000).split()[:1] != [sha256(path)]:
            raise ValueError("its checksum differs")
        # Not splitlines, which also splits at characters that a document may hold.
        lines = [dict(parse_json(line)) for line in read_text(path).split("\n")[:-1]]
        kinds = {"text": str, "complete": bool, "tokens": int}
        if not all(type(line.get(name)) is kind for line in lines for name, kind in kinds.items()):
            raise ValueError("a line says nothing of its tokens")
    except (OSError, ValueError, TypeError, InputError) as error:
        remove_tree(path)
        warn(f"{path} is damaged ({short(error)}); its documents are sampled again")
        return None
    return lines if len(lines) == rows else None  # another number was asked for


# --- one batch -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel, tokenizer: Tokenizer, first: int, rows: int, limit: int, options: CorpusOptions
) -> Iterator[dict[str, Any]]:
    """Documents first … first + rows - 1: {"text", "complete", "tokens"} each. tokens: with the begin token."""
    uniform = torch.from_numpy(
        np.stack([stream.random(limit) for stream in row_generators_from(options.seed, first, rows)])
    )
    ids = torch.full((rows, limit), tokenizer.eos_token_id)
    ids[:, 0] = tokenizer.bos_token_id
    lengths = torch.full((rows,), limit)
    active = torch.arange(rows)  # the document that each row of the cache belongs to
    ended = torch.zeros(rows, dtype=torch.bool)  # of these rows
    layers = [Preallocated(limit) for _ in range(model.config.get_text_config().num_hidden_layers)]
    cache = Cache(layers=[*layers])
    base, head = model.get_decoder(), model.get_output_embeddings()
    for place in range(1, limit):
        features = base(ids[active, place - 1 : place], past_key_values=cache, use_cache=True).last_hidden_state
        logits = head(features[:, -1])[:, : tokenizer.vocab_size].float()
        chosen = draw(logits / options.temperature if options.temperature != 1 else logits, uniform[active, place])
        ids[active, place] = torch.where(ended, ids[active, place], chosen)
        fresh = (chosen == tokenizer.eos_token_id) & ~ended
        lengths[active[fresh]] = place
        ended |= fresh
        if ended.all():
            break
        if ended.sum() * SHRINK >= len(ended):
            keep = (~ended).nonzero().flatten()
            for layer in layers:
                layer.keep(keep)
            active, ended = active[keep], ended[keep]
    complete = lengths < limit
    for row, length, whole in zip(ids.tolist(), lengths.tolist(), complete.tolist(), strict=True):
        yield {"text": tokenizer.decode(row[1:length]).strip(), "complete": whole, "tokens": length}


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [rows, vocabulary] by inverse distribution, uniform [rows] in [0, 1).

    Weights are summed in blocks, the blocks in float64: one pass over the vocabulary instead of a running sum over it.
    """
    weights = torch.exp(logits - logits.amax(1, keepdim=True))
    weights = nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    blocks = weights.sum(2).double().cumsum(1)
    target = uniform.double() * blocks[:, -1]
    block = torch.searchsorted(blocks, target[:, None], right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(1)
    # Rounding may leave the target beyond the block's last sum: then the last token that has any weight is meant.
    last = BLOCK - 1 - (inside.diff(prepend=torch.zeros_like(inside[:, :1])) > 0).flip(1).int().argmax(1)
    place = torch.searchsorted(inside, target[:, None] - before, right=True)[:, 0]
    return block[:, 0] * BLOCK + torch.minimum(place, last)


class Preallocated(DynamicLayer):
    """Keys and values of one layer in memory that is taken once; a step writes its own row and copies nothing else."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.filled = limit, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _length, width = key_states.shape
            self.keys = key_states.new_empty(rows, heads, self.limit, width)
            self.values = value_states.new_empty(rows, heads, self.limit, value_states.shape[-1])
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        end = self.filled + key_states.shape[2]
        keys[:, :, self.filled : end] = key_states
        values[:, :, self.filled : end] = value_states
        self.filled = end
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.filled

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        for name in ("keys", "values"):
            whole: Tensor = getattr(self, name)
            moved = whole[: len(rows)]  # rows only move down, so the memory can be used again
            for new, old in enumerate(rows.tolist()):
                if new != old:
                    moved[new, :, : self.filled] = whole[old, :, : self.filled]
            setattr(self, name, moved)
