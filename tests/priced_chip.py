"""A chip without SANA-FE: the interpreter's counts at SANA-FE's prices, routed over the same placement. numpy only."""

from __future__ import annotations

import numpy as np

from neuro_sim.sanafe.interpreter import Interpreter
from neuro_sim.sanafe.placement import messages, place

PRICES = {
    "dense_event": 35.5, "sparse_event": 33.6, "access": 51.2, "update": 21.6, "spike": 69.3, "message": 111.0,
    "hop_ew": 3.0, "hop_ns": 4.2,
}  # fmt: skip


class PricedInterpreter(Interpreter):
    """An executor with the record of a chip. Its time is made up: a microsecond per step."""

    def __init__(self, network, **placing):
        super().__init__(network)
        self.placement = place(network, **placing)
        self.reached = messages(network, self.placement.core_of)
        self.about = {
            "simulator": "interpreter",
            "version": "0",
            "prices_pj": PRICES,
            "placement": self.placement.report,
            "mesh": {"width": self.placement.chip.width, "height": self.placement.chip.height},
        }

    def run(self, biases):
        outcome = super().run(biases)
        network, counts, chip = self.network, outcome.counts, self.placement.chip
        sent = outcome.sent
        tables = dict.fromkeys(("messages", "hops_ew", "hops_ns", "site_messages", "site_hops_ew", "site_hops_ns"), 0)
        traffic = np.zeros((chip.width * chip.height,) * 2, np.int64)
        for name, (neuron, core) in self.reached.items():
            many, here = sent[name][neuron], self.placement.core_of[name][neuron]
            (x, y), (column, row) = chip.tiles_of(here), chip.tiles_of(core)
            east, north = int((many * abs(x - column)).sum()), int((many * abs(y - row)).sum())
            for prefix in ("", "site_") if network.groups[name].kind == "site" else ("",):
                tables[f"{prefix}messages"] += int(many.sum())
                tables[f"{prefix}hops_ew"] += east
                tables[f"{prefix}hops_ns"] += north
            np.add.at(traffic, (here // chip.tile_cores, core // chip.tile_cores), many)
        matrices = network.matrix_targets
        dense = sum(
            int((sent[b.source] * b.fan_out(len(sent[b.source]))).sum())
            for b in network.synapses
            if b.target in matrices
        )
        energies = {
            "synapse_pj": dense * PRICES["dense_event"] + (counts["events"] - dense) * PRICES["sparse_event"],
            "dendrite_pj": 0.0,
            "network_pj": sum(tables[f"{n}s" if n == "message" else n.replace("hop", "hops")] * PRICES[n]
                              for n in ("message", "hop_ew", "hop_ns")),
        }  # fmt: skip
        for kind in ("site", "gate", "relay"):
            spikes = sum(int(sent[group.name].sum()) for group in network.of_kind(kind))
            energies[f"soma_{kind}_pj"] = (
                network.neurons(kind) * network.steps * PRICES["access"]
                + counts.pop(f"updated_{kind}") * PRICES["update"]
                + spikes * PRICES["spike"]
            )
        energies["soma_pj"] = sum(energies[f"soma_{kind}_pj"] for kind in ("site", "gate", "relay"))
        pairs = np.argwhere(traffic)
        table = np.column_stack([pairs, traffic[traffic > 0]])
        counts.update(tables, **energies, seconds=network.steps * 1e-6, traffic=table)
        return outcome
