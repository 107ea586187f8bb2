"""Counts operations and memory accesses of recorded blocks with NeuroBench and SpikingJelly, in their environment.

    python energy_counters.py BLOCKS.npz

BLOCKS.npz holds, per layer l: `l.NAME.spikes` [rows, in] and `l.NAME.weight` [in, out] of every projection, and
`l.q`, `l.k`, `l.v` [tokens, T_s, heads, head_dim] and `l.a.TOKEN` [T_s, heads, TOKEN + 1]; of a quantised twin
`l.NAME.counts` and `l.NAME.weight` alone. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from neurobench.metrics.workload import SynapticOperations
from neurobench.models import TorchModel
from spikingjelly.activation_based.neuron import LIFNode
from spikingjelly.activation_based.op_counter import (
    DispatchCounterMode,
    LemaireEnergyCostConfig,
    SynOpCounter,
    estimate_lemaire_energy,
)


def neurobench_counts(spikes: np.ndarray, weight: np.ndarray) -> dict[str, int]:
    """SynapticOperations of one Linear layer. It reports per sample; every row here is one."""
    layer = torch.nn.Linear(*weight.shape, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.T.astype(np.float32)))
    model = TorchModel(torch.nn.Sequential(layer))
    model.register_hooks()
    data = torch.from_numpy(spikes.astype(np.float32))
    with torch.no_grad():
        predictions = model(data)
        metric = SynapticOperations()
        result = metric(model, predictions, (data, None))
    model.cleanup_hooks()
    return {key: round(value * len(data)) for key, value in result.items()}


def spikingjelly_count(left: np.ndarray, right: np.ndarray) -> int:
    """SynOpCounter of one matrix product."""
    counter = SynOpCounter()
    with DispatchCounterMode([counter]), torch.no_grad():
        torch.from_numpy(left.astype(np.float32)) @ torch.from_numpy(right.astype(np.float32))
    return int(counter.get_total())


def lemaire(model: torch.nn.Module, data: np.ndarray) -> dict[str, float]:
    """Lemaire et al. 2022 as SpikingJelly has it: accesses in words of 32 bits, energies, sizes of the stores."""
    report = estimate_lemaire_energy(model, torch.from_numpy(data.astype(np.float32)))
    words = {key.replace("bytes", "words"): value // 4 for key, value in report.counts.items() if "bytes" in key}
    return {**report.counts, **words, **report.breakdown_pj, **report.buffer_sizes_bytes, "total_pj": report.total_pj}


def lemaire_synapses(spikes: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    return lemaire(torch.nn.Linear(*weight.shape, bias=False), spikes)


def lemaire_neurons(spikes: np.ndarray) -> dict[str, float]:
    """A LIF of which exactly the recorded neurons fire: v = x / 2 reaches its threshold of 1 where x is 2."""
    return lemaire(LIFNode(tau=2.0, v_threshold=1.0, v_reset=0.0, step_mode="s"), 2 * spikes)


def projection(spikes: np.ndarray, weight: np.ndarray) -> dict:
    counts = neurobench_counts(spikes, weight)
    return {
        "neurobench_acs": counts["Effective_ACs"],
        "neurobench_macs": counts["Effective_MACs"],
        "neurobench_dense": counts["Dense"],
        "spikingjelly": spikingjelly_count(spikes, weight),
        "lemaire": lemaire_synapses(spikes, weight),
        "lemaire_neurons": lemaire_neurons(spikes),
    }


def graded_projection(counts: np.ndarray, weight: np.ndarray) -> dict[str, int]:
    """A projection of a quantised twin: values that are not binary, and which of them are not zero."""
    found = neurobench_counts(counts, weight)
    return {
        "neurobench_acs": found["Effective_ACs"],
        "neurobench_macs": found["Effective_MACs"],
        "neurobench_dense": found["Dense"],
        "spikingjelly": spikingjelly_count(counts > 0, weight),
    }


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, a: list[np.ndarray]) -> dict[str, int]:
    """The two attention products, token by token (masked) and as squares (unmasked), with binary and other operands.

    With a binary second operand both tools count pairs in which both spike; with any other every synapse a spike
    reaches. Keys and values thus stand in twice: as they are, and as weights that are neither 0 nor 1.
    """
    tokens, steps, heads, head_dim = q.shape
    totals = dict.fromkeys(
        ("neurobench_pairs", "neurobench_synapses", "spikingjelly_pairs", "spikingjelly_synapses",
         "spikingjelly_square_pairs", "spikingjelly_square_synapses", "spikingjelly_square_masked_pairs",
         "neurobench_av_pairs", "neurobench_av_synapses", "spikingjelly_av_pairs", "spikingjelly_av_synapses"), 0,
    )  # fmt: skip
    for step in range(steps):
        for head in range(heads):
            for token in range(tokens):
                query = q[token, step, head][None]
                keys = k[: token + 1, step, head].T
                values = v[: token + 1, step, head]
                row = a[token][step, head][None]
                totals["neurobench_pairs"] += neurobench_counts(query, keys)["Effective_ACs"]
                totals["neurobench_synapses"] += neurobench_counts(query, keys + 2)["Effective_ACs"]
                totals["spikingjelly_pairs"] += spikingjelly_count(query, keys)
                totals["spikingjelly_synapses"] += spikingjelly_count(query, keys + 2)
                totals["neurobench_av_pairs"] += neurobench_counts(row, values)["Effective_ACs"]
                totals["neurobench_av_synapses"] += neurobench_counts(row, values + 2)["Effective_ACs"]
                totals["spikingjelly_av_pairs"] += spikingjelly_count(row, values)
                totals["spikingjelly_av_synapses"] += spikingjelly_count(row, values + 2)
            square_q, square_k = q[:, step, head], k[:, step, head].T
            totals["spikingjelly_square_pairs"] += spikingjelly_count(square_q, square_k)
            totals["spikingjelly_square_synapses"] += spikingjelly_count(square_q, square_k + 2)
            totals["spikingjelly_square_masked_pairs"] += int(np.tril(square_q.astype(int) @ square_k).sum())
    return totals


def main(path: str) -> None:
    with np.load(path, allow_pickle=False) as archive:
        blocks = {name: archive[name].astype(np.int64) for name in archive.files}
    result: dict[str, dict] = {}
    for name in blocks:
        if name.endswith(".spikes"):
            stem = name.removesuffix(".spikes")
            result[stem] = projection(blocks[name], blocks[f"{stem}.weight"])
        if name.endswith(".counts"):
            stem = name.removesuffix(".counts")
            result[stem] = graded_projection(blocks[name], blocks[f"{stem}.weight"])
    for layer in sorted({name.split(".")[0] for name in blocks if name.endswith(".q")}):
        q = blocks[f"{layer}.q"]
        a = [blocks[f"{layer}.a.{token}"] for token in range(len(q))]
        result[f"{layer}.attention"] = attention(q, blocks[f"{layer}.k"], blocks[f"{layer}.v"], a)
    prices = LemaireEnergyCostConfig()
    result["lemaire_prices"] = {
        "add": prices.e_add_pj,
        "mul": prices.e_mul_pj,
        **{f"sram-{size}": prices.memory_cost_pj(bytes_) for size, bytes_ in
           (("8kb", 8 * 1024), ("32kb", 32 * 1024), ("1mb", 1024 * 1024))},
    }  # fmt: skip
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    # Both packages print while they are imported or run; the caller reads the last line.
    print()
    main(sys.argv[1])
