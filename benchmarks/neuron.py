"""Forward and backward of the multi-step neuron: compiled path, torch path, plain autograd loop, and library peers.

python benchmarks/neuron.py [--shape 4 4 512 768] [--rounds 7]
Interleaved in one run, one thread; prints the best CPU time of each and the ratio to the compiled path.
SpikingJelly and snnTorch are measured when they are installed.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from spikeopd.allocation import keep_freed_memory
from spikeopd.models import lif_cpu
from spikeopd.models.neurons import lif, lif_step


def plain_loop(current, threshold):
    u = s = torch.zeros_like(current[0])
    spikes = []
    for t in range(current.shape[0]):
        u, s = lif_step(current[t], u, s, threshold)
        spikes.append(s)
    return torch.stack(spikes)


def with_path(enabled):
    def run(current, threshold):
        lif_cpu.ENABLED = enabled
        return lif(current, threshold)

    return run


def peers():
    found = {"ours, compiled": with_path(True), "ours, torch": with_path(False), "plain autograd loop": plain_loop}
    try:
        from spikingjelly.activation_based import functional, neuron, surrogate

        node = neuron.LIFNode(
            tau=2.0, v_threshold=0.7, v_reset=None, surrogate_function=surrogate.ATan(), step_mode="m"
        )

        def jelly(current, threshold):
            functional.reset_net(node)
            return node(current)

        found["SpikingJelly LIFNode"] = jelly
    except ImportError:
        pass
    try:
        import snntorch

        leaky = snntorch.Leaky(beta=0.9, threshold=0.7)

        def snn(current, threshold):
            membrane = torch.zeros_like(current[0])
            spikes = []
            for t in range(current.shape[0]):
                s, membrane = leaky(current[t], membrane)
                spikes.append(s)
            return torch.stack(spikes)

        found["snnTorch Leaky"] = snn
    except ImportError:
        pass
    return found


def saved_bytes(function, current, threshold):
    """Bytes that autograd keeps between forward and backward, each storage once, but for the input."""
    seen = {}

    def keep(x):
        seen[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())  # held: addresses are used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        function(current, threshold)
    seen.pop(current.untyped_storage().data_ptr(), None)
    return sum(size for _, size in seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(4, 4, 512, 768))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training; for all alike
    current = (torch.randn(*arguments.shape) * 0.7 + 0.2).requires_grad_()
    threshold = torch.tensor([0.7])
    weight = torch.randn(*arguments.shape)
    best: dict[str, list[float]] = {}
    candidates = peers()
    for _ in range(arguments.rounds):
        for name, function in candidates.items():
            current.grad = None
            t0 = time.process_time()
            spikes = function(current, threshold)
            t1 = time.process_time()
            spikes.backward(weight)
            t2 = time.process_time()
            old = best.setdefault(name, [9e9, 9e9])
            best[name] = [min(old[0], t1 - t0), min(old[1], t2 - t1)]
    base = sum(best["ours, compiled"])
    saved = {name: saved_bytes(function, current, threshold) / 2**20 for name, function in candidates.items()}
    if arguments.json:
        print(
            json.dumps(
                {
                    name: {"forward_s": f, "backward_s": b, "ratio": (f + b) / base, "saved_mib": saved[name]}
                    for name, (f, b) in best.items()
                }
            )
        )
        return
    print(f"{'implementation':24}{'forward ms':>12}{'backward ms':>13}{'ratio':>8}{'saved MiB':>11}")
    for name, (f, b) in best.items():
        print(f"{name:24}{f * 1e3:12.1f}{b * 1e3:13.1f}{(f + b) / base:8.1f}{saved[name]:11.1f}")


if __name__ == "__main__":
    main()
