"""spikeopd-train: parse, call the Python API, print. torch is imported inside functions only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import spikeopd
from spikeopd.arguments import add_version
from spikeopd.errors import ConfigError, run_command

TRAIN_EPILOG = """examples:
  spikeopd-train --config tiny --output runs/tiny
  spikeopd-train --config tiny --output runs/quick stage1.updates=20 stage2.updates=5 --stage both --json

other commands:
  spikeopd-train teacher --output DIR      train a small OPT teacher (how the shipped one was made)
  spikeopd-train tokenizer --output DIR    train a byte-level BPE tokenizer
  spikeopd-train --suggest TEACHER         a recipe for a teacher that no recipe knows
  spikeopd-train --explain stage2.ref_coef what an option means and where its value comes from
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("spikeopd-train", _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["teacher"]:
        return _teacher(words[1:])
    if words[:1] == ["tokenizer"]:
        return _tokenizer(words[1:])
    return _train(words)


def _parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _train(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train",
        "Distil a frozen teacher into a spiking student (Stage 1, SpAD) and adapt it on its own generations "
        "(Stage 2, SpikeOPD).",
        TRAIN_EPILOG,
    )
    add_version(parser)
    parser.add_argument("--config", default="tiny", metavar="RECIPE", help="recipe name or YAML path (default: tiny)")
    parser.add_argument("--output", metavar="DIR", help="run folder to create, or to continue with --resume")
    parser.add_argument("--stage", choices=("1", "2", "both"), help="stages to run (default: the recipe's)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output, bit for bit on CPU")
    parser.add_argument("--dry-run", action="store_true", help="random weights and tokens, one small update, sizes")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--explain", nargs="?", const="", metavar="KEY", help="explain an option, a section, or all")
    parser.add_argument(
        "--suggest", metavar="TEACHER", help="write a recipe for this teacher (to --output FILE.yaml, else printed)"
    )
    parser.add_argument("--list", choices=("recipes", "methods", "losses", "neurons"), help="list what there is")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    arguments = parser.parse_intermixed_args(words)
    if arguments.list:
        print("\n".join(_names(arguments.list)))
        return 0
    if arguments.explain is not None:
        from spikeopd.config import explain

        print(explain(arguments.explain or None))
        return 0
    if arguments.suggest is not None:
        return _suggest(arguments.suggest, arguments.output, arguments.overrides)
    overrides = [*arguments.overrides, *([f"train.stage={arguments.stage}"] if arguments.stage else [])]
    config = spikeopd.load_config(arguments.config, overrides)  # first: its mistakes need not wait for torch
    if arguments.dry_run:
        _show(spikeopd.dry_run(config), arguments.json)
        return 0
    if not arguments.output:
        raise ConfigError("--output DIR is needed: the folder this run is written to")
    run = spikeopd.train(config, arguments.output, resume=arguments.resume, quiet=arguments.quiet)
    if run.main:
        _show(run.summary, arguments.json)
    return 0


def _suggest(teacher: str, output: str | None, overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(f"--suggest writes a recipe; give {overrides[0]} when you train with it")
    if output:
        from spikeopd.errors import check_writable

        check_writable(output, "--output", in_folder=True)
    text: str = spikeopd.suggest(teacher)
    if output is None:
        print(text, end="")
        return 0
    from spikeopd.files import write_text

    write_text(output, text)
    print(f"recipe in {output}; train with it: spikeopd-train --config {output} --output DIR data.source=SOURCE")
    return 0


def _names(what: str) -> list[str]:
    from spikeopd import registry
    from spikeopd.config import recipe_names

    return {
        "recipes": recipe_names(),
        "methods": list(registry.METHODS),
        "losses": list(registry.DIVERGENCES),
        "neurons": list(registry.NEURONS),
    }[what]


def _show(summary: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(summary, ensure_ascii=False) if as_json else _readable(summary))


def _readable(summary: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in summary.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", _readable(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:<24}{value:.4g}" if isinstance(value, float) else f"{indent}{key:<24}{value}")
    return "\n".join(lines)


def _teacher(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train teacher",
        "Train a small OPT teacher on text. The defaults re-create the shipped one.",
        "examples:\n  spikeopd-train teacher --output runs/teacher\n"
        "  spikeopd-train teacher --output runs/small --updates 50 --hidden-size 32 --layers 1",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the teacher")
    parser.add_argument("--source", default="python-docs", help="text source (default: python-docs)")
    parser.add_argument("--tokenizer", default="tiny", help="tokenizer folder (default: the shipped one)")
    parser.add_argument("--updates", type=int, help="optimizer steps")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    runs = "share of rows that end in a run of - = * or . (the constructed stress-test teacher)"
    parser.add_argument("--rule-runs", type=float, default=0.0, metavar="SHARE", help=runs)
    parser.add_argument("--start", metavar="DIR", help="continue from this teacher instead of random weights")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    named = {name: value for name, value in vars(arguments).items() if name not in ("output", "json")}
    _show(spikeopd.train_teacher(arguments.output, **named), arguments.json)
    return 0


def _tokenizer(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train tokenizer",
        "Train a byte-level BPE tokenizer. The defaults re-create the shipped one (on Python 3.11).",
        "examples:\n  spikeopd-train tokenizer --output runs/tokenizer\n"
        "  spikeopd-train tokenizer --output runs/small --vocab-size 512",
    )
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--source", default="python-docs")
    parser.add_argument("--vocab-size", type=int, default=1024)
    arguments = parser.parse_args(words)
    tokenizer = spikeopd.train_tokenizer(arguments.source, arguments.vocab_size, arguments.output)
    print(f"{tokenizer.vocab_size} entries in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
