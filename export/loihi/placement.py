"""Placement of a model on Loihi 2 neuro-cores: limits with their sources, groups of neurons, cores.

A group is one site of one layer with the synapses that enter it; a core holds a slice of one group's neurons together
with all their synapses. The map counts memory, neurons and axons; it does not schedule spikes. Cached keys and values
are counted as synapses of one bit per step that are written while the model runs; embedding and head stay on the host.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from spikeopd.contracts import ModelShape

BRIEF = (
    'Intel Labs, "Taking Neuromorphic Computing to the Next Level with Loihi 2", technology brief, 2021 '
    "(as reproduced by others)"
)
NENGO = "nengo-loihi, nengo_loihi/block.py (limits of a Loihi 1 core; no public figure for Loihi 2)"


@dataclass(frozen=True)
class Limits:
    """What one core and one chip hold."""

    core_bytes: int = 192 * 1024
    core_neurons: int = 8192
    core_in_axons: int = 4096
    core_out_axons: int = 4096
    chip_cores: int = 128
    state_bytes: int = 4096  # per neuron
    payload_bits: int = 32  # of a graded spike
    weight_bits: int = 8


SOURCES = {
    "core_bytes": f"{BRIEF}: 192 KB of flexible memory per core",
    "core_neurons": f"{BRIEF}: 1 million neurons per chip of 128 cores, 8192 each",
    "core_in_axons": NENGO,
    "core_out_axons": NENGO,
    "chip_cores": f"{BRIEF}: 128 neuro-cores per chip",
    "state_bytes": f"{BRIEF}: up to 4096 bytes of state per neuron",
    "payload_bits": f"{BRIEF}: graded spikes of up to 32 bits",
    "weight_bits": "lava-nc 0.10, lava.proc.dense: 8-bit signed weights with a shared exponent",
}

NEURON_BYTES = 12  # membrane and last spike, threshold, bias: one 32-bit word each
RESIDUAL_BYTES = 4  # sites x and h also keep the residual stream


@dataclass(frozen=True)
class Group:
    """Neurons of one site. fan_in synapses of `synapse_bits` each enter a neuron."""

    name: str
    layer: int
    site: str
    neurons: int
    fan_in: int
    synapse_bits: int
    neuron_bytes: int
    targets: tuple[str, ...]  # groups that receive its spikes

    @property
    def bytes_per_neuron(self) -> float:
        return self.neuron_bytes + self.fan_in * self.synapse_bits / 8


@dataclass(frozen=True)
class Core:
    """One core and its load. `number` counts over all chips."""

    number: int
    chip: int
    group: str
    site: str
    layer: int
    neurons: int
    synapses: int
    synapse_bits: int
    state_bytes: int
    in_axons: int
    out_axons: int

    @property
    def used_bytes(self) -> int:
        return self.synapse_bits // 8 + self.state_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "used_bytes": self.used_bytes}


def groups_of(shape: ModelShape, context: int, precision_bits: int = 8) -> list[Group]:
    """All groups in the order of computation, attention sized for `context` tokens in the cache."""
    d, ffn, heads, steps = shape.hidden_size, shape.ffn_dim, shape.num_attention_heads, shape.num_steps
    w = precision_bits
    first = tuple(f"layer0.{site}" for site in "qkvx")
    groups = [Group("embed", -1, "embed", d, 1, 32, NEURON_BYTES + RESIDUAL_BYTES, first)]
    for layer in range(shape.num_hidden_layers):
        here, after = f"layer{layer}.", f"layer{layer + 1}."
        last = layer == shape.num_hidden_layers - 1
        following = () if last else tuple(after + site for site in "qkvx")

        sized: list[tuple[str, int, int, int, tuple[str, ...]]] = [
            ("q", d, d, w, (here + "a",)),
            ("k", d, d, w, (here + "a",)),
            ("v", d, d, w, (here + "r",)),
            ("a", heads * context, shape.head_dim, steps, (here + "r",)),
            ("r", d, context, steps, (here + "o",)),
            ("o", d, d, w, (here + "x",)),
            ("x", d, 1, 32, (here + "f", here + "h")),
            ("f", ffn, d, w, (here + "y",)),
            ("y", d, ffn, w, (here + "h",)),
            ("h", d, 1, 32, following),
        ]
        for site, neurons, fan_in, bits, targets in sized:
            size = NEURON_BYTES + (RESIDUAL_BYTES if site in ("x", "h") else 0)
            groups.append(Group(here + site, layer, site, neurons, fan_in, bits, size, targets))
    return groups


def place(shape: ModelShape, context: int, limits: Limits | None = None, weight_bits: int = 8) -> list[Core]:
    """Slice every group evenly over as few cores as the limits allow; a neuron that fits nowhere gets its own core."""
    limits = limits or Limits()
    groups = groups_of(shape, context, weight_bits)
    count: dict[str, int] = {}
    reach: dict[str, int] = {}
    for group in reversed(groups):  # a group's outgoing axons depend on how its targets were cut
        reach[group.name] = max(1, sum(_cores_reached(group, target, count, shape) for target in group.targets))
        per_core = min(
            limits.core_neurons,
            int(limits.core_bytes // group.bytes_per_neuron),
            limits.core_out_axons // reach[group.name],
        )
        while per_core > 1 and _in_axons(group, per_core, shape, context) > limits.core_in_axons:
            per_core -= 1
        count[group.name] = math.ceil(group.neurons / max(1, per_core))
    cores: list[Core] = []
    for group in groups:
        for part in range(count[group.name]):
            neurons = group.neurons // count[group.name] + (part < group.neurons % count[group.name])
            cores.append(
                Core(
                    number=len(cores),
                    chip=len(cores) // limits.chip_cores,
                    group=group.name,
                    site=group.site,
                    layer=group.layer,
                    neurons=neurons,
                    synapses=neurons * group.fan_in,
                    synapse_bits=neurons * group.fan_in * group.synapse_bits,
                    state_bytes=neurons * group.neuron_bytes,
                    in_axons=_in_axons(group, neurons, shape, context),
                    out_axons=neurons * reach[group.name] if group.targets else 0,
                )
            )
    return cores


def cache_bytes(shape: ModelShape, context: int) -> int:
    """Keys and values of `context` tokens: one bit per channel and step."""
    return 2 * shape.num_hidden_layers * math.ceil(shape.num_steps * context * shape.hidden_size / 8)


def _cores_reached(group: Group, target: str, count: dict[str, int], shape: ModelShape) -> int:
    """Cores of `target` that one neuron's spike must visit."""
    site = target.rpartition(".")[2]
    if site in ("x", "h"):
        return 1  # one-to-one
    cores = count[target]
    if site in ("a", "r"):
        return math.ceil(cores / shape.num_attention_heads)  # the cores of the neuron's own head
    return cores


def _in_axons(group: Group, neurons: int, shape: ModelShape, context: int) -> int:
    """Distinct sources that reach one core."""
    if group.site == "embed":
        return neurons  # from the host
    if group.site in ("x", "h"):
        return 2 * neurons  # a spike and the residual stream for each
    if group.site == "a":
        heads = min(shape.num_attention_heads, math.ceil(neurons / context) + 1)
        return 2 * min(shape.hidden_size, heads * shape.head_dim)  # queries and new keys
    if group.site == "r":
        heads = min(shape.num_attention_heads, math.ceil(neurons / shape.head_dim))
        return heads * context + neurons  # the map and new values
    return group.fan_in
