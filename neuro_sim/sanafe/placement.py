"""Where the network's neurons lie on Loihi 1: cores cut by its limits, tiles chosen so that spikes travel little.

Groups are cut into slices and packed onto cores in the order of their windows, as many as neurons, synapse memory and
axons of a core allow (the simulator itself limits neurons alone); cores that would stay idle take a share. Then cores
trade places on the mesh as long as that lowers the hops of the expected traffic, one message per spiking neuron and
core that it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.sanafe.network import Kind, Network, Synapses
from spikeopd.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True)
class Chip:
    """What a core of Loihi 1 holds, and its mesh: tiles are numbered column by column, four cores each."""

    core_neurons: int = 1024
    core_synapse_bits: int = 128 * 1024 * 8
    core_in_axons: int = 4096
    core_out_axons: int = 4096
    width: int = 8
    height: int = 4
    tile_cores: int = 4

    @property
    def cores(self) -> int:
        return self.width * self.height * self.tile_cores

    def tiles_of(self, places: Array) -> tuple[Array, Array]:
        """Column and row of cores."""
        tile = places // self.tile_cores
        return tile // self.height, tile % self.height


LOIHI1 = Chip()
SOURCES = {
    "core_neurons": "M. Davies et al., IEEE Micro 38(1), 2018: up to 1,024 compartments per core",
    "core_synapse_bits": "the same: 128 KB of synaptic state per core",
    "core_in_axons": "nengo-loihi, nengo_loihi/block.py",
    "core_out_axons": "nengo-loihi, nengo_loihi/block.py",
    "mesh": "SANA-FE's Loihi: 32 tiles of four cores, eight columns of four",
}
# Synapse memory: an int8 weight of a full matrix; a weight that is no int8 (gain, reset) in a word of 32 bits with its
# target; a spike's presence with its target of ten bits.
MATRIX_BITS, WIDE_BITS, UNIT_BITS = 8, 32, 18
WIDE_ROLES = ("reset", "residual")
# Expected spikes of a neuron relative to a site's; a gate needs two at once.
TRAFFIC: dict[Kind, float] = {"site": 1.0, "relay": 1.0, "gate": 0.1}
TRADES, WARMTH = 300, 0.3  # proposed trades per core, and how much longer a way may become at first
SHARE = 0.85  # of the synapse memory, tried again and again while the chip has idle cores


@dataclass(frozen=True)
class Placement:
    """core_of: physical core of every neuron, per group. `report` says what was placed and what optimising gained."""

    chip: Chip
    core_of: Mapping[str, Array]
    report: dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """Consecutive neurons of one group, and what they take of a core."""

    group: str
    first: int
    neurons: int
    bits: int
    in_axons: int
    out_axons: int


def place(network: Network, chip: Chip = LOIHI1, *, spread: bool = True, optimise: bool = True) -> Placement:
    """Cut, pack, trade. `spread` off: as few cores as possible; `optimise` off: cores in the order of the mesh."""
    core_of, cores = pack(network, chip)
    fewest = cores
    # A core works through its synapses one by one, so a chip's idle cores take a share of the busiest.
    share = chip
    while spread and cores < chip.cores:
        share = replace(share, core_synapse_bits=int(SHARE * share.core_synapse_bits))
        try:
            finer, more = pack(network, share)
        except InputError:  # less than one neuron's
            break
        if more > chip.cores:
            break
        core_of, cores = finer, more
    chips = math.ceil(cores / chip.cores)
    chip = replace(chip, width=chip.width * chips)  # more cores than a chip has: the mesh goes on to the east
    reached = messages(network, core_of)
    between = traffic(network, reached, core_of, cores)
    seats = np.arange(cores)
    report: dict[str, Any] = {"expected_hops": {"in_order": _mean_hops(between, seats, chip)}}
    if optimise:
        seats = trade(between, chip)
        report["expected_hops"]["traded"] = _mean_hops(between, seats, chip)
    axons = {
        "in_axons": np.concatenate([core for _, core in reached.values()]),
        "out_axons": np.concatenate([core_of[name][neuron] for name, (neuron, _) in reached.items()]),
    }
    most = {name: int(np.bincount(core).max()) for name, core in axons.items()}
    most["neurons"] = int(np.bincount(np.concatenate(list(core_of.values()))).max())
    report |= {
        "cores": cores,
        "fewest_cores": fewest,
        "chips": chips,
        "neurons": {kind: network.neurons(kind) for kind in TRAFFIC},
        "synapses": sum(bundle.count for bundle in network.synapses),
        "most_in_a_core": most,
    }
    limits = {"in_axons": chip.core_in_axons, "out_axons": chip.core_out_axons, "neurons": chip.core_neurons}
    report["violations"] = [f"{most[name]} {name} in a core of {most_allowed}" for name, most_allowed in limits.items()
                            if most[name] > most_allowed]  # fmt: skip
    return Placement(chip, {name: seats[core] for name, core in core_of.items()}, report)


def _cut(network: Network, chip: Chip) -> dict[str, list[Slice]]:
    """Every group evenly over as few cores as it would need alone; a group's targets are cut before it."""
    entering: dict[str, list[Synapses]] = {name: [] for name in network.groups}
    leaving: dict[str, list[Synapses]] = {name: [] for name in network.groups}
    for bundle in network.synapses:
        entering[bundle.target].append(bundle)
        leaving[bundle.source].append(bundle)
    cut: dict[str, list[Slice]] = {}
    for name, group in reversed(network.groups.items()):
        fans = [(bundle, bundle.count / group.neurons) for bundle in entering[name]]
        bits = sum(fan * _bits(bundle) for bundle, fan in fans)
        reach = sum(len(cut.get(b.target, ())) or 1 if b.pairs is None else 1 for b in leaving[name])
        # One message serves a channel's slots, or a head's, where they lie together.
        unit = network.slots if group.kind == "gate" or group.site == "a" else 1
        dense = sum(network.groups[bundle.source].neurons for bundle, _ in fans if bundle.pairs is None)
        sparse = sum(_sources(bundle.pairs, unit) / unit for bundle, _ in fans if bundle.pairs is not None)
        if dense > chip.core_in_axons or bits > chip.core_synapse_bits:
            raise InputError(f"one neuron of {name} needs {dense} axons and {int(bits)} bits: more than a core has")
        largest = min(
            chip.core_neurons,
            int(chip.core_synapse_bits / max(bits, 1)),
            int((chip.core_in_axons - dense) / max(sparse, 1e-9)),
            chip.core_out_axons // max(reach, 1),
        )
        if largest >= unit:
            largest -= largest % unit
        parts = math.ceil(group.neurons / max(1, largest))
        edges = np.linspace(0, group.neurons / unit, parts + 1).round().astype(int) * unit
        cut[name] = [
            Slice(
                name, int(first), int(last - first), int(bits * (last - first)),
                int(dense + sparse * (last - first)), int(reach * (last - first)),
            )
            for first, last in zip(edges, edges[1:], strict=False)
        ]  # fmt: skip
    return cut


def _sources(pairs: Array, unit: int) -> int:
    """Distinct sources of a group's first `unit` neurons; the others have as many."""
    return len(np.unique(pairs[pairs[:, 1] < unit, 0]))


def _bits(bundle: Synapses) -> int:
    return MATRIX_BITS if bundle.pairs is None else WIDE_BITS if bundle.role in WIDE_ROLES else UNIT_BITS


def pack(network: Network, chip: Chip = LOIHI1) -> tuple[dict[str, Array], int]:
    """Core of every neuron, per group, and how many cores: a slice joins the core before it if both fit."""
    core_of = {name: np.zeros(group.neurons, np.int64) for name, group in network.groups.items()}
    limits = np.array([chip.core_neurons, chip.core_synapse_bits, chip.core_in_axons, chip.core_out_axons])
    used, core = limits, -1
    cut = _cut(network, chip)
    for part in (part for name in network.groups for part in cut[name]):
        load = np.array([part.neurons, part.bits, part.in_axons, part.out_axons])
        if (used + load > limits).any():
            core, used = core + 1, np.zeros_like(limits)
        used = used + load
        core_of[part.group][part.first : part.first + part.neurons] = core
    return core_of, core + 1


def messages(network: Network, core_of: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Per group: (neuron, core) of every message that a spike of it sends, one for each core it reaches."""
    found: dict[str, list[Array]] = {name: [] for name in network.groups}
    for bundle in network.synapses:
        if bundle.pairs is None:
            targets = np.unique(core_of[bundle.target])
            neurons = np.arange(network.groups[bundle.source].neurons)
            both = np.stack([np.repeat(neurons, len(targets)), np.tile(targets, len(neurons))], 1)
        else:
            both = np.stack([bundle.pairs[:, 0], core_of[bundle.target][bundle.pairs[:, 1]]], 1)
        found[bundle.source].append(both)
    unique = {name: np.unique(np.concatenate(rows), axis=0) for name, rows in found.items() if rows}
    return {name: (rows[:, 0], rows[:, 1]) for name, rows in unique.items()}


def traffic(
    network: Network, reached: Mapping[str, tuple[Array, Array]], core_of: Mapping[str, Array], cores: int
) -> Array:
    """Expected messages [from core, to core], in spikes of a site's neuron."""
    between = np.zeros((cores, cores))
    for name, (neuron, core) in reached.items():
        np.add.at(between, (core_of[name][neuron], core), TRAFFIC[network.groups[name].kind])
    return between


def trade(between: Array, chip: Chip, seed: int = 0) -> Array:
    """A seat on the mesh for every core: random trades of two seats, kept if they shorten the ways.

    At first a trade that lengthens them a little may be kept too (annealing); the best seats seen are the answer.
    """
    cores, seats_in_all = len(between), chip.cores
    trades = TRADES * cores
    both = np.zeros((seats_in_all, seats_in_all))
    both[:cores, :cores] = between + between.T
    columns, rows = chip.tiles_of(np.arange(seats_in_all))
    hops = np.abs(columns[:, None] - columns) + np.abs(rows[:, None] - rows)
    rng = np.random.default_rng(seed)
    seat = np.arange(seats_in_all)
    best, lowest, cost = seat.copy(), 0.0, 0.0
    warmth = WARMTH * (both[both > 0].mean() if (both > 0).any() else 1.0)
    for turn, (a, b) in enumerate(rng.integers(0, [cores, seats_in_all], (trades, 2))):
        if a == b:
            continue
        gain = (both[a] - both[b]) @ (hops[seat[b], seat] - hops[seat[a], seat])
        gain += 2 * both[a, b] * hops[seat[a], seat[b]]  # the way between the two does not change
        if gain <= 0 or rng.random() < np.exp(-gain / (warmth * (1 - turn / trades) + 1e-9)):
            seat[a], seat[b] = seat[b], seat[a]
            cost += gain
            if cost < lowest:
                best, lowest = seat.copy(), cost
    return np.asarray(best[:cores])


def _mean_hops(between: Array, seats: Array, chip: Chip) -> dict[str, float]:
    """Expected hops of one message."""
    columns, rows = chip.tiles_of(seats)
    east, north = np.abs(columns[:, None] - columns), np.abs(rows[:, None] - rows)
    total = between.sum()
    return {
        "mean": float((between * (east + north)).sum() / total),
        "east_west": float((between * east).sum() / total),
        "north_south": float((between * north).sum() / total),
    }
