"""Long work of each kind, and what it leaks: slopes of memory, open files and threads, and what is left at the end.

    python benchmarks/soak.py [--tokens 20000] [--updates 2000] [--lava 100] [--scale small|tiny]

Prints one JSON line per kind. A slope is per thousand tokens, updates or starts, fitted over the last three quarters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


class Watch:
    """Resident memory, open files, threads, children and names in /dev/shm, sampled as work goes on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.began = kind, time.monotonic()
        self.rows: list[list[float]] = []

    def look(self, done: int) -> None:
        task = Path(f"/proc/self/task/{os.getpid()}/children")
        self.rows.append(
            [
                done,
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                len(task.read_text().split()),
                len(os.listdir("/dev/shm")),
            ]
        )

    def report(self) -> None:
        table = np.array(self.rows)
        late = table[len(table) // 4 :]
        names = ("memory_mib", "open_files", "threads", "children", "shm")
        slopes = {
            name: round(1000 * float(np.polyfit(late[:, 0], late[:, i + 1], 1)[0]), 4) for i, name in enumerate(names)
        }
        ends = {name: round(float(table[-1, i + 1]), 1) for i, name in enumerate(names)}
        seconds = round(time.monotonic() - self.began, 1)
        print(json.dumps({"kind": self.kind, "done": int(table[-1, 0]), "seconds": seconds, "slope_per_1000": slopes,
                          "at_the_end": ends}), flush=True)  # fmt: skip


def soak_tokens(count: int) -> None:
    from random_models import random_model, random_shape

    from neuro_sim.event.engine import EventDecoder

    shape = random_shape(positions=128)
    decoder, watch, done = EventDecoder(random_model(shape)), Watch("event engine, tokens"), 0
    while done < count:
        batch = decoder.batch([None])
        batch.prefill(0, [1])
        for token in range(min(100, count - done)):
            batch.step([0], [token % shape.vocab_size])
            done += 1
        watch.look(done)
    watch.report()


# Students of 2,000 updates: `tiny` is the recipe's with fewer and shorter rows (a third of a CPU-second an update),
# `small` has two layers of width 32 (a tenth of that).
SCALES = {
    "tiny": ("batch_size=4", "micro_batch_size=4", "prompt_length=16", "max_completion_length=8"),
    "small": (),
}


def soak_updates(count: int, scale: str = "small") -> None:
    from training_setup import SMALL

    from spikeopd.config import load_config
    from spikeopd.methods import opd, spad
    from spikeopd.methods.setup import make_accelerator
    from spikeopd.runlog import RunLog
    from spikeopd.students import no_bars
    from spikeopd.training import random_setup

    no_bars()
    words = [f"stage2.{word}" for word in SCALES[scale]] or SMALL
    words = [*words, f"stage2.updates={count}", "stage1.updates=2", "stage1.deploy_updates=0", "train.threads=1"]
    config = load_config("tiny", [*words, "train.save_every=100"])
    setup = random_setup(config, make_accelerator(config))
    watch = Watch(f"Stage-2 updates, {scale}")

    class Log(RunLog):
        def metrics(self, stage: str, update: int, values: Any) -> None:
            super().metrics(stage, update, values)
            if stage == "stage2" and update % max(1, count // 100) == 0:
                watch.look(update)

    with tempfile.TemporaryDirectory() as folder, Log(folder, quiet=True) as log:
        spad.run(setup, log)
        opd.run(setup, log, str(Path(folder) / "stage1" / "final"))
    watch.report()


def soak_lava(count: int) -> None:
    from random_models import random_model

    from neuro_sim.lava.decoder import LavaDecoder

    model, watch = random_model(), Watch("Lava, starts and stops")
    for done in range(1, count + 1):
        with LavaDecoder(model) as decoder:
            decoder.step(1)
        watch.look(done)
    watch.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--updates", type=int, default=2_000)
    parser.add_argument("--lava", type=int, default=100)
    parser.add_argument("--scale", choices=tuple(SCALES), default="small", help="student of the updates")
    arguments = parser.parse_args()
    for work, count in (
        (soak_tokens, arguments.tokens),
        (partial(soak_updates, scale=arguments.scale), arguments.updates),
        (soak_lava, arguments.lava),
    ):
        if count:
            work(count)


if __name__ == "__main__":
    main()
