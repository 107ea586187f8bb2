"""spikeopd-train: parse, load the configuration, call the stages. torch is imported inside functions only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spikeopd.errors import ConfigError, run_command

TRAIN_EPILOG = """examples:
  spikeopd-train --config tiny --output runs/tiny
  spikeopd-train --config tiny --output runs/quick stage1.updates=20 stage2.updates=5 --stage both --json

other commands:
  spikeopd-train teacher --output DIR      train a small OPT teacher (how the shipped one was made)
  spikeopd-train tokenizer --output DIR    train a byte-level BPE tokenizer
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
    parser.add_argument("--config", default="tiny", metavar="RECIPE", help="recipe name or YAML path (default: tiny)")
    parser.add_argument("--output", metavar="DIR", help="run folder to create, or to continue with --resume")
    parser.add_argument("--stage", choices=("1", "2", "both"), help="stages to run (default: the recipe's)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output, bit for bit on CPU")
    parser.add_argument("--dry-run", action="store_true", help="random weights and tokens, one small update, sizes")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--explain", nargs="?", const="", metavar="KEY", help="explain an option, a section, or all")
    parser.add_argument("--list", choices=("recipes", "methods", "losses", "neurons"), help="list what there is")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    arguments = parser.parse_intermixed_args(words)
    if arguments.list:
        print("\n".join(_names(arguments.list)))
        return 0
    from spikeopd.config import explain, load_config

    if arguments.explain is not None:
        print(explain(arguments.explain or None))
        return 0
    overrides = [*arguments.overrides, *([f"train.stage={arguments.stage}"] if arguments.stage else [])]
    config = load_config(arguments.config, overrides)
    if arguments.dry_run:
        summary = _quietly().dry_run(config)
    else:
        if not arguments.output:
            raise ConfigError("--output DIR is needed: the folder this run is written to")
        summary = _quietly().train(config, Path(arguments.output), resume=arguments.resume, quiet=arguments.quiet)
    if summary is not None:
        print(json.dumps(summary, indent=None if arguments.json else 2, ensure_ascii=False) if arguments.json
              else _readable(summary))  # fmt: skip
    return 0


def _quietly() -> Any:
    """The training entry points, with transformers' own progress bars off."""
    from spikeopd.errors import BackendMissing

    try:
        from transformers.utils import logging

        from spikeopd import training
    except ImportError as error:
        raise BackendMissing(
            f"training needs torch and transformers ({error}); install them with: pip install 'spikeopd[train]'"
        ) from error
    logging.disable_progress_bar()
    return training


def _names(what: str) -> list[str]:
    if what == "recipes":
        from spikeopd.config import recipe_names

        return recipe_names()
    if what == "methods":
        from spikeopd.config import METHODS

        return list(METHODS)
    if what == "losses":
        from spikeopd.losses import DIVERGENCES

        return list(DIVERGENCES)
    from spikeopd.models.neurons import NEURONS

    return list(NEURONS)


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
    parser.add_argument(
        "--rule-runs", type=float, default=0.0, metavar="SHARE",
        help="share of rows that end in a run of - = * or . (the constructed stress-test teacher)",
    )  # fmt: skip
    parser.add_argument("--start", metavar="DIR", help="continue from this teacher instead of random weights")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    summary = _quietly().train_teacher(arguments)
    print(json.dumps(summary) if arguments.json else _readable(summary))
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
    from spikeopd.text.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(arguments.source, arguments.vocab_size, arguments.output)
    print(f"{tokenizer.vocab_size} entries in {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
