"""What placement does to a model on SANA-FE's Loihi: hops, busiest link, energy and time, as the simulator has them.

    make sanafe
    python benchmarks/sanafe_placement.py BUNDLE [TOKENS]

The same tokens under three placements: as few cores as the limits allow in the order of the mesh; all the chip's cores;
and these with their seats traded, which is what the backend does.
"""

from __future__ import annotations

import sys

import numpy as np

from neuro_sim.sanafe.chip import summarise
from neuro_sim.sanafe.decoder import NetworkDecoder
from neuro_sim.sanafe.placement import place
from neuro_sim.sanafe.process import ChipProcess
from spikeopd.contracts.bundle import load_bundle

PLACEMENTS = {
    "fewest cores, in order": {"spread": False, "optimise": False},
    "all cores, in order": {"optimise": False},
    "all cores, seats traded": {},
}


def main() -> None:
    model, tokens = load_bundle(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 4
    fed = np.random.default_rng(0).integers(4, model.shape.vocab_size, tokens).tolist()
    print(
        f"{'placement':<26}{'cores':>6}{'messages':>10}{'hops each':>11}{'busiest link':>14}{'energy':>11}{'time':>11}"
    )
    for name, options in PLACEMENTS.items():

        def execute(network, options=options):
            return ChipProcess(network, 600.0, place(network, **options))

        decoder = NetworkDecoder(model, execute)
        decoder.begin(32)
        for token in fed:
            decoder.step(token)
        found = summarise(decoder._running[1].about, decoder.records)
        decoder.close()
        totals = found["totals"]
        hops = totals["hops_ew"] + totals["hops_ns"]
        energy = sum(found["per_token"]["energy_pj"]) / tokens
        print(
            f"{name:<26}{found['placement']['cores']:>6}{totals['messages'] / tokens:>10,.0f}"
            f"{hops / totals['messages']:>11.3f}{found['links'][0]['messages'] / tokens:>14,.0f}"
            f"{energy / 1e6:>8.1f} µJ{totals['seconds'] / tokens * 1e6:>8,.0f} µs",
            flush=True,
        )


if __name__ == "__main__":
    main()
