"""Spiking attention of whole sequences, forward and backward: tiles against the plain path. CPU time, what autograd keeps.

python benchmarks/attention.py [--shape 4 1 256 6 48] [--shape 4 4 512 12 64] [--rounds 5]     T_s, rows, tokens, heads, d_h
"""  # noqa: E501

from __future__ import annotations

import argparse
import time

import torch

from spikeopd.allocation import keep_freed_memory
from spikeopd.models import attention_cpu
from spikeopd.models.attention import causal_pairs, coincidences, merge_heads, split_heads, weighted_values
from spikeopd.models.neurons import lif

DISTANCES = 16


def plain(q, k, v, threshold, bias, how):
    heads, length = threshold.numel(), q.shape[2]
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    pairs = causal_pairs(None, q.shape[1], length, length, DISTANCES, q.device, q.dtype)
    current = (coincidences(q, k) + bias[:, pairs.distance].movedim(0, -3)) * pairs.mask
    unit = torch.tensor([how.unit], dtype=torch.float64)
    a = lif(current, threshold.view(-1, 1, 1), how.alpha, how.xi, how.scaled, unit) * pairs.mask
    return merge_heads(weighted_values(a, v))


def kept_mib(work):
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: seen.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x
    ):
        work()
    return sum(x.untyped_storage().nbytes() for x in seen.values()) / 2**20


SHAPES = [(4, 4, 64, 4, 32), (4, 1, 256, 6, 48), (4, 2, 512, 12, 64)]


def ways_of(steps, rows, length, heads, size):
    """The same work three ways, and the slope to send back."""
    spikes = [(torch.rand(steps, rows, length, heads * size) < 0.2).float().requires_grad_() for _ in range(3)]
    values = [*spikes, torch.full((heads,), 4.0, requires_grad=True), torch.zeros(heads, DISTANCES, requires_grad=True)]
    how = attention_cpu.Synapse(0.9, 2.0, True, 2.0**-10)
    ways = {
        "plain": lambda: plain(*values, how),
        "tiles": lambda: attention_cpu.attend(*values, how)[0],
        "tiles, bf16": lambda: attention_cpu.attend(*values, how._replace(gradients="bf16"))[0],
    }
    return ways, torch.randn(steps, rows, length, heads * size)


def measure(ways, slope, rounds):
    best = {name: [9e9, 9e9] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            began = time.process_time()
            z = work()
            middle = time.process_time()
            z.backward(slope)
            best[name] = [min(best[name][0], middle - began), min(best[name][1], time.process_time() - middle)]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=5, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    head = f"{'T_s, rows, tokens, heads, d_h':32}{'way':14}{'forward ms':>11}{'backward ms':>12}"
    print(f"{head}{'ratio':>7}{'kept MiB':>10}")
    for shape in arguments.shape or SHAPES:
        ways, slope = ways_of(*shape)
        best = measure(ways, slope, arguments.rounds)
        for name, (forward, backward) in best.items():
            ratio, kept = sum(best["plain"]) / (forward + backward), kept_mib(ways[name])
            times = f"{forward * 1e3:11.1f}{backward * 1e3:12.1f}"
            print(f"{', '.join(map(str, shape)):32}{name:14}{times}{ratio:7.1f}{kept:10.1f}")


if __name__ == "__main__":
    main()
