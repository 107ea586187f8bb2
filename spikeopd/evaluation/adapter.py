"""The harness's view of a model: an lm-evaluation-harness `LM` around any `Scorer`.

Prompts, metrics and the splitting of context and continuation are the harness's own; this class answers its requests.
Texts begin with the tokenizer's BOS (`</s>` for OPT), unless they already do; an empty context is the BOS alone; a
context too long for the position table loses its beginning: all as the harness's `HFLM` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from spikeopd.errors import InputError
from spikeopd.evaluation.generation import generate
from spikeopd.evaluation.scoring import Codec, Item, Limits, Scored, Scorer, make_item, score
from spikeopd.reporting import Progress, shown
from spikeopd.sampling import Sampling, generators

GENERATION_BATCH = 16
GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "seed"}


class HarnessLM(TemplateLM):  # type: ignore[misc] # the harness has no types
    """`lm_eval.simple_evaluate(model=HarnessLM(scorer, tokenizer), …)`."""

    backend = "causal"
    tokenizer = None  # the harness asks it for chat templates, which base models have not

    def __init__(
        self, scorer: Scorer, codec: Codec, limits: Limits | None = None, progress: Progress | None = None
    ) -> None:
        super().__init__()
        self.scorer, self.codec = scorer, codec
        self.limits = limits or Limits()
        self._progress = progress
        self._bos = codec.decode([codec.bos_token_id], skip_special_tokens=False)
        # A question's context is encoded once for each choice; remembering it saves most of that.
        self._encode = lru_cache(maxsize=4096)(lambda text, special: tuple(codec.encode(text, special)))
        self.truncated = 0  # requests whose context lost its beginning

    @property
    def eot_token_id(self) -> int:
        return self.codec.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.codec.bos_token_id

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def batch_size(self) -> int | str:
        return self.limits.sequences or "auto"

    @property
    def tokenizer_name(self) -> str:
        return getattr(self.codec, "origin", "tokenizer").replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not (self._bos and string.startswith(self._bos))
        return list(self._encode(string, add_special_tokens))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        items = [make_item(request[1], request[2], self.max_length) for request in requests]
        self.truncated += sum(len(request[1]) + len(request[2]) > self.max_length + 1 for request in requests)
        answers = [(result.total, result.greedy) for result in self._score(items, "log-likelihoods")]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[int, Item]] = []
        for index, (text,) in enumerate(request.args for request in requests):
            for context, continuation in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                before, targets = utils.make_disjoint_window((context, continuation))
                windows.append((index, make_item(before, targets, self.max_length)))
        totals = [0.0] * len(requests)
        for (index, _), result in zip(windows, self._score([item for _, item in windows], "texts"), strict=True):
            totals[index] += result.total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        answers: list[str] = [""] * len(requests)
        plans = [self._generation(*request.args) for request in requests]
        # Of all requests together, so that a continuation does not depend on the batch.
        streams: dict[int, np.random.Generator] = {}
        for seed in {plan[1][3] for plan in plans}:
            places = [index for index, plan in enumerate(plans) if plan[1][3] == seed]
            streams |= zip(places, generators([plans[index][0] for index in places], seed), strict=True)
        # Same options and similar length together; the place in the list is kept with each.
        order = sorted(range(len(plans)), key=lambda i: (repr(plans[i][1]), -len(plans[i][0]), i))
        size = self.limits.sequences or GENERATION_BATCH
        runs: list[list[int]] = []
        for index in order:
            if runs and len(runs[-1]) < size and plans[runs[-1][0]][1] == plans[index][1]:
                runs[-1].append(index)
            else:
                runs.append([index])
        with shown(self._progress, "generations", len(requests)) as advance:
            for run in runs:
                length, until, temperature, seed = plans[run[0]][1]

                def finished(tokens: list[int], until: tuple[str, ...] = until) -> bool:
                    if tokens[-1] == self.eot_token_id:
                        return True
                    text = self.codec.decode(tokens)
                    return any(term in text for term in until)

                made = generate(
                    self.scorer,
                    [plans[index][0] for index in run],
                    Sampling(temperature, seed=seed, max_new_tokens=length),
                    [streams[index] for index in run],
                    finished,
                )
                for index, tokens in zip(run, made, strict=True):
                    answers[index] = _before(self.codec.decode(tokens), until)
                    self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                advance(len(run))
        return answers

    def _generation(
        self, context: str, options: dict[str, Any]
    ) -> tuple[list[int], tuple[int, tuple[str, ...], float, int]]:
        unknown = sorted(set(options) - GENERATION_OPTIONS)
        if unknown:
            raise InputError(
                f"generation option '{unknown[0]}' is not offered; there is {', '.join(sorted(GENERATION_OPTIONS))}"
            )
        until = options.get("until") or []
        until = (until,) if isinstance(until, str) else tuple(until)
        length = int(options.get("max_gen_toks", 256))
        if not 0 < length < self.max_length:
            raise InputError(f"max_gen_toks {length} leaves no room for a prompt in {self.max_length} positions")
        sampled = bool(options.get("do_sample", False))
        temperature = float(options.get("temperature", 1.0 if sampled else 0.0)) if sampled else 0.0
        prompt = self.tok_encode(context)[-(self.max_length - length) :]
        return prompt, (length, tuple(term for term in until if term), temperature, int(options.get("seed", 0)))

    def _score(self, items: Sequence[Item], name: str) -> list[Scored]:
        with shown(self._progress, name, len(items)) as advance:
            return score(self.scorer, items, self.limits, advance)


def _before(text: str, until: tuple[str, ...]) -> str:
    for term in until:
        text = text.split(term)[0]
    return text
