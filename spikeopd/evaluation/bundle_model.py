"""An exported bundle as a `Scorer`: log-likelihoods from the integers that are deployed, not from the training model.

The only module of `spikeopd` that imports another package: neuro_sim runs the bundle. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.backends import event_place
from neuro_sim.event.engine import EventBatch, EventDecoder
from neuro_sim.graded import oracle
from spikeopd.contracts import Activity, ModelShape, SpikeModel
from spikeopd.contracts.bundle import load_bundle, read_manifest
from spikeopd.errors import InputError
from spikeopd.evaluation.scoring import Group, Item, Scored, Tokens
from spikeopd.quality import log_likelihoods
from spikeopd.text.backend import read_backend
from spikeopd.text.tokenizer import Tokenizer, load_tokenizer

Array = NDArray[Any]


class BundleScorer:
    """Integer bundles run on the event engine; float32 bundles and quantised twins on the slow dense decoder."""

    shares = True

    def __init__(self, model: SpikeModel) -> None:
        self.max_length = model.shape.max_position_embeddings
        self.vocab_size = model.shape.vocab_size
        self.precision = model.precision
        spikes = model.integer and not model.shape.graded
        self._decoder = EventDecoder(model) if spikes else None
        self.engine = "event" if spikes else "dense"
        self._model = self._decoder.model if self._decoder else model
        self._sequence = _Event(self._decoder.batch([None])) if self._decoder else _Dense(model)

    def run(self, groups: Sequence[Group]) -> list[list[Scored]]:
        return [self._group(group) for group in groups]

    def _group(self, group: Group) -> list[Scored]:
        self._sequence.rewind(0)
        first = self._sequence.feed(group.prefix, 1) if group.shared else None
        return [self._score(item, group.shared, first) for item in group.items]

    def _score(self, item: Item, shared: int, first: Array | None) -> Scored:
        """`first`: logits after the shared beginning, which predict the first target of items that end with it."""
        self._sequence.rewind(shared)
        rest = item.inputs[shared:]
        parts = [self._sequence.feed(rest, min(len(item.targets), len(rest)))] if rest else []
        if first is not None and len(rest) < len(item.targets):
            parts.insert(0, first)
        logits, targets = np.concatenate(parts), np.array(item.targets)
        return Scored(log_likelihoods(logits, targets), bool((logits.argmax(-1) == targets).all()))

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[_EventSession | _DenseSession, Array]:
        if self._decoder is None:
            sequences = [_Dense(self._model) for _ in prompts]
            logits = [sequence.feed(tuple(p), 1)[-1] for sequence, p in zip(sequences, prompts, strict=True)]
            return _DenseSession(sequences), np.stack(logits)
        batch = self._decoder.batch([None] * len(prompts))
        logits = [batch.prefill(row, prompt)[0] for row, prompt in enumerate(prompts)]
        return _EventSession(batch), np.stack(logits)


class _EventSession:
    def __init__(self, batch: EventBatch) -> None:
        self.batch = batch

    def feed(self, tokens: Sequence[int]) -> Array:
        return self.batch.step(range(len(tokens)), tokens)[0]


class _DenseSession:
    def __init__(self, sequences: list[_Dense]) -> None:
        self.sequences = sequences

    def feed(self, tokens: Sequence[int]) -> Array:
        return np.stack([s.feed((t,), 1)[-1] for s, t in zip(self.sequences, tokens, strict=True)])


class _Event:
    """One sequence on the event engine."""

    def __init__(self, batch: EventBatch) -> None:
        self.batch = batch

    def rewind(self, position: int) -> None:
        """Keep the first `position` tokens. What lies behind them in the cache is masked until it is written anew."""
        self.batch.caches[0].position = position

    def feed(self, tokens: Tokens, outputs: int) -> Array:
        """Logits [outputs, vocab] of the last positions."""
        silent = tokens[: len(tokens) - outputs]
        if silent:
            self.batch.prefill(0, silent)
        return self.batch.prefill(0, tokens[len(silent) :], last_only=False)[0]


class _Dense:
    """One sequence on the dense decoder."""

    def __init__(self, model: SpikeModel) -> None:
        self.decoder = oracle(model)

    def rewind(self, position: int) -> None:
        self.decoder.position = position
        for cache in (*self.decoder.keys, *self.decoder.values):
            del cache[position:]

    def feed(self, tokens: Tokens, outputs: int) -> Array:
        return np.stack([self.decoder.step(token)[0] for token in tokens][-outputs:])


def open_bundle(path: Path, tokenizer: str | None = None) -> tuple[BundleScorer, Tokenizer, dict[str, Any]]:
    """The model, its tokenizer and what a summary says about it."""
    manifest = read_manifest(path)
    text = (load_tokenizer(tokenizer) if tokenizer else _bundle_tokenizer(path, manifest)).framed()
    scorer = BundleScorer(load_bundle(path, place=event_place))
    about = {
        "kind": "bundle",
        "engine": scorer.engine,
        "precision": scorer.precision,
        "schema": manifest["schema"],
        "files": {name: entry["sha256"] for name, entry in manifest["files"].items()},
        "shape": manifest["shape"],
    }
    return scorer, text, about


@dataclass(frozen=True)
class Counted:
    """What a bundle did over some sequences. keys: that its tokens looked at in total; cpu_seconds: of one thread of
    the event engine, None of a quantised twin, which that does not run.
    """

    shape: ModelShape
    activity: Activity
    keys: int
    cpu_seconds: float | None


def count_events(path: Path, sequences: Sequence[Tokens]) -> Counted:
    """Feed sequences token by token and count every event."""
    model = load_bundle(path)
    decoder = oracle(model) if model.shape.graded else EventDecoder(model, threads=1)
    decoder.step(int(sequences[0][0]))  # whatever happens once happens now
    found, began = [], time.process_time()
    for sequence in sequences:
        decoder.reset()
        found += [decoder.step(int(token))[1] for token in sequence]
    spent = time.process_time() - began
    keys = sum(len(sequence) * (len(sequence) + 1) // 2 for sequence in sequences)
    return Counted(model.shape, Activity.total(found), keys, None if model.shape.graded else spent)


def _bundle_tokenizer(path: Path, manifest: dict[str, Any]) -> Tokenizer:
    """tokenizer.json holds no roles; the manifest's `tokens` say which ids begin and end a text."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{path}: the bundle has no tokenizer.json; name one with --tokenizer")
    backend = read_backend(file, "export the bundle again")
    ids = manifest.get("tokens") or {}
    roles = {f"{role}_token": backend.id_to_token(ids[role]) for role in ("bos", "eos", "pad") if role in ids}
    return Tokenizer(backend, {role: token for role, token in roles.items() if token}, origin=str(file))
