"""Does a backend do what the model says? Its spikes, tokens and counts against another backend's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuro_sim.decode import Result
from spikeopd.contracts import Activity, SpikeTrace, equal_share, first_difference
from spikeopd.errors import CheckFailed


def compare(
    name: str,
    mine: Result,
    my_traces: Sequence[SpikeTrace],
    reference: str,
    theirs: Result,
    their_traces: Sequence[SpikeTrace],
) -> str:
    """One line if spikes, tokens and counts agree; CheckFailed naming the first difference if not."""
    for index, (left, right) in enumerate(zip(my_traces, their_traces, strict=True)):
        difference = first_difference(left, right)
        if difference is not None:
            raise CheckFailed(f"{name} and {reference} differ first at sequence {index}, {difference}")
    for index, (a, b) in enumerate(zip(mine.sequences, theirs.sequences, strict=True)):
        if a.generated_tokens != b.generated_tokens:
            place = _first(a.generated_tokens, b.generated_tokens)
            raise CheckFailed(f"{name} and {reference} generate different tokens: sequence {index}, token {place}")
    for phase in mine.phases:
        field = different_count(mine.phases[phase], theirs.phases[phase])
        if field is not None:
            raise CheckFailed(f"{name} and {reference} count differently in phase {phase}: {field}")
    spikes = sum(int(counts.sum()) for counts in mine.activity.spikes.values())
    return f"{name} = {reference}: {mine.activity.tokens} tokens, {spikes} spikes, all counts equal"


def agreement(name: str, traces: Sequence[SpikeTrace], reference: str, others: Sequence[SpikeTrace]) -> str:
    """For float precision, where equality is not owed: the share of equal spikes, and the site with the least."""
    shares: dict[tuple[int, str], list[float]] = {}
    for left, right in zip(traces, others, strict=True):
        for key, share in equal_share(left, right).items():
            shares.setdefault(key, []).append(share)
    means = {key: sum(values) / len(values) for key, values in shares.items()}
    layer, site = min(means, key=lambda key: means[key])
    mean = sum(means.values()) / len(means)
    where = "embed" if layer < 0 else f"{layer}.{site}"
    return f"{name} and {reference} in float32: {mean:.4%} of spikes equal, least at {where} ({means[layer, site]:.4%})"


def different_count(a: Activity, b: Activity) -> str | None:
    """Name and values of the first count that differs."""
    left, right = a.to_dict(), b.to_dict()
    for name, value in left.items():
        if value == right[name]:
            continue
        if isinstance(value, dict):
            for key, counts in value.items():
                if counts != right[name][key]:
                    return f"{name}.{key} {_short(counts)} against {_short(right[name][key])}"
        return f"{name} {_short(value)} against {_short(right[name])}"
    return None


def _first(a: Sequence[Any], b: Sequence[Any]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
