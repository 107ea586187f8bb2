"""Placement of a model on Loihi 2 neuro-cores: limits with their sources, groups of neurons, cores.

A group is one site of one layer with the synapses that enter it; a core holds a slice of one group's neurons together
with all their synapses. The map counts memory, neurons and axons; it does not schedule spikes. Cached keys and values
are counted as synapses of one bit per step that are written while the model runs; embedding and head stay on the host.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from spikeopd.contracts import EMBED_SITE, RESIDUAL, Connection, ModelShape, connections
from spikeopd.contracts.topology import RESIDUAL_SITES

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
WRITE_BYTES = 4  # and with a current write its bias and shift, in one word
CACHED = {"coincidence": "k", "values": "v"}  # whose spikes become the synapses of a connection that has no array
Spread = Literal["all", "head", "one"]  # a spike visits every core of its target, those of its head, or one


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
    targets: tuple[tuple[str, Spread], ...]  # groups that receive its spikes, or the residual stream it passes on

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


def reader(shape: ModelShape, connection: Connection) -> str:
    """The site that a connection's sums reach; for the residual stream the next site that reads it."""
    if connection.target != RESIDUAL:
        return connection.target
    sites = shape.layer_sites
    return next(site for site in sites[sites.index(connection.driver) :] if site in RESIDUAL_SITES)


def groups_of(shape: ModelShape, context: int, precision_bits: int = 8) -> list[Group]:
    """All groups in the order of computation, attention sized for `context` tokens in the cache."""
    table = connections(shape)
    entering = {reader(shape, connection): connection for connection in table}
    stream = NEURON_BYTES + RESIDUAL_BYTES + (WRITE_BYTES if shape.residual_write == "current" else 0)
    first = [site for site in shape.layer_sites if site in RESIDUAL_SITES][0]

    def targets(layer: int, site: str) -> tuple[tuple[str, Spread], ...]:
        found: list[tuple[str, Spread]] = []
        for place in (layer, layer + 1):
            for c in table if place in range(shape.num_hidden_layers) else ():
                if (layer, site) in (c.driver_of(place), (place, CACHED.get(c.name))):
                    spread: Spread = "all" if c.dense else "head" if c.name in CACHED else "one"
                    found.append((f"layer{place}.{reader(shape, c)}", spread))
        # The residual stream goes from embed and h to x of the next layer, and from x to h.
        if site == first:
            found.append((f"layer{layer}.h", "one"))
        elif site in RESIDUAL_SITES and layer + 1 < shape.num_hidden_layers:
            found.append((f"layer{layer + 1}.{first}", "one"))
        return tuple(found)

    size = shape.hidden_size
    groups = [Group(EMBED_SITE, -1, EMBED_SITE, size, 1, 32, NEURON_BYTES + RESIDUAL_BYTES, targets(-1, EMBED_SITE))]
    for layer in range(shape.num_hidden_layers):
        for site in shape.layer_sites:
            connection = entering[site]
            bits = precision_bits if connection.dense else shape.num_steps if connection.name in CACHED else 32
            groups.append(
                Group(
                    name=f"layer{layer}.{site}",
                    layer=layer,
                    site=site,
                    neurons=shape.site_slots(site, 1, context),
                    fan_in=connection.fan_in or context,
                    synapse_bits=bits,
                    neuron_bytes=stream if site in RESIDUAL_SITES else NEURON_BYTES,
                    targets=targets(layer, site),
                )
            )
    return groups


def place(shape: ModelShape, context: int, limits: Limits | None = None, weight_bits: int = 8) -> list[Core]:
    """Slice every group evenly over as few cores as the limits allow; a neuron that fits nowhere gets its own core."""
    limits = limits or Limits()
    groups = groups_of(shape, context, weight_bits)
    count: dict[str, int] = {}
    reach: dict[str, int] = {}
    for group in reversed(groups):  # a group's outgoing axons depend on how its targets were cut
        reach[group.name] = max(
            1, sum(_cores_reached(spread, count[target], shape) for target, spread in group.targets)
        )
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


def _cores_reached(spread: Spread, cores: int, shape: ModelShape) -> int:
    """Cores of a target that one neuron's spike must visit."""
    if spread == "one":
        return 1
    return cores if spread == "all" else math.ceil(cores / shape.num_attention_heads)


def _in_axons(group: Group, neurons: int, shape: ModelShape, context: int) -> int:
    """Distinct sources that reach one core."""
    if group.site == EMBED_SITE:
        return neurons  # from the host
    if group.site in RESIDUAL_SITES:  # what is written, and the residual stream for each
        return (neurons if group.fan_in == 1 else group.fan_in) + neurons
    if group.site == "a":
        heads = min(shape.num_attention_heads, math.ceil(neurons / context) + 1)
        return 2 * min(shape.hidden_size, heads * shape.head_dim)  # queries and new keys
    if group.site == "r":
        heads = min(shape.num_attention_heads, math.ceil(neurons / shape.head_dim))
        return heads * context + neurons  # the map and new values
    return group.fan_in
