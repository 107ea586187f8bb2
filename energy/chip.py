"""A run on a simulated chip beside our count of it: both bills under the simulator's prices, every difference named.

The simulator (SANA-FE's Loihi) prices what it executes: the model's neurons and synapses, and what mapping the model
to a chip without graded spikes adds. Our count holds the model alone. Subtracting named extras turns one into the
other, to the last event; a record in which that fails is refused.
"""

from __future__ import annotations

from typing import Any

from energy.costs import COSTS
from energy.models import Hops
from spikeopd.contracts import Activity
from spikeopd.contracts.chip import KINDS, ChipRun
from spikeopd.contracts.run import Run
from spikeopd.errors import CheckFailed

TOLERANCE = 1e-6  # of sums of floats against products of counts
OUTSIDE = "embedding and head (the host's), and the host's writes of biases and cached spikes between steps"


def measured_hops(run: Run) -> Hops | None:
    """Mean hops of a spike as the simulator routed them; None if the run was not on a chip."""
    return None if run.chip is None else Hops(*run.chip.site_hops)


def chip_section(run: Run) -> dict[str, Any] | None:
    """Everything a report says about the simulated chip; None if the run was not on one."""
    chip = run.chip
    if chip is None:
        return None
    activity, tokens = run.activity(), chip.tokens or 1
    bill, extras = _bill(chip, activity), _extras(chip, activity)
    counted, simulated = (sum(row[key] for row in bill) for key in ("counted_pj", "simulated_pj"))
    _check(run.name, "events times prices", simulated, chip.energy_pj)
    _check(run.name, "the count plus its extras", counted + sum(row["energy_pj"] for row in extras), simulated)
    messages = chip.totals["messages"]
    links = chip.raw.get("links") or []
    return {
        "simulator": f"{chip.simulator} {chip.version}",
        "published_error": {**chip.error, "source": chip.error_source},
        "tokens": chip.tokens,
        "energy_per_token_pj": simulated / tokens,
        "energy_error_pj": simulated / tokens * chip.error["energy"],
        "synapse_per_token_pj": chip.totals["synapse_pj"] / tokens,
        "soma_per_token_pj": chip.totals["soma_pj"] / tokens,
        "network_per_token_pj": chip.totals["network_pj"] / tokens,
        "seconds_per_token": chip.totals["seconds"] / tokens,
        "seconds_error": chip.totals["seconds"] / tokens * chip.error["latency"],
        "counted_per_token_pj": counted / tokens,
        "bill": [*_per_token(bill, tokens), _total(bill, tokens)],
        "extras": [row for row in _per_token(extras, tokens) if row["count"]],
        "prices": _prices(chip),
        "hops": {
            "per_spike": dict(zip(("east_west", "north_south"), chip.site_hops, strict=True)),
            "per_message": (chip.totals["hops_ew"] + chip.totals["hops_ns"]) / messages if messages else 0.0,
        },
        "links": [{**link, "per_token": link["messages"] / tokens} for link in links],
        "placement": chip.raw.get("placement"),
        "outside": OUTSIDE,
    }


def _event_pj(chip: ChipRun, role: str) -> float:
    dense = chip.dense_roles.get(role, 0)
    return dense * chip.prices_pj["dense_event"] + (chip.roles[role] - dense) * chip.prices_pj["sparse_event"]


def _counts(activity: Activity) -> dict[str, int]:
    return {
        name: sum(int(table.sum()) for table in tables.values())
        for name, tables in (("sops", activity.sops), ("cells", activity.cells), ("spikes", activity.spikes))
    }


def _bill(chip: ChipRun, activity: Activity) -> list[dict[str, Any]]:
    """Every kind of event, counted and simulated, at the simulator's price."""
    ours, totals, prices = _counts(activity), chip.totals, chip.prices_pj
    own = sum(count for role, count in chip.roles.items() if role not in chip.extras)
    if own != ours["sops"]:
        raise CheckFailed(f"{own} synaptic events of the model on {chip.simulator}, {ours['sops']} in the run's count")
    rows = [
        {
            "part": "synaptic events",
            "counted": ours["sops"],
            "simulated": totals["events"],
            "counted_pj": sum(_event_pj(chip, role) for role in chip.roles if role not in chip.extras),
            "simulated_pj": sum(_event_pj(chip, role) for role in chip.roles),
        }
    ]
    for part, price, counted, simulated in (
        ("neuron accesses", "access", ours["cells"], totals["accessed"]),
        ("membrane updates", "update", ours["cells"], totals["updated"]),
        ("spikes", "spike", ours["spikes"], totals["fired"]),
        ("messages", "message", ours["spikes"], totals["messages"]),
        ("hops east-west", "hop_ew", 0, totals["hops_ew"]),
        ("hops north-south", "hop_ns", 0, totals["hops_ns"]),
    ):
        pj = prices[price]
        rows.append(
            {"part": part, "counted": counted, "simulated": simulated}
            | {"counted_pj": counted * pj, "simulated_pj": simulated * pj}
        )
    return rows


def _extras(chip: ChipRun, activity: Activity) -> list[dict[str, Any]]:
    """What the simulator charges beyond our count, each with its reason; a negative row is charged here alone."""
    ours, totals, prices = _counts(activity), chip.totals, chip.prices_pj
    rows = [
        {"part": "synaptic events", "what": meaning, "count": chip.roles[role], "energy_pj": _event_pj(chip, role)}
        for role, meaning in chip.extras.items()
    ]

    def add(part: str, what: str, count: float, price: str) -> None:
        rows.append({"part": part, "what": what, "count": count, "energy_pj": count * prices[price]})

    steps = totals["steps"]
    accessed = {kind: chip.neurons[kind] * steps for kind in KINDS}
    known = sum(accessed.values()) == totals["accessed"]  # not where the cache grew on the way
    if not known:
        add("neuron accesses", "gates, relays and idle steps", totals["accessed"] - ours["cells"], "access")
        add("membrane updates", "gates, relays, and neurons at rest", totals["updated"] - ours["cells"], "update")
    else:
        updated = {
            kind: round(
                (totals[f"soma_{kind}_pj"] - accessed[kind] * prices["access"] - chip.spikes[kind] * prices["spike"])
                / prices["update"]
            )
            for kind in KINDS
        }
        idle = "the model's neurons outside their T_s steps, and empty slots of the map"
        add("neuron accesses", idle, accessed["site"] - ours["cells"], "access")
        for kind in ("gate", "relay"):
            add("neuron accesses", f"{kind}s, in every step", accessed[kind], "access")
        rest = "neurons at rest, which the simulator does not update; and the reset after the last step, which it does"
        add("membrane updates", rest, updated["site"] - ours["cells"], "update")
        for kind in ("gate", "relay"):
            add("membrane updates", f"{kind}s", updated[kind], "update")
    for kind in ("gate", "relay"):
        add("spikes", f"of {kind}s", chip.spikes[kind], "spike")
    further = "resets, gates, relays, and every further core that a spike reaches"
    add("messages", further, totals["messages"] - ours["spikes"], "message")
    for name, way in (("hop_ew", "hops east-west"), ("hop_ns", "hops north-south")):
        add(way, "as the messages were routed", totals[f"{name.replace('hop', 'hops')}"], name)
    return rows


def _prices(chip: ChipRun) -> list[dict[str, Any]]:
    """Two tables of the same chip: as published before silicon, and as the simulator was calibrated."""
    published, its = COSTS["loihi"].prices_pj, chip.prices_pj
    quiet = its["access"] + its["update"]
    return [
        {"event": "synaptic operation", "loihi": published["ac"], "simulator": its["dense_event"]},
        {"event": "update of a silent neuron", "loihi": published["neuron_inactive"], "simulator": quiet},
        {"event": "update of a firing neuron", "loihi": published["neuron_active"], "simulator": quiet + its["spike"]},
        {"event": "spike sent to a core", "loihi": published["spike"], "simulator": its["message"]},
        {"event": "hop east-west", "loihi": published["hop_ew"], "simulator": its["hop_ew"]},
        {"event": "hop north-south", "loihi": published["hop_ns"], "simulator": its["hop_ns"]},
    ]


def _per_token(rows: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    return [{k: v / tokens if isinstance(v, int | float) else v for k, v in row.items()} for row in rows]


def _total(rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    sums = {key: sum(row[key] for row in rows) / tokens for key in ("counted_pj", "simulated_pj")}
    return {"part": "all", "counted": None, "simulated": None, **sums}


def _check(name: str, what: str, got: float, due: float) -> None:
    if abs(got - due) > TOLERANCE * max(abs(due), 1.0):
        raise CheckFailed(f"{name}: chip: {what} give {got:.6g} pJ, the simulator charged {due:.6g}")
