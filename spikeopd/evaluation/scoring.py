"""Log-probabilities of many continuations, planned so that each shared beginning is computed once. No torch here.

An `Item` is what is fed and what should come out. `score` drops duplicates, finds items that begin alike (the choices
of a question), sorts by length, packs batches and hands them to a `Scorer`: the student or another torch model
(`torch_model.py`), or an exported bundle (`bundle_model.py`). The result of an item depends on the item alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spikeopd.errors import CheckFailed, InputError

Tokens = tuple[int, ...]
WINDOW = 16  # neighbours among which a shared beginning is looked for: more than any question has choices
WORTHWHILE = 8  # tokens: below this, a second forward pass costs more than it saves


@dataclass(frozen=True)
class Item:
    """The last len(targets) positions of `inputs` are to predict `targets`."""

    inputs: Tokens
    targets: Tokens

    @property
    def context(self) -> int:
        """Tokens fed up to the one whose output predicts the first target."""
        return len(self.inputs) - len(self.targets) + 1


@dataclass(frozen=True)
class Scored:
    """logprobs [len(targets)]; greedy: every target was the most likely token."""

    logprobs: NDArray[np.float64]
    greedy: bool

    @property
    def total(self) -> float:
        return float(self.logprobs.sum())


@dataclass(frozen=True)
class Group:
    """Items whose first `shared` tokens are the same; 0 for an item on its own."""

    items: tuple[Item, ...]
    shared: int = 0

    @property
    def prefix(self) -> Tokens:
        return self.items[0].inputs[: self.shared]

    @property
    def longest(self) -> int:
        return max(len(item.inputs) for item in self.items)


class Session(Protocol):
    """Sequences being continued side by side."""

    def feed(self, tokens: Sequence[int]) -> NDArray[Any]:
        """One token for each sequence; the logits [sequences, vocab] of what follows."""


class Codec(Protocol):
    """What evaluation asks of a tokenizer; `spikeopd.text.tokenizer.Tokenizer` has it."""

    bos_token_id: int
    eos_token_id: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Scorer(Protocol):
    """A language model seen from evaluation."""

    max_length: int  # positions
    vocab_size: int
    shares: bool  # whether a shared beginning can be computed once

    def run(self, groups: Sequence[Group]) -> list[list[Scored]]:
        """Results of each group's items, in order."""

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Session, NDArray[Any]]:
        """Begin sequences; logits [sequences, vocab] after each prompt."""


@dataclass(frozen=True)
class Limits:
    """What one batch may hold. sequences: items, if the user says so; else memory decides.

    tokens: positions held in the cache, padding included.
    logits: numbers the output layer may return at once (256 MB in float32).
    """

    sequences: int | None = None
    tokens: int = 4096
    logits: int = 1 << 26

    @staticmethod
    def on(device: str, sequences: int | None = None) -> Limits:
        """An accelerator needs larger batches to be busy; one that turns out too large is halved there."""
        return Limits(sequences) if device == "cpu" else Limits(sequences, tokens=1 << 15, logits=1 << 28)


def make_item(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Item:
    """Context and continuation as the model sees them: cut from the left to what the position table holds."""
    if not context or not continuation:
        raise InputError("a log-likelihood needs at least one token of context and one of continuation")
    if len(continuation) > max_length:
        raise InputError(
            f"a continuation of {len(continuation)} tokens does not fit the model's {max_length} positions"
        )
    whole = (*context, *continuation)[-(max_length + 1) :]
    return Item(whole[:-1], tuple(continuation))


def score(
    scorer: Scorer, items: Sequence[Item], limits: Limits | None = None, advance: Callable[[int], None] | None = None
) -> list[Scored]:
    """Score every item; `advance` is told how many of them a finished batch answers."""
    copies: dict[Item, int] = {}
    for item in items:
        copies[item] = copies.get(item, 0) + 1
    results: dict[Item, Scored] = {}
    groups = plan(list(copies), scorer.shares)
    for batch in batches(groups, limits or Limits(), scorer):
        for group, answers in zip(batch, scorer.run(batch), strict=True):
            if not all(np.isfinite(answer.logprobs).all() for answer in answers):
                raise CheckFailed("the model's log-likelihoods are not finite; its weights are damaged or overflow")
            results.update(zip(group.items, answers, strict=True))
        if advance:
            advance(sum(copies[item] for group in batch for item in group.items))
    return [results[item] for item in items]


# --- which items share what ------------------------------------------------------------------------------------------


def plan(items: Sequence[Item], share: bool = True) -> list[Group]:
    """Divide the items into groups so that the fewest tokens are fed.

    Sorted, items that begin alike stand together, so a group is a run of neighbours. `saved[i]` is the best saving
    for the first i items; the last group of them has one of at most WINDOW sizes.
    """
    if not share:
        return [Group((item,)) for item in items]
    order = sorted(items, key=lambda item: (item.inputs, item.targets))
    alike = [_common(one.inputs, two.inputs) for one, two in pairwise(order)]
    saved, sizes = [0], [0]
    for end in range(1, len(order) + 1):
        best, size, shared = saved[end - 1], 1, order[end - 1].context
        for first in range(end - 2, max(-1, end - 1 - WINDOW), -1):
            # What is shared must end before the first output that any member needs of its own.
            shared = min(shared, alike[first], order[first].context)
            saving = saved[first] + (end - first - 1) * shared - WORTHWHILE
            if saving > best:
                best, size = saving, end - first
        saved.append(best)
        sizes.append(size)
    groups, end = [], len(order)
    while end:
        members = tuple(order[end - sizes[end] : end])
        groups.append(Group(members, _shared(members) if len(members) > 1 else 0))
        end -= sizes[end]
    return groups


def _shared(members: tuple[Item, ...]) -> int:
    ends = _common(members[0].inputs, members[-1].inputs)  # sorted: what first and last share, all share
    return min(ends, *(item.context for item in members))


def _common(one: Tokens, two: Tokens) -> int:
    if one == two:
        return len(one)
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return min(len(one), len(two))


def batches(groups: Sequence[Group], limits: Limits, scorer: Scorer) -> Iterator[list[Group]]:
    """Groups of similar length together, longest first: too large a batch fails at once, not after an hour."""
    for alone in (False, True):
        kind = sorted(
            (group for group in groups if (group.shared == 0) == alone),
            key=lambda group: (-group.shared, -group.longest, group.items[0].inputs, group.items[0].targets),
        )
        batch: list[Group] = []
        for group in kind:
            if batch and not _fits([*batch, group], limits, scorer):
                yield batch
                batch = []
            batch.append(group)
        if batch:
            yield batch


def _fits(batch: Sequence[Group], limits: Limits, scorer: Scorer) -> bool:
    # Padded to one length each, shared beginnings and what follows them may be longer together than any item is.
    length = max(group.shared for group in batch) + max(group.longest - group.shared for group in batch)
    if length > scorer.max_length:
        return False
    sequences = sum(len(group.items) for group in batch)
    if limits.sequences is not None:
        return sequences <= limits.sequences
    outputs = max(len(item.targets) for group in batch for item in group.items)
    return sequences * length <= limits.tokens and sequences * outputs * scorer.vocab_size <= limits.logits
