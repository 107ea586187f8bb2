r"""A deployable model as a NIR graph of standard nodes (product of spikes = AND, exact neuron = a loop).

    exact neuron   LI -> Threshold(just below V) -> Scale(-V) -> back to LI      the loop delays the reset by one step
    spike product  a, b -> Threshold(1.5)                                        two fan-ins sum, AND fires on both
    current write  Linear(w) -> Scale(2**shift) -> residual stream               no neurons between
    bias           Affine(0, b), fed by nothing that counts, into whatever adds  where no projection could carry it

Profile `cell`: one nested graph per block, residual stream in and out; its attention is the cell of *one* pair, query
and key of the same token, and metadata says how to replicate it. Profile `unrolled`: every token and every causal pair
of a fixed context has nodes of its own, nothing needs metadata.

Every graph takes the embedding current (residual stream) and returns what the head reads: the spikes of the last site,
or with the readout "residual" the stream itself. Embedding and head are host work (the head's LayerNorm is not a NIR
primitive); their arrays travel in the root's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import nir
import numpy as np
from numpy.typing import NDArray

from export.arrays import Location
from spikeopd.contracts import DECAY_BITS, EMBED_SITE, WEIGHT_BITS, Site, SpikeModel, projections
from spikeopd.contracts.bundle import model_arrays
from spikeopd.errors import InputError

Array = NDArray[Any]
Profile = Literal["cell", "unrolled"]
Neuron = Literal["exact", "lif"]

DT = 1e-4  # seconds per step; the value other NIR readers assume
HOST_ARRAYS = ("embedding.", "head.")

CELL_WARNING = (
    "This file holds the attention cell of ONE query-key pair, with query, key and value of the same token. Executed "
    "as it stands it computes self-attention of single tokens, not the model. Replicate the nodes marked 'pair' for "
    "every causal pair (i, j), j <= i, as 'replicate' says, or export the profile 'unrolled'."
)
REPLICATE = (
    "The query spikes come from token i, the key and value spikes from token j at the same step; the attention map "
    "neuron has a state of its own for every pair and head; the 'value' products of all j <= i, and their "
    "'inhibition' where there is one, add up in the membrane of site r of token i."
)
DISTANCE = (
    "The bias current of a pair's map neuron depends on its distance: 'distance_bias' has for each layer an array "
    "[heads, distances] in membrane units, and pair (i, j) uses column min(i - j, distances - 1). The 'count' node "
    "here holds column 0, in units of counts."
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
OUTPUTS = {
    "rate": "spikes of the last site; their sum over the steps enters the head",
    "residual": "residual stream after the last block; its sum over the steps enters the head",
}
INTEGER_NOTE = (
    "Integer model: before it decays, a membrane's magnitude is multiplied by decay_numerator and shifted right by 12 "
    "bits (truncation), and it saturates at 24 bits. NIR's nodes cannot say so; run as real numbers they may differ."
)


# The host's part as formulas; names are the arrays under `host` and the fields beside them. docs/formats.md repeats
# them.
HOST = {
    "prompt": "tokens.bos, then the token ids of the text without special tokens; decoding ends at tokens.eos. Token i "
    "(from 0) of the sequence has position i.",
    "readout": "n = sum over the num_steps steps of the graph's output for the token; mu = mean(n) / unit; inv = 1 / "
    "sqrt(mean(n**2) / unit**2 - mu**2 + epsilon). unit = num_steps; with readout 'residual' in int8 4096 * num_steps.",
    "sampling": "Greedy: the largest logit, of equal ones the lowest token id. At temperature T: weights exp((logit - "
    "max) / T) in order of token id, c their running sum, the first id with c > u * c[last]; u are the successive "
    "random() of numpy.random.default_rng([seed, how often this prompt came before in the run, *prompt token ids]).",
}
EMBED = {
    "int8": "e = (((table[x] P) * row_scale[x] * channel_gain + 2**(embedding_shift - 1)) >> embedding_shift) + "
    "position[i], 64-bit integers, >> rounds towards minus infinity; P = project_in, or the identity.",
    "float32": "e = (table[x] P) * channel_gain + position[i] in float32; P = project_in, or the identity.",
}
HEAD_GAMMA = (
    "logit[v] = row_scale[v] * ((a[v] / unit - mu * g[v]) * inv) + bias[v] in float64, with the exact sums a[v] = "
    "sum_k n[k] * gamma[k] * table[v, k] and g[v] = sum_k gamma[k] * table[v, k]; table is the embedding's."
)
HEAD_FEATURES = (
    "y[k] = out_scale[k] * ((a[k] / unit - mu * p[k]) * inv) + out_bias[k] in float64, with a[k] = sum_i n[i] P[i, k], "
    "p[k] = sum_i P[i, k], P = project_out or the identity; in int8 y is rounded to the nearest integer (halves to "
    "even) and cut to -8191 .. 8191; logit[v] = row_scale[v] * sum_k y[k] * table[v, k] + bias[v]; table is the "
    "embedding's."
)


@dataclass
class _Builder:
    """Nodes and edges of one graph; names sort in the order of addition, which is topological up to the reset loop."""

    prefix: str
    locations: dict[str, Location]
    nodes: dict[str, nir.NIRNode] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, node: nir.NIRNode, *sources: str) -> str:
        name = f"n{len(self.nodes):05d}_{label}"
        self.nodes[name] = node
        self.edges += [(source, name) for source in sources]
        return name

    def locate(self, array: str, name: str, attribute: str, **options: Any) -> None:
        self.locations.setdefault(array, Location(f"{self.prefix}/nodes/{name}/{attribute}", **options))

    def constant(self, array: str, values: Array, transform: str = "") -> str:
        """A node that emits `values` at every step, whatever the graph's input is."""
        if array not in self.constants:
            narrow = np.int8 if values.dtype.kind == "i" else np.float32
            if not self.constants:
                entry = next(iter(self.nodes))
                width = int(self.nodes[entry].output_type["output"][0])
                self.constants[""] = self.add("silence", nir.Linear(np.zeros((1, width), narrow)), entry)
            name = self.add("constant", nir.Affine(np.zeros((len(values), 1), narrow), values), self.constants[""])
            self.locate(array, name, "bias", transform=transform)
            self.constants[array] = name
        return self.constants[array]

    def graph(self, metadata: dict[str, Any] | None = None) -> nir.NIRGraph:
        return nir.NIRGraph(nodes=self.nodes, edges=self.edges, metadata=metadata or {})


@dataclass(frozen=True)
class NirModel:
    """The graph and the places of the model's arrays in the file written from it."""

    graph: nir.NIRGraph
    locations: dict[str, Location]


def build_graph(
    model: SpikeModel,
    *,
    profile: Profile = "cell",
    neuron: Neuron = "exact",
    context: int = 1,
    tokens: Mapping[str, int] | None = None,
) -> NirModel:
    """SpikeModel to NIR. context: tokens of the unrolled profile; tokens: ids of bos and eos, for the host."""
    if not alpha_of(model) < 1:
        raise InputError("NIR's leaky integrator has no exact form for alpha = 1; train with alpha below 1")
    if profile == "cell":
        return _cell(model, neuron, tokens or {})
    if not 1 <= context <= model.shape.max_position_embeddings:
        raise InputError(
            f"--context {context}: the unrolled profile takes 1 to {model.shape.max_position_embeddings} tokens"
        )
    return _unrolled(model, neuron, context, tokens or {})


def alpha_of(model: SpikeModel) -> float:
    return model.decay / (1 << DECAY_BITS) if model.integer else float(np.float32(model.decay))


# --- profiles --------------------------------------------------------------------------------------------------------


def _cell(model: SpikeModel, neuron: Neuron, tokens: Mapping[str, int]) -> NirModel:
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
    root.add(_output_name(model), nir.Output(np.array([d])), _readout(root, model, neuron, stream))
    note = {"warning": CELL_WARNING, "replicate": REPLICATE}
    if model.shape.distances:
        note["distance"] = DISTANCE
    return _finish(root, model, neuron, "cell", 1, note, tokens)


def _unrolled(model: SpikeModel, neuron: Neuron, context: int, tokens: Mapping[str, int]) -> NirModel:
    d = model.shape.hidden_size
    root = _Builder("/node", {})
    whole = root.add("current", nir.Input(np.array([context * d])))
    # One input and one output, as most readers want it; 0/1 matrices take it apart and put it together.
    parts = np.eye(context * d, dtype=np.int8 if model.integer else np.float32).reshape(context, d, -1)
    streams = [root.add(f"token{i}", nir.Linear(np.ascontiguousarray(parts[i])), whole) for i in range(context)]
    for index in range(model.shape.num_hidden_layers):
        streams = _blocks(root, model, neuron, index, streams)
    read = [_readout(root, model, neuron, stream) for stream in streams]
    joined = [root.add(f"place{i}", nir.Linear(np.ascontiguousarray(parts[i].T)), node) for i, node in enumerate(read)]
    # Readers add up what enters a node, but not all of them what enters an Output.
    whole = root.add("all_tokens", nir.Scale(np.ones(context * d, np.float32)), *joined)
    root.add(_output_name(model), nir.Output(np.array([context * d])), whole)
    return _finish(root, model, neuron, "unrolled", context, {}, tokens)


def _output_name(model: SpikeModel) -> str:
    return "spikes" if model.shape.readout == "rate" else "stream"


def _readout(root: _Builder, model: SpikeModel, neuron: Neuron, stream: str) -> str:
    """The last site, and the node that the head reads: its spikes or the residual stream."""
    last, d = model.shape.num_hidden_layers - 1, model.shape.hidden_size
    spikes = _residual_neuron(root, "h", model.layers[last].sites["h"], model, neuron, stream, f"layers.{last}.h")
    if model.shape.readout == "rate":
        return spikes
    # The last site drives nothing, but nir.read gives every loose end an Output of its own: a weight of zero ties it.
    mute = root.add("mute", nir.Scale(np.zeros(d, np.float32)), spikes)
    return root.add("readout", nir.Scale(np.ones(d, np.float32)), stream, mute)


def _finish(
    root: _Builder,
    model: SpikeModel,
    neuron: Neuron,
    profile: Profile,
    context: int,
    note: dict[str, str],
    tokens: Mapping[str, int],
) -> NirModel:
    """Root metadata: what the file is, and the host's arrays. Only strings, numbers, arrays and nested dicts."""
    about: dict[str, Any] = {
        "schema": f"spikeopd.nir/{3 if model.shape.inhibiting else 1 if model.shape.paper_block else 2}",
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
        "output": OUTPUTS[model.shape.readout],
        "host": {
            **HOST,
            "embedding": EMBED["int8" if model.integer else "float32"],
            "head": HEAD_FEATURES if model.head.gamma is None else HEAD_GAMMA,
        },
        **note,
    }
    if model.integer:
        about |= {"decay_numerator": int(model.decay), "decay_bits": DECAY_BITS, "integers": INTEGER_NOTE}
    if model.precision == "int4":
        about["weight_bits"] = WEIGHT_BITS[
            model.precision
        ]  # the nodes hold one weight a byte, as NIR's readers want it
    if tokens:
        about["tokens"] = {name: int(value) for name, value in tokens.items()}
    host: dict[str, Any] = {}
    distance: dict[str, Any] = {}
    for name, array in model_arrays(model).items():
        if name.endswith(".a.bias"):
            layer = f"layer{int(name.split('.')[1]):03d}"
            distance[layer] = array
            root.locations[name] = Location(f"/node/metadata/distance_bias/{layer}")
        if name.startswith(HOST_ARRAYS):
            group, _, leaf = name.partition(".")
            host.setdefault(group, {})[leaf] = array
            root.locations[name] = Location(f"/node/metadata/host/{group}/{leaf}")
    metadata = {"spikeopd": about, "host": host} | ({"distance_bias": distance} if distance else {})
    return NirModel(root.graph(metadata), root.locations)


# --- one block -------------------------------------------------------------------------------------------------------


def _blocks(b: _Builder, model: SpikeModel, neuron: Neuron, index: int, streams: Sequence[str]) -> list[str]:
    """Block `index` of all tokens; `streams` are the nodes that carry each token's residual stream."""
    layer = model.layers[index]
    before = (
        (EMBED_SITE, model.embed_site) if index == 0 else (f"layers.{index - 1}.h", model.layers[index - 1].sites["h"])
    )

    def fire(site: str, sources: Sequence[str]) -> str:
        return _neuron(b, site, layer.sites[site], model, neuron, sources, f"layers.{index}.{site}")

    def fire_residual(site: str, stream: str) -> str:
        return _residual_neuron(b, site, layer.sites[site], model, neuron, stream, f"layers.{index}.{site}")

    def project(weight: str, source: str) -> str:
        """Weights of a projection, then its neurons."""
        site = targets[weight]
        return fire(site, [_projection(b, index, weight, getattr(layer, weight), site, layer.sites[site], source)])

    def write(stream: str, weight: str, source: str) -> str:
        """Residual stream plus what a sublayer adds to it."""
        site = "o" if weight == "w_o" else "y"
        if model.shape.residual_write == "spike":
            gain = f"gain_{site}"
            branch = b.add(gain, nir.Scale(getattr(layer, gain)), project(weight, source))
            b.locate(f"layers.{index}.{gain}", branch, "scale")
            return b.add("residual", nir.Scale(np.ones(model.shape.hidden_size, np.float32)), stream, branch)
        branch = _linear(b, index, weight, getattr(layer, weight), source)
        shift = getattr(layer, f"shift_{site}")
        if shift is not None:
            branch = b.add(f"shift_{site}", nir.Scale(np.exp2(shift.astype(np.float32))), branch)
            b.locate(f"layers.{index}.shift_{site}", branch, "scale", transform="exponent")
        bias = b.constant(f"layers.{index}.bias_{site}", getattr(layer, f"bias_{site}"))
        return b.add("residual", nir.Scale(np.ones(model.shape.hidden_size, np.float32)), stream, branch, bias)

    targets = {connection.name: connection.target for connection in projections(model.shape)}
    tokens = range(len(streams))
    x = [_residual_neuron(b, "input", before[1], model, neuron, stream, before[0]) for stream in streams]
    q = [project("w_q", x[i]) for i in tokens]
    k = [project("w_k", x[i]) for i in tokens]
    v = [project("w_v", x[i]) for i in tokens]
    z = [[n for j in range(i + 1) for n in _pair(b, fire, model, index, i - j, q[i], k[j], v[j])] for i in tokens]
    r_bias = _bias_current(layer.sites["r"])
    constant = [b.constant(f"layers.{index}.r.bias", r_bias, "count_units")] if r_bias.any() else []
    r = [fire("r", [*z[i], *constant]) for i in tokens]
    middle = [write(streams[i], "w_o", r[i]) for i in tokens]
    f = [project("w_1", fire_residual("x", middle[i])) for i in tokens]
    return [write(middle[i], "w_2", f[i]) for i in tokens]


def _pair(
    b: _Builder, fire: Any, model: SpikeModel, index: int, distance: int, query: str, key: str, value: str
) -> list[str]:
    """Attention of one query-key pair: count coincidences per head, fire, gate the values. The nodes that S_r hears."""
    layer, site = model.layers[index], model.layers[index].sites["a"]
    pair = {"pair": "yes"}
    heads = _head_matrix(model)
    both = np.full(heads.shape[1], 1.5, np.float32)
    coincidence = b.add("coincidence", nir.Threshold(both, metadata=dict(pair)), query, key)
    counter = nir.Linear(heads, metadata=dict(pair))
    if model.shape.distances:
        bias = _bias_current(site)[:, min(distance, model.shape.distances - 1)]
        counter = nir.Affine(heads, np.ascontiguousarray(bias), metadata=dict(pair))
    count = b.add("count", counter, coincidence)
    attention = fire("a", [count])
    spread = b.add("spread", nir.Linear(np.ascontiguousarray(heads.T), metadata=dict(pair)), attention)
    gated = b.add("value", nir.Threshold(both.copy(), metadata=dict(pair)), spread, value)
    if layer.inhibition is None:
        return [gated]
    weights = layer.inhibition.astype(np.float32) / np.float32(1 << layer.sites["r"].shift)
    inhibition = b.add("inhibition", nir.Scale(weights, metadata=dict(pair)), spread)
    b.locate(f"layers.{index}.inhibition", inhibition, "scale", transform="count_units")
    return [gated, inhibition]


def _head_matrix(model: SpikeModel) -> Array:
    """[heads, d]: one where a channel belongs to a head."""
    dtype = np.int8 if model.integer else np.float32
    return np.repeat(np.eye(model.shape.num_attention_heads, dtype=dtype), model.shape.head_dim, axis=1)


def _projection(b: _Builder, index: int, label: str, weight: Array, target: str, site: Site, source: str) -> str:
    """Affine where a bias exists, else Linear: readers are known to drop an Affine's bias (nirtorch 2.6 does)."""
    if not site.bias.any():
        return _linear(b, index, label, weight, source)
    name = _linear(b, index, label, weight, source, _bias_current(site))
    b.locate(f"layers.{index}.{target}.bias", name, "bias", transform="weight_units")
    return name


def _bias_current(site: Site) -> Array:
    """A bias as a current, which counts 2**shift membrane units. Exact: a bias has 24 bits at most."""
    return site.bias.astype(np.float32) / np.float32(1 << site.shift)


def _linear(b: _Builder, index: int, label: str, weight: Array, source: str, bias: Array | None = None) -> str:
    stored = np.ascontiguousarray(weight.T)
    name = b.add(label, nir.Linear(stored) if bias is None else nir.Affine(stored, bias), source)
    b.locate(f"layers.{index}.{label}", name, "weight", transposed=True)
    return name


def _residual_neuron(
    b: _Builder, label: str, site: Site, model: SpikeModel, neuron: Neuron, stream: str, array: str
) -> str:
    """Neurons driven by the residual stream itself and a bias."""
    constant = [b.constant(f"{array}.bias", site.bias)] if site.bias.any() else []
    return _neuron(b, label, site, model, neuron, [stream, *constant], array)


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
