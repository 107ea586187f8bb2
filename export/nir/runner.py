r"""Execute a NIR graph as the specification says, and nothing more: no metadata is read, no name means anything.

    LI, LIF     tau dv/dt = (v_leak - v) + r I       one forward Euler step of dt per time step
    LIF         z = v > v_threshold, then v = v_reset where z
    Threshold   z = x > threshold
    Linear, Affine, Scale                            y = W x, W x + b, s * x;   fan-in adds up

An edge that closes a cycle carries the value of the previous step. Used to prove that an exported file means what the
model means, without any of our own conventions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nir
import numpy as np
from numpy.typing import NDArray

from spikeopd.errors import InputError

Array = NDArray[Any]


class Runner:
    """`outputs = Runner(graph, dt).run(currents)`; currents [time, n]. Spikes of every Threshold and LIF in `fired`."""

    def __init__(self, graph: nir.NIRGraph, dt: float, *, subtractive: bool = False) -> None:
        """subtractive: read LIF by this project's convention (reset by v_threshold, one step late, not to v_reset)."""
        self.dt, self.subtractive = dt, subtractive
        self.fired: dict[str, Array] = {}
        self._graph = _Graph(graph, "", self)

    def run(self, currents: Array) -> Array:
        history: dict[str, list[Array]] = {}
        outputs = []
        self._graph.reset()
        for current in currents:
            outputs.append(self._graph.step(np.asarray(current, np.float64), history))
        self.fired = {name: np.stack(steps) for name, steps in history.items()}
        return np.stack(outputs)

    def node(self, node: nir.NIRNode, path: str) -> Any:
        if isinstance(node, nir.NIRGraph):
            return _Graph(node, path, self)
        if isinstance(node, nir.LI | nir.LIF):
            return _Leaky(node, path, self.dt, self.subtractive)
        functions: dict[type, Callable[[Any], Callable[[Array], Array]]] = {
            nir.Linear: lambda n: lambda x: n.weight.astype(np.float64) @ x,
            nir.Affine: lambda n: lambda x: n.weight.astype(np.float64) @ x + n.bias,
            nir.Scale: lambda n: lambda x: n.scale * x,
            nir.Threshold: lambda n: lambda x: (x > n.threshold).astype(np.float64),
            nir.Input: lambda n: lambda x: x,
            nir.Output: lambda n: lambda x: x,
        }
        if type(node) not in functions:
            raise InputError(f"NIR node {path}: {type(node).__name__} is not one that this runner executes")
        return _Plain(functions[type(node)](node), path, isinstance(node, nir.Threshold))


class _Plain:
    def __init__(self, function: Callable[[Array], Array], path: str, fires: bool) -> None:
        self.function, self.path, self.fires = function, path, fires

    def reset(self) -> None:
        pass

    def step(self, x: Array, history: dict[str, list[Array]]) -> Array:
        y = self.function(x)
        if self.fires:
            history.setdefault(self.path, []).append(y > 0)
        return y


class _Leaky:
    def __init__(self, node: nir.LI | nir.LIF, path: str, dt: float, subtractive: bool) -> None:
        self.node_, self.path, self.subtractive = node, path, subtractive
        tau = node.tau.astype(np.float64)
        # dt in the file's own precision: tau = dt / (1 - alpha) was rounded, and the same rounding cancels here.
        self.rate = np.float64(node.tau.dtype.type(dt)) / tau
        self.fires = isinstance(node, nir.LIF)

    def reset(self) -> None:
        self.v = np.zeros(self.node_.tau.shape)
        self.spikes = np.zeros(self.node_.tau.shape)

    def step(self, x: Array, history: dict[str, list[Array]]) -> Array:
        n = self.node_
        self.v = self.v + self.rate * ((n.v_leak - self.v) + n.r.astype(np.float64) * x)
        if not self.fires:
            return self.v
        if self.subtractive:
            self.v = self.v - np.nextafter(n.v_threshold, np.inf) * self.spikes
        self.spikes = (self.v > n.v_threshold).astype(np.float64)
        if not self.subtractive:
            self.v = np.where(self.spikes > 0, n.v_reset, self.v)
        history.setdefault(self.path, []).append(self.spikes > 0)
        return self.spikes


class _Graph:
    def __init__(self, graph: nir.NIRGraph, path: str, runner: Runner) -> None:
        self.nodes = {name: runner.node(node, f"{path}/{name}") for name, node in graph.nodes.items()}
        self.order = execution_order(list(graph.nodes), list(graph.edges))
        self.sources: dict[str, list[str]] = {name: [] for name in graph.nodes}
        for source, target in graph.edges:
            self.sources[target].append(source)
        self.sizes = {name: _size(node) for name, node in graph.nodes.items()}
        self.inputs = [name for name, node in graph.nodes.items() if isinstance(node, nir.Input)]
        self.outputs = [name for name, node in graph.nodes.items() if isinstance(node, nir.Output)]
        if len(self.inputs) != 1 or len(self.outputs) != 1:
            raise InputError(f"NIR graph {path or '/'}: one Input and one Output expected")

    def reset(self) -> None:
        self.values = {name: np.zeros(size) for name, size in self.sizes.items()}
        for node in self.nodes.values():
            node.reset()

    def step(self, x: Array, history: dict[str, list[Array]]) -> Array:
        values: dict[str, Array] = {}
        for name in self.order:
            # A source that has not run yet in this step closes a cycle: its previous value arrives.
            total = x if name in self.inputs else 0.0
            for source in self.sources[name]:
                total = total + values.get(source, self.values[source])
            values[name] = self.nodes[name].step(np.asarray(total), history)
        self.values = values
        return values[self.outputs[0]]


def execution_order(names: list[str], edges: list[tuple[str, str]]) -> list[str]:
    """Depth-first order from the roots: every node after its sources, except along edges that close a cycle."""
    targets: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        targets[source].append(target)
    reached = {target for _, target in edges}
    finished: list[str] = []
    state: dict[str, int] = {}
    for root in [name for name in names if name not in reached] + names:
        stack = [] if root in state else [(root, iter(targets[root]))]
        state.setdefault(root, 1)
        while stack:
            name, rest = stack[-1]
            following = next((t for t in rest if t not in state), None)
            if following is None:
                finished.append(name)
                stack.pop()
            else:
                state[following] = 1
                stack.append((following, iter(targets[following])))
    return finished[::-1]


def _size(node: nir.NIRNode) -> int:
    return int(np.prod(next(iter(node.output_type.values()))))
