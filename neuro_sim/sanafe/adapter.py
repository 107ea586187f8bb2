"""Runs in SANA-FE's own environment: executes a network of `neuro_sim.sanafe.network`, token by token.

SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later. This one file is run by the Python of another environment and
imports SANA-FE there, which is under GPL-3.0. It is offered under the project's Apache-2.0 and, at your choice, under
GPL-3.0 or later; what it becomes together with SANA-FE in that process is under GPL-3.0. It imports nothing of this
project, nothing of the project imports it, and the two exchange files and lines of JSON alone.

    python adapter.py FOLDER        FOLDER holds network.json and network.npz (docs/formats.md)

One JSON object per line. It says {"ready": ..., "prices_pj": ...} when the chip is loaded; for {"biases": FILE.npz,
"spikes": FILE.npz} it runs one token, writes the spikes, and answers with what the simulator counted; {"stop": true} or
the end of its input ends it. What cannot be done is answered with {"error": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

UNIT = 64.0  # membrane units in one of the simulator's
DECAY = 4096.0
SOMA = "loihi_lif"
SYNAPSES = {"dense": "loihi_dense_synapse", "pairs": "loihi_sparse_synapse"}


class ChipRun:
    """A network on SANA-FE's Loihi."""

    def __init__(self, folder: Path) -> None:
        import sanafe

        self.about = json.loads((folder / "network.json").read_text(encoding="utf-8"))
        with np.load(folder / "network.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self.groups = {group["name"]: group for group in self.about["groups"]}
        self.steps, self.window = self.about["steps"], self.about["num_steps"]
        architecture, self.prices = load_loihi(sanafe, self.about["mesh"])
        self.chip = sanafe.SpikingChip(architecture)
        self.chip.load(self._network(sanafe, architecture, arrays))
        mapped = self.chip.mapped_neuron_groups
        self.neurons = {name: list(mapped[name]) for name in self.groups}
        # What the simulator holds now, so that only changes are written.
        self.bias = {name: np.zeros(group["neurons"]) for name, group in self.groups.items()}
        self.open = dict.fromkeys(self.groups, False)
        self.given = {name: arrays[f"bias/{name}"] / UNIT for name in self.groups}

    def _network(self, sanafe: Any, architecture: Any, arrays: dict[str, Any]) -> Any:
        net, cores = sanafe.Network(), architecture.cores()
        made = {}
        for name, group in self.groups.items():
            made[name] = net.create_neuron_group(
                name,
                group["neurons"],
                model_attributes={"reset_mode": "none", "leak_decay": 0.0, "threshold": 0.0},
                soma_hw_name=f"{SOMA}_{group['kind']}",
                default_synapse_hw_name=SYNAPSES[group["synapses"]],
                default_dendrite_hw_name="loihi_dendrites",
                log_spikes=group["kind"] == "site",
                log_potential=name == self.about["readout"],
            )
            # It fires above its threshold, the model at it: half a unit less says the same of whole numbers.
            thresholds = (arrays[f"threshold/{name}"] - 0.5) / UNIT
            for neuron, threshold, core in zip(made[name], thresholds, arrays[f"core/{name}"], strict=True):
                neuron.set_attributes(model_attributes={"threshold": float(threshold)})
                neuron.map_to_core(cores[int(core)])
        for place, bundle in enumerate(self.about["synapses"]):
            weights = {"weight": (arrays[f"weights/{place}"].astype(float) / UNIT).ravel().tolist()}
            source, target = made[bundle["source"]], made[bundle["target"]]
            if f"pairs/{place}" in arrays:
                source.connect_neurons_sparse(target, weights, [tuple(p) for p in arrays[f"pairs/{place}"].tolist()])
            else:
                source.connect_neurons_dense(target, weights)
        return net

    def token(self, biases: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """One token from rest: (arrays to write, what was counted)."""
        given = {name: biases[name] / UNIT if name in biases else self.given[name] for name in self.groups}
        spikes = {n: np.zeros((self.window, g["neurons"]), bool) for n, g in self.groups.items() if g["kind"] == "site"}
        readout = self.groups[self.about["readout"]]
        membranes = np.zeros((self.window, readout["neurons"]), np.int64)
        totals: Counter[str] = Counter()
        between: Counter[tuple[int, int]] = Counter()
        self.chip.reset()
        for name in [name for name, opened in self.open.items() if opened]:  # windows that closed with the last token
            self._write(name, self.groups[name], self.window + 1, given[name])
        for step in range(1, self.steps + 1):
            for name, group in self.groups.items():
                self._write(name, group, step - group["start"], given[name])
            tau = step - readout["start"]
            reading = 1 <= tau <= self.window
            done = self.chip.sim(
                1,
                spike_trace=True,
                perf_trace=True,
                message_trace=True,
                potential_trace=True if reading else None,
                processing_threads=1,
            )
            for address in done["spike_trace"][0]:
                name = address.group_name
                spikes[name][step - self.groups[name]["start"] - 1, address.neuron_offset] = True
            if reading:
                membranes[tau - 1] = np.rint(np.array(done["potential_trace"][0]) * UNIT).astype(np.int64)
            self._count(done, totals, between)
        arrays = {f"spikes/{name}": np.packbits(bits, axis=1) for name, bits in spikes.items()}
        traffic = np.array([[a, b, n] for (a, b), n in sorted(between.items())], np.int64).reshape(-1, 3)
        return {**arrays, "membranes": membranes, "traffic": traffic}, dict(totals)

    def _write(self, name: str, group: dict[str, Any], tau: int, given: Any) -> None:
        """The host's writes before a step: biases in a window, decay at its beginning and end."""
        opens, closes = tau == 1, tau == self.window + 1
        if not 1 <= tau <= self.window + 1 or group["kind"] == "relay":
            return
        due = np.zeros(group["neurons"]) if closes else given if given.ndim == 1 else given[tau - 1]
        leak = group["decay"] / DECAY if opens else 0.0 if closes else None
        turned = leak is not None and group["decay"]
        wanted = range(group["neurons"]) if turned else np.flatnonzero(due != self.bias[name]).tolist()
        neurons = self.neurons[name]
        for place in wanted:
            values: dict[str, Any] = {"bias": float(due[place])}
            if turned:
                values["leak_decay"] = leak
            neurons[place].set_attributes(model_attributes=values)
        self.bias[name], self.open[name] = due, not closes

    def _count(self, done: dict[str, Any], totals: Counter[str], between: Counter[tuple[int, int]]) -> None:
        for name in ("synapse", "dendrite", "soma", "network"):
            totals[f"{name}_pj"] += done["energy"][name] * 1e12
        totals["seconds"] += done["sim_time"]
        totals["events"] += done["spikes"]
        totals["messages"] += done["packets_sent"]
        totals["updated"] += done["neurons_updated"]
        totals["fired"] += done["neurons_fired"]
        totals["accessed"] += sum(map(len, self.neurons.values()))
        for name, values in done["perf_trace"].items():
            if f".{SOMA}_" in name and name.endswith(".energy"):
                kind = name.removesuffix(".energy").rpartition("_")[2]
                totals[f"soma_{kind}_pj"] += sum(values) * 1e12
        for message in done["message_trace"][0]:
            if not message["placeholder"]:
                between[message["src_tile_id"], message["dest_tile_id"]] += 1
                east, north = abs(message["src_x"] - message["dest_x"]), abs(message["src_y"] - message["dest_y"])
                totals["hops_ew"] += east
                totals["hops_ns"] += north
                if self.groups[message["src_neuron_group_id"]]["kind"] == "site":
                    totals["site_messages"] += 1
                    totals["site_hops_ew"] += east
                    totals["site_hops_ns"] += north


def load_loihi(sanafe: Any, mesh: dict[str, int]) -> tuple[Any, dict[str, float]]:
    """SANA-FE's own Loihi with three changes that no figure of it depends on, and its prices in pJ and ns.

    One neuron unit for each kind of neuron, all alike, so that their energies can be told apart; no input units, whose
    131,072 cost gigabytes; and, where one chip is not enough, more tiles of the same kind.
    """
    import yaml

    text = resources.files("sanafe.examples").joinpath("loihi.yaml").read_text(encoding="utf-8")
    whole = yaml.safe_load(text)
    description = whole["architecture"]
    description["attributes"].update(width=mesh["width"], height=mesh["height"])
    tile = description["tile"][0]
    tile["name"] = f"loihi_tile[0..{mesh['width'] * mesh['height'] - 1}]"
    core = tile["core"][0]
    lif = next(unit for unit in core["soma"] if unit["name"] == SOMA)
    core["soma"] = [
        {"name": f"{SOMA}_{kind}", "attributes": {**lif["attributes"], "log_energy": True}}
        for kind in ("site", "gate", "relay")
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loihi.yaml"
        path.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
        architecture = sanafe.load_arch(path)

    def unit(section: str, name: str, attribute: str) -> float:
        found = next(one for one in core[section] if one["name"] == name)
        return float(found["attributes"][attribute])

    soma = lif["attributes"]
    prices = {
        "dense_event": unit("synapse", SYNAPSES["dense"], "energy_process_spike"),
        "sparse_event": unit("synapse", SYNAPSES["pairs"], "energy_process_spike"),
        "access": float(soma["energy_access_neuron"]),
        "update": float(soma["energy_update_neuron"]),
        "spike": float(soma["energy_spike_out"]),
        "message": float(core["axon_out"][0]["attributes"]["energy_message_out"]),
        "hop_ew": float(tile["attributes"]["energy_east_hop"]),
        "hop_ns": float(tile["attributes"]["energy_north_hop"]),
    }
    return architecture, {name: round(value * 1e12, 6) for name, value in prices.items()}


def main() -> int:
    # The simulator writes on the standard output; the answers go where that was, and its own words to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        import sanafe  # noqa: F401 - is it there?
    except ImportError as error:
        answer(error=f"SANA-FE cannot be imported: {error}", missing=True)
        return 4
    from importlib.metadata import version

    try:
        started = time.perf_counter()
        run = ChipRun(Path(sys.argv[1]))
        answer(ready=version("sanafe"), prices_pj=run.prices, seconds=time.perf_counter() - started)
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("stop"):
                break
            with np.load(request["biases"], allow_pickle=False) as file:
                arrays, counts = run.token({name: file[name] for name in file.files})
            np.savez(request["spikes"], **arrays)
            answer(counts=counts)
    except Exception as error:  # the other side reports it, in one line
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
