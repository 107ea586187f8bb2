r"""Energy with memory inside: what a student, its quantised twin and its teacher read, write and address.

Beside Appendix E, which counts arithmetic alone. A tally says how often each event happens over some tokens; `bill`
multiplies by the published prices of `energy.costs`. Every model of a comparison is tallied by the same rules:

    operations   accumulations, multiply-accumulates, and one update per neuron and step (an activation: one rescaling)
    memory       weights read; keys and values read and written; running sums; membranes; the residual stream; spikes
    addressing   additions that find an address (Lemaire et al. 2022, arXiv:2210.13107)

Two ways to run the same student, both known to its run:

    spike        events are taken one by one, as they come: each fetches the weights of its row, and reads and writes
                 the sum of every synapse; membranes are read and written at every step; one address per synapse
    token        the T_s steps of a token are taken together, as our engine does: the row of an input that fired at all
                 is fetched once, sums and membranes stay in registers (a membrane starts at zero for every token)

The quantised twin is the student's block with one step and ceil(log2(T_s + 1))-bit activations, as many levels as T_s
steps can count. It is computed from the student's shape, or from a run of a twin that was trained. Dense, it reads
every weight once per token and keeps its sums in registers; under a convention it skips activations that are zero and
treats the others as it treats spikes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from energy.costs import OPERATIONS, Placement
from energy.flops import DenseShape, SpikeGPTShape
from energy.models import Rates, driven_rates, estimated_sops, measured_rates, measured_site_rates, site_cells
from spikeopd.contracts import MEMBRANE_BITS, Activity, ModelShape, connections, projections
from spikeopd.contracts.model import WEIGHT_BITS as STORED_BITS
from spikeopd.contracts.run import Run
from spikeopd.contracts.topology import layer_macs, outer_macs
from spikeopd.errors import InputError

CONVENTIONS = {
    "spike": "each spike fetches its row and touches every sum in memory, step by step",
    "token": "the row of an input that fired is fetched once per token; sums and membranes in registers",
}
WEIGHT_BITS, ADDRESS_BITS = 8, 16  # an event names its neuron; no group of neurons here has more than 2^16
PARTS = ("operations", "memory", "addressing")
# event -> (part, store of a placement, what one of it is); traffic is counted in elements
EVENTS: Mapping[str, tuple[str, str | None, str]] = {
    "ac": ("operations", None, "accumulation"),
    "mac": ("operations", None, "multiply-accumulate"),
    "update": ("operations", None, "neuron update (dense: rescaling of an activation)"),
    "weight_read": ("memory", "weights", "weight read"),
    "cache_read": ("memory", "cache", "key or value read"),
    "cache_write": ("memory", "cache", "key or value written"),
    "sum_read": ("memory", "local", "running sum read"),
    "sum_write": ("memory", "local", "running sum written"),
    "state_read": ("memory", "local", "membrane read"),
    "state_write": ("memory", "local", "membrane written"),
    "stream_read": ("memory", "local", "residual stream read"),
    "stream_write": ("memory", "local", "residual stream written"),
    "spike_read": ("memory", "local", "spike or activation read"),
    "spike_write": ("memory", "local", "spike or activation written"),
    "address": ("addressing", None, "address addition"),
}
NOT_COSTED = (
    "biases, thresholds and scales: read and added once per output by every model here, per step by the student",
    "comparison with the threshold and reset of a neuron; clipping and rounding of an activation",
    "LayerNorm of the head; LayerNorm, softmax and activation functions of the teacher",
    "registers, control, clock, leakage and idle time; wires and hops between cores",
    "sampling and tokenisation; input and output",
)
_CACHED = ("k", "v")  # these go to the cache and drive nothing else


@dataclass(frozen=True)
class Work:
    """What a student did over some tokens, all layers together.

    sops     per component: synapses that spikes reached
    reached  per component: the same with every input counted once per token, however often it fired
    spikes   outside keys and values                active   neurons outside keys and values that fired, once per token
    rate     spikes per neuron and step over every group of fixed size
    """

    shape: ModelShape
    tokens: int
    keys: int
    sops: Mapping[str, float]
    reached: Mapping[str, float]
    spikes: float
    active: float
    rate: float


def fired_share(rate: float, steps: int) -> float:
    """Share of neurons that fire at least once in `steps` steps, if steps were independent."""
    return 1.0 - (1.0 - rate) ** steps


def estimated_work(shape: ModelShape, rates: Rates, tokens: int, keys: int) -> Work:
    """From firing rates alone, with `fired_share` for what was not counted."""
    macs, layers = layer_macs(shape, tokens, keys), range(shape.num_hidden_layers)
    reached = {
        name: sum(fired_share(rates[name][layer], shape.steps) * macs[name] for layer in layers) for name in macs
    }
    sops = {name: sum(estimated_sops(shape, rates, tokens, keys, name)) for name in macs}
    spikes, active, rate = _site_totals(shape, driven_rates(shape, rates), tokens, keys)
    return Work(shape, tokens, keys, sops, reached, spikes, active, rate)


def counted_work(run: Run, phase: str | None = None) -> Work:
    """From the counted events of a run."""
    return activity_work(run.shape, run.activity(phase), run.keys(phase), run.precision)


def activity_work(shape: ModelShape, activity: Activity, keys: int, precision: str = "int8") -> Work:
    """From counted events. Rows that were fetched are counted too, except the attention's, which are estimated."""
    site_rates = measured_site_rates(activity)
    estimate = estimated_work(shape, measured_rates(shape, activity), activity.tokens, keys)
    # bytes / width of a weight; gains are 32 bits wide in every precision
    width = {"residual": 4.0} | {c.component: STORED_BITS[precision] / 8 for c in projections(shape)}
    reached = {
        name: activity.bytes[name] / width[name] if name in width else value for name, value in estimate.reached.items()
    }
    spikes, active, rate = _site_totals(shape, site_rates, activity.tokens, keys)
    sops = {name: float(table.sum()) for name, table in activity.sops.items()}
    return Work(shape, activity.tokens, keys, sops, reached, spikes, active, rate)


def _site_totals(shape: ModelShape, site_rates: Rates, tokens: int, keys: int) -> tuple[float, float, float]:
    """Spikes and neurons that fired at all, outside keys and values; mean rate outside the attention map."""
    spikes = active = fired = slots = 0.0
    for site, row in site_cells(shape, tokens, keys).items():
        for cells, rate in zip(row, site_rates[site], strict=True):
            if site not in _CACHED:
                spikes += cells * rate
                active += cells / shape.steps * fired_share(rate, shape.steps)
            if site != "a":
                fired, slots = fired + cells * rate, slots + cells
    return spikes, active, fired / slots if slots else 0.0


@dataclass(frozen=True)
class Tally:
    """Events of one model over some tokens: `blocks`, and `outer` (embedding and head). `bits` of traffic events."""

    name: str
    tokens: int
    blocks: Mapping[str, float]
    outer: Mapping[str, float]
    bits: Mapping[str, int]
    mac: str = "mac_int8"


@dataclass(frozen=True)
class Entry:
    """One line of a bill. `count`: operations, or elements of `bits` bits each; `price_pj` is that of one."""

    place: str
    part: str
    event: str
    count: float
    bits: int | None
    price_pj: float

    @property
    def energy_pj(self) -> float:
        return self.count * self.price_pj


def bill(tally: Tally, placement: Placement) -> list[Entry]:
    """Counts times prices, in the order of EVENTS; events that did not happen are left out."""
    entries = []
    for place, counts in (("blocks", tally.blocks), ("head", tally.outer)):
        for event, (part, store, _) in EVENTS.items():
            if counts.get(event):
                bits = None if store is None else tally.bits[event]
                entries.append(Entry(place, part, event, counts[event], bits, price(event, tally, placement)))
    return entries


def price(event: str, tally: Tally, placement: Placement) -> float:
    """pJ of one event of a tally: an operation, or the moving of one element."""
    store = EVENTS[event][1]
    if store is None:
        return OPERATIONS[tally.mac if event == "mac" else event].pj
    return tally.bits[event] / 8 * float(getattr(placement, store).pj_per_byte)


def total(tally: Tally, placement: Placement, part: str | None = None, place: str | None = None) -> float:
    """pJ of a tally: all of it, or one part or place."""
    chosen = (e for e in bill(tally, placement) if part in (None, e.part) and place in (None, e.place))
    return sum(entry.energy_pj for entry in chosen)


def student_tally(work: Work, convention: str, name: str = "student") -> Tally:
    """The spiking student under one of CONVENTIONS."""
    shape, steps = work.shape, work.shape.num_steps
    rows, cells = _cells(shape, work.tokens, work.keys)
    attention = work.sops["coincidence"] + work.sops["av"]
    synapses = sum(work.sops.values())
    gains = work.sops.get("residual", 0.0)
    counts = {
        "ac": synapses,
        "update": float(rows + cells),
        **_stream(shape, work.tokens, steps),
        "cache_write": _cache(shape, work.tokens) * steps,
    }
    if convention == "spike":
        counts |= {
            "weight_read": synapses - attention,
            "cache_read": attention,
            **_pair("sum", synapses - gains),  # a gain adds to the residual stream, counted above
            **_pair("state", rows + cells),
            **_pair("spike", work.spikes),
            "address": synapses,
        }
        spike_bits = ADDRESS_BITS
    else:
        counts |= {
            "weight_read": sum(value for name, value in work.reached.items() if name not in ("coincidence", "av")),
            # every key's bits, and the value bits that the map selects, step by step
            "cache_read": _cache(shape, work.keys) / 2 * steps + work.sops["av"],
            **_pair("spike", cells),
            "address": _row_addresses(shape, work.tokens, work.keys, work.reached),
        }
        spike_bits = 1
    bits = _bits(WEIGHT_BITS, 1, MEMBRANE_BITS, spike_bits)
    return Tally(name, work.tokens, counts, _outer(shape, work.tokens), bits)


def twin_bits(num_steps: int) -> int:
    """ceil(log2(T_s + 1)): bits that hold every count of spikes that T_s steps can give."""
    return num_steps.bit_length()


def twin_tally(work: Work, convention: str | None = None, name: str = "quantised twin") -> Tally:
    """A quantised twin: dense, or under one of CONVENTIONS with its zeros skipped.

    work: of a run of the twin itself; or of the student, and the twin is taken to have as many zeros as that has
    neurons that never fired.
    """
    shape = replace(work.shape, neuron="quantised")
    bits = twin_bits(work.shape.num_steps)
    if convention is None:
        return _dense_tally(name, shape, work.tokens, work.keys, (WEIGHT_BITS, bits, MEMBRANE_BITS), gains=True)
    rows, cells = _cells(shape, work.tokens, work.keys)
    macs = sum(work.reached.values())
    attention = work.reached["coincidence"] + work.reached["av"]
    counts = {
        "mac": macs,
        "update": float(rows + cells),
        **_stream(shape, work.tokens, 1),
        "weight_read": macs - attention,
        "cache_write": _cache(shape, work.tokens),
    }
    if convention == "spike":
        counts |= {
            "cache_read": attention,
            **_pair("sum", macs - work.reached.get("residual", 0.0)),
            **_pair("spike", work.active),
            "address": macs,
        }
        spike_bits = ADDRESS_BITS + bits
    else:
        counts |= {
            "cache_read": _cache(shape, work.keys) / 2 + work.reached["av"],
            **_pair("spike", cells),
            "address": _row_addresses(shape, work.tokens, work.keys, work.reached),
        }
        spike_bits = bits
    return Tally(
        name,
        work.tokens,
        counts,
        _outer(shape, work.tokens),
        _bits(WEIGHT_BITS, bits, MEMBRANE_BITS, spike_bits),
    )


def teacher_tally(name: str, shape: ModelShape, tokens: int, keys: int, precision: str) -> Tally:
    """The dense teacher in `int8` (8-bit weights, activations and cache) or `fp32`. Its reads are counted for OPT."""
    if isinstance(shape, DenseShape):
        raise InputError(f"{name}: what a {shape.family} reads and writes is not counted; compare with an OPT")
    if precision == "int8":
        return _dense_tally(name, shape, tokens, keys, (8, 8, MEMBRANE_BITS))
    return _dense_tally(name, shape, tokens, keys, (32, 32, 32), mac="mac_fp32")


def spikegpt_tally(shape: SpikeGPTShape, tokens: int, rate: float, convention: str) -> Tally:
    """SpikeGPT's matrices at a rate, one step per token; its recurrent state and neuron updates are not counted."""
    macs = shape.macs(tokens)
    sops = rate * (macs["time_mix"] + macs["channel_mix"])
    counts = {"ac": sops, "weight_read": sops}
    if convention == "spike":
        counts |= {**_pair("sum", sops), "address": sops}
    outer = {"mac": float(macs["head"]), "weight_read": float(macs["head"])}
    return Tally(shape.name, tokens, counts, outer, _bits(WEIGHT_BITS, 1, MEMBRANE_BITS, 1))


def uniform_curve(
    shape: ModelShape, tokens: int, keys: int, placement: Placement, tally_of: Callable[[Work], Tally]
) -> Callable[[float], float]:
    """pJ of a model as a function of the rate at which every neuron of its student fires.

    Tallies are affine in what spikes reach (the rate) and in what is reached at all (`fired_share`): three points do.
    """
    silent, full = (
        estimated_work(shape, dict.fromkeys(shape.layer_components, [rate] * shape.num_hidden_layers), tokens, keys)
        for rate in (0.0, 1.0)
    )
    once = replace(full, sops=silent.sops, spikes=0.0)  # what is reached, each once
    base, spiking = total(tally_of(silent), placement), replace(full, reached=silent.reached, active=0.0)
    by_rate, by_share = (total(tally_of(work), placement) - base for work in (spiking, once))
    return lambda rate: base + by_rate * rate + by_share * fired_share(rate, shape.num_steps)


def cheaper_bands(
    student: Callable[[float], float], rival: Callable[[float], float], points: int = 200
) -> list[tuple[float, float]]:
    """Intervals of the rate in [0, 1] in which the student costs no more than its rival, edges to 1e-9."""

    def gap(rate: float) -> float:
        return student(rate) - rival(rate)

    grid = [index / points for index in range(points + 1)]
    cheap = [gap(rate) <= 0 for rate in grid]
    bands, start = [], 0.0 if cheap[0] else None
    for left, right, before, after in zip(grid, grid[1:], cheap, cheap[1:], strict=False):
        if before != after:
            low, high = left, right
            while high - low > 1e-10:
                middle = (low + high) / 2
                low, high = (middle, high) if (gap(middle) <= 0) == before else (low, middle)
            if after:
                start = high
            else:
                assert start is not None
                bands.append((start, low))
                start = None
    if start is not None:
        bands.append((start, 1.0))
    return bands


def _dense_tally(
    name: str,
    shape: ModelShape,
    tokens: int,
    keys: int,
    widths: tuple[int, int, int],
    mac: str = "mac_int8",
    gains: bool = False,
) -> Tally:
    """Every weight once per token, sums in registers, activations written and read once. widths: weight, value, sum."""
    weight, value, wide = widths
    layers = shape.num_hidden_layers
    one = {name: macs for name, macs in layer_macs(shape, tokens, keys).items() if gains or name != "residual"}
    attention = one["coincidence"] + one["av"]
    rows, cells = _cells(shape, tokens, keys)
    counts = {
        "mac": float(layers * sum(one.values())),
        "update": float(rows + cells) if gains else 0.0,  # a teacher's activation functions are not costed
        **_stream(shape, tokens, 1),
        "weight_read": float(layers * (sum(one.values()) - attention)),
        "cache_read": _cache(shape, keys),
        "cache_write": _cache(shape, tokens),
        **_pair("spike", cells),
        "address": _row_addresses(shape, tokens, keys, {name: layers * macs for name, macs in one.items()}),
    }
    return Tally(name, tokens, counts, _outer(shape, tokens), _bits(weight, value, wide, value), mac)


def _cells(shape: ModelShape, tokens: int, keys: int) -> tuple[int, int]:
    """Neuron slots over all steps: of keys and values, and of all other groups."""
    cells = {site: sum(row) for site, row in site_cells(shape, tokens, keys).items()}
    cached = sum(cells[site] for site in _CACHED)
    return cached, sum(cells.values()) - cached


def _cache(shape: ModelShape, keys: int) -> float:
    """Elements of keys and values of one step over `keys` keys."""
    return 2.0 * shape.hidden_size * shape.num_hidden_layers * keys


def _stream(shape: ModelShape, tokens: int, steps: int) -> dict[str, float]:
    """Both sublayers of a layer read the residual stream, add and write it; the next neurons see what is written."""
    return _pair("stream", 2.0 * shape.hidden_size * shape.num_hidden_layers * tokens * steps)


def _row_addresses(shape: ModelShape, tokens: int, keys: int, reached: Mapping[str, float]) -> float:
    """One address per row fetched and per output written; the attention's inputs and outputs likewise."""
    rows = sum(
        reached[name] / fan_out
        for name, fan_out in {c.component: c.fan_out for c in connections(shape) if c.dense and c.fan_out}.items()
    )
    outputs = sum(c.fan_out or 0 for c in projections(shape)) * shape.num_hidden_layers * tokens
    pairs = shape.num_hidden_layers * (shape.hidden_size * tokens + shape.num_attention_heads * keys)
    return rows + outputs + 2.0 * pairs


def _outer(shape: ModelShape, tokens: int) -> dict[str, float]:
    """Embedding and head, dense in every model: 8-bit weights unless the model's are wider."""
    d, width = shape.hidden_size, shape.word_embed_proj_dim
    macs = sum(outer_macs(shape, tokens).values())
    factors = 2 * (d + width) if shape.factorised else 0
    return {
        "mac": float(macs),
        "weight_read": float(macs + tokens * (width + d)),  # the token's row and the position's are looked up
        "address": float(tokens * (width + shape.vocab_size + factors)),
    }


def _bits(weight: int, cache: int, wide: int, spike: int) -> dict[str, int]:
    kinds = {"weight": weight, "cache": cache, "sum": wide, "state": wide, "stream": wide, "spike": spike}
    return {event: kinds[event.partition("_")[0]] for event, (_, store, _) in EVENTS.items() if store is not None}


def _pair(kind: str, number: float) -> dict[str, float]:
    return {f"{kind}_read": float(number), f"{kind}_write": float(number)}
