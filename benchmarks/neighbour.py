"""How fast two-thread training goes beside one busy process, as a share of its speed without.

    python benchmarks/neighbour.py [--seconds 10] [--rounds 3] [--threads 2] [--set GOMP_SPINCOUNT=0 ...]

One `spikeopd-train` of the tiny recipe runs throughout; a process that only counts is woken and stopped in turns, so
that whatever else the machine does meets both alike. Updates are counted by the lines of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="environment of the training")
    arguments = parser.parse_args()
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
    environment |= dict(word.split("=", 1) for word in arguments.set)
    words = ["stage1.updates=1000000", f"train.threads={arguments.threads}", "train.save_every=1000000"]
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    neighbour.send_signal(signal.SIGSTOP)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "spikeopd.cli", "--config", "tiny", "--stage", "1", "--output", str(run)]
        training = subprocess.Popen([*command, "--quiet", *words], env=environment)
        try:
            print(json.dumps({"set": arguments.set, "load": os.getloadavg()[0]} | measure(run, neighbour, arguments)))
        finally:
            training.kill()
            training.wait()
            neighbour.kill()
            neighbour.wait()


def measure(run: Path, neighbour: subprocess.Popen[bytes], arguments: argparse.Namespace) -> dict[str, object]:
    while updates(run) < 3:  # compiled, warm
        time.sleep(0.5)
    rates: dict[str, list[float]] = {"quiet": [], "beside a neighbour": []}
    for _ in range(arguments.rounds):
        for kind, found in rates.items():
            neighbour.send_signal(signal.SIGSTOP if kind == "quiet" else signal.SIGCONT)
            time.sleep(0.5)
            before, began = updates(run), time.monotonic()
            time.sleep(arguments.seconds)
            found.append((updates(run) - before) / (time.monotonic() - began))
    means = {kind: round(sum(found) / len(found), 3) for kind, found in rates.items()}
    return {"updates_per_second": means, "share": round(means["beside a neighbour"] / max(means["quiet"], 1e-9), 3)}


def updates(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


if __name__ == "__main__":
    main()
