"""The simulated chip in a report: its line at the head, its bill beside ours, what explains the difference."""

from __future__ import annotations

from typing import Any

from energy.render.table import Column, Table, significant, unit_of


def chip_line(chip: dict[str, Any]) -> str:
    """Energy and time of a token with their published errors, for the head of a report."""
    divisor, unit = unit_of("energy", chip["energy_per_token_pj"])
    energy, spread = (significant(chip[key] / divisor, 3) for key in ("energy_per_token_pj", "energy_error_pj"))
    time, late = (significant(chip[key] * 1e6, 3) for key in ("seconds_per_token", "seconds_error"))
    return (
        f"on {chip['simulator']}'s Loihi (simulated): {energy} ± {spread} {unit} and {time} ± {late} µs per token; "
        f"outside of it: {chip['outside']}"
    )


def chip_tables(chip: dict[str, Any]) -> list[Table]:
    """Per token: both bills, the extras, the prices, the busiest links."""
    error = chip["published_error"]
    unit = unit_of("energy", chip["energy_per_token_pj"] / 100)
    bill = Table(
        "chip",
        f"On {chip['simulator']}'s Loihi, per token",
        (
            Column("part", "What"),
            Column("counted", "Counted here", "int", "events"),
            Column("simulated", "Simulated", "int", "events"),
            Column("counted_pj", "Counted here, its prices", "energy"),
            Column("simulated_pj", "Simulated", "energy"),
        ),
        chip["bill"],
        f"Both under the simulator's prices. Published error of the simulator against silicon: "
        f"{error['energy']:.0%} of energy, {error['latency']:.0%} of latency ({error['source']}). "
        f"Time per token: {significant(chip['seconds_per_token'] * 1e6, 4)} µs. Outside: {chip['outside']}.",
        energy_unit=unit,
    )
    extras = Table(
        "chip_extras",
        "What explains the difference, per token",
        (
            Column("part", "What"),
            Column("what", "Because of"),
            Column("count", "Events", "int"),
            Column("energy_pj", "Energy", "energy"),
        ),
        chip["extras"],
        "The sum of these is the difference of the two bills, to the last event. Negative: counted here, not there.",
        energy_unit=unit,
    )
    prices = Table(
        "chip_prices",
        "Two price lists of the same chip",
        (
            Column("event", "Event"),
            Column("loihi", "loihi, as published", "number", "pJ"),
            Column("simulator", "as the simulator has it", "number", "pJ"),
        ),
        chip["prices"],
        "Published: before silicon, the synaptic operation as a minimum. The simulator's: its own description of the "
        "chip, to which its published error belongs.",
    )
    per_spike = chip["hops"]["per_spike"]
    links = Table(
        "chip_links",
        "Busiest links of the mesh",
        (
            Column("from", "From tile", "int", "index"),
            Column("to", "To tile", "int", "index"),
            Column("per_token", "Messages per token", "number"),
        ),
        chip["links"][:8],
        f"{len(chip['links'])} links carried messages; a message takes {chip['hops']['per_message']:.3f} hops. A spike "
        f"of the model takes {per_spike['east_west']:.3f} east-west and {per_spike['north_south']:.3f} north-south "
        "over all the cores it reaches: what --hops is unless it is given.",
    )
    return [bill, extras, prices, links]
