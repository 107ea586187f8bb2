"""What serving costs over the bare engine: one client that streams, against `neuro_sim.generate`, in turns in one run.

The server is the command itself in a process of its own; the client reads bytes and parses nothing. Per token: wall
time of the whole answer, CPU time of the server's process (all its threads), and that of the bare engine's process.
The work of the socket and of JSON overlaps with the engine where a second core is free, so read the wall ratio on a
quiet machine and the CPU ratio on a busy one.

  python benchmarks/serve.py BUNDLE --tokens 256 --rounds 7
  python benchmarks/serve.py --opt-125m                # random weights of that shape, rate 0.17
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import neuro_sim

PROMPT = [2, 17, 4, 100]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def random_bundle(folder: Path) -> Path:
    from calibrated import calibrated_model

    from energy.flops import opt_shape
    from export.bundle_writer import BundleOptions, write_bundle
    from spikeopd.contracts.topology import parse_shape

    model = calibrated_model(parse_shape(opt_shape("opt-125m").to_dict(), "opt-125m", 4), 0.17, 64)
    return write_bundle(model, folder / "opt-125m", BundleOptions(target="lava"))


class Served:
    def __init__(self, bundle: Path) -> None:
        command = [sys.executable, "-m", "neuro_sim.serve.cli", str(bundle), "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen([*command, "--name", "model"], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        while not (found := re.search(r"127\.0\.0\.1:(\d+)", self.process.stderr.readline())):
            pass
        self.port = int(found[1])

    def stream(self, tokens: int) -> None:
        body = json.dumps(
            {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while part := connection.recv(1 << 16):
            received = received[-64:] + part
        if b"[DONE]" not in received:
            raise RuntimeError("the answer broke off")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def timed(work: Callable[[], object], pid: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), cpu_seconds(pid)
    work()
    return time.perf_counter() - wall, cpu_seconds(pid) - cpu


def main() -> None:
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--opt-125m", action="store_true")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not args.bundle and not args.opt_125m:
        parser.error("give a bundle, or --opt-125m")
    with tempfile.TemporaryDirectory() as folder:
        bundle = args.bundle or random_bundle(Path(folder))
        served, model = Served(bundle), neuro_sim.load(bundle, threads=1)
        options = {"max_new_tokens": args.tokens, "temperature": 0.0, "ignore_eos": True}
        rows = []
        for number in range(args.rounds + 1):
            bare = timed(lambda: neuro_sim.generate(model, PROMPT, **options), os.getpid())
            through = timed(lambda: served.stream(args.tokens), served.process.pid)
            if number:  # the first warms up
                rows.append((*bare, *through))
                print("  ".join(f"{1e3 * value / args.tokens:8.3f}" for value in rows[-1]), "ms/token", flush=True)
        served.close()
        model.close()
    for name, mine, base in (("wall", 2, 0), ("CPU", 3, 1)):
        ratios = [row[mine] / row[base] for row in rows]
        best = min(row[mine] for row in rows) / min(row[base] for row in rows)
        print(f"served / bare, {name}: median {statistics.median(ratios):.3f}, best against best {best:.3f}")


if __name__ == "__main__":
    main()
