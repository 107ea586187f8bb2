r"""A deployable model as a NIR graph of standard nodes (product of spikes = AND, exact neuron = a loop).

    exact neuron   LI -> Threshold(just below V) -> Scale(-V) -> back to LI      the loop delays the reset by one step
    spike product  a, b -> Threshold(1.5)                                        two fan-ins sum, AND fires on both

Profile `cell`: one nested graph per block, residual stream in and out; its attention is the cell of *one* pair, query
and key of the same token, and metadata says how to replicate it. Profile `unrolled`: every token and every causal pair
of a fixed context has nodes of its own, nothing needs metadata.

Every graph takes the embedding current (residual stream) and returns the spikes of the last site. Embedding and head
are host work (the head's LayerNorm is not a NIR primitive); their arrays travel in the root's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import nir
import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import DECAY_BITS, EMBED_SITE, Site, SpikeModel, projections
from spikeopd.contracts.bundle import model_arrays
from spikeopd.errors import InputError

Array = NDArray[Any]
Profile = Literal["cell", "unrolled"]
Neuron = Literal["exact", "lif"]

DT = 1e-4  # seconds per step; the value other NIR readers assume
NIR_SCHEMA = "spikeopd.nir/1"
HOST_ARRAYS = ("embedding.", "head.")

CELL_WARNING = (
    "This file holds the attention cell of ONE query-key pair, with query, key and value of the same token. Executed "
    "as it stands it computes self-attention of single tokens, not the model. Replicate the nodes marked 'pair' for "
    "every causal pair (i, j), j <= i, as 'replicate' says, or export the profile 'unrolled'."
)
REPLICATE = (
    "The query spikes come from token i, the key and value spikes from token j at the same step; the attention map "
    "neuron has a state of its own for every pair and head; the 'value' products of all j <= i add up in the membrane "
    "of site r of token i."
)
EXACT_NEURON = (
    "u[t] = alpha u[t-1] + I[t] - V s[t-1]; s[t] = u[t] >= V; u and s start at 0 for every token. LI -> Threshold -> "
    "Scale(-V) -> LI: the recurrent edge carries the previous step's value. The stored threshold is the float32 just "
    "below V because NIR's Threshold fires at >."
)
LIF_NEURON = (
    "u[t] = alpha u[t-1] + I[t] - V s[t-1]; s[t] = u[t] >= V; u and s start at 0 for every token. nir.LIF is written "
    "for tools without recurrent LI; its own reset is hard and immediate, so a reader must be told to use a "
    "subtractive reset delayed by one step to get the model's spikes. v_threshold is the float32 just below V because "
    "LIF fires at >."
)
INTEGER_NOTE = (
    "Integer model: before it decays, a membrane's magnitude is multiplied by decay_numerator and shifted right by 12 "
    "bits (truncation), and it saturates at 24 bits. NIR's nodes cannot say so; run as real numbers they may differ."
)


@dataclass(frozen=True)
class Location:
    """Where an array of the model lies in the NIR file. `transposed`: stored [out, in] as NIR wants it."""

    path: str
    transposed: bool = False
    transform: str = ""


@dataclass
class _Builder:
    """Nodes and edges of one graph; names sort in the order of addition, which is topological up to the reset loop."""

    prefix: str
    locations: dict[str, Location]
    nodes: dict[str, nir.NIRNode] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def add(self, label: str, node: nir.NIRNode, *sources: str) -> str:
        name = f"n{len(self.nodes):05d}_{label}"
        self.nodes[name] = node
        self.edges += [(source, name) for source in sources]
        return name

    def locate(self, array: str, name: str, attribute: str, **options: Any) -> None:
        self.locations.setdefault(array, Location(f"{self.prefix}/nodes/{name}/{attribute}", **options))

    def graph(self, metadata: dict[str, Any] | None = None) -> nir.NIRGraph:
        return nir.NIRGraph(nodes=self.nodes, edges=self.edges, metadata=metadata or {})


@dataclass(frozen=True)
class NirModel:
    """The graph and the places of the model's arrays in the file written from it."""

    graph: nir.NIRGraph
    locations: dict[str, Location]


def build_graph(
    model: SpikeModel, *, profile: Profile = "cell", neuron: Neuron = "exact", context: int = 1
) -> NirModel:
    """SpikeModel to NIR. `context` is the number of tokens of the unrolled profile."""
    if not alpha_of(model) < 1:
        raise InputError("NIR's leaky integrator has no exact form for alpha = 1; train with alpha below 1")
    if profile == "cell":
        return _cell(model, neuron)
    if not 1 <= context <= model.shape.max_position_embeddings:
        raise InputError(
            f"--context {context}: the unrolled profile takes 1 to {model.shape.max_position_embeddings} tokens"
        )
    return _unrolled(model, neuron, context)


def alpha_of(model: SpikeModel) -> float:
    return model.decay / (1 << DECAY_BITS) if model.precision == "int8" else float(np.float32(model.decay))


# --- profiles --------------------------------------------------------------------------------------------------------


def _cell(model: SpikeModel, neuron: Neuron) -> NirModel:
    d = model.shape.hidden_size
    root = _Builder("/node", {})
    stream = root.add("current", nir.Input(np.array([d])))
    for index in range(model.shape.num_hidden_layers):
        # The name is known before the node: blocks follow the input one by one.
        name = f"n{len(root.nodes):05d}_block"
        block = _Builder(f"/node/nodes/{name}", root.locations)
        inner = block.add("residual", nir.Input(np.array([d])))
        out = _blocks(block, model, neuron, index, [inner])[0]
        block.add("residual_out", nir.Output(np.array([d])), out)
        stream = root.add("block", block.graph({"layer": index}), stream)
    last = model.shape.num_hidden_layers - 1
    spikes = _neuron(root, "h", model.layers[last].sites["h"], model, neuron, [stream], f"layers.{last}.h")
    root.add("spikes", nir.Output(np.array([d])), spikes)
    note = {"warning": CELL_WARNING, "replicate": REPLICATE}
    return _finish(root, model, neuron, "cell", 1, note)


def _unrolled(model: SpikeModel, neuron: Neuron, context: int) -> NirModel:
    d = model.shape.hidden_size
    root = _Builder("/node", {})
    whole = root.add("current", nir.Input(np.array([context * d])))
    # One input and one output, as most readers want it; 0/1 matrices take it apart and put it together.
    parts = np.eye(context * d, dtype=np.int8 if model.precision == "int8" else np.float32).reshape(context, d, -1)
    streams = [root.add(f"token{i}", nir.Linear(np.ascontiguousarray(parts[i])), whole) for i in range(context)]
    for index in range(model.shape.num_hidden_layers):
        streams = _blocks(root, model, neuron, index, streams)
    last = model.shape.num_hidden_layers - 1
    site = model.layers[last].sites["h"]
    fired = [_neuron(root, "h", site, model, neuron, [stream], f"layers.{last}.h") for stream in streams]
    joined = [
        root.add(f"place{i}", nir.Linear(np.ascontiguousarray(parts[i].T)), spikes) for i, spikes in enumerate(fired)
    ]
    # Readers add up what enters a node, but not all of them what enters an Output.
    whole = root.add("all_tokens", nir.Scale(np.ones(context * d, np.float32)), *joined)
    root.add("spikes", nir.Output(np.array([context * d])), whole)
    return _finish(root, model, neuron, "unrolled", context, {})


def _finish(
    root: _Builder, model: SpikeModel, neuron: Neuron, profile: Profile, context: int, note: dict[str, str]
) -> NirModel:
    """Root metadata: what the file is, and the host's arrays. Only strings, numbers, arrays and nested dicts."""
    about: dict[str, Any] = {
        "schema": NIR_SCHEMA,
        "profile": profile,
        "context": context,
        "neuron": neuron,
        "neuron_semantics": EXACT_NEURON if neuron == "exact" else LIF_NEURON,
        "precision": model.precision,
        "dt": DT,
        "alpha": alpha_of(model),
        "shape": model.shape.to_dict(),
        "embedding_shift": model.embedding.shift,
        "epsilon": float(model.head.epsilon),
        "input": "embedding current of each token in residual units, held for num_steps steps",
        "output": "spikes of the last site; their sum over the steps enters the head",
        **note,
    }
    if model.precision == "int8":
        about |= {"decay_numerator": int(model.decay), "decay_bits": DECAY_BITS, "integers": INTEGER_NOTE}
    host: dict[str, Any] = {}
    for name, array in model_arrays(model).items():
        if name.startswith(HOST_ARRAYS):
            group, _, leaf = name.partition(".")
            host.setdefault(group, {})[leaf] = array
            root.locations[name] = Location(f"/node/metadata/host/{group}/{leaf}")
    return NirModel(root.graph({"spikeopd": about, "host": host}), root.locations)


# --- one block -------------------------------------------------------------------------------------------------------


def _blocks(b: _Builder, model: SpikeModel, neuron: Neuron, index: int, streams: Sequence[str]) -> list[str]:
    """Block `index` of all tokens; `streams` are the nodes that carry each token's residual stream."""
    layer = model.layers[index]
    before = (
        (EMBED_SITE, model.embed_site) if index == 0 else (f"layers.{index - 1}.h", model.layers[index - 1].sites["h"])
    )

    def fire(site: str, sources: Sequence[str]) -> str:
        return _neuron(b, site, layer.sites[site], model, neuron, sources, f"layers.{index}.{site}")

    def project(weight: str, source: str) -> str:
        """Weights of a projection, then its neurons."""
        site = targets[weight]
        return fire(site, [_projection(b, index, weight, getattr(layer, weight), site, layer.sites[site], source)])

    def add(stream: str, gain: str, values: Array, source: str) -> str:
        """Residual stream plus a one-to-one synapse."""
        branch = b.add(gain, nir.Scale(values), source)
        b.locate(f"layers.{index}.{gain}", branch, "scale")
        return b.add("residual", nir.Scale(np.ones(values.shape, np.float32)), stream, branch)

    targets = {connection.name: connection.target for connection in projections(model.shape)}
    tokens = range(len(streams))
    x = [_neuron(b, "input", before[1], model, neuron, [stream], before[0]) for stream in streams]
    q = [project("w_q", x[i]) for i in tokens]
    k = [project("w_k", x[i]) for i in tokens]
    v = [project("w_v", x[i]) for i in tokens]
    heads = _head_matrix(model)
    z = [[_pair(b, fire, heads, q[i], k[j], v[j]) for j in range(i + 1)] for i in tokens]
    r = [fire("r", z[i]) for i in tokens]
    o = [project("w_o", r[i]) for i in tokens]
    middle = [add(streams[i], "gain_o", layer.gain_o, o[i]) for i in tokens]
    f = [project("w_1", fire("x", [middle[i]])) for i in tokens]
    y = [project("w_2", f[i]) for i in tokens]
    return [add(middle[i], "gain_y", layer.gain_y, y[i]) for i in tokens]


def _pair(b: _Builder, fire: Any, heads: Array, query: str, key: str, value: str) -> str:
    """Attention of one query-key pair: count coincidences per head, fire, gate the values."""
    pair = {"pair": "yes"}
    both = np.full(heads.shape[1], 1.5, np.float32)
    coincidence = b.add("coincidence", nir.Threshold(both, metadata=dict(pair)), query, key)
    count = b.add("count", nir.Linear(heads, metadata=dict(pair)), coincidence)
    attention = fire("a", [count])
    spread = b.add("spread", nir.Linear(np.ascontiguousarray(heads.T), metadata=dict(pair)), attention)
    return b.add("value", nir.Threshold(both.copy(), metadata=dict(pair)), spread, value)


def _head_matrix(model: SpikeModel) -> Array:
    """[heads, d]: one where a channel belongs to a head."""
    dtype = np.int8 if model.precision == "int8" else np.float32
    return np.repeat(np.eye(model.shape.num_attention_heads, dtype=dtype), model.shape.head_dim, axis=1)


def _projection(b: _Builder, index: int, label: str, weight: Array, target: str, site: Site, source: str) -> str:
    """Affine where a bias exists, else Linear: readers are known to drop an Affine's bias (nirtorch 2.6 does)."""
    stored = np.ascontiguousarray(weight.T)
    if site.bias.any():
        bias = site.bias.astype(np.float32) / np.float32(1 << site.shift)
        name = b.add(label, nir.Affine(stored, bias), source)
        b.locate(f"layers.{index}.{target}.bias", name, "bias", transform="weight_units")
    else:
        name = b.add(label, nir.Linear(stored), source)
    b.locate(f"layers.{index}.{label}", name, "weight", transposed=True)
    return name


def _neuron(
    b: _Builder, label: str, site: Site, model: SpikeModel, neuron: Neuron, sources: Sequence[str], array: str
) -> str:
    """Neurons of one site; returns the node that carries their spikes. Shifts go into the resistance."""
    leak = 1 - alpha_of(model)
    threshold = site.threshold.astype(np.float32)
    size, unit = threshold.shape, np.float32(1 << site.shift)
    below = np.nextafter(threshold, np.float32(-np.inf))
    about = {"site": array, "pair": "yes"} if label == "a" else {"site": array}
    common: dict[str, Any] = {
        "tau": np.full(size, DT / leak, np.float32),
        "r": np.full(size, unit / leak, np.float32),
        "v_leak": np.zeros(size, np.float32),
    }
    if neuron == "lif":
        name = b.add(
            f"{label}_lif",
            nir.LIF(**common, v_reset=np.zeros(size, np.float32), v_threshold=below, metadata=about),
            *sources,
        )
        b.locate(f"{array}.threshold", name, "v_threshold", transform="next_above")
        return name
    membrane = b.add(f"{label}_membrane", nir.LI(**common, metadata=dict(about)), *sources)
    fire = b.add(f"{label}_fire", nir.Threshold(below, metadata=dict(about)), membrane)
    reset = b.add(f"{label}_reset", nir.Scale(-threshold / unit, metadata=dict(about)), fire)
    b.edges.append((reset, membrane))
    b.locate(f"{array}.threshold", fire, "threshold", transform="next_above")
    return fire
