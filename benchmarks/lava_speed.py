"""Speed of the Lava backend against the event engine on the same random models, by depth, width and granularity.

    python benchmarks/lava_speed.py    # the full table, some minutes on a quiet machine
    python benchmarks/lava_speed.py --layers 1 4 --widths 64 --tokens 8 --json out.json

Each row: one model (T_s = 4, FFN = 4 x width, vocabulary 1024), decoded greedily after a short prompt. Both backends
must give the same logits and event counts for every token, or the row is an error. Times are the best of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from random_models import PLUS, random_model, random_shape  # noqa: E402

from neuro_sim.event.engine import EventDecoder  # noqa: E402
from neuro_sim.lava.decoder import LavaDecoder  # noqa: E402
from spikeopd.contracts import SpikeModel  # noqa: E402
from spikeopd.errors import CheckFailed, run_command  # noqa: E402
from spikeopd.files import write_json  # noqa: E402

GOAL_SHAPE = dict(heads=4, head_dim=32, layers=4, ffn=512, vocab=1024)
COLUMNS = (
    ("layers", 6), ("width", 5), ("ffn", 5), ("granularity", 11), ("processes", 9), ("rate", 6), ("start_seconds", 13),
    ("lava_steps_per_second", 21), ("lava_tokens_per_second", 22), ("event_tokens_per_second", 23), ("ratio", 7),
)  # fmt: skip


def make_model(layers: int, width: int, positions: int, block: str) -> SpikeModel:
    heads = max(1, width // 64) if width != GOAL_SHAPE["heads"] * GOAL_SHAPE["head_dim"] else GOAL_SHAPE["heads"]
    sizes = dict(heads=heads, head_dim=width // heads, layers=layers, ffn=4 * width, vocab=1024, positions=positions)
    shape = random_shape(**sizes, **(PLUS if block == "plus" else {}))
    return random_model(shape, seed=layers + width)


def decode(step: Callable[[int], tuple[Any, Any]], tokens: int) -> tuple[float, list[tuple[Any, Any]]]:
    """Seconds and results for some tokens, greedily."""
    results, token = [], 1
    begin = time.perf_counter()
    for _ in range(tokens):
        results.append(step(token))
        token = int(results[-1][0].argmax())
    return time.perf_counter() - begin, results


def measure(model: SpikeModel, granularity: str, tokens: int, rounds: int) -> dict[str, Any]:
    event = EventDecoder(model, threads=1)
    begin = time.perf_counter()
    with LavaDecoder(model, "fixed", granularity, timeout=300) as lava:
        lava.step(1)
        start_seconds = time.perf_counter() - begin
        processes = len(lava.process_names)
        lava_seconds, event_seconds = [], []
        for _ in range(rounds):
            lava.reset()
            event.reset()
            seconds, got = decode(lava.step, tokens)
            lava_seconds.append(seconds)
            seconds, expected = decode(event.step, tokens)
            event_seconds.append(seconds)
            for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
                if not np.array_equal(mine[0], theirs[0]) or mine[1].to_dict() != theirs[1].to_dict():
                    raise CheckFailed(
                        f"{model.shape}: Lava ({granularity}) and the event engine differ at token {index}"
                    )
    shape, activity = model.shape, got[-1][1]
    spikes = sum(int(counts.sum()) for site, counts in activity.spikes.items() if site != "a")
    cells = sum(int(counts.sum()) for site, counts in activity.cells.items() if site != "a")
    speed = tokens / min(lava_seconds)
    return {
        "layers": shape.num_hidden_layers,
        "width": shape.hidden_size,
        "ffn": shape.ffn_dim,
        "granularity": granularity,
        "processes": processes,
        "rate": spikes / cells,
        "start_seconds": start_seconds,
        "lava_steps_per_second": speed * shape.num_steps,
        "lava_tokens_per_second": speed,
        "event_tokens_per_second": tokens / min(event_seconds),
        "ratio": tokens / min(event_seconds) / speed,
    }


def show(row: dict[str, Any]) -> str:
    cells = []
    for name, width in COLUMNS:
        value = row[name]
        text = (
            f"{value:.3g}"
            if isinstance(value, float) and value < 1
            else f"{value:.1f}"
            if isinstance(value, float)
            else value
        )
        cells.append(f"{text!s:>{width}}")
    return "  ".join(cells)


def body(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="lava_speed.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python benchmarks/lava_speed.py --layers 1 --widths 64 --tokens 4\n"
        "  python benchmarks/lava_speed.py --granularity fused --json lava.json",
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 768])
    parser.add_argument("--granularity", nargs="+", choices=["fused", "graph"], default=["fused", "graph"])
    parser.add_argument("--block", choices=["paper", "plus"], default="paper", help="form of the block (default paper)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per round (default 32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best counts (default 3)")
    parser.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    options = parser.parse_args(argv)
    rows = []
    print("  ".join(f"{name:>{width}}" for name, width in COLUMNS))
    for layers in options.layers:
        for width in options.widths:
            model = make_model(layers, width, options.tokens + 1, options.block)
            for granularity in options.granularity:
                rows.append(measure(model, granularity, options.tokens, options.rounds))
                print(show(rows[-1]), flush=True)
    if options.json:
        machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "numpy": np.__version__}
        setup = {"block": options.block, "tokens": options.tokens, "rounds": options.rounds, "machine": machine}
        write_json(options.json, setup | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(run_command("lava_speed.py", body, None))
