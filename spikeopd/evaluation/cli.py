"""spikeopd-eval: zero-shot benchmarks, perplexity and rollouts of checkpoints, Hugging Face models and bundles.

A subcommand is one entry of COMMANDS: its help, its examples, a function that adds its arguments and one that runs it.
Whatever is heavy is imported by the latter.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.diagnostics import command as diagnose
from spikeopd.errors import ConfigError, InputError, check_writable, run_command

if TYPE_CHECKING:
    from spikeopd.evaluation.models import Model
    from spikeopd.evaluation.scoring import Limits
    from spikeopd.runlog import RunLog

PROG = "spikeopd-eval"
MODEL_HELP = "a checkpoint or run folder, an exported bundle, `tiny` (the shipped teacher), or a model on the hub"
PAPER_ROWS = ("auto", "0.125B", "0.35B", "1.3B", "controlled", "none")


@dataclass(frozen=True)
class Command:
    """help: one sentence; examples: commands that run; arguments: adds them; run: does the work."""

    help: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return COMMANDS[arguments.command].run(arguments) or 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Evaluate a spiking student, its teacher, or the exported bundle that is deployed.",
        epilog=_epilog([COMMANDS[name].examples[0] for name in list(COMMANDS)[:2]]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    return parser


def _epilog(examples: Sequence[str]) -> str:
    return "examples:\n" + "\n".join(f"  {PROG} {example}" for example in examples)


# --- what the commands share -----------------------------------------------------------------------------------------


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer folder or file (default: the model's own)")
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="DIR", help="folder of summary.json (default: runs/eval/COMMAND-MODEL)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def batch_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", default="auto", metavar="N", help="sequences at once (default: auto, by memory)"
    )


def text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="python-docs", metavar="NAME",
                        help="python-docs, text:PATH, jsonl:PATH[#FIELD], parquet:PATH[#FIELD] or hf:OWNER/NAME "
                        "(default: python-docs)")  # fmt: skip
    parser.add_argument("--split", choices=("train", "validation", "all"), default="validation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use the first N tokens (needed for hf: sources)")


def open_log(arguments: argparse.Namespace) -> RunLog:
    """The folder this evaluation is written to, and its progress."""
    from spikeopd.runlog import RunLog

    name = re.sub(r"[^\w.-]+", "_", arguments.model.strip("./")) or "model"
    folder = Path(arguments.output) if arguments.output else Path("runs") / "eval" / f"{arguments.command}-{name}"
    check_writable(folder / "summary.json", "--output")  # now, not after the whole evaluation
    return RunLog(folder, quiet=arguments.quiet)


def load(arguments: argparse.Namespace, name: str | None = None) -> Model:
    from spikeopd.evaluation.models import open_model

    return open_model(
        name or arguments.model, tokenizer=arguments.tokenizer, device=arguments.device, dtype=arguments.dtype
    )


def limits(arguments: argparse.Namespace, model: Model) -> Limits:
    from spikeopd.evaluation.scoring import Limits

    return Limits.on(model.about.get("device", "cpu"), batch_size(arguments))


def batch_size(arguments: argparse.Namespace) -> int | None:
    word = arguments.batch_size
    if word == "auto":
        return None
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"--batch-size {word}: give a number from 1 on, or auto")
    return int(word)


def finish(arguments: argparse.Namespace, log: RunLog, summary: Mapping[str, Any], text: str) -> None:
    """Write summary.json and print the result."""
    from spikeopd.runlog import environment

    device = arguments.device or "auto"
    whole = {"command": arguments.command, **summary, "environment": environment(device=device, seeds={})}
    try:
        log.summary(whole)
    except OSError as error:
        raise InputError(f"--output {log.folder}: cannot be written ({error.strerror or error})") from error
    print((log.folder / "summary.json").read_text("utf-8").strip() if arguments.json else text)
    log.note(f"{PROG}: wrote {log.folder / 'summary.json'}")


# --- zeroshot --------------------------------------------------------------------------------------------------------


def _zeroshot_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="some of the eight (default: all)")
    parser.add_argument("--data-dir", metavar="DIR",
                        help="local TASK/SPLIT.jsonl[.gz] files (default: the harness downloads the data)")  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    parser.add_argument("--metric", choices=("acc", "acc_norm"), default="acc", help="of the table (default: acc)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED",
                        help="trained runs to average over: each replaces {seed} in MODEL")  # fmt: skip
    parser.add_argument("--paper", choices=PAPER_ROWS, default="auto", help="the paper's rows to show beside")
    batch_argument(parser)
    output_arguments(parser)


def _zeroshot(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation import paper, zeroshot
    from spikeopd.evaluation.models import offline
    from spikeopd.evaluation.tasks import choose, data_files

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: give at least one question")
    benchmarks = choose(arguments.tasks)
    runs = zeroshot.models_of(arguments.model, arguments.seeds)
    data_dir = Path(arguments.data_dir).expanduser() if arguments.data_dir else None
    batch_size(arguments)  # a wrong word is refused before anything is loaded
    if data_dir is not None:
        offline()
        data_files(data_dir, benchmarks)  # a missing file is reported before a model is loaded
    log = open_log(arguments)
    results = []
    for seed, name in runs:
        model = load(arguments, name)
        result = zeroshot.evaluate(
            model,
            benchmarks,
            data_dir=data_dir,
            limit=arguments.limit,
            limits=limits(arguments, model),
            progress=lambda what, total: log.progress(what, total, unit="request"),
        )
        if result["truncated_requests"]:
            log.note(
                f"{PROG}: {name}: {result['truncated_requests']} requests were longer than the model's "
                f"{model.scorer.max_length} positions and lost their beginning"
            )
        results.append({"model": name, "seed": seed, **model.about, **result})
    shape = results[0]["shape"]
    rows = paper.rows(arguments.paper, shape)
    summary = {
        "metric": arguments.metric,
        **zeroshot.aggregate(results, arguments.metric),
        "definitions": zeroshot.DEFINITIONS,
        "data": str(data_dir) if data_dir else "hub",
        "limit": arguments.limit,
        "batch_size": arguments.batch_size,
        "runs": results,
        "paper": {
            "scale_of_model": paper.scale_of(shape),
            "metric": "accuracy; the paper does not say whether any column is length-normalised",
            "rows": [row.to_dict() for row in rows],
        },
    }
    text = zeroshot.table(arguments.model, summary, rows)
    remarks = []
    if arguments.limit is not None:
        remarks.append(f"only the first {arguments.limit} questions of each task: not comparable with full results")
    if rows and paper.scale_of(shape) is None:
        remarks.append("this model has none of the paper's sizes; its rows are there for orientation")
    finish(arguments, log, summary, "\n".join([text, *(f"note: {remark}" for remark in remarks)]))


# --- perplexity ------------------------------------------------------------------------------------------------------


def _perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    text_arguments(parser)
    parser.add_argument("--window", type=int, metavar="N", help="tokens fed at once (default: the model's positions)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens the window moves by (default: half of it)")
    batch_argument(parser)
    output_arguments(parser)


def _perplexity(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation import perplexity

    batch_size(arguments)
    log = open_log(arguments)
    model = load(arguments)
    result = perplexity.perplexity(
        model,
        arguments.source,
        split=arguments.split,
        window=arguments.window,
        stride=arguments.stride,
        max_tokens=arguments.max_tokens,
        limits=limits(arguments, model),
        progress=lambda what, total: log.progress(what, total, unit="window"),
    )
    summary = {"model": arguments.model, **model.about, **result, "definitions": perplexity.DEFINITIONS}
    text = (
        f"{arguments.model} on {arguments.source} ({arguments.split}): {result['tokens']} tokens, "
        f"{result['bytes']} bytes\n"
        f"perplexity per token  {result['perplexity']:.4f}\n"
        f"perplexity per byte   {result['byte_perplexity']:.4f}\n"
        f"bits per byte         {result['bits_per_byte']:.4f}"
    )
    finish(arguments, log, summary, text)


# --- rollouts --------------------------------------------------------------------------------------------------------


def _rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    text_arguments(parser)
    parser.add_argument("--prompts", type=int, default=256, metavar="N", help="continuations (default: 256)")
    parser.add_argument("--prompt-length", type=int, metavar="N", help="tokens (default: 480, or what the model holds)")
    parser.add_argument("--length", type=int, default=32, metavar="K", help="tokens to generate (default: 32)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="continuations to show (default: 3)")
    parser.add_argument("--paper", choices=("controlled", "none"), default="controlled", help="the paper's rows beside")
    batch_argument(parser)
    output_arguments(parser)


def _rollouts(arguments: argparse.Namespace) -> None:
    from spikeopd.evaluation import paper, rollouts

    size = batch_size(arguments)
    log = open_log(arguments)
    model = load(arguments)
    result = rollouts.rollouts(
        model,
        arguments.source,
        split=arguments.split,
        prompts=arguments.prompts,
        prompt_length=arguments.prompt_length,
        length=arguments.length,
        temperature=arguments.temperature,
        seed=arguments.seed,
        samples=arguments.samples,
        max_tokens=arguments.max_tokens,
        batch_size=size,
        progress=lambda what, total: log.progress(what, total, unit="sequence"),
    )
    rows = paper.rows(arguments.paper, {})
    summary = {
        "model": arguments.model,
        **model.about,
        **result,
        "definitions": rollouts.DEFINITIONS,
        "paper": {"rows": [row.to_dict() for row in rows]},
    }
    samples = [
        f"\n{number}. … {' '.join(sample['prompt'].split())[-100:]} ⇒ {' '.join(sample['continuation'].split())}"
        for number, sample in enumerate(result["samples"], start=1)
    ]
    finish(arguments, log, summary, rollouts.table(arguments.model, result, rows) + "".join(samples))


# --- diagnose --------------------------------------------------------------------------------------------------------


def _diagnose(arguments: argparse.Namespace) -> None:
    log = open_log(arguments)
    finish(arguments, log, *diagnose.measure(arguments, log))


COMMANDS = {
    "zeroshot": Command(
        "Accuracy on the paper's eight zero-shot benchmarks, through lm-evaluation-harness.",
        (
            "zeroshot tiny --tasks piqa --limit 20",
            "zeroshot tiny --tasks arc_easy,openbookqa --limit 20 --metric acc_norm --json",
        ),
        _zeroshot_arguments,
        _zeroshot,
    ),
    "perplexity": Command(
        "Perplexity of any text source, per token and per byte, with a sliding window.",
        (
            "perplexity tiny --source python-docs --max-tokens 2000",
            "perplexity tiny --split train --max-tokens 2000 --window 128 --stride 64 --json",
        ),
        _perplexity_arguments,
        _perplexity,
    ),
    "rollouts": Command(
        "Adjacent repetition, distinct 4-grams and longest run of a model's own continuations, with samples.",
        (
            "rollouts tiny --prompts 8 --prompt-length 64",
            "rollouts tiny --prompts 4 --prompt-length 32 --length 16 --temperature 0 --json",
        ),
        _rollouts_arguments,
        _rollouts,
    ),
    "diagnose": Command(diagnose.HELP, diagnose.EXAMPLES, diagnose.arguments, _diagnose),
}


if __name__ == "__main__":
    sys.exit(main())
