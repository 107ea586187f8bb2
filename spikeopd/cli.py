"""spikeopd-train: parse, call the Python API, print. torch is imported inside functions only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spikeopd
from spikeopd.arguments import add_version
from spikeopd.errors import ConfigError, run_command, say, say_loading
from spikeopd.paths import check_file, check_model, check_paths, check_source

TRAIN_EPILOG = """examples:
  spikeopd-train --config tiny --output runs/tiny
  spikeopd-train --config tiny --output runs/quick stage1.updates=20 stage2.updates=5 --stage both --json

other commands:
  spikeopd-train prepare --config RECIPE   tokenise a recipe's text into the cache, before any GPU waits for it
  spikeopd-train teacher --output DIR      train a small OPT teacher (how the shipped one was made)
  spikeopd-train tokenizer --output DIR    train a byte-level BPE tokenizer
  spikeopd-train --plan gpus=8,memory=24   memory per GPU and time of a recipe, before anything is loaded
  spikeopd-train corpus --teacher DIR --output DIR      sample text from a teacher
  spikeopd-train vocabulary --teacher DIR --source SOURCE --output DIR    cut a teacher to the tokens a text uses
  spikeopd-train llama2c FILE --output DIR llama2.c's model file to a Hugging Face directory
  spikeopd-train share STUDENT             put a student on the hub, or its code beside it
  spikeopd-train --suggest TEACHER         a recipe for a teacher that no recipe knows
  spikeopd-train --explain stage2.ref_coef what an option means and where its value comes from
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("spikeopd-train", _main, argv)


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "prepare": _prepare,
        "teacher": _teacher,
        "tokenizer": _tokenizer,
        "corpus": _corpus,
        "vocabulary": _vocabulary,
        "llama2c": _llama2c,
        "share": _share,
    }
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
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
    parser.add_argument("--dry-run", action="store_true", help="one update of a small sister on random tokens; sizes")
    parser.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="MACHINE",
        help="memory per GPU, communication and speed, calculated; MACHINE: gpus=8,memory=24,tflops=70,link=12,shard=1",
    )
    _add_sharing(parser)
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
        print(_explain(arguments.explain or None, arguments.config if "--config" in words else None))
        return 0
    if arguments.suggest is not None:
        return _suggest(arguments.suggest, arguments.output, arguments.overrides)
    overrides = [*arguments.overrides, *([f"train.stage={arguments.stage}"] if arguments.stage else [])]
    config = spikeopd.load_config(arguments.config, overrides)  # first: its mistakes need not wait for torch
    if arguments.plan is not None:
        found = spikeopd.plan(config, arguments.plan)
        _show(found, arguments.json)
        return 0 if found["fits"] else 1
    if arguments.dry_run:
        say_loading(arguments.quiet)
        _show(spikeopd.dry_run(config, None if arguments.quiet else _step), arguments.json)
        return 0
    if not arguments.output:
        raise ConfigError("--output DIR is needed: the folder this run is written to")
    check_paths(config, Path(arguments.output), arguments.resume)  # these neither
    if arguments.push_to_hub:
        from spikeopd.hub import check_hub

        check_hub(arguments.push_to_hub)  # nor a name that would be refused after hours
    say_loading(arguments.quiet)
    run = spikeopd.train(config, arguments.output, resume=arguments.resume, quiet=arguments.quiet)
    if run.main:
        _show({**run.summary, **_shared(run.student, arguments)}, arguments.json)
    return 0


def _step(line: str) -> None:
    say(f"dry run: {line} ...")


def _add_sharing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help="write the student's code beside it, for processes that have torch and transformers alone",
    )
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help="upload the student to the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="a repository made by --push-to-hub is not public")


def _shared(student: str | Path, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if arguments.remote_code:
        found["remote_code"] = str(spikeopd.add_remote_code(student))
    if arguments.push_to_hub:
        say(f"uploading {student} to {arguments.push_to_hub}")
        found["hub"] = spikeopd.push_to_hub(student, arguments.push_to_hub, private=arguments.private)
    return found


def _share(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train share",
        "Put a trained student on the Hugging Face hub (log in before: hf auth login), or its code beside it, so that "
        "transformers loads it without this package (trust_remote_code=True, which this package never sets).",
        "examples:\n  spikeopd-train share runs/tiny --remote-code\n"
        "  spikeopd-train share runs/tiny --push-to-hub me/tiny-spikes --private",
    )
    parser.add_argument("student", metavar="STUDENT", help="run folder or folder of a student")
    _add_sharing(parser)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    if not (arguments.remote_code or arguments.push_to_hub):
        raise ConfigError("nothing to do: give --remote-code, --push-to-hub OWNER/NAME, or both")
    if arguments.push_to_hub:
        from spikeopd.hub import check_hub

        check_hub(arguments.push_to_hub)
    _show(_shared(arguments.student, arguments), arguments.json)
    return 0


def _explain(key: str | None, recipe: str | None) -> str:
    """Options with their defaults, and behind each the value of a recipe that changes it."""
    from spikeopd.config import config_to_dict, explain

    text = explain(key)
    if recipe is None:
        return text
    values = config_to_dict(spikeopd.load_config(recipe))
    lines = []
    for line in text.splitlines():
        name, equals, default = line.partition(" = ")
        section, dot, option = name.partition(".")
        if equals and dot and option in values.get(section, {}):
            value = values[section][option]
            if not default.startswith(f"{value}:"):
                line += f" ({Path(recipe).stem}: {value})"
        lines.append(line)
    return "\n".join(lines)


def _suggest(teacher: str, output: str | None, overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(f"--suggest writes a recipe; give {overrides[0]} when you train with it")
    if output:
        from spikeopd.errors import check_writable

        check_writable(output, "--output", in_folder=True)
    check_model(teacher, "--suggest")
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


# How people read what --json calls by these names.
WORDS = {
    "teacher_kl": "KL to the teacher",
    "self_kl": "KL on own prefixes",
    "adj": "adjacent repetition",
    "dist4": "distinct 4-grams",
    "run": "longest run",
    "onset": "collapse at update",
    "last_rollouts": "last rollouts",
    "from_teacher": "from the teacher",
    "remote_code": "code for transformers",
    "block_parameters": "parameters of blocks",
    "training_gib": "GiB to train",
    "after_one_update": "after one update",
    "tried_with": "tried with",
    "dry_run": "dry run",
}


def _readable(summary: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in summary.items():
        name = WORDS.get(key, key)
        if isinstance(value, dict):
            lines += [f"{indent}{name}", _readable(value, indent + "  ")]
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else "none" if value is None else value
        lines.append(f"{indent}{name:<23} {shown}")
    return "\n".join(lines)


def _prepare(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train prepare",
        "Tokenise the text of a recipe into the token cache: training, prompts, validation. Killed and started again "
        "it goes on; a run then begins at once.",
        "examples:\n  spikeopd-train prepare --config opt-125m\n"
        "  spikeopd-train prepare --config tiny data.cache_dir=/shared/tokens",
    )
    parser.add_argument("--config", default="tiny", metavar="RECIPE", help="recipe name or YAML path (default: tiny)")
    parser.add_argument("--json", action="store_true", help="print what was prepared as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    arguments = parser.parse_intermixed_args(words)
    config = spikeopd.load_config(arguments.config, arguments.overrides)
    _show(spikeopd.prepare_tokens(config, quiet=arguments.quiet), arguments.json)
    return 0


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


def _corpus(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train corpus",
        "Sample documents from a teacher's full distribution, framed by its own special tokens. A stopped call goes on "
        "where it was when it is repeated; the same seed gives the same documents.",
        "examples:\n  spikeopd-train corpus --teacher tiny --output runs/corpus --documents 64 --max-tokens 64\n"
        "  spikeopd-train corpus --teacher stories15M --output runs/stories --documents 4000",
    )
    parser.add_argument("--teacher", required=True, metavar="DIR", help="teacher: folder, hub name or .gguf")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the corpus (corpus.jsonl)")
    parser.add_argument("--documents", type=int, default=1000, metavar="N", help="documents (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="documents at once (default: 128)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of a document (default: what the teacher reads)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1, the teacher itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32",
        help="of the teacher; bf16 is faster and rounds its distribution (docs/stories.md)",
    )  # fmt: skip
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer (default: the teacher's)")
    parser.add_argument("--framing", choices=("auto", "bos", "eos", "both"), default="auto", help="see docs/data.md")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(words)
    named = {name: value for name, value in vars(arguments).items() if name != "json"}
    check_model(arguments.teacher, "--teacher")
    _show(spikeopd.sample_corpus(**named), arguments.json)
    return 0


def _vocabulary(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train vocabulary",
        "Cut a teacher to the tokens that a text uses: tokenizer, token table and head. The text is split as before; "
        "other text is spelled in smaller pieces, down to bytes.",
        "examples:\n  spikeopd-train vocabulary --teacher stories15M --source jsonl:corpus.jsonl --output runs/cut\n"
        "  spikeopd-train vocabulary --teacher tiny --source python-docs --output runs/cut --min-count 20",
    )
    parser.add_argument("--teacher", required=True, metavar="DIR", help="teacher: folder or hub name")
    parser.add_argument("--source", required=True, help="text whose training part is counted (docs/data.md)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the cut teacher")
    parser.add_argument("--like", metavar="BUNDLE", help="keep the tokens of this bundle or tokenizer instead")
    parser.add_argument("--min-count", type=int, default=1, metavar="N", help="keep tokens seen so often (default: 1)")
    parser.add_argument(
        "--multiple", type=int, default=64, metavar="N", help="fill rows up to a multiple (default: 64)"
    )
    parser.add_argument("--documents", type=int, default=64, metavar="N", help="validation documents that both score")
    parser.add_argument("--framing", choices=("auto", "bos", "eos", "both"), default="auto", help="see docs/data.md")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    named = {name: value for name, value in vars(arguments).items() if name != "json"}
    check_model(arguments.teacher, "--teacher")
    check_source(arguments.source)
    _show(spikeopd.cut_vocabulary(**named), arguments.json)
    return 0


def _llama2c(words: list[str]) -> int:
    parser = _parser(
        "spikeopd-train llama2c",
        "Convert a model file of llama2.c (version 0, float32) to a Hugging Face directory.",
        "examples:\n  spikeopd-train llama2c stories15M.bin --tokenizer tokenizer.bin --output stories15M\n"
        "  spikeopd-train llama2c package/src/llama2.data --output stories15M",
    )
    parser.add_argument("model", metavar="FILE", help="model file; the tokenizer may follow its weights")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.bin, if it is a file of its own")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    for file in filter(None, (arguments.model, arguments.tokenizer)):
        check_file(file, "llama2c:")
    _show(spikeopd.convert_llama2c(arguments.model, arguments.output, arguments.tokenizer), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
