"""Writes energy/data/example_run.json: the dense oracle over a small random model. Run it after a change of format.

python tests/unit/energy/make_example_run.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[2] / "energy" / "data" / "example_run.json"


def example_run() -> dict:
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    from energy_runs import make_run
    from random_models import random_shape

    shape = random_shape(heads=4, head_dim=8, layers=3, ffn=64, vocab=256, positions=64)
    return make_run(shape, prompts=(16,), generated=(17,), seed=7) | {"bundle": {"name": "example", "sha256": "0" * 64}}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(example_run(), separators=(",", ":")) + "\n")
