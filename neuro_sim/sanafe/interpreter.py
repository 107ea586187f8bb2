"""The network of `neuro_sim.sanafe.network` executed in numpy, step by step: what any executor of it must do.

It shares nothing with the model's own simulators but the definition of a neuron, so that spikes of the mapping can be
checked where SANA-FE is not installed; and it counts what SANA-FE counts, so that its bill can be checked too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from neuro_sim.fixed_point import decay_integer
from neuro_sim.sanafe.network import Network
from spikeopd.contracts.chip import KINDS

Array = NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """One token: spikes bool [T_s, n] of every site, membranes [T_s, n] of the last one, and what was counted.

    sent  spikes of every neuron [n], gates and relays too, where the executor knows them
    """

    spikes: dict[str, Array]
    membranes: Array
    counts: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, Array] = field(default_factory=dict)


class Executor(Protocol):
    """Whatever runs a network: for each token the biases that the host writes."""

    def run(self, biases: Mapping[str, Array]) -> Outcome: ...

    def close(self) -> None: ...


class Interpreter:
    """Every neuron in every step, all of it integers."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def run(self, biases: Mapping[str, Array]) -> Outcome:
        network, steps = self.network, self.network.shape.num_steps
        groups = network.groups
        v: dict[str, Array] = {name: np.zeros(group.neurons, np.int64) for name, group in groups.items()}
        arriving: dict[str, Array] = {}
        reached: dict[str, Array] = {}  # neurons that a synapse reached, whatever its weight
        spikes = {group.name: np.zeros((steps, group.neurons), bool) for group in network.of_kind("site")}
        membranes = np.zeros((steps, network.last.neurons), np.int64)
        counts = dict.fromkeys(("events", "fired", "updated", *(f"updated_{kind}" for kind in KINDS)), 0)
        sent = {name: np.zeros(group.neurons, np.int64) for name, group in groups.items()}
        for step in range(1, network.steps + 1):
            current, touched, arriving, reached = arriving, reached, {}, {}
            fired: dict[str, Array] = {}
            for name, group in groups.items():
                tau = step - group.start  # 1 ... T_s in the window
                given = np.asarray(biases.get(name, group.bias))
                bias = (given if given.ndim == 1 else given[tau - 1]) if 1 <= tau <= steps else np.zeros_like(v[name])
                busy = (v[name] != 0) | (bias != 0)
                if name in touched:
                    busy |= touched[name]
                # A site leaks through its window; what is left of it afterwards is gone at once.
                kept = decay_integer(v[name], group.decay) if tau <= steps else np.zeros_like(v[name])
                v[name] = kept + bias + current.get(name, 0)
                shot: Array = v[name] >= group.threshold
                for count in ("updated", f"updated_{group.kind}"):
                    counts[count] += int((busy | shot).sum())
                if shot.any():
                    fired[name] = shot
                    counts["fired"] += int(shot.sum())
                    sent[name] += shot
                if group.kind == "site" and 1 <= tau <= steps:
                    spikes[name][tau - 1] = shot
                    if group is network.last:
                        membranes[tau - 1] = v[name]
            for bundle in network.synapses:
                if bundle.source not in fired:
                    continue
                shot = fired[bundle.source]
                target = groups[bundle.target].neurons
                total = arriving.setdefault(bundle.target, np.zeros(target, np.int64))
                seen = reached.setdefault(bundle.target, np.zeros(target, bool))
                if bundle.pairs is None:
                    total += bundle.weights[shot].sum(0)
                    seen[:] = True
                    counts["events"] += int(shot.sum()) * target
                else:
                    chosen = shot[bundle.pairs[:, 0]]
                    ends = bundle.pairs[chosen, 1]
                    np.add.at(total, ends, bundle.weights[chosen])
                    seen[ends] = True
                    counts["events"] += int(chosen.sum())
        accessed = network.neurons("site", "gate", "relay") * network.steps
        return Outcome(spikes, membranes, {**counts, "accessed": accessed}, sent)

    def close(self) -> None:
        """Nothing to end; every executor has it."""
