"""Rollout statistics of a model's own continuations: Adj, Dist-4, Run (App. B), and samples to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spikeopd.errors import ConfigError
from spikeopd.evaluation import paper
from spikeopd.evaluation.generation import generate, in_batches
from spikeopd.evaluation.models import Model
from spikeopd.quality import rollout_statistics
from spikeopd.reporting import Progress, Report, shown
from spikeopd.sampling import LARGEST_SEED, Sampling
from spikeopd.tables import aligned
from spikeopd.text.sources import Split, open_source
from spikeopd.text.tokens import batch, prepare

PROMPT_LENGTH = 480  # the paper's; shortened to what the model holds
LENGTH = 32
BATCH = 16
DEFINITIONS = {
    "version": 1,
    "adj": "share of positions that repeat their predecessor, mean over continuations",
    "dist4": "distinct four-token sequences over their number, mean over continuations",
    "run": "longest stretch of one identical token, mean over continuations",
    "rep4": "1 - dist4",
}


def rollouts(
    model: Model,
    source: str,
    *,
    split: Split = "validation",
    prompts: int = 256,
    prompt_length: int | None = None,
    length: int = LENGTH,
    temperature: float = 1.0,
    seed: int = 0,
    samples: int = 3,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Continue `prompts` windows of a text source; temperature 0 is greedy. Tokens follow from the seed alone."""
    most = model.scorer.max_length - length
    if prompts < 1 or length < 1 or most < 1:
        raise ConfigError(
            f"--num-prompts {prompts} and --max-new-tokens {length} must be at least 1, and the model's "
            f"{model.scorer.max_length} positions must hold a prompt too"
        )
    if not (math.isfinite(temperature) and temperature >= 0) or samples < 0:
        raise ConfigError(f"--temperature {temperature} and --samples {samples} must be 0 or more")
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"--seed must lie between 0 and 2^63 - 1, got {seed}")
    prompt_length = min(PROMPT_LENGTH, most) if prompt_length is None else prompt_length
    if not 1 <= prompt_length <= most:
        raise ConfigError(f"--prompt-length {prompt_length} must lie between 1 and {most}, to leave room for {length}")
    text = prepare(open_source(source), model.tokenizer, split, max_tokens=max_tokens)
    rows = batch(text, batch_size=prompts, length=prompt_length, seed=seed, step=0).tolist()
    sampling = Sampling(temperature, seed=seed, max_new_tokens=length)
    streams = model.streams(rows, seed)
    made: list[list[int]] = []
    with shown(progress, "rollouts", prompts) as advance:
        for part in in_batches(prompts, batch_size or BATCH):
            made += generate(model.scorer, rows[part], sampling, streams[part])
            advance(part.stop - part.start)
    decode = model.tokenizer.decode
    return {
        "source": source,
        "split": split,
        "text_fingerprint": text.fingerprint,
        "prompts": prompts,
        "prompt_length": prompt_length,
        "length": length,
        "temperature": temperature,
        "seed": seed,
        **rollout_statistics(np.array(made, dtype=np.int64)),
        "samples": [
            {"prompt": decode(rows[row]), "continuation": decode(made[row]), "tokens": made[row]}
            for row in range(min(samples, prompts))
        ],
    }


def describe(model: Model, result: Mapping[str, Any], beside: str = "none") -> Report:
    """What `spikeopd-eval rollouts` writes and prints of a result; beside: the paper's rows to show."""
    rows = paper.rows(beside, {})
    summary = {
        "model": model.name,
        **model.about,
        **result,
        "definitions": DEFINITIONS,
        "paper": {"rows": [row.to_dict() for row in rows]},
    }
    samples = [
        f"\n{number}. … {' '.join(sample['prompt'].split())[-100:]} ⇒ {' '.join(sample['continuation'].split())}"
        for number, sample in enumerate(result["samples"], start=1)
    ]
    return Report(summary, table(model.name, result, rows) + "".join(samples))


def table(name: str, result: Mapping[str, Any], rows: Sequence[paper.Row]) -> str:
    """Adj and Dist-4 in percent and Run in tokens, as the paper prints them."""
    lines = [["", "Adj. %", "Dist.-4 %", "Run"]]
    lines.append([name, f"{100 * result['adj']:.2f}", f"{100 * result['dist4']:.2f}", f"{result['run']:.4f}"])
    for row in rows:
        if row.run is not None:
            lines.append([f"paper: {row.method} {row.scale}", f"{row.adj:.2f}", f"{row.dist4:.2f}", f"{row.run:.4f}"])
    return "\n".join(aligned(lines))
