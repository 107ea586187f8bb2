"""spikeopd-bench: prompt and decoding speed of a bundle over contexts, threads and batch, with events and energy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spikeopd.arguments import add_version
from spikeopd.errors import ConfigError, cannot_write, check_writable, run_command, say

if TYPE_CHECKING:
    from neuro_sim.bench.measure import Row

PROG = "spikeopd-bench"
EXAMPLES = f"""\
examples:
  {PROG} bundle
  {PROG} bundle --prompt-length 64 --decode 32 --context 16,64 --batch 1,8 --threads 1,2 --format csv
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Time the event engine on a bundle: tokens per second (median of the rounds), CPU time, synaptic "
        "operations and energy of a token, firing rate, peak memory. Tokens are random.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="folder written by spikeopd-export, or a shipped bundle's name"
    )
    parser.add_argument("--prompt-length", type=_numbers, metavar="N,N", help="prompts to read (default: as fits, 64)")
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="tokens to write, 0: none (default: 32)")
    parser.add_argument("--context", type=_numbers, metavar="N,N", help="fed before them (default: as fits, 16 and 64)")
    parser.add_argument("--batch", type=_numbers, default=[1, 8], metavar="N,N", help="sequences (default: 1,8)")
    parser.add_argument("--threads", type=_numbers, metavar="N,N", help="of the engine (default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each test (default: 5)")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="default: table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of to the terminal")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as in 1,8") from None


def _main(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    if args.output:
        check_writable(args.output, "--output", in_folder=True)
    from neuro_sim.api import Bundle
    from neuro_sim.bench.measure import Plan, measure

    bundle = Bundle(args.bundle)
    if bundle.precision == "float32":
        raise ConfigError("the event engine is for integers and this bundle is float32; there is nothing to time")
    room = bundle.shape.max_position_embeddings
    contexts = args.context or [n for n in (16, 64) if n + args.decode <= room] or [max(1, room - args.decode)]
    plan = Plan(args.prompt_length or [min(64, room)], args.decode, contexts, args.threads or [None], args.batch,
                args.rounds)  # fmt: skip
    tell = (lambda line: None) if args.quiet else (lambda line: say(f"{PROG}: {line}"))
    rows = list(measure(bundle, plan, tell))
    text = {"table": table, "csv": csv_text, "json": json_text}[args.format](rows, bundle.folder.resolve().name)
    if args.output is None:
        print(text)
        return 0
    from spikeopd.files import write_bytes

    try:
        write_bytes(args.output, (text + "\n").encode())
    except OSError as error:
        raise cannot_write(args.output, "--output", error) from error
    return 0


def table(rows: Sequence[Row], name: str) -> str:
    from neuro_sim.display import energy

    head = [
        "test",
        "threads",
        "batch",
        "tokens/s",
        "±",
        "CPU ms/token",
        "M SOPs/token",
        "energy/token",
        "rate",
        "peak MiB",
    ]
    cells = [
        [row.test, str(row.threads), str(row.batch), f"{row.tokens_per_second:.1f}", f"{row.deviation:.1f}",
         f"{row.cpu_ms:.3f}", f"{row.sops_per_token / 1e6:.3f}", energy(row.pj_per_token), f"{row.firing_rate:.3f}",
         f"{row.peak_mib:.0f}"]
        for row in rows
    ]  # fmt: skip
    widths = [max(len(line[place]) for line in [head, *cells]) for place in range(len(head))]
    lines = [[name], *([text.rjust(width) if place else text.ljust(width) for place, (text, width) in
              enumerate(zip(line, widths, strict=True))] for line in [head, *cells])]  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in lines)


def csv_text(rows: Sequence[Row], name: str) -> str:
    import csv
    import io
    from dataclasses import asdict

    out = io.StringIO()
    writer = csv.DictWriter(out, ["bundle", *asdict(rows[0])] if rows else ["bundle"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"bundle": name, **asdict(row)} for row in rows)
    return out.getvalue().rstrip("\n")


def json_text(rows: Sequence[Row], name: str) -> str:
    import json
    from dataclasses import asdict

    from neuro_sim.runfile import environment

    data = {"bundle": name, "environment": environment(), "rows": [asdict(row) for row in rows]}
    return json.dumps(data, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
