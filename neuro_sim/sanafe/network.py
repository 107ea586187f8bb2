r"""The model as plain integrate-and-fire neurons with static synapses, for a chip whose spikes carry no number.

A chip of this kind (Loihi 1, and SANA-FE, which simulates it) gives three things: neurons `v = decay(v) + bias + input`
that fire at a threshold, synapses that add their weight one step later, and a host that may write biases between
steps. Everything the block needs is said with these, exactly:

    site    a group of the model's own neurons. It fires in the T_s steps of its window, `start + 1 ... start + T_s`;
            its biases are on in the window alone, its decay is zero after it. The reset of a spike, which the model
            subtracts one step later, is a synapse of weight -threshold from the neuron to itself.
    gate    the product of two spikes: two inputs of 64 and a threshold of 128, no memory. One per channel and cache
            slot, for keys and for values. A cached spike is 64 in the bias of its gate, in its own step of the window.
    relay   a spike one step later: input 64, threshold 64, no memory.

    residual stream   nobody sends it. Every station that reads it (x and h of every layer) has a synapse from every
                      spike written before, through relays that make all of them arrive in its window: gains, or with
                      `residual_write: current` a copy of W_o or W_2, shifted. Embedding current and written biases are
                      a bias of every station.
    distance bias     a bias of the map's neurons, written anew for every token
    residual readout  the host reads the membranes of the last site in its window and undoes their recurrence

Units are the membrane units of `spikeopd.contracts.model`; nothing here is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spikeopd.contracts import COUNT_SHIFT, EMBED_SITE, Layer, ModelShape, Site, SpikeModel
from spikeopd.errors import InputError

Array = NDArray[Any]
Kind = Literal["site", "gate", "relay"]
UNIT = 64  # what one spike counts where only its presence matters
PLACES = 1 << 23  # whole and half membrane units below this are exact in the simulator's 32-bit attributes

# What a bundle of synapses is: a component of the model, or one of these, which the model itself does not have.
EXTRAS = {
    "reset": "reset of a neuron by a synapse to itself",
    "gated": "output of a product of two spikes",
    "own": "key and value of the token itself into their gates",
    "inhibition": "what an attended token takes from the neurons of its head",
    "empty": "query spikes into cache slots that hold nothing yet",
    "relay": "spikes passed on one step later",
    "copy": "residual writes again, for every later station that reads the stream",
}


@dataclass(frozen=True)
class Group:
    """Neurons of one kind with one window. `site` is the site itself, or the one whose spikes are gated or relayed."""

    name: str
    kind: Kind
    layer: int
    site: str
    start: int
    decay: int
    threshold: Array  # [n]: fires at v >= threshold
    bias: Array  # [n], in the window; the host may write others for a token

    @property
    def neurons(self) -> int:
        return len(self.threshold)


@dataclass(frozen=True)
class Synapses:
    """A bundle from one group to another: all pairs with `weights` [source, target], or `pairs` [m, 2] with [m]."""

    source: str
    target: str
    role: str
    weights: Array
    pairs: Array | None = None

    @property
    def count(self) -> int:
        return int(self.weights.size)

    def fan_out(self, sources: int) -> Array:
        """Synapses of each source neuron."""
        if self.pairs is None:
            return np.full(sources, self.weights.shape[1])
        return np.bincount(self.pairs[:, 0], minlength=sources)


@dataclass
class Network:
    """All groups and synapses of a model with room for `slots` tokens. Groups are in the order of their windows."""

    shape: ModelShape
    slots: int
    groups: dict[str, Group] = field(default_factory=dict)
    synapses: list[Synapses] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps of one token: until the last window closes."""
        return max(group.start for group in self.groups.values()) + self.shape.num_steps

    @property
    def last(self) -> Group:
        """The site that the head reads."""
        return self.groups[group_name(self.shape.num_hidden_layers - 1, "h")]

    def of_kind(self, *kinds: Kind) -> list[Group]:
        return [group for group in self.groups.values() if group.kind in kinds]

    @property
    def matrix_targets(self) -> set[str]:
        """Groups that a full matrix enters."""
        return {bundle.target for bundle in self.synapses if bundle.pairs is None}

    def origin(self, group: Group) -> Group:
        """The site whose spikes a relay passes on."""
        return self.groups[group_name(group.layer, group.site)] if group.kind == "relay" else group

    def neurons(self, *kinds: Kind) -> int:
        return sum(group.neurons for group in self.of_kind(*kinds))


def group_name(layer: int, site: str) -> str:
    return EMBED_SITE if site == EMBED_SITE else f"layer{layer}.{site}"


def build_network(model: SpikeModel, slots: int) -> Network:
    """The network of an integer model with a cache of `slots` tokens, the one being decoded among them."""
    if model.shape.graded:
        raise InputError("SANA-FE runs spikes and this model is a quantised twin, whose neurons send counts")
    if not model.integer:
        raise InputError("SANA-FE runs integers and this model is float32; export it with --precision int8")
    if not 1 <= slots <= model.shape.max_position_embeddings:
        raise InputError(f"a cache of {slots} tokens: this model takes 1 to {model.shape.max_position_embeddings}")
    network = _Builder(model, slots).build()
    _check_range(network)
    return network


class _Builder:
    def __init__(self, model: SpikeModel, slots: int) -> None:
        self.model, self.shape, self.slots = model, model.shape, slots
        self.network = Network(model.shape, slots)
        # Everything that was written into the residual stream: its spikes and their synapses to one station.
        self.written: list[tuple[Group, str, Array, Array | None]] = []
        self.written_bias: Array = np.zeros(self.shape.hidden_size, np.int64)

    def build(self) -> Network:
        incoming = self.station(-1, EMBED_SITE, 0)
        for index, layer in enumerate(self.model.layers):
            incoming = self.block(index, layer, incoming)
        ordered = sorted(self.network.groups.values(), key=lambda group: (group.start, group.kind != "site"))
        self.network.groups = {group.name: group for group in ordered}
        return self.network

    def block(self, index: int, layer: Layer, incoming: Group) -> Group:
        start = incoming.start + 1
        q, k, v = (self.projected(index, layer, site, incoming, start) for site in "qkv")
        r = self.attention(index, q, k, v)
        x = self.write(index, layer, "o", r, "x")
        f = self.projected(index, layer, "f", x, x.start + 1)
        return self.write(index, layer, "y", f, "h")

    def projected(self, index: int, layer: Layer, site: str, source: Group, start: int) -> Group:
        """A site whose current is a weighted sum of spikes."""
        name, role = {
            "q": ("w_q", "qkv"), "k": ("w_k", "qkv"), "v": ("w_v", "qkv"),
            "o": ("w_o", "output"), "f": ("w_1", "ffn_in"), "y": ("w_2", "ffn_out"),
        }[site]  # fmt: skip
        group = self.site(index, site, start, layer.sites[site])
        self.connect(source, group, role, getattr(layer, name).astype(np.int64) << layer.sites[site].shift)
        return group

    def attention(self, index: int, q: Group, k: Group, v: Group) -> Group:
        """Coincidences, map, gated values: C = popcount(Q & K_j), A = S_a(C), Z = sum_j A[j] V_j, R = S_r(Z)."""
        shape, slots, layer = self.shape, self.slots, self.model.layers[index]
        d, heads = shape.hidden_size, shape.num_attention_heads
        channel, slot = (part.reshape(-1) for part in np.indices((d, slots)))  # gates lie channel by channel
        gate = np.arange(d * slots)
        pair = channel // shape.head_dim * slots + slot  # the map's neuron of a gate: head by head
        own = np.arange(d) * slots + slots - 1  # the last slot is the token's own

        keys = self.gates(index, "k", q.start + 1)
        self.connect(q, keys, "coincidence", UNIT, channel, gate)
        self.connect(k, keys, "own", UNIT, np.arange(d), own)
        a = layer.sites["a"]
        spread = Site(np.repeat(a.threshold, slots), np.zeros(heads * slots, np.int64), a.shift)
        pairs = self.site(index, "a", keys.start + 1, spread)
        self.connect(keys, pairs, "gated", 1 << COUNT_SHIFT, gate, pair)

        values = self.gates(index, "v", pairs.start + 1)
        self.connect(pairs, values, "av", UNIT, pair, gate)
        self.connect(self.relayed(v, values.start - 1), values, "own", UNIT, np.arange(d), own)
        r = self.site(index, "r", values.start + 1, layer.sites["r"])
        self.connect(values, r, "gated", 1 << COUNT_SHIFT, gate, channel)
        if layer.inhibition is not None:
            self.connect(self.relayed(pairs, r.start - 1), r, "inhibition", layer.inhibition[channel], pair, channel)
        return r

    def gates(self, index: int, site: str, start: int) -> Group:
        neurons = self.shape.hidden_size * self.slots
        return self.add(
            Group(
                f"{group_name(index, site)}.gate", "gate", index, site, start, 0,
                np.full(neurons, 2 * UNIT), np.zeros(neurons, np.int64),
            )
        )  # fmt: skip

    def write(self, index: int, layer: Layer, site: str, source: Group, station: str) -> Group:
        """What a sublayer adds to the residual stream, and the station that reads it next."""
        if self.shape.residual_write == "spike":
            source = self.projected(index, layer, site, source, source.start + 1)
            gain = layer.gain_o if site == "o" else layer.gain_y
            assert gain is not None
            diagonal = np.arange(self.shape.hidden_size)
            self.written.append((source, "residual", gain.astype(np.int64), np.stack([diagonal, diagonal], 1)))
        else:
            weights, shift, bias = (
                (layer.w_o, layer.shift_o, layer.bias_o) if site == "o" else (layer.w_2, layer.shift_y, layer.bias_y)
            )
            assert shift is not None and bias is not None
            role = "output" if site == "o" else "ffn_out"
            self.written.append((source, role, weights.astype(np.int64) << shift.astype(np.int64), None))
            self.written_bias = self.written_bias + bias
        return self.station(index, station, source.start + 1)

    def station(self, index: int, site: str, start: int) -> Group:
        """A site that reads the residual stream: every write so far, in the same steps."""
        neurons = self.model.site(index, site)
        group = self.site(index, site, start, Site(neurons.threshold, neurons.bias + self.written_bias, 0))
        for place, (source, role, weights, pairs) in enumerate(self.written):
            first = place == len(self.written) - 1  # a write is the model's own once; later stations need copies
            sender = self.relayed(source, start - 1)
            self.network.synapses.append(Synapses(sender.name, group.name, role if first else "copy", weights, pairs))
        return group

    def relayed(self, source: Group, start: int) -> Group:
        """The group that repeats `source` in the window after `start`; relays are added as far as needed."""
        group, all_of_them = source, np.arange(source.neurons)
        for stage in range(1, start - source.start + 1):
            name = f"{source.name}.relay{stage}"
            known = self.network.groups.get(name)
            if known is None:
                full = np.full(source.neurons, UNIT)
                known = Group(
                    name, "relay", source.layer, source.site, source.start + stage, 0, full, np.zeros_like(full)
                )
                self.add(known)
                self.connect(group, known, "relay", UNIT, all_of_them, all_of_them)
            group = known
        return group

    def site(self, index: int, site: str, start: int, neurons: Site) -> Group:
        threshold, bias = neurons.threshold.astype(np.int64), neurons.bias.astype(np.int64)
        if threshold.min() < 1:
            raise InputError(
                f"{group_name(index, site)}: a threshold of {threshold.min()}; a neuron here needs 1 or more"
            )
        group = Group(group_name(index, site), "site", index, site, start, int(self.model.decay), threshold, bias)
        self.add(group)
        itself = np.arange(group.neurons)
        self.connect(group, group, "reset", -threshold, itself, itself)
        return group

    def add(self, group: Group) -> Group:
        self.network.groups[group.name] = group
        return group

    def connect(
        self,
        source: Group,
        target: Group,
        role: str,
        weights: Array | int,
        sources: Array | None = None,
        targets: Array | None = None,
    ) -> None:
        pairs = None if sources is None or targets is None else np.stack([sources, targets], 1)
        full = np.asarray(weights, np.int64) if pairs is None else np.broadcast_to(np.int64(weights), len(pairs)).copy()
        self.network.synapses.append(Synapses(source.name, target.name, role, full, pairs))


def token_biases(
    network: Network, model: SpikeModel, current: Array, cache: Sequence[Sequence[Array]]
) -> dict[str, Array]:
    """What the host writes for one token: biases [n] for its whole window, or [T_s, n] step by step.

    current  the token's embedding current        cache  per layer: keys and values of the past, bool [past, T_s, d]
    """
    shape, slots = network.shape, network.slots
    heads, steps, past = shape.num_attention_heads, shape.num_steps, len(cache[0][0])
    wide = current.astype(np.int64)
    biases = {
        group.name: group.bias + wide for group in network.of_kind("site") if group.site in (EMBED_SITE, "x", "h")
    }
    for index, layer in enumerate(model.layers):
        for site, spikes in zip("kv", cache[index], strict=True):
            bits = np.zeros((steps, shape.hidden_size, slots), np.int64)
            bits[:, :, :past] = UNIT * spikes.transpose(1, 2, 0)
            biases[f"{group_name(index, site)}.gate"] = bits.reshape(steps, -1)
        table = layer.sites["a"].bias
        filled = np.zeros((heads, slots), np.int64)
        if table.ndim == 1:
            filled[:, :past] = filled[:, -1:] = table[:, None]
        else:
            far = np.minimum(past - np.arange(past), table.shape[1] - 1)
            filled[:, :past], filled[:, -1] = table[:, far], table[:, 0]
        biases[group_name(index, "a")] = filled.reshape(-1)
    _check_values("the host's biases of this token", biases.values())
    return biases


def read_stream(network: Network, model: SpikeModel, membranes: Array, spikes: Array) -> Array:
    """The residual stream [T_s, d] behind the last site's membranes: h = v - decay(v') + threshold s' - bias."""
    from neuro_sim.fixed_point import decay_integer

    site = model.site(network.last.layer, "h")
    before = np.vstack([np.zeros_like(membranes[:1]), membranes[:-1]])
    fired = np.vstack([np.zeros_like(spikes[:1]), spikes[:-1]])
    leaked = decay_integer(before, int(model.decay))
    return np.asarray(membranes - leaked + site.threshold.astype(np.int64) * fired - site.bias)


def map_spikes(network: Network, spikes: Array, position: int) -> Array:
    """The map's spikes of the filled slots as the model orders them: head by head, oldest key first."""
    heads = network.shape.num_attention_heads
    table = spikes.reshape(len(spikes), heads, network.slots)
    filled = np.concatenate([table[:, :, :position], table[:, :, -1:]], axis=2)
    return np.asarray(filled.reshape(len(spikes), -1))


def events(
    network: Network, fired: dict[str, Array], gated: dict[str, int], position: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Synaptic events of one token by role, from the spikes of the sites and the products that were one.

    fired  spikes of every site's neurons [n], the map with all its slots      gated  spikes of every group of gates
    The second table holds those that end in groups which a full matrix enters: a chip may price them otherwise.
    """
    extras = (name for name in EXTRAS if name != "inhibition" or network.shape.inhibiting)
    counts = dict.fromkeys((*network.shape.layer_components, *extras), 0)
    dense, matrices = dict(counts), network.matrix_targets
    for bundle in network.synapses:
        group, role = network.groups[bundle.source], bundle.role
        if group.kind == "gate":
            total = gated[group.name]  # each has one synapse
        else:
            spikes = fired[network.origin(group).name]
            total = int((spikes * bundle.fan_out(group.neurons)).sum())
            if role == "coincidence":
                empty = int(spikes.sum()) * (network.slots - position - 1)
                counts["empty"] += empty
                total -= empty
        counts[role] += total
        if bundle.target in matrices:
            dense[role] += total
    return counts, dense


def _check_range(network: Network) -> None:
    for group in network.groups.values():
        _check_values(f"thresholds and biases of {group.name}", (group.threshold, group.bias))
    for bundle in network.synapses:
        _check_values(f"synapses {bundle.source} to {bundle.target}", (bundle.weights,))


def _check_values(what: str, arrays: Iterable[Array]) -> None:
    largest = max((int(np.abs(array).max(initial=0)) for array in arrays), default=0)
    if largest >= PLACES:
        raise InputError(f"{what}: {largest} is beyond the {PLACES} that SANA-FE's attributes hold exactly")
