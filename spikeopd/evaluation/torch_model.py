"""A torch causal language model as a `Scorer`: the spiking student, OPT, or another model of transformers.

Rows are padded on the left, so the outputs wanted are always the last ones and the output layer computes no others.
"""

from __future__ import annotations

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


class TorchScorer:
    """Shared beginnings go through the model's key/value cache, which for the student holds spikes, one bit each."""

    def __init__(self, model: PreTrainedModel, share: bool = True) -> None:
        if getattr(model, "_is_stateful", False):
            raise InputError(
                f"a recurrent model ({model.config.model_type}) keeps a state that can be neither padded nor shared; "
                "evaluate it with the harness's own command"
            )
        self.model = model.eval()
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
        longer = [index for index, tokens in enumerate(rest) if tokens]
        following: dict[int, Tensor] = {}
        if longer:
            prefixes.select([members[index][0] for index in longer])
            outputs = max(min(len(members[index][1].targets), len(rest[index])) for index in longer)
            logits = prefixes.extend([rest[index] for index in longer], outputs)
            following = dict(zip(longer, logits, strict=True))
        for index, (row, item) in enumerate(members):
            parts = [following[index][-min(len(item.targets), len(rest[index])) :]] if index in following else []
            if len(rest[index]) < len(item.targets):
                parts.insert(0, first[row])
            results[row].append(_scored(torch.cat(parts), item))
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

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row rows[i]."""
        index = torch.tensor(rows, device=self.mask.device)
        self.mask = self.mask[index]
        self.cache.batch_select_indices(index)

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
        return output.logits


def _scored(logits: Tensor, item: Item) -> Scored:
    """logits [len(targets), vocab]"""
    logits = logits.float()
    targets = torch.tensor(item.targets, device=logits.device)
    chosen = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)
    greedy = bool((logits.argmax(-1) == targets).all())
    return Scored(chosen.double().cpu().numpy().astype(np.float64), greedy)
