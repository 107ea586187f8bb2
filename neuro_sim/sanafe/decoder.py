"""A model decoded through its network on an executor: the host's part, and the counts of what ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuro_sim.counting import EventCounter
from neuro_sim.sanafe.chip import summarise
from neuro_sim.sanafe.interpreter import Executor, Interpreter
from neuro_sim.sanafe.network import Network, build_network, events, group_name, map_spikes, read_stream, token_biases
from spikeopd.contracts import Activity, SpikeModel, SpikeTrace, head_logits, ordered_sites
from spikeopd.errors import CheckFailed, InputError

Array = NDArray[Any]
FIRST_SLOTS = 32  # room for a sequence whose length nobody told; it doubles


class NetworkDecoder:
    """`logits, activity = decoder.step(token)`, every spike from an executor of the network.

    The host keeps the cache of key and value spikes, which the network itself produced, and computes embedding and
    head. `slots` tokens fit; a longer sequence gets a larger network. `begin` says beforehand how long it may become.
    """

    def __init__(
        self,
        model: SpikeModel,
        execute: Callable[[Network], Executor] = Interpreter,
        trace: SpikeTrace | None = None,
        slots: int | None = None,
    ) -> None:
        self.model, self.trace, self._execute = model, trace, execute
        self._slots = slots
        self._running: tuple[Network, Executor] | None = None
        self._counter = EventCounter(model)
        self._rows = _head_rows(model)
        self.records: list[dict[str, Any]] = []
        build_network(model, 1)  # refuses what cannot be mapped
        self.reset()

    def begin(self, context: int) -> None:
        """A run begins whose sequences have at most `context` tokens."""
        limit = self.model.shape.max_position_embeddings
        self._slots = max(1, min(context, limit))
        self.records = []
        if self._running is not None and self._running[0].slots != self._slots:
            self.close()

    def reset(self) -> None:
        """Forget the sequence."""
        shape = self.model.shape
        empty = np.zeros((0, shape.num_steps, shape.hidden_size), bool)
        self.cache: list[list[Array]] = [[empty, empty] for _ in self.model.layers]
        self._counter.reset()
        self.position = 0

    def step(self, token: int) -> tuple[Array, Activity]:
        """Feed one token; return its logits (float64 [vocab]) and the events it caused."""
        model, shape, position = self.model, self.model.shape, self.position
        if not 0 <= token < shape.vocab_size:
            raise InputError(f"token {token} is outside the vocabulary of {shape.vocab_size}")
        if position >= shape.max_position_embeddings:
            raise InputError(f"the context is full: {position} tokens is this model's limit")
        network, executor = self._network()
        current = model.embedding.current(token, position)
        outcome = executor.run(token_biases(network, model, current, self.cache))
        spikes = {}
        for layer, site in ordered_sites(shape):
            fired = outcome.spikes[group_name(layer, site)]
            spikes[layer, site] = map_spikes(network, fired, position) if site == "a" else fired
        for layer, cached in enumerate(self.cache):
            for place, site in enumerate("kv"):
                cached[place] = np.concatenate([cached[place], spikes[layer, site][None]])
        quiet = dict.fromkeys(spikes, np.zeros(shape.num_steps, np.int64))  # no executor clips membranes
        activity = self._counter.count(spikes, quiet)
        self._record(network, outcome.spikes, outcome.counts, activity)
        if self.trace is not None:
            for key, fired in spikes.items():
                self.trace.add(*key, fired)
            self.trace.tokens.append(token)
        self.position += 1
        last = outcome.spikes[network.last.name]
        counts = last.sum(0) if shape.readout == "rate" else read_stream(network, model, outcome.membranes, last).sum(0)
        accumulated = counts if self._rows is None else counts @ self._rows
        return head_logits(model, counts, accumulated, 1.0 if self._rows is None else self._rows.sum(0)), activity

    def measured(self) -> dict[str, Any] | None:
        """What a simulated chip measured since the run began, for run.json (docs/formats.md); None for any other."""
        about = getattr(self._running[1], "about", None) if self._running is not None else None
        return None if about is None or not self.records else summarise(about, self.records)

    def close(self) -> None:
        """End the executor."""
        if self._running is not None:
            self._running[1].close()
            self._running = None

    def _network(self) -> tuple[Network, Executor]:
        if self._running is not None and self.position >= self._running[0].slots:
            self._slots = 2 * self._running[0].slots
            self.close()
        if self._running is None:
            limit = self.model.shape.max_position_embeddings
            slots = max(self._slots or FIRST_SLOTS, self.position + 1)
            network = build_network(self.model, min(slots, limit))
            self._running = network, self._execute(network)
        return self._running

    def _record(self, network: Network, fired: dict[str, Array], counts: dict[str, Any], activity: Activity) -> None:
        """Keep what the executor counted, after its events were found to be those of the network."""
        gated = {}
        for index in range(network.shape.num_hidden_layers):
            gated[f"{group_name(index, 'k')}.gate"] = int(activity.additions["coincidence"][index].sum())
            gated[f"{group_name(index, 'v')}.gate"] = int(self._counter.picked[index].sum())
        sums = {name: spikes.sum(0) for name, spikes in fired.items()}
        roles, dense = events(network, sums, gated, self.position)
        relays = sum(int(sums[network.origin(group).name].sum()) for group in network.of_kind("relay"))
        due = {
            "events": sum(roles.values()),
            "fired": sum(int(spikes.sum()) for spikes in sums.values()) + sum(gated.values()) + relays,
            "accessed": network.neurons("site", "gate", "relay") * network.steps,
        }
        for name, count in due.items():
            if counts[name] != count:
                raise CheckFailed(
                    f"token {self.position}: the executor counts {counts[name]} {name}, the network has {count}"
                )
        spiked = {"site": sum(int(s.sum()) for s in sums.values()), "gate": sum(gated.values()), "relay": relays}
        self.records.append(
            {
                **counts,
                "roles": roles,
                "dense_roles": dense,
                "spikes": spiked,
                "steps": network.steps,
                "slots": network.slots,
            }
        )


def _head_rows(model: SpikeModel) -> Array | None:
    """What the readout's sums are multiplied with; None: the identity."""
    head = model.head
    if head.gamma is not None:
        return np.asarray(np.multiply(model.embedding.table.T, head.gamma[:, None], dtype=np.int64))
    return None if head.project_out is None else head.project_out.astype(np.int64)
