"""The Loihi 2 resource map of a bundle as text, JSON and a picture: `export.resource_map`, `spikeopd-export map`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.loihi.placement import SOURCES, Core, Limits, cache_bytes, place
from export.loihi.rules import Design, Violation, check_all
from spikeopd.contracts import WEIGHT_BITS, SpikeModel
from spikeopd.contracts.bundle import load_bundle, manifest_shape, read_manifest
from spikeopd.errors import BackendMissing, CheckFailed, InputError, cannot_write, install_command
from spikeopd.files import write_bytes

MAP_SCHEMA = "spikeopd.loihi-map/1"
SITE_COLOURS = {
    "embed": "#4d4d4d", "q": "#1f77b4", "k": "#17becf", "v": "#9edae5", "a": "#d62728", "r": "#ff9896",
    "o": "#9467bd", "x": "#8c564b", "f": "#2ca02c", "y": "#98df8a", "h": "#e7ba52",
}  # fmt: skip


@dataclass(frozen=True)
class ResourceMap:
    """Where every neuron lies and which design rules that breaks. `report` is JSON-ready."""

    name: str
    report: dict[str, Any]
    cores: Sequence[Core]
    violations: Sequence[Violation]
    limits: Limits

    def __str__(self) -> str:
        return _text(self.report, self.violations)

    def check(self) -> None:
        """A violated design rule is `CheckFailed`."""
        if self.violations:
            raise CheckFailed(f"{len(self.violations)} design rule(s) violated; first: {self.violations[0]}")

    def save_picture(self, path: Path | str) -> None:
        """Draw the placement as a PNG file; needs matplotlib."""
        drawn = picture(self.cores, self.limits, f"{self.name}, context {self.report['context']}")
        try:
            write_bytes(Path(path), drawn)
        except OSError as error:
            raise cannot_write(path, "--picture", error) from error


def resource_map(
    bundle: SpikeModel | Path | str, context: int | None = None, limits: Limits | None = None
) -> ResourceMap:
    """Place a bundle, or the model of one, on Loihi 2 cores. context: tokens in the K/V cache; None: the model's."""
    limits = limits or Limits()
    shape = bundle.shape if isinstance(bundle, SpikeModel) else manifest_shape(read_manifest(bundle))
    if shape.graded:
        raise InputError("a quantised twin has no spikes to place on Loihi 2: its activations are counts")
    context = shape.max_position_embeddings if context is None else context
    if not 1 <= context <= shape.max_position_embeddings:
        raise InputError(f"--context {context}: this model takes 1 to {shape.max_position_embeddings} tokens")
    model = bundle if isinstance(bundle, SpikeModel) else load_bundle(bundle)
    name = "model" if isinstance(bundle, SpikeModel) else Path(bundle).name
    weight_bits = WEIGHT_BITS[model.precision]
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
    return ResourceMap(name, result, cores, violations, limits)


def picture(cores: Sequence[Core], limits: Limits, title: str) -> bytes:
    """One square per core, chip by chip; colour is the site, the filled height is the memory in use."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise BackendMissing(f"--picture needs matplotlib; install it with: {install_command('viz')}") from error
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


def _text(result: dict[str, Any], violations: Sequence[Violation]) -> str:
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
