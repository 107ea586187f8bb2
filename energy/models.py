r"""From counted events to energy, and from firing rates to the paper's estimate. Pure functions.

Measured:    every counted event times its price.
Analytical:  SOPs_c(l) = f_r^c(l) T_s FLOPs_c(l)  (Appendix E), with f_r unrounded, per component and layer.

The two are equal, to the last operation, wherever the fan-out of a spike does not depend on when it fires: the
projections, the residual gains (where the block has them) and the attention's value sum. A query spike meets i + 1
keys, so for the coincidences the estimate (mean rate x all pairs) and the count differ by how the rate varies with
position; counted unmasked, over sequences of one length, they are equal again. `compare_counts` computes both and says
which must agree. Which neurons drive what, and how far a spike reaches, is read from `spikeopd.contracts.topology`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from energy.costs import CostTable
from spikeopd.contracts import EMBED_SITE, Activity, Array, ModelShape, component_drivers, connections
from spikeopd.contracts.activity import site_rows
from spikeopd.contracts.run import PerToken, Run
from spikeopd.contracts.topology import INPUT, layer_macs, outer_macs
from spikeopd.errors import InputError

Key = TypeVar("Key")
# Rates per component, one per layer: spikes of the driving neurons per neuron and step.
Rates = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Hops:
    """Mean tile hops of one spike. Where neurons sit is the mapper's choice, so the default costs none."""

    east_west: float = 0.0
    north_south: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.east_west < float("inf") and 0 <= self.north_south < float("inf")):
            raise InputError(f"hops of a spike (--hops) must be two numbers from 0, got {astuple(self)}")


NO_HOPS = Hops()


@dataclass(frozen=True)
class Line:
    """Events of one kind in one place. Layer is None outside the layers; `count` is whole when it was counted."""

    component: str
    layer: int | None
    event: str
    count: float
    energy_pj: float


def operation(shape: ModelShape) -> str:
    """What a synapse does with what reaches it: accumulate a weight or, in a quantised twin, multiply it first."""
    return "mac" if shape.graded else "ac"


def measured_lines(activity: Activity, costs: CostTable, hops: Hops = NO_HOPS, synapse: str = "ac") -> list[Line]:
    """Energy of counted events: synaptic operations (`operation`), dense MACs, neuron updates and spike delivery."""
    lines = [
        _line(costs, name, layer, synapse, int(row.sum()))
        for name, table in activity.sops.items()
        for layer, row in enumerate(table)
    ]
    lines += [_line(costs, name, None, "mac", activity.macs[name]) for name in ("embed", "head")]
    spikes, cells = (
        {site: [int(row.sum()) for row in table] for site, table in tables.items()}
        for tables in (activity.spikes, activity.cells)
    )
    return lines + _neuron_lines(costs, hops, spikes, cells)


def estimated_lines(
    shape: ModelShape,
    rates: Rates,
    tokens: int,
    keys: int,
    costs: CostTable,
    hops: Hops = NO_HOPS,
    site_rates: Rates | None = None,
) -> list[Line]:
    """Energy from firing rates alone: Appendix E, with neuron updates and deliveries where the table prices them.

    `site_rates` gives the rate of every neuron group, per layer, for those updates; without it, `driven_rates`.
    """
    lines = [
        _line(costs, name, layer, operation(shape), sops)
        for name in shape.layer_components
        for layer, sops in enumerate(estimated_sops(shape, rates, tokens, keys, name))
    ]
    lines += [_line(costs, name, None, "mac", count) for name, count in outer_macs(shape, tokens).items()]
    cells = site_cells(shape, tokens, keys)
    return lines + _neuron_lines(costs, hops, site_spikes(cells, site_rates or driven_rates(shape, rates)), cells)


def site_cells(shape: ModelShape, tokens: int, keys: int) -> dict[str, list[int]]:
    """Neuron slots of every group, per layer, over all steps of `tokens` tokens that look at `keys` keys in total."""
    return {
        site: [shape.steps * shape.site_slots(site, tokens, keys)] * rows for site, rows in site_rows(shape).items()
    }


def site_spikes(cells: Mapping[str, Sequence[int]], site_rates: Rates) -> dict[str, list[float]]:
    return {
        site: [slots * rate for slots, rate in zip(row, site_rates[site], strict=True)] for site, row in cells.items()
    }


def driven_rates(shape: ModelShape, rates: Rates) -> dict[str, list[float]]:
    """Rates of the neuron groups from those of the components: a group fires like the component it drives.

    Keys and values drive none and are taken to fire like queries, the last layer's output like that layer's input.
    """
    driven = {connection.driver: rates[connection.component] for connection in connections(shape)}
    layers = {site: list(driven.get(site, driven["q"])) for site in shape.layer_sites}
    entering = list(driven[INPUT])
    return {EMBED_SITE: entering[:1], **layers, "h": [*entering[1:], entering[-1]]}


def estimated_sops(shape: ModelShape, rates: Rates, tokens: int, keys: int, component: str) -> list[float]:
    """f_r T_s FLOPs of one component, per layer."""
    dense = layer_macs(shape, tokens, keys)[component]
    return [rate * shape.steps * dense for rate in rates[component]]


def measured_rates(shape: ModelShape, activity: Activity) -> dict[str, list[float]]:
    """Unrounded firing rate of every component's driver, per layer."""
    return {
        name: [_ratio(*driver_counts(shape, activity, name, layer)) for layer in range(shape.num_hidden_layers)]
        for name in shape.layer_components
    }


def measured_site_rates(activity: Activity) -> dict[str, list[float]]:
    """Unrounded firing rate of every neuron group, per layer."""
    return {
        site: [
            _ratio(int(spikes), int(cells))
            for spikes, cells in zip(table.sum(1), activity.cells[site].sum(1), strict=True)
        ]
        for site, table in activity.spikes.items()
    }


def uniform_rates(shape: ModelShape, rate: float) -> dict[str, list[float]]:
    return {name: [rate] * shape.num_hidden_layers for name in shape.layer_components}


def driver_counts(shape: ModelShape, activity: Activity, component: str, layer: int) -> tuple[int, int]:
    """Spikes and neuron slots of the neurons that drive one component."""
    drivers = [(site, max(row, 0)) for row, site in component_drivers(shape, component, layer)]
    return (
        sum(int(activity.spikes[site][row].sum()) for site, row in drivers),
        sum(int(activity.cells[site][row].sum()) for site, row in drivers),
    )


def mean_rate(activity: Activity) -> float:
    """Spikes per neuron and step over every fixed-size site; the attention map is left out."""
    sites = [site for site in activity.spikes if site != "a"]
    return _ratio(
        sum(int(activity.spikes[site].sum()) for site in sites), sum(int(activity.cells[site].sum()) for site in sites)
    )


@dataclass(frozen=True)
class Check:
    """One component of one layer, counted and estimated. `must_equal` where theory leaves no room for a difference."""

    component: str
    layer: int
    rate: float
    dense_macs: int
    measured: int
    analytical: float
    must_equal: bool
    equal: bool


def compare_counts(run: Run, phase: str | None = None) -> list[Check]:
    """Counted SOPs beside f_r T_s FLOPs, exactly (as fractions); `coincidence_unmasked` is a component of its own."""
    activity, shape = run.activity(phase), run.shape
    masked = layer_macs(shape, activity.tokens, run.keys(phase))
    square = layer_macs(shape, activity.tokens, run.keys_unmasked(phase))["coincidence"]
    one_length = len(set(run.contexts().values())) <= 1
    rows = []
    for name in (*shape.layer_components, "coincidence_unmasked"):
        driver = name.removesuffix("_unmasked")
        for layer in range(shape.num_hidden_layers):
            spikes, cells = driver_counts(shape, activity, driver, layer)
            dense = square if name != driver else masked[name]
            counted = activity.sops_unmasked if name != driver else activity.sops[name]
            measured = int(counted[layer].sum())
            exact = Fraction(spikes, cells) * shape.steps * dense if cells else Fraction(0)
            must = one_length if name == "coincidence_unmasked" else name != "coincidence"
            rows.append(
                Check(name, layer, _ratio(spikes, cells), dense, measured, float(exact), must, exact == measured)
            )
    return rows


def token_energies(shape: ModelShape, tokens: PerToken, costs: CostTable, hops: Hops = NO_HOPS) -> Array:
    """pJ of every fed token. Their sum is the run's energy: neuron slots follow from shape and position."""
    fixed, grown = (sum(map(sum, site_cells(shape, 1, keys).values())) for keys in (0, 1))
    cells = fixed + (grown - fixed) * (tokens.position + 1)
    per_spike = _delivery(costs, hops)
    return np.asarray(
        costs.price(operation(shape)) * tokens.sops
        + costs.price("mac") * tokens.macs
        + costs.price("neuron_active") * tokens.spikes
        + costs.price("neuron_inactive") * (cells - tokens.spikes)
        + per_spike * tokens.spikes,
        dtype=np.float64,
    )


def total(lines: Iterable[Line]) -> float:
    return sum(line.energy_pj for line in lines)


def group(lines: Iterable[Line], key: Callable[[Line], Key]) -> dict[Key, float]:
    """Energy in pJ by any property of a line, in order of first appearance."""
    sums: dict[Key, float] = defaultdict(float)
    for line in lines:
        sums[key(line)] += line.energy_pj
    return dict(sums)


def count(lines: Iterable[Line], *events: str) -> float:
    return sum(line.count for line in lines if line.event in events)


def break_even_rate(
    shape: ModelShape, tokens: int, keys: int, costs: CostTable, teacher_pj: float, hops: Hops = NO_HOPS
) -> float | None:
    """The rate at which a student whose neurons all fire alike costs what its teacher costs; may exceed 1.

    None when even a silent student costs more (its dense head and idle neurons), or spikes cost nothing.
    """
    silent = total(estimated_lines(shape, uniform_rates(shape, 0.0), tokens, keys, costs, hops))
    full = total(estimated_lines(shape, uniform_rates(shape, 1.0), tokens, keys, costs, hops))
    if silent > teacher_pj or full <= silent:
        return None
    return (teacher_pj - silent) / (full - silent)


def _line(costs: CostTable, component: str, layer: int | None, event: str, number: float) -> Line:
    return Line(component, layer, event, number, number * costs.price(event))


def _neuron_lines(
    costs: CostTable, hops: Hops, spikes: Mapping[str, Sequence[float]], cells: Mapping[str, Sequence[int]]
) -> list[Line]:
    """Updates and deliveries of the embedding's neurons, then of each layer's. Both tables: group -> one per layer."""
    inner = [site for site in cells if site != EMBED_SITE]
    places: list[tuple[int | None, list[str]]] = [(None, [EMBED_SITE])]
    places += [(layer, inner) for layer in range(len(cells[inner[0]]))]
    lines = []
    for place, sites in places:
        fired = sum(spikes[site][place or 0] for site in sites)
        slots = sum(cells[site][place or 0] for site in sites)
        lines += [
            _line(costs, "neurons", place, "neuron_active", fired),
            _line(costs, "neurons", place, "neuron_inactive", slots - fired),
            _line(costs, "routing", place, "spike", fired),
        ]
        for event, number in (("hop_ew", hops.east_west), ("hop_ns", hops.north_south)):
            if number:
                lines.append(_line(costs, "routing", place, event, fired * number))
    return lines


def _delivery(costs: CostTable, hops: Hops) -> float:
    return costs.price("spike") + hops.east_west * costs.price("hop_ew") + hops.north_south * costs.price("hop_ns")


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
