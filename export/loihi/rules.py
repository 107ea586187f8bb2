"""Hardware rules, one small function each. All run, every violation is reported, none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from export.loihi.placement import SOURCES, Core, Limits
from spikeopd.contracts import EMBED_SITE, MEMBRANE_MAX, RESIDUAL, Array, SpikeModel, projections


@dataclass(frozen=True)
class Violation:
    """`count` places break a rule; `where` names the first and `worst` is the largest value found."""

    rule: str
    where: str
    count: int
    worst: int
    limit: int
    source: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where} needs {self.worst}, the limit is {self.limit} ({self.count} in all)"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Design:
    model: SpikeModel
    cores: Sequence[Core]
    limits: Limits


def core_memory(design: Design) -> list[Violation]:
    """Synapses and state of a core fit its memory."""
    return _per_core(design, "core memory in bytes", lambda core: core.used_bytes, "core_bytes")


def core_neurons(design: Design) -> list[Violation]:
    return _per_core(design, "neurons per core", lambda core: core.neurons, "core_neurons")


def input_axons(design: Design) -> list[Violation]:
    """Distinct sources of a core: the fan-in of a dense layer."""
    return _per_core(design, "input axons per core", lambda core: core.in_axons, "core_in_axons")


def output_axons(design: Design) -> list[Violation]:
    """Destinations of a core's neurons, one per core reached."""
    return _per_core(design, "output axons per core", lambda core: core.out_axons, "core_out_axons")


def weights_are_narrow(design: Design) -> list[Violation]:
    if design.model.integer:
        return []
    return [
        _violation("bits per weight", "every projection", len(design.model.layers), 32, design.limits, "weight_bits")
    ]


def membranes_hold_thresholds(design: Design) -> list[Violation]:
    """Thresholds and biases lie inside the 24-bit membrane."""
    if not design.model.integer:
        return []
    found = []
    for index, layer in enumerate(design.model.layers):
        for site in design.model.shape.layer_sites:
            values = layer.sites[site]
            largest = int(max(np.abs(values.threshold).max(), np.abs(values.bias).max()))
            if largest > MEMBRANE_MAX:
                found.append((f"layer {index} site {site}", largest))
    return _collect("threshold or bias", found, MEMBRANE_MAX, "contract: 24-bit membranes")


def sums_cannot_saturate(design: Design) -> list[Violation]:
    """Worst case of one step: every input of the worst neuron spikes. A warning more than an error: it is counted."""
    if not design.model.integer:
        return []
    found = []
    for index, layer in enumerate(design.model.layers):
        for name, site in ((c.name, c.target) for c in projections(design.model.shape) if c.target != RESIDUAL):
            weights, shift = getattr(layer, name).astype(np.int64), layer.sites[site].shift
            bias = layer.sites[site].bias
            reach = max(
                int(((np.maximum(weights, 0).sum(0) << shift) + bias).max()),
                int(((np.maximum(-weights, 0).sum(0) << shift) - bias).max()),
            )
            if reach > MEMBRANE_MAX:
                found.append((f"layer {index} weight {name}", reach))
    return _collect("worst-case input of one step", found, MEMBRANE_MAX, "contract: 24-bit membranes saturate")


def residual_cannot_saturate(design: Design) -> list[Violation]:
    """Worst case of one step at a site that the residual stream drives. A warning, as above."""
    if not design.model.integer:
        return []
    found = []
    for layer, site, stream in residual_reach(design.model):
        reach = int((stream + np.abs(design.model.site(layer, site).bias.astype(np.int64))).max())
        if reach > MEMBRANE_MAX:
            found.append((EMBED_SITE if layer < 0 else f"layer {layer} site {site}", reach))
    return _collect("worst-case residual stream", found, MEMBRANE_MAX, "contract: 24-bit membranes saturate")


def residual_fits_payload(design: Design) -> list[Violation]:
    """The residual stream travels as graded spikes."""
    if not design.model.integer:
        return []
    bits = max(int(stream.max()).bit_length() + 1 for _, _, stream in residual_reach(design.model))
    if bits <= design.limits.payload_bits:
        return []
    return [_violation("bits of the residual stream", "all layers", 1, bits, design.limits, "payload_bits")]


def residual_reach(model: SpikeModel) -> Iterator[tuple[int, str, Array]]:
    """(layer, site, largest |h| that can reach it, per channel): every token, every input of every write spikes."""
    e = model.embedding
    largest = np.abs(e.table.astype(np.int64)).max() * np.int64(e.row_scale.max())
    if e.project_in is not None:
        largest = largest * np.abs(e.project_in.astype(np.int64)).sum(0)
    reach = largest * np.abs(e.channel_gain.astype(np.int64)) >> e.shift
    reach = reach + np.abs(e.position.astype(np.int64)).max(0)
    yield -1, EMBED_SITE, reach
    for index, layer in enumerate(model.layers):
        for site, weight, written in (("x", layer.w_o, "o"), ("h", layer.w_2, "y")):
            if model.shape.residual_write == "spike":
                reach = reach + np.abs(getattr(layer, f"gain_{written}").astype(np.int64))
            else:
                wide, bias = weight.astype(np.int64), getattr(layer, f"bias_{written}").astype(np.int64)
                shift = getattr(layer, f"shift_{written}")
                up, down = np.maximum(wide, 0).sum(0) << shift, np.maximum(-wide, 0).sum(0) << shift
                reach = reach + np.maximum(np.abs(up + bias), np.abs(down - bias))
            yield index, site, reach


RULES: tuple[Callable[[Design], list[Violation]], ...] = (
    core_memory,
    core_neurons,
    input_axons,
    output_axons,
    weights_are_narrow,
    membranes_hold_thresholds,
    sums_cannot_saturate,
    residual_cannot_saturate,
    residual_fits_payload,
)


def check_all(design: Design) -> dict[str, list[Violation]]:
    """Every rule by name with what it found."""
    return {rule.__name__: rule(design) for rule in RULES}


def _per_core(design: Design, rule: str, measure: Callable[[Core], int], limit: str) -> list[Violation]:
    allowed = getattr(design.limits, limit)
    found = [(f"core {core.number} ({core.group})", measure(core)) for core in design.cores]
    return _collect(rule, [pair for pair in found if pair[1] > allowed], allowed, SOURCES[limit])


def _collect(rule: str, found: list[tuple[str, int]], limit: int, source: str) -> list[Violation]:
    if not found:
        return []
    return [Violation(rule, found[0][0], len(found), max(value for _, value in found), limit, source)]


def _violation(rule: str, where: str, count: int, worst: int, limits: Limits, limit: str) -> Violation:
    return Violation(rule, where, count, worst, getattr(limits, limit), SOURCES[limit])
