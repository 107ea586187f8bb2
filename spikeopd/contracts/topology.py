r"""The block as a table: its neuron sites, what drives each, and how far a spike reaches. One home for all of it.

Energy drivers, tallies, graph.json, the Loihi map, netx chains, calibration and the checks of run.json are derived
from `connections`. The simulators themselves (dense, reference, event kernels, Lava) are written against the equations
instead, on purpose: they check each other and this table.

Two forms of the block exist (`ModelShape.residual_write`):

    spike     h = h + gain_o O,  O = S_o(R W_o + b)   and   h = h + gain_y Y,  Y = S_y(F W_2 + b)      the paper's
    current   h = h + R W_o + b_o                     and   h = h + F W_2 + b_y                        sites o, y vanish
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from spikeopd.errors import InputError, short

EMBED_SITE = "embed"
INPUT = "input"  # as a driver: the previous layer's h, or embed before the first layer
RESIDUAL = "residual"  # as a target: the residual stream, read by the sites x and h
# Every site and component that a block may have, in the order of computation.
LAYER_SITES = ("q", "k", "v", "a", "r", "o", "x", "f", "y", "h")
LAYER_COMPONENTS = ("qkv", "coincidence", "av", "output", "residual", "ffn_in", "ffn_out")
RESIDUAL_SITES = (EMBED_SITE, "x", "h")  # their current is the residual stream itself
HOST_COMPONENTS = ("embed", "head")  # dense work outside the blocks
CACHE_TRAFFIC = ("kv_read", "kv_write")

Write = Literal["spike", "current"]
Readout = Literal["rate", "residual"]
NeuronKind = Literal["lif", "quantised"]
Attention = Literal["sum", "inhibiting"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes, named as in OPTConfig, and the form of the block.

    word_embed_proj_dim  differs from `hidden_size` in OPT-350M only
    residual_write       how a sublayer adds to the residual stream (above)
    readout              what the head's LayerNorm reads: "rate", the mean of the last spikes, or "residual", the mean
                         of the residual stream over the steps
    distances            width of the attention's distance bias: a current per head and distance i - j into S_a, the
                         last entry for every larger distance. 0: none
    attention            what a spike of the map adds at S_r: "sum", the value spikes that it picks; "inhibiting",
                         these and a constant of each neuron, most often negative
    neuron               "lif", T_s steps of spikes; "quantised", the twin: one step of counts from 0 to T_s
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_steps: int
    word_embed_proj_dim: int
    residual_write: Write = "spike"
    readout: Readout = "rate"
    distances: int = 0
    neuron: NeuronKind = "lif"
    attention: Attention = "sum"

    @property
    def graded(self) -> bool:
        """The quantised twin: its activations are counts."""
        return self.neuron == "quantised"

    @property
    def inhibiting(self) -> bool:
        """An attended token also takes away, where its value is silent."""
        return self.attention == "inhibiting"

    @property
    def steps(self) -> int:
        """Steps that a token takes: T_s, or one of a twin."""
        return 1 if self.graded else self.num_steps

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def factorised(self) -> bool:
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def paper_block(self) -> bool:
        """The paper's form of the block, which schema 1 of every file describes."""
        form = (self.residual_write, self.readout, self.distances, self.neuron, self.attention)
        return form == ("spike", "rate", 0, "lif", "sum")

    @property
    def layer_sites(self) -> tuple[str, ...]:
        """The neuron sites of one layer in the order in which they fire."""
        gone = () if self.residual_write == "spike" else ("o", "y")
        return tuple(site for site in LAYER_SITES if site not in gone)

    @property
    def layer_components(self) -> tuple[str, ...]:
        """The components of one layer in the order in which they compute."""
        return tuple(dict.fromkeys(connection.component for connection in connections(self)))

    def site_size(self, site: str, position: int) -> int:
        """Neurons of one site for the token at `position` (0-based). Only the attention map `a` grows."""
        if site == "a":
            return self.num_attention_heads * (position + 1)
        return self.ffn_dim if site == "f" else self.hidden_size

    def site_slots(self, site: str, tokens: int, keys: int) -> int:
        """Neurons of one site over `tokens` tokens that look at `keys` keys in total."""
        return self.num_attention_heads * keys if site == "a" else self.site_size(site, 0) * tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values. The form of the block is left out where it is the paper's, as schema 1 has it, the neuron
        where it spikes and attention where it only sums.
        """
        values = asdict(self)
        if not self.graded:
            del values["neuron"]
        if not self.inhibiting:
            del values["attention"]
        return {name: value for name, value in values.items() if name in SIZES or not self.paper_block}


SIZES = tuple(field.name for field in fields(ModelShape) if field.type == "int" and field.name != "distances")
FORMS: dict[str, tuple[str, ...]] = {
    "residual_write": ("spike", "current"),
    "readout": ("rate", "residual"),
    "neuron": ("lif", "quantised"),
    "attention": ("sum", "inhibiting"),
}
DISTANCES_LIMIT = 1 << 12


def parse_shape(raw: Any, where: str, num_steps: int | None = None, limit: int = 2**31) -> ModelShape:
    """A checked shape from plain data: sizes named as in OPTConfig, at the top level or under `model` or `shape`."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}: expected a JSON object")
    outer = raw
    for key in ("model", "shape", "shapes"):
        if "hidden_size" not in raw and isinstance(raw.get(key), dict):
            raw = raw[key]
    steps = num_steps if num_steps is not None else raw.get("num_steps", outer.get("num_steps"))
    if steps is None:
        raise InputError(
            f"{where}: field 'num_steps' is missing; say with --num-steps how many steps T_s a token takes"
        )
    values = {name: raw.get(name) for name in SIZES} | {"num_steps": steps}
    if values["word_embed_proj_dim"] is None:
        values["word_embed_proj_dim"] = values["hidden_size"]
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < limit:
            raise InputError(f"{where}: field {name!r} must be a whole number from 1 to 2^31, got {_show(value)}")
    for name, choices in FORMS.items():
        values[name] = raw.get(name, choices[0])
        if values[name] not in choices:
            raise InputError(f"{where}: field {name!r} must be {' or '.join(choices)}, got {_show(values[name])}")
    distances = values["distances"] = raw.get("distances", 0)
    if type(distances) is not int or not 0 <= distances <= DISTANCES_LIMIT:
        raise InputError(
            f"{where}: field 'distances' must be a whole number from 0 to {DISTANCES_LIMIT}, got {_show(distances)}"
        )
    shape = ModelShape(**values)
    if shape.graded and shape.inhibiting:
        raise InputError(f"{where}: field 'attention' is 'inhibiting', which a quantised twin has not")
    if shape.hidden_size % shape.num_attention_heads:
        raise InputError(f"{where}: hidden_size {shape.hidden_size} is not a multiple of num_attention_heads")
    return shape


def _show(value: Any) -> str:
    return f"{value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else short(repr(value))


@dataclass(frozen=True)
class Connection:
    """One bundle of synapses of a layer.

    component  the name under which its operations are counted
    name       the layer's array: w_q ... w_2, gain_o, gain_y; "coincidence" and "values" read the cache instead
    driver     site whose spikes arrive; INPUT for the site before the layer
    target     site whose current it feeds, or RESIDUAL
    fan_in     inputs of one target neuron            fan_out  targets of one spike; None: as many as there are keys
    """

    component: str
    name: str
    driver: str
    target: str
    fan_in: int | None
    fan_out: int | None

    @property
    def dense(self) -> bool:
        """A full weight matrix [driver, target]."""
        return self.name.startswith("w_")

    def driver_of(self, layer: int) -> tuple[int, str]:
        """(layer, site) of the neurons that drive this connection of `layer`; layer -1 is the embedding's."""
        if self.driver != INPUT:
            return layer, self.driver
        return (layer - 1, "h") if layer else (-1, EMBED_SITE)

    def macs(self, shape: ModelShape, tokens: int, keys: int) -> int:
        """Operations if every driver fired once per token: FLOPs_c(l) of the paper's Appendix E."""
        if self.component in ("coincidence", "av"):
            return shape.hidden_size * keys
        assert self.fan_out is not None
        return shape.site_size("h" if self.driver == INPUT else self.driver, 0) * self.fan_out * tokens


@lru_cache(maxsize=64)
def connections(shape: ModelShape) -> tuple[Connection, ...]:
    """The synapses of one layer in the order of computation."""
    d, ffn, head_dim = shape.hidden_size, shape.ffn_dim, shape.head_dim
    spikes = shape.residual_write == "spike"

    def written(gain: str, driver: str) -> list[Connection]:
        return [Connection("residual", gain, driver, RESIDUAL, 1, 1)] if spikes else []

    table = [
        *(Connection("qkv", f"w_{site}", INPUT, site, d, d) for site in "qkv"),
        Connection("coincidence", "coincidence", "q", "a", head_dim, None),
        Connection("av", "values", "a", "r", None, head_dim),
        Connection("output", "w_o", "r", "o" if spikes else RESIDUAL, d, d),
        *written("gain_o", "o"),
        Connection("ffn_in", "w_1", "x", "f", d, ffn),
        Connection("ffn_out", "w_2", "f", "y" if spikes else RESIDUAL, ffn, d),
        *written("gain_y", "y"),
    ]
    order = {name: place for place, name in enumerate(LAYER_COMPONENTS)}
    return tuple(sorted(table, key=lambda connection: order[connection.component]))


def projections(shape: ModelShape) -> tuple[Connection, ...]:
    """The weight matrices of one layer: w_q, w_k, w_v, w_o, w_1, w_2."""
    return tuple(connection for connection in connections(shape) if connection.dense)


def component_drivers(shape: ModelShape, component: str, layer: int) -> tuple[tuple[int, str], ...]:
    """(layer, site) of the neurons whose spikes drive one component, each once."""
    keys = (c.driver_of(layer) for c in connections(shape) if c.component == component)
    return tuple(dict.fromkeys(keys))


def layer_macs(shape: ModelShape, tokens: int, keys: int) -> dict[str, int]:
    """Dense operations of one layer by component, over `tokens` tokens that look at `keys` keys in total."""
    counts = dict.fromkeys(shape.layer_components, 0)
    for connection in connections(shape):
        counts[connection.component] += connection.macs(shape, tokens, keys)
    return counts


def outer_macs(shape: ModelShape, tokens: int) -> dict[str, int]:
    """MACs of the dense parts around the layers: the factorised embedding and the head."""
    d, w = shape.hidden_size, shape.word_embed_proj_dim
    factor = d * w if shape.factorised else 0
    return {"embed": factor * tokens, "head": (factor + w * shape.vocab_size) * tokens}


def ordered_sites(shape: ModelShape) -> Iterator[tuple[int, str]]:
    """All sites as (layer, site) in the order of computation; layer -1 is the embedding's."""
    yield -1, EMBED_SITE
    for layer in range(shape.num_hidden_layers):
        for site in shape.layer_sites:
            yield layer, site
