"""Benchmark data never trains a model: recognised by name or by the shape of its records, and refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spikeopd.errors import InputError

BENCHMARK_NAMES = re.compile(
    r"(?:^|_)(ai2_?arc|arc_?easy|arc_?challenge|wino_?grande|boolq|piqa|hella_?swag|open_?book_?qa|obqa|head_?qa)(?![a-z])"
)


def benchmark_name(path: str) -> str | None:
    """The benchmark a path or dataset name speaks of, if any: `/data/ARC-Easy/test.jsonl` -> `arc_easy`."""
    for part in re.split(r"[/\\]", path):
        if found := BENCHMARK_NAMES.search(re.sub(r"[^a-z0-9]+", "_", part.lower())):
            return found[1]
    return None


def benchmark_record(record: Mapping[str, Any]) -> str | None:
    """The benchmark whose records have these fields, if any; a renamed file is still recognised by its shape."""
    keys = set(record)
    if "answerKey" in keys and keys & {"question", "question_stem", "choices"}:
        return "ARC or OpenBookQA"
    if {"sol1", "sol2"} <= keys:
        return "PIQA"
    if {"sentence", "option1", "option2"} <= keys:
        return "WinoGrande"
    if {"question", "passage"} <= keys and keys & {"answer", "label"}:
        return "BoolQ"
    if "endings" in keys and keys & {"ctx", "ctx_a", "ctx_b"}:
        return "HellaSwag"
    if {"qtext", "ra"} <= keys:
        return "HeadQA"
    return None


def refuse(where: str, benchmark: str | None) -> None:
    """The one line a user reads when `benchmark` was recognised at `where`."""
    if benchmark:
        raise InputError(
            f"{where}: this is evaluation data ({benchmark}) and must never train a model; "
            "give another text source, and use spikeopd-eval for benchmarks"
        )
