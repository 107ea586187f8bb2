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


def affine(node: nir.Affine) -> torch.nn.Linear:
    """nirtorch 2.6 forgets an Affine's bias (it sets `weight.bias`); files with biases need this fourth entry."""
    module = torch.nn.Linear(node.weight.shape[1], node.weight.shape[0])
    module.weight.data, module.bias.data = torch.from_numpy(node.weight), torch.from_numpy(node.bias)
    return module


THREE = {nir.LI: LeakyIntegrator, nir.Threshold: Fire, nir.Scale: Multiply}


def run_nirtorch(path: str, inputs: np.ndarray, node_map: dict) -> np.ndarray:
    import nirtorch

    module = nirtorch.nir_to_torch(path, node_map)
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


def run_snntorch(path: str, inputs: np.ndarray, patched: bool) -> np.ndarray:
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
    return step_through(net, inputs)


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
    "nirtorch": lambda path, inputs: run_nirtorch(path, inputs, THREE),
    "nirtorch-affine": lambda path, inputs: run_nirtorch(path, inputs, {**THREE, nir.Affine: affine}),
    "snntorch": lambda path, inputs: run_snntorch(path, inputs, False),
    "snntorch-patched": lambda path, inputs: run_snntorch(path, inputs, True),
    "spikingjelly": lambda path, inputs: run_spikingjelly(path, inputs, False),
    "spikingjelly-patched": lambda path, inputs: run_spikingjelly(path, inputs, True),
}

if __name__ == "__main__":
    tool, path, given, wanted = sys.argv[1:]
    np.savez(wanted, out=TOOLS[tool](path, np.load(given)))
