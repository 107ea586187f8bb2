"""Decoding speed of the event engine against dense runtimes, measured interleaved in one run.

OPT-125M shape, random weights, firing rates set by calibration (calibrated.py), prompt of context - 32 tokens, then
single tokens. Every contender lives in a process of its own (decode_worker.py) and waits while another measures, so a
busy machine disturbs all alike; each is measured in every round, and the best round counts. One thread: CPU time.
Several threads: wall time. The bandwidth bound is bytes touched / read bandwidth measured in the same rounds.

  python benchmarks/decode.py --output decode.json --plot decode.png
  python benchmarks/decode.py --quick --peers ""

Peers that need packages of their own run with --peer-python (default: .venv-bench/bin/python if it exists):
  python -m venv .venv-bench && .venv-bench/bin/pip install torch==2.13.0
  .venv-bench/bin/pip install transformers==5.22.2 ctranslate2 onnxruntime onnx onnxscript numba "numpy<2.4"
  .venv-bench/bin/pip install xllamacpp gguf
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = {
    "hf": "Hugging Face OPT-125M fp32, generate with KV cache",
    "torch_int8": "torch dynamic int8, generate with KV cache",
    "ctranslate2": "CTranslate2 int8",
    "onnxruntime": "onnxruntime int8",
    "llama_q8": "llama.cpp Q8_0, C interface",
    "llama_q4": "llama.cpp Q4_0, C interface",
    "student": "dense torch student, T_s = 4, generate with KV cache",
}
OWN_ENVIRONMENT = tuple(name for name in NAMES if name != "student")  # the student needs this project's
# Goals as ratios at rate 0.17, context 512, one thread.
GOALS = {"hf": 8.0, "onnxruntime": 4.0, "llama_q4": 4.0, "prefill llama_q4": 2.0}


class Contender:
    """A worker process and what it measured."""

    def __init__(self, name: str, python: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self.times: list[dict[str, float]] = []
        threads = str(options["threads"])
        limits = {key: threads for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        self.process = subprocess.Popen(
            [python, str(HERE / "decode_worker.py"), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **limits},
        )  # fmt: skip
        self.can_prefill = "prefill" in self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the worker ended with code {self.process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **options}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def measure(self, tokens: int) -> None:
        seconds = self.ask("measure", tokens=tokens)
        self.times.append({clock: 1e3 * value / tokens for clock, value in seconds.items()})

    def best(self) -> float:
        """Milliseconds per token: CPU time on one thread, wall time on several."""
        clock = "cpu" if self.options["threads"] == 1 else "wall"
        return min(entry[clock] for entry in self.times)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    args = parse()
    contenders: list[Contender] = []
    failed: dict[str, str] = {}

    def start(name: str, python: str, **options: Any) -> None:
        print(f"starting {name}", file=sys.stderr)
        try:
            contenders.append(Contender(name, python, options))
        except RuntimeError as error:
            failed[name] = str(error)
            print(f"  not available: {error}", file=sys.stderr)

    for threads in args.threads:
        for context in args.contexts:
            for rate in args.rates:
                for precision in args.precisions:
                    start(f"event {precision} rate {rate} context {context} threads {threads}", sys.executable,
                          kind="event", shape=args.shape, precision=precision, rate=rate, context=context,
                          threads=threads)  # fmt: skip
        for peer in args.peers:
            python = args.peer_python if peer in OWN_ENVIRONMENT else sys.executable
            start(f"{peer} context {args.contexts[0]} threads {threads}", python,
                  kind=peer, context=args.contexts[0], threads=threads)  # fmt: skip
    events = [c for c in contenders if c.options["kind"] == "event"]
    bandwidth: dict[int, list[float]] = {threads: [] for threads in args.threads}
    prefill: dict[str, list[float]] = {c.name: [] for c in contenders if c.can_prefill}
    batches: dict[str, dict[int, list[float]]] = {c.name: {size: [] for size in args.batch} for c in events}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for threads in args.threads:
            reader = next((c for c in events if c.options["threads"] == threads), None)
            if reader is not None:
                bandwidth[threads].append(reader.ask("bandwidth")["bytes_per_second"])
        for contender in contenders:
            contender.measure(args.tokens)
        for contender in contenders:
            clock = "cpu" if contender.options["threads"] == 1 else "wall"
            if contender.can_prefill:
                prefill[contender.name].append(1e3 * contender.ask("prefill", tokens=128)[clock] / 128)
            for size, values in batches.get(contender.name, {}).items():
                seconds = contender.ask("batch", tokens=args.tokens, size=size)[clock]
                values.append(1e3 * seconds / args.tokens / size)
    report = {
        "schema": "spikeopd.benchmark.decode/1",
        "shape": args.shape,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "bandwidth_bytes_per_second": {str(k): max(v) for k, v in bandwidth.items() if v},
        "not_available": failed,
        "contenders": [describe(c, bandwidth, prefill, batches) for c in contenders],
    }
    for contender in contenders:
        contender.close()
    report["ratios"] = ratios(report["contenders"])
    print(table(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(report, args.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_python = HERE.parent / ".venv-bench" / "bin" / "python"
    parser.add_argument("--shape", default="125m", choices=("tiny", "125m", "350m", "1.3b"))
    parser.add_argument("--rates", default="0.05,0.17,0.3")
    parser.add_argument("--precisions", default="int8,int4", help="of the event engine's weights")
    parser.add_argument("--contexts", default="512,2048", help="peers run at the first")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--peers", default=",".join(NAMES), help="comma list, empty for none")
    parser.add_argument("--peer-python", default=str(default_python if default_python.exists() else sys.executable))
    parser.add_argument("--batch", default="4,16", help="batch sizes of batched decoding")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per measurement")
    parser.add_argument("--quick", action="store_true", help="two rounds, rate 0.17, context 512, one thread")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rates, args.contexts, args.threads, args.rounds, args.batch = "0.17", "512", "1", 2, "4"
    args.precisions = args.precisions.split(",")
    args.rates = [float(item) for item in args.rates.split(",")]
    args.contexts, args.threads, args.batch = (
        [int(item) for item in text.split(",") if item] for text in (args.contexts, args.threads, args.batch)
    )
    args.peers = [item for item in args.peers.split(",") if item]
    unknown = set(args.peers) - set(NAMES)
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}; choose from {', '.join(NAMES)}")
    return args


def describe(contender: Contender, bandwidth: dict[int, list[float]], prefill: Any, batches: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": contender.name, **contender.options, "ms_per_token": contender.best()}
    entry["all_ms"] = contender.times
    if contender.can_prefill:
        entry["prefill_ms_per_token"] = min(prefill[contender.name])
    if contender.options["kind"] == "event":
        facts = contender.ask("facts")
        bound = 1e3 * facts["bytes_per_token"] / max(bandwidth[contender.options["threads"]])
        entry |= facts | {
            "bound_ms": bound,
            "share_of_bound": bound / entry["ms_per_token"],
            "batch_ms_per_token": {size: min(values) for size, values in batches[contender.name].items()},
        }
    return entry


def ratios(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Every figure the goals name at the first context, for each number of threads, precision and rate."""
    result: dict[str, Any] = {}
    first = min(entry["context"] for entry in entries)
    peers = [entry for entry in entries if entry["kind"] != "event"]
    events = [entry for entry in entries if entry["kind"] == "event"]
    for mine in (entry for entry in events if entry["context"] == first):
        row: dict[str, Any] = {}
        for peer in (entry for entry in peers if entry["threads"] == mine["threads"]):
            row[peer["kind"]] = peer["ms_per_token"] / mine["ms_per_token"]
            if "prefill_ms_per_token" in peer:
                row[f"prefill {peer['kind']}"] = peer["prefill_ms_per_token"] / mine["prefill_ms_per_token"]
        row["share of bandwidth bound"] = mine["share_of_bound"]
        row["prefill / decode throughput"] = mine["ms_per_token"] / mine["prefill_ms_per_token"]
        for size, ms in mine["batch_ms_per_token"].items():
            row[f"batch {size} / batch 1 throughput"] = mine["ms_per_token"] / ms
        same = [entry for entry in events if all(entry[key] == mine[key] for key in ("precision", "rate"))]
        for other in same:
            if other["threads"] == mine["threads"] and other["context"] != first:
                row[f"cost at context {other['context']} / {first}"] = other["ms_per_token"] / mine["ms_per_token"]
            if other["threads"] < mine["threads"] and other["context"] == first:
                wall = min(times["wall"] for times in other["all_ms"])
                row[f"threads {mine['threads']} / {other['threads']} throughput"] = wall / mine["ms_per_token"]
        result[f"{mine['precision']}, rate {mine['rate']}, threads {mine['threads']}"] = row
    return result


def table(report: dict[str, Any]) -> str:
    lines = [f"{'contender':58s} {'ms/token':>9s} {'tok/s':>8s} {'MB/token':>9s} {'of bound':>9s} {'prefill ms':>11s}"]
    for entry in sorted(report["contenders"], key=lambda e: (e["threads"], e["kind"] != "event", e["ms_per_token"])):
        name = NAMES.get(entry["kind"], "")
        label = f"{name}, threads {entry['threads']}" if name else entry["name"]
        line = f"{label:58s} {entry['ms_per_token']:9.2f} {1e3 / entry['ms_per_token']:8.1f}"
        if entry["kind"] == "event":
            line += f" {entry['bytes_per_token'] / 1e6:9.1f} {entry['share_of_bound']:9.0%}"
        if "prefill_ms_per_token" in entry:
            line = f"{line:96s} {entry['prefill_ms_per_token']:11.2f}"
        lines.append(line)
    for case, row in report["ratios"].items():
        lines.append(f"\nagainst event {case}")
        for name, value in row.items():
            goal = f"   (goal {GOALS[name]})" if name in GOALS and "rate 0.17, threads 1" in case else ""
            lines.append(f"  {name:36s} {value:7.2f}{goal}")
    for name, why in report["not_available"].items():
        lines.append(f"not available: {name}: {why}")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [e for e in report["contenders"] if e["threads"] == min(x["threads"] for x in report["contenders"])]
    entries.sort(key=lambda e: e["ms_per_token"])
    labels = [
        f"event {e['precision']}, rate {e['rate']}, context {e['context']}"
        if e["kind"] == "event"
        else NAMES[e["kind"]].split(",")[0]
        for e in entries
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.6 + 0.42 * len(entries)))
    colours = ["tab:orange" if e["kind"] == "event" else "tab:gray" for e in entries]
    bars = axis.barh(labels, [e["ms_per_token"] for e in entries], color=colours)
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.margins(x=0.08)
    bounds = [(i, e["bound_ms"]) for i, e in enumerate(entries) if e["kind"] == "event"]
    axis.scatter([b for _, b in bounds], [i for i, _ in bounds], marker="|", s=160, color="black", zorder=3,
                 label="bytes touched / read bandwidth")  # fmt: skip
    axis.invert_yaxis()
    axis.set_xlabel("CPU ms per token, one thread (best round)")
    axis.set_title(f"Decoding one token, OPT-{report['shape']} shape", loc="left", fontsize=10)
    if bounds:
        axis.legend(fontsize=8, loc="upper right")
    axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
