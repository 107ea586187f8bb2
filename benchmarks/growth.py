"""How the event engine's cost per token grows with rate, steps, context, width, depth and batch.

python benchmarks/growth.py [--tables rate,steps,context,width,depth,batch] [--threads 1] [--precision int8]
Calibrated random models (calibrated.py; with --plus random ones at their own rate), FFN four times the width,
vocabulary 1024. One quantity of the base case is changed at a time. Prints milliseconds per token and sequence, best of
the rounds: CPU time on one thread, wall time on several.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from calibrated import calibrated_model, refine  # noqa: E402
from random_models import PLUS, random_model, random_shape  # noqa: E402

from neuro_sim.event.engine import EventDecoder  # noqa: E402
from spikeopd.contracts import SpikeModel  # noqa: E402

VOCAB, POSITIONS, TOKENS = 1024, 2048, 8


@dataclass(frozen=True)
class Case:
    rate: float = 0.17
    steps: int = 4
    context: int = 128
    width: int = 768
    depth: int = 4
    batch: int = 1


TABLES = {
    "rate": (0.03, 0.07, 0.17, 0.30),
    "steps": (1, 2, 4, 8),
    "context": (128, 512, 1024, 2032),
    "width": (256, 512, 768, 1024, 2048),
    "depth": (1, 4, 12),
    "batch": (1, 2, 4, 8, 16, 32),
}


def build(case: Case, precision: str, plus: bool) -> SpikeModel:
    sizes = {"heads": case.width // 64, "head_dim": 64, "layers": case.depth, "ffn": 4 * case.width}
    shape = random_shape(**sizes, vocab=VOCAB, positions=POSITIONS, num_steps=case.steps, **(PLUS if plus else {}))
    if plus:
        return random_model(shape, seed=1, drive=0.6, precision=precision)
    return refine(calibrated_model(shape, case.rate, case.context, precision=precision), case.rate, case.context)


def cost(case: Case, model: SpikeModel, rounds: int, threads: int) -> tuple[float, float]:
    """(milliseconds a token and sequence, firing rate) behind `context` tokens in the cache."""
    clock = time.process_time if threads == 1 else time.perf_counter
    decoder = EventDecoder(model, threads=threads)
    tokens = np.random.default_rng(0).integers(4, VOCAB, case.context).tolist()
    decoder.prefill(tokens)
    filled, sequences = decoder._batch.caches[0], decoder.batch([None] * case.batch)
    for cache in sequences.caches:
        cache.keys[:], cache.values[:] = filled.keys, filled.values
    best = 9e9
    for _ in range(rounds):
        for cache in sequences.caches:
            cache.position = case.context
        for index in range(TOKENS):
            fed = [tokens[(index + 7 * lane) % len(tokens)] for lane in range(case.batch)]
            started = clock()
            _, activities = sequences.step(range(case.batch), fed)
            best = min(best, (clock() - started) / case.batch)
    decoder.close()
    sites = [site for site in activities[0].spikes if site != "a"]
    spikes, cells = (
        sum(int(part[site].sum()) for activity in activities for part in [getattr(activity, name)] for site in sites)
        for name in ("spikes", "cells")
    )
    return best * 1e3, spikes / cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="int8", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plus", action="store_true", help="the second form of the block, with every option")
    args = parser.parse_args()
    print(f"base: {Case()}, {args.precision}, {args.threads} thread(s)")
    known: dict[Case, SpikeModel] = {}
    for table in args.tables.split(","):
        for value in TABLES[table]:
            case = replace(Case(), **{table: value})
            built = replace(case, batch=1)
            if built not in known:
                known = {built: build(built, args.precision, args.plus)}
            ms, rate = cost(case, known[built], args.rounds, args.threads)
            print(f"{table:>8} {value:>6} {ms:8.3f} ms   rate {rate:.2f}", flush=True)


if __name__ == "__main__":
    main()
