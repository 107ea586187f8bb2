"""The arguments of spikeopd-eval. A subcommand is one entry of COMMANDS, and a function of the same name in cli.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spikeopd.arguments import PRECISIONS, add_version, precision, renamed
from spikeopd.errors import ConfigError

PROG = "spikeopd-eval"
PAPER_ROWS = ("auto", "0.125B", "0.35B", "1.3B", "controlled", "none")


@dataclass(frozen=True)
class Command:
    """help: one sentence; examples: commands that run; arguments: adds them."""

    help: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Evaluate a spiking student, its teacher, or the exported bundle that is deployed.",
        epilog=_epilog([COMMANDS[name].examples[0] for name in list(COMMANDS)[:2]]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=_epilog(command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.arguments(child)
        child.add_argument("--output", metavar="DIR", help=f"folder of summary.json (default: runs/eval/{name}-MODEL)")
        child.add_argument("--json", action="store_true", help="print the summary as one JSON object")
        child.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _epilog(examples: Sequence[str]) -> str:
    return "examples:\n" + "\n".join(f"  {PROG} {example}" for example in examples)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint or run folder, an exported bundle, `tiny` (the shipped teacher), or a model on the hub",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer folder or file (default: the model's own)")
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    words = "{" + ",".join(PRECISIONS) + "}"
    parser.add_argument("--precision", type=precision, default="fp32", metavar=words, help="(default: fp32)")
    renamed(parser, "--dtype", "--precision", type=precision, metavar=words)
    parser.add_argument(
        "--batch-size", type=_batch_size, metavar="N", help="sequences at once (default: auto, by memory)"
    )


def _text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        default="python-docs",
        metavar="NAME",
        help="python-docs, text:PATH, jsonl:PATH[#FIELD], parquet:PATH[#FIELD] or hf:OWNER/NAME (default: python-docs)",
    )
    parser.add_argument("--split", choices=("train", "validation", "all"), default="validation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use the first N tokens (needed for hf: sources)")


def _rollout_arguments(parser: argparse.ArgumentParser, what: str, prompt_length: int | None, known: str) -> None:
    parser.add_argument("--num-prompts", type=int, default=256, metavar="N", help=f"{what} (default: 256)")
    renamed(parser, "--prompts", "--num-prompts", type=int, metavar="N")
    parser.add_argument(
        "--prompt-length", type=int, default=prompt_length, metavar="N", help=f"tokens (default: {known})"
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="K", help="to generate (default: 32)")
    renamed(parser, "--length", "--max-new-tokens", type=int, metavar="K")
    parser.add_argument("--seed", type=int, default=0)


def _batch_size(word: str) -> int | None:
    if word == "auto":
        return None
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"--batch-size {word}: give a number from 1 on, or auto")
    return int(word)


def _zeroshot_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="some of the eight (default: all)")
    parser.add_argument(
        "--benchmarks",
        metavar="DIR",
        help="local TASK/SPLIT.jsonl[.gz] files (default: the harness downloads the data)",
    )
    renamed(parser, "--data-dir", "--benchmarks", metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="count the answers that differ from this model's: a bundle against its student",
    )
    parser.add_argument("--metric", choices=("acc", "acc_norm"), default="acc", help="of the table (default: acc)")
    parser.add_argument(
        "--seeds",
        nargs="+",
        metavar="SEED",
        help="trained runs to average over, numbers or ranges such as 0-2: each replaces {seed} in MODEL",
    )
    parser.add_argument("--paper", choices=PAPER_ROWS, default="auto", help="the paper's rows to show beside")


def _perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    _text_arguments(parser)
    parser.add_argument("--window", type=int, metavar="N", help="tokens fed at once (default: the model's positions)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens the window moves by (default: half of it)")


def _rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    _text_arguments(parser)
    _rollout_arguments(parser, "continuations", None, "480, or what the model holds")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="continuations to show (default: 3)")
    parser.add_argument("--paper", choices=("controlled", "none"), default="controlled", help="the paper's rows beside")


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="OFFLINE", help="checkpoint that generates the bank: a student or run folder")
    parser.add_argument("others", nargs="*", metavar="NAME=MODEL", help="checkpoints replayed on the same bank")
    parser.add_argument("--teacher", default="tiny", help="`tiny`, `tiny-rule`, a folder or a hub name (default: tiny)")
    parser.add_argument(
        "--bank", type=Path, metavar="FILE", help="prefix bank to read, or to write if it does not exist"
    )
    _text_arguments(parser)
    _rollout_arguments(parser, "pairs", 480, "480")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="pairs at once (default: 16)")
    parser.add_argument("--device", help="torch device (default: cpu)")
    parser.add_argument("--figures", action="store_true", help="also draw them (PNG and SVG, beside summary.json)")


COMMANDS = {
    "zeroshot": Command(
        "Accuracy on the paper's eight zero-shot benchmarks, through lm-evaluation-harness.",
        (
            "zeroshot tiny --tasks piqa --limit 20",
            "zeroshot tiny --tasks arc_easy,openbookqa --limit 20 --metric acc_norm --json",
        ),
        _zeroshot_arguments,
    ),
    "perplexity": Command(
        "Perplexity of any text source, per token and per byte, with a sliding window.",
        (
            "perplexity tiny --source python-docs --max-tokens 2000",
            "perplexity tiny --split train --max-tokens 2000 --window 128 --stride 64 --json",
        ),
        _perplexity_arguments,
    ),
    "rollouts": Command(
        "Adjacent repetition, distinct 4-grams and longest run of a model's own continuations, with samples.",
        (
            "rollouts tiny --num-prompts 8 --prompt-length 64",
            "rollouts tiny --num-prompts 4 --prompt-length 32 --max-new-tokens 16 --temperature 0 --json",
        ),
        _rollouts_arguments,
    ),
    "diagnose": Command(
        "Teacher KL, spike-rate, hidden and membrane gaps on a stored bank of paired prefixes (Figs. 1-2).",
        (
            "diagnose runs/tiny/stage1/final SpikeOPD=runs/tiny/final --prompt-length 32 --num-prompts 32",
            "diagnose runs/tiny/stage1/final --bank runs/bank.npz --prompt-length 32 --num-prompts 8 --json",
        ),
        _diagnose_arguments,
    ),
}
