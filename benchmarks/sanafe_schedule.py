"""Draws which neurons work in which step of a token, from networks written by `spikeopd-export --to sanafe`.

spikeopd-export BUNDLE --to sanafe --output network
python benchmarks/sanafe_schedule.py network [network ...] --output schedule.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLOURS = {"site": "#4477aa", "gate": "#cc6677", "relay": "#bbbbbb"}
SHOWN = 20  # steps


def rows_of(about: dict) -> list[tuple[str, str, int, int]]:
    """(label, kind, first start, last start): sites and gates with the same window share a row, relays one a chain."""
    groups = [group for group in about["groups"] if group["start"] + 1 <= SHOWN]
    rows: dict[tuple, list] = {}
    for group in groups:
        name = group["site"] if group["layer"] < 0 else f"{group['site']}{group['layer']}"
        chain = group["kind"] == "relay"
        key = (group["kind"], name if chain else group["start"])
        rows.setdefault(key, [set(), group["start"], group["start"]])
        rows[key][0].add(name)
        rows[key][2] = max(rows[key][2], group["start"])
    found = []
    for (kind, _), (names, first, last) in rows.items():
        order = sorted(names, key=lambda name: "qkvarofxyh".find(name[0]))
        label = {"site": ", ".join(order), "gate": f"{order[0]} gates", "relay": f"{order[0]} relayed"}[kind]
        found.append((label, kind, first, last))
    return sorted(found, key=lambda row: (row[2], row[1] == "relay"))


def draw(folders: list[Path], output: Path) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Polygon, Rectangle

    networks = [json.loads((folder / "network.json").read_text(encoding="utf-8")) for folder in folders]
    tables = [rows_of(about) for about in networks]
    height = 0.6 + 0.22 * max(map(len, tables))
    figure = Figure(figsize=(6.2 * len(networks), height + 0.8), layout="constrained")
    for axis, about, rows in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, tables, strict=True):
        window = about["num_steps"]
        for place, (_, kind, first, last) in enumerate(rows):
            if kind == "relay":  # a chain: every stage one step later
                corners = [(first, place + 0.85), (first + window, place + 0.85), (last + window, place + 0.15)]
                axis.add_patch(Polygon([*corners, (last, place + 0.15)], facecolor=COLOURS[kind]))
                continue
            for tau in range(window):
                axis.add_patch(
                    Rectangle((first + tau, place + 0.12), 0.94, 0.76, facecolor=COLOURS[kind], alpha=1 - 0.14 * tau)
                )
                axis.text(
                    first + tau + 0.47, place + 0.52, str(tau + 1), ha="center", va="center", fontsize=7, color="w"
                )
        axis.set_xlim(0, SHOWN)
        axis.set_ylim(len(rows), 0)
        axis.set_xticks([step + 0.5 for step in range(SHOWN)], [str(step + 1) for step in range(SHOWN)], fontsize=7)
        axis.set_yticks([place + 0.5 for place in range(len(rows))], [label for label, *_ in rows], fontsize=8)
        axis.set_xlabel(f"step of the chip (a token takes {about['steps']})", fontsize=8)
        form = "residual stream written by currents" if "o0" not in str(rows) else "residual stream written by spikes"
        axis.set_title(form, fontsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    titles = {
        "site": "the model's neurons, number = step τ",
        "gate": "gates: a product of two spikes",
        "relay": "relays",
    }
    handles = [Patch(color=COLOURS[kind], label=title) for kind, title in titles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    rcParams["svg.fonttype"] = "none"  # letters as letters
    figure.savefig(output, dpi=140, metadata={"Date": None} if output.suffix == ".svg" else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    draw(arguments.networks, arguments.output)
