"""A torch causal language model as a `Scorer`: the spiking student, OPT, or another model of transformers.

Rows are padded on the left, so the outputs wanted are always the last ones and the output layer computes no others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spikeopd.errors import InputError
from spikeopd.evaluation.scoring import Group, Item, Scored

LENGTH_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx")  # where configurations keep their context length
DEFAULT_LENGTH = 2048
PADDED_SHARE = 0.8  # a row shorter than this share of the longest begins a new pass …
SMALLEST_PASS = 128  # … if the present one has so many tokens


class TorchScorer:
    """Shared beginnings go through the model's key/value cache, which for the student holds spikes, one bit each."""

    def __init__(self, model: PreTrainedModel, share: bool = True) -> None:
        if getattr(model, "_is_stateful", False):
            raise InputError(
                f"a recurrent model ({model.config.model_type}) keeps a state that can be neither padded nor shared; "
                "evaluate it with the harness's own command"
            )
        self.model = model
        model.train(False)
        config = model.config.get_text_config()
        lengths = [getattr(config, name) for name in LENGTH_FIELDS if getattr(config, name, None)]
        self.max_length = int(lengths[0]) if lengths else DEFAULT_LENGTH
        self.vocab_size = int(config.vocab_size)
        self.shares = share
        self._positions = "position_ids" in inspect.signature(model.forward).parameters

    def run(self, groups: Sequence[Group]) -> list[list[Scored]]:
        try:
            return self._run(groups)
        except torch.OutOfMemoryError:
            if len(groups) == 1:
                raise
            torch.cuda.empty_cache()
        half = len(groups) // 2
        return self.run(groups[:half]) + self.run(groups[half:])

    @torch.inference_mode()
    def _run(self, groups: Sequence[Group]) -> list[list[Scored]]:
        members = [(row, item) for row, group in enumerate(groups) for item in group.items]
        results: list[list[Scored]] = [[] for _ in groups]
        if groups[0].shared == 0:
            outputs = max(len(item.targets) for _, item in members)
            logits = _Rows(self, [item.inputs for _, item in members], caching=False).forward(outputs)
            for (row, item), part in zip(members, logits, strict=True):
                results[row].append(_scored(part[-len(item.targets) :], item))
            return results
        prefixes = _Rows(self, [group.prefix for group in groups])
        first = prefixes.forward(1)  # what the shared beginning itself predicts
        rest = [item.inputs[groups[row].shared :] for row, item in members]
        parts: list[list[Tensor]] = [
            [first[row]] if len(tokens) < len(item.targets) else []
            for (row, item), tokens in zip(members, rest, strict=True)
        ]
        for chunk in _similar([len(tokens) for tokens in rest]):
            wanted = [min(len(members[index][1].targets), len(rest[index])) for index in chunk]
            rows = prefixes.select([members[index][0] for index in chunk])
            logits = rows.extend([rest[index] for index in chunk], max(wanted))
            for index, count, outputs in zip(chunk, wanted, logits, strict=True):
                parts[index].append(outputs[-count:])
        for (row, item), found in zip(members, parts, strict=True):
            results[row].append(_scored(torch.cat(found), item))
        return results

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[_Session, NDArray[Any]]:
        rows = _Rows(self, prompts)
        return _Session(rows), rows.forward(1)[:, -1].float().cpu().numpy()


class _Session:
    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> NDArray[Any]:
        return self.rows.extend([[token] for token in tokens], 1)[:, -1].float().cpu().numpy()


class _Rows:
    """Sequences fed part by part: tokens waiting, mask of everything fed, and the cache."""

    def __init__(self, scorer: TorchScorer, sequences: Sequence[Sequence[int]], caching: bool = True) -> None:
        self.scorer, self.caching = scorer, caching
        self.cache: Any = None
        self.tokens, self.mask = self._pad(sequences)

    def _pad(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, width - len(sequence) :] = torch.tensor(sequence)
            mask[row, width - len(sequence) :] = 1
        device = self.scorer.model.device
        return tokens.to(device), mask.to(device)

    def extend(self, sequences: Sequence[Sequence[int]], outputs: int) -> Tensor:
        self.tokens, mask = self._pad(sequences)
        self.mask = torch.cat([self.mask, mask], 1)
        return self.forward(outputs)

    def select(self, rows: list[int]) -> _Rows:
        """New sequences that begin as these do: row i as row rows[i]."""
        index = torch.tensor(rows, device=self.mask.device)
        chosen = copy.copy(self)
        chosen.mask = self.mask[index]
        chosen.cache = copy.deepcopy(self.cache)
        chosen.cache.batch_select_indices(index)
        return chosen

    def forward(self, outputs: int) -> Tensor:
        """Feed the waiting tokens; logits [rows, outputs, vocab] of the last positions."""
        options: dict[str, Any] = {}
        if self.scorer._positions:
            # Positions count real tokens only, as OPT's and the student's do.
            options["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -self.tokens.shape[1] :]
        output = self.scorer.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=self.caching,
            logits_to_keep=outputs,
            **options,
        )
        self.cache = output.past_key_values if self.caching else None
        logits: Tensor = output.logits
        return logits


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Places of the lengths above 0, divided so that little is padded: each part is a forward pass of its own."""
    chunks: list[list[int]] = []
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i)):
        longest = lengths[chunks[-1][0]] if chunks else 0
        padded = lengths[index] < PADDED_SHARE * longest and len(chunks[-1]) * longest >= SMALLEST_PASS
        if not chunks or padded:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _scored(logits: Tensor, item: Item) -> Scored:
    """logits [len(targets), vocab]"""
    logits = logits.float()
    targets = torch.tensor(item.targets, device=logits.device)
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)
    greedy = bool((logits.argmax(-1) == targets).all())
    return Scored(chosen.double().cpu().numpy().astype(np.float64), greedy)
