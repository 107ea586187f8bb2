"""The event engine with 8- and 4-bit weights, in one process and in turns: decoding, prefill, batches. One thread.

python benchmarks/precision.py [--width 768] [--layers 12] [--vocab 50272] [--context 128] [--rounds 4]
Random models at their own firing rate, which is printed. CPU milliseconds per token, best of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from random_models import random_model, random_shape  # noqa: E402

from neuro_sim.event.engine import EventDecoder  # noqa: E402

BATCH = 8


class Contender:
    """One decoder with a filled cache, and what it can be timed at."""

    def __init__(self, args: argparse.Namespace, precision: str) -> None:
        sizes = {"heads": args.width // 64, "head_dim": 64, "layers": args.layers, "ffn": 4 * args.width}
        shape = random_shape(**sizes, vocab=args.vocab, positions=args.context + 64)
        self.decoder = EventDecoder(random_model(shape, seed=1, drive=args.drive, precision=precision), threads=1)
        self.tokens = np.random.default_rng(0).integers(4, args.vocab, args.context).tolist()
        self.decoder.prefill(self.tokens)
        self.lanes = self.decoder.batch([None] * BATCH)
        for lane, cache in enumerate(self.lanes.caches):
            self.lanes.prefill(lane, self.tokens[lane : lane + 16])
            cache.position = 16

    def decode(self) -> int:
        self.decoder._batch.caches[0].position = len(self.tokens)
        for token in self.tokens[:4]:
            _, self.activity = self.decoder.step(token)
        return 4

    def prefill(self) -> int:
        self.decoder._batch.caches[0].position = len(self.tokens) - 32
        self.decoder.prefill(self.tokens[:32])
        return 32

    def batch(self) -> int:
        for cache in self.lanes.caches:
            cache.position = 16
        self.lanes.step(range(BATCH), self.tokens[:BATCH])
        return BATCH


def cpu_ms(work: Callable[[], int]) -> float:
    started = time.process_time()
    tokens = work()
    return 1e3 * (time.process_time() - started) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 768, "layers": 12, "vocab": 50272, "context": 128, "rounds": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--drive", type=float, default=0.8, help="larger: lower thresholds, more spikes")
    args = parser.parse_args()
    contenders = {precision: Contender(args, precision) for precision in ("int8", "int4")}
    best: dict[tuple[str, str], float] = {}
    for _ in range(args.rounds):
        for kind in ("decode", "prefill", "batch"):
            for precision, contender in contenders.items():
                ms = cpu_ms(getattr(contender, kind))
                best[precision, kind] = min(ms, best.get((precision, kind), 9e9))
    print(f"{'weights':8}{'decode':>9}{'prefill':>9}{'batch 8':>9}{'MB/token':>10}{'rate':>7}   CPU ms per token")
    for precision, contender in contenders.items():
        activity = contender.activity
        sites = [site for site in activity.spikes if site != "a"]
        rate = sum(activity.spikes[s].sum() for s in sites) / sum(activity.cells[s].sum() for s in sites)
        row = "".join(f"{best[precision, kind]:9.2f}" for kind in ("decode", "prefill", "batch"))
        print(f"{precision:8}{row}{sum(activity.bytes.values()) / 1e6:10.1f}{rate:7.2f}")


if __name__ == "__main__":
    main()
