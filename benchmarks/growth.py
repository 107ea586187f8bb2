"""How the event engine's cost per token grows with width, depth, context and batch. Random models, one thread.

python benchmarks/growth.py [--rounds 3] [--plus]
Prints CPU milliseconds per token and sequence, best of the rounds, with the model's own measured firing rate.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from random_models import PLUS, random_model, random_shape  # noqa: E402

from neuro_sim.event.engine import EventDecoder  # noqa: E402


def cost(width: int, layers: int, context: int, rounds: int, batch: int, form: dict[str, Any]) -> tuple[float, float]:
    """(CPU ms a token and sequence, firing rate) after `context` tokens in the cache."""
    sizes = {"heads": width // 64, "head_dim": 64, "layers": layers, "ffn": 4 * width, "vocab": 1024, "positions": 2048}
    shape = random_shape(**sizes, **form)
    decoder = EventDecoder(random_model(shape, seed=1, drive=0.6), threads=1)
    tokens = np.random.default_rng(0).integers(4, 1024, context + 8 * rounds).tolist()
    best, rate = 9e9, 0.0
    if batch > 1:
        lanes = decoder.batch([None] * batch)
        for position in range(16):
            lanes.step(range(batch), [(tokens[position] + lane) % 1024 for lane in range(batch)])
        for round_ in range(rounds):
            started = time.process_time()
            for position in range(4):
                lanes.step(range(batch), [(tokens[round_ * 4 + position] + lane) % 1024 for lane in range(batch)])
            best = min(best, (time.process_time() - started) / (4 * batch))
        return best * 1e3, rate
    decoder.prefill(tokens[:context])
    for round_ in range(rounds):
        started = time.process_time()
        for token in tokens[context + 8 * round_ : context + 8 * round_ + 8]:
            _, activity = decoder.step(token)
        best = min(best, (time.process_time() - started) / 8)
        sites = [site for site in activity.spikes if site != "a"]
        rate = sum(activity.spikes[s].sum() for s in sites) / sum(activity.cells[s].sum() for s in sites)
    return best * 1e3, float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plus", action="store_true", help="the second form of the block, with every option")
    args = parser.parse_args()
    print(f"{'width':>6}{'layers':>8}{'context':>9}{'batch':>7}{'ms/token':>10}{'rate':>7}")
    cases = [(w, 4, 128, 1) for w in (128, 256, 512, 768)] + [(256, n, 128, 1) for n in (1, 8, 12)]
    cases += [(256, 4, c, 1) for c in (512, 1024, 1900)] + [(256, 4, 16, b) for b in (2, 4, 8)]
    for width, layers, context, batch in cases:
        ms, rate = cost(width, layers, context, args.rounds, batch, PLUS if args.plus else {})
        print(f"{width:6d}{layers:8d}{context:9d}{batch:7d}{ms:10.3f}" + (f"{rate:7.2f}" if rate else ""), flush=True)


if __name__ == "__main__":
    main()
