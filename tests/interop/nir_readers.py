"""Runs inside the interop environment, without this project: other tools execute an exported model.nir.

python nir_readers.py TOOL model.nir inputs.npy outputs.npz
"""

from __future__ import annotations

import sys

import nir
import numpy as np
import torch

DT = 1e-4


class LeakyIntegrator(torch.nn.Module):
    """One Euler step of nir.LI; the state is the membrane."""

    def __init__(self, node: nir.LI) -> None:
        super().__init__()
        self.rate = torch.from_numpy(np.float32(DT) / node.tau)
        self.r, self.leak = torch.from_numpy(node.r), torch.from_numpy(node.v_leak)

    def forward(self, x, state=None):
        v = torch.zeros_like(self.r) if state is None else state
        v = v + self.rate * ((self.leak - v) + self.r * x)
        return v, v


class Fire(torch.nn.Module):
    def __init__(self, node: nir.Threshold) -> None:
        super().__init__()
        self.threshold = torch.from_numpy(node.threshold)

    def forward(self, x):
        return (x > self.threshold).to(x.dtype)


class Multiply(torch.nn.Module):
    def __init__(self, node: nir.Scale) -> None:
        super().__init__()
        self.scale = torch.from_numpy(node.scale).float()

    def forward(self, x):
        return self.scale * x


def linear(node: nir.Linear | nir.Affine) -> torch.nn.Linear:
    """nirtorch 2.6 keeps a file's int8 weights, which torch refuses, and forgets an Affine's bias (`weight.bias`)."""
    bias = isinstance(node, nir.Affine)
    module = torch.nn.Linear(node.weight.shape[1], node.weight.shape[0], bias=bias)
    module.weight.data = torch.from_numpy(node.weight).float()
    if bias:
        module.bias.data = torch.from_numpy(node.bias).float()
    return module


FIVE = {nir.LI: LeakyIntegrator, nir.Threshold: Fire, nir.Scale: Multiply, nir.Linear: linear, nir.Affine: linear}


def run_nirtorch(path: str, inputs: np.ndarray) -> np.ndarray:
    import nirtorch

    module = nirtorch.nir_to_torch(path, FIVE)
    return step_through(module, inputs)


def step_through(module, inputs: np.ndarray) -> np.ndarray:
    state, outputs = None, []
    with torch.no_grad():
        for current in torch.from_numpy(inputs.astype(np.float32)):
            out, state = module(current, state)
            outputs.append(out.numpy())
    return np.stack(outputs)


def ffn(path: str, layer: int = 0) -> nir.NIRGraph:
    """The feed-forward part of one block as a graph of its own: Input, w_1, f, w_2, y, Output."""
    graph = nir.read(path)
    block = [node for node in graph.nodes.values() if isinstance(node, nir.NIRGraph)][layer]
    chosen = {
        name.partition("_")[2]: node
        for name, node in block.nodes.items()
        if name.endswith(("_w_1", "_f_lif", "_w_2", "_y_lif"))
    }
    return nir.NIRGraph.from_list(chosen["w_1"], chosen["f_lif"], chosen["w_2"], chosen["y_lif"])


def run_tokens(path: str, inputs: np.ndarray, reset: bool, steps: int = 4) -> np.ndarray:
    """Token after token through one imported network: snnTorch's neurons remember, and the model's start at rest."""
    import snntorch

    net, outputs = patched_snntorch(path, True), []
    for start in range(0, len(inputs), steps):
        for module in net.modules():
            if reset and isinstance(module, snntorch.Leaky):
                module.reset_mem()
        outputs.append(step_through(net, inputs[start : start + steps]))
    return np.concatenate(outputs)


def run_snntorch(path: str, inputs: np.ndarray, patched: bool) -> np.ndarray:
    return step_through(patched_snntorch(path, patched), inputs)


def patched_snntorch(path: str, patched: bool) -> torch.nn.Module:
    import snntorch
    from snntorch.import_nir import import_from_nir

    net = import_from_nir(ffn(path))
    if patched:
        # What docs/export.md tells a snnTorch user: the reset subtracts, one step late.
        for module in net.modules():
            if isinstance(module, snntorch.Leaky):
                module.reset_mechanism = "subtract"
                module.state_function = module._base_sub
                module.reset_delay = True
    return net


def run_spikingjelly(path: str, inputs: np.ndarray, patched: bool) -> np.ndarray:
    from spikingjelly.activation_based import neuron
    from spikingjelly.activation_based.nir_exchange import import_from_nir

    class DelayedReset(neuron.LIFNode):
        """What docs/export.md tells a SpikingJelly user: its reset acts before the decay, so it must take V/alpha."""

        def single_step_functional_forward(self, inputs, states, **kwargs):
            alpha = 1 - 1 / self.tau
            u = alpha * states[0] + inputs[0]
            spike = self.surrogate_function(u - self.v_threshold)
            return (spike,), (u - spike * self.v_threshold / alpha, *states[1:])

    net = import_from_nir(ffn(path), dt=DT)
    if patched:
        for module in net.modules():
            if isinstance(module, neuron.LIFNode):
                module.__class__ = DelayedReset
    return step_through(net, inputs)


TOOLS = {
    "nirtorch": run_nirtorch,
    "snntorch-reset": lambda path, inputs: run_tokens(path, inputs, True),
    "snntorch-carried": lambda path, inputs: run_tokens(path, inputs, False),
    "snntorch": lambda path, inputs: run_snntorch(path, inputs, False),
    "snntorch-patched": lambda path, inputs: run_snntorch(path, inputs, True),
    "spikingjelly": lambda path, inputs: run_spikingjelly(path, inputs, False),
    "spikingjelly-patched": lambda path, inputs: run_spikingjelly(path, inputs, True),
}

if __name__ == "__main__":
    tool, path, given, wanted = sys.argv[1:]
    np.savez(wanted, out=TOOLS[tool](path, np.load(given)))
