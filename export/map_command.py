"""`spikeopd-export map BUNDLE`: the Loihi 2 resource map as text, JSON and a picture."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from export.design_rules import Design, Violation, check_all
from export.loihi import SOURCES, Core, Limits, cache_bytes, place
from spikeopd.contracts import SpikeModel
from spikeopd.contracts.bundle import load_bundle, manifest_shape, read_manifest
from spikeopd.errors import BackendMissing, CheckFailed, InputError, cannot_write, check_writable
from spikeopd.files import write_bytes

MAP_SCHEMA = "spikeopd.loihi-map/1"
SITE_COLOURS = {
    "embed": "#4d4d4d", "q": "#1f77b4", "k": "#17becf", "v": "#9edae5", "a": "#d62728", "r": "#ff9896",
    "o": "#9467bd", "x": "#8c564b", "f": "#2ca02c", "y": "#98df8a", "h": "#e7ba52",
}  # fmt: skip


def run_map(args: argparse.Namespace) -> str:
    """What the command prints. With --strict a violated rule is `CheckFailed`, raised after the picture is written."""
    positions = manifest_shape(read_manifest(args.bundle)).max_position_embeddings
    context = positions if args.context is None else args.context
    if not 1 <= context <= positions:
        raise InputError(f"--context {context}: this model takes 1 to {positions} tokens")
    if args.picture:
        check_writable(args.picture, "--picture")
    result, cores, violations = resource_map(load_bundle(args.bundle), context)
    if args.picture:
        drawn = picture(cores, Limits(), f"{Path(args.bundle).name}, context {context}")
        try:
            write_bytes(Path(args.picture), drawn)
        except OSError as error:
            raise cannot_write(args.picture, "--picture", error) from error
    if args.strict and violations:
        raise CheckFailed(f"{len(violations)} design rule(s) violated; first: {violations[0]}")
    return json.dumps(result, allow_nan=False) if args.json else _text(result, violations)


def resource_map(
    model: SpikeModel, context: int, limits: Limits | None = None
) -> tuple[dict[str, Any], list[Core], list[Violation]]:
    """The map as a JSON-ready dict, its cores and the violations of all rules."""
    limits = limits or Limits()
    weight_bits = 8 if model.precision == "int8" else 32
    cores = place(model.shape, context, limits, weight_bits)
    checked = check_all(Design(model, cores, limits))
    violations = [violation for found in checked.values() for violation in found]
    sites: dict[str, dict[str, int]] = {}
    for core in cores:
        row = sites.setdefault(core.site, dict.fromkeys(("cores", "neurons", "synapses", "synapse_bits", "bytes"), 0))
        row["cores"] += 1
        row["neurons"] += core.neurons
        row["synapses"] += core.synapses
        row["synapse_bits"] += core.synapse_bits
        row["bytes"] += core.used_bytes
    contexts = sorted({n for n in (128, 256, 512, 1024, 2048, context) if n <= model.shape.max_position_embeddings})
    chips = cores[-1].chip + 1
    result = {
        "schema": MAP_SCHEMA,
        "context": context,
        "limits": {name: {"value": getattr(limits, name), "source": SOURCES[name]} for name in SOURCES},
        "cores": len(cores),
        "chips": chips,
        "neurons": sum(core.neurons for core in cores),
        "synapses": sum(core.synapses for core in cores),
        "used_bytes": sum(core.used_bytes for core in cores),
        "memory_utilisation": sum(core.used_bytes for core in cores) / (len(cores) * limits.core_bytes),
        "sites": sites,
        "cache": [
            {
                "context": n,
                "cache_bytes": cache_bytes(model.shape, n),
                "cores": len(place(model.shape, n, limits, weight_bits)),
            }
            for n in contexts
        ],
        "host": "embedding and head: their tables stay on the host or the embedded processors",
        "rules": {name: [violation.to_dict() for violation in found] for name, found in checked.items()},
        "placement": [core.to_dict() for core in cores],
    }
    return result, cores, violations


def picture(cores: list[Core], limits: Limits, title: str) -> bytes:
    """One square per core, chip by chip; colour is the site, the filled height is the memory in use."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise BackendMissing("--picture needs matplotlib; install it with: pip install 'spikeopd[viz]'") from error
    columns = 16
    chips = cores[-1].chip + 1
    rows = -(-limits.chip_cores // columns)
    across = min(chips, 3)
    down = -(-chips // across)
    figure = Figure(figsize=(1 + across * 4.6, 1.3 + down * (0.29 * rows + 0.5)), layout="constrained")
    for chip, axis in enumerate(figure.subplots(down, across, squeeze=False).flat):
        axis.set_axis_off()
        if chip >= chips:
            continue
        here = [core for core in cores if core.chip == chip]
        axis.set_title(f"chip {chip}: {len(here)} of {limits.chip_cores} cores", fontsize=9)
        axis.set_xlim(-0.1, columns)
        axis.set_ylim(rows, -0.1)
        axis.set_aspect("equal")
        for place_ in range(limits.chip_cores):
            left, top = place_ % columns, place_ // columns
            axis.add_patch(Rectangle((left, top), 0.9, 0.9, facecolor="#f4f4f4", edgecolor="#bbbbbb", linewidth=0.5))
            if place_ < len(here):
                core = here[place_]
                share = min(1.0, core.used_bytes / limits.core_bytes)
                colour = SITE_COLOURS[core.site]
                axis.add_patch(Rectangle((left, top + 0.9 * (1 - share)), 0.9, 0.9 * share, facecolor=colour))
                edge = Rectangle((left, top), 0.9, 0.9, fill=False, edgecolor=colour, linewidth=0.8)
                axis.add_patch(edge)
    used = [site for site in SITE_COLOURS if any(core.site == site for core in cores)]
    handles = [Patch(color=SITE_COLOURS[site], label=site) for site in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(used), fontsize=8, frameon=False)
    figure.suptitle(f"{title}: {len(cores)} cores, {chips} chip(s); filled height = memory in use", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _text(result: dict[str, Any], violations: list[Violation]) -> str:
    lines = [
        f"context {result['context']}: {result['cores']} cores on {result['chips']} chip(s), "
        f"{result['neurons']:,} neurons, {result['synapses']:,} synapses, "
        f"{result['used_bytes'] / 1e6:.2f} MB ({result['memory_utilisation'] * 100:.0f} % of the cores' memory)",
        "",
        f"{'site':<6} {'cores':>6} {'neurons':>10} {'synapses':>13} {'synapse bits':>14} {'KB':>10}",
    ]
    lines += [
        f"{site:<6} {row['cores']:>6} {row['neurons']:>10,} {row['synapses']:>13,} {row['synapse_bits']:>14,} "
        f"{row['bytes'] / 1024:>10.1f}"
        for site, row in result["sites"].items()
    ]
    lines += ["", f"{'context':>8} {'K/V cache':>12} {'cores':>6}"]
    lines += [f"{row['context']:>8} {row['cache_bytes'] / 1024:>9.1f} KB {row['cores']:>6}" for row in result["cache"]]
    lines += ["", *(f"{'ok' if not found else 'VIOLATED':<9} {name}" for name, found in result["rules"].items())]
    lines += [f"          {violation}" for violation in violations]
    lines += ["", "limits:"]
    lines += [f"  {name} = {entry['value']}: {entry['source']}" for name, entry in result["limits"].items()]
    return "\n".join(lines)
