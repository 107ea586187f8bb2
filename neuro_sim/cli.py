"""spikeopd-run-lava: decode text with an exported bundle on the event engine, on Lava, or with the dense oracle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from neuro_sim.backends import BACKENDS, Running, pick_backend
from spikeopd.arguments import add_version
from spikeopd.errors import (
    BackendMissing,
    ConfigError,
    InputError,
    cannot_write,
    check_writable,
    run_command,
    say,
    short,
)

if TYPE_CHECKING:
    from neuro_sim.api import Generation
    from neuro_sim.text import Text

PROG = "spikeopd-run-lava"
PRECISIONS = ("int8", "int4", "float32")
PROMPT_LIMIT = 64 << 20  # characters
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_new_tokens")
OLD_PRECISIONS = {"fixed": "int8", "float": "float32"}  # accepted for a release
EXAMPLES = f"""\
examples:
  {PROG} bundle --prompt "The cat" --max-new-tokens 20
  {PROG} bundle --backend event --prompt "One" --prompt "Two" --temperature 0.8 --seed 1 --output run.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Decode text with an exported spiking model and count every event. Text goes to stdout, "
        "speed and events to stderr, everything `spikeopd-energy` needs to --output.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by spikeopd-export")
    parser.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        help="; ".join(f"{name}: {backend.about}" for name, backend in BACKENDS.items())
        + " (default: lava for a small model where it is installed, else event)",
    )
    parser.add_argument(
        "--precision",
        choices=(*PRECISIONS, *OLD_PRECISIONS),
        metavar=f"{{{','.join(PRECISIONS)}}}",
        help="int8, int4: integers, spike for spike the same on every backend; float32: for float32 bundles, and on "
        "Lava for any (default: what the bundle holds)",
    )
    add_version(parser)
    text = parser.add_argument_group("prompts", "several may be given; without any, stdin is one prompt")
    # One list for all three, so that the results come in the order of the command line.
    prompt: dict[str, Any] = {"action": _AddPrompt, "dest": "prompts", "default": []}
    text.add_argument("--prompt", metavar="TEXT", **prompt)
    text.add_argument("--prompt-file", metavar="FILE", help="a whole file is one prompt; - is stdin", **prompt)
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help='every line is a prompt, or an object {"prompt": "..."} (JSONL); - is stdin',
        **prompt | {"dest": "prompts"},
    )
    text.add_argument("--prompt-tokens", metavar="IDS", help="token numbers: 2,100,4", **prompt)
    text.add_argument("--interactive", action="store_true", help="continue a text in turns, line by line")
    choice = parser.add_argument_group(
        "generation", "without any of these: the bundle's generation config, else temperature 0.8 and top-p 0.95"
    )
    choice.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    choice.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    choice.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest; 0 keeps all")
    choice.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest that make up this share; 1: all")
    choice.add_argument("--min-p", type=float, metavar="P", help="drop what is less likely than P times the likeliest")
    choice.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: what was said is less likely")
    choice.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    choice.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    choice.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="RUN.json", help="write tokens, counts and timing")
    output.add_argument("--trace", metavar="SITES", help="record spikes: all, embed, 0.q, *.h (comma list)")
    output.add_argument(
        "--trace-file",
        type=Path,
        metavar="FILE.npz",
        help="where to write them, and a picture beside (default: RUN.trace.npz beside RUN.json)",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--stats", action="store_true", help="time by phase, events and energy by part, on stderr")
    output.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    run = parser.add_argument_group("running")
    run.add_argument("--threads", type=int, metavar="N", help="of the event engine (default: all cores)")
    run.add_argument(
        "--verify",
        action="store_true",
        help="decode a second time on another backend and compare spikes, tokens and counts",
    )
    run.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long Lava may take for one token, and to build each of its processes (default: 60)",
    )
    return parser


class _AddPrompt(argparse.Action):
    """Collects (option, value) pairs."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (option_string, values)])


def _main(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    from neuro_sim.api import Bundle, generate, other_backend
    from neuro_sim.decode import Sampling, check_prompts
    from neuro_sim.display import Display, columns, put, stats_lines, status_line
    from neuro_sim.raster import parse_sites
    from neuro_sim.runfile import saturations
    from spikeopd.sampling import asked_for

    given = {name: getattr(args, name) for name in SAMPLING_OPTIONS if getattr(args, name) is not None}
    Sampling(**given)  # refuses what makes no sense, before anything is read
    precision: Any = OLD_PRECISIONS.get(args.precision, args.precision)
    running = Running(args.threads, precision, args.timeout)
    if args.trace_file and not args.trace:
        raise ConfigError("--trace-file needs --trace SITES, for example --trace all")
    _check_outputs(args)
    _check_interactive(args)
    bundle = Bundle(args.bundle)
    sampling = asked_for(given, bundle.sampling)
    options: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING_OPTIONS}
    wanted = parse_sites(args.trace, bundle.shape) if args.trace else frozenset()
    prompts = []
    if not args.interactive:
        prompts = _read_prompts(args, bundle.text)
        check_prompts(bundle.shape, prompts)
    backend, reason = pick_backend(bundle.shape, bundle.precision, args.backend, precision)
    if args.verify:
        other_backend(backend, precision or bundle.precision)  # refuses what cannot be compared
    if not args.quiet:
        if args.precision in OLD_PRECISIONS:
            say(f"{PROG}: --precision {args.precision} is now called {precision}, as everywhere")
        if reason:
            say(f"{PROG}: backend {backend}: {reason}")
    must_finish = bool(args.output or wanted or args.verify)
    options |= {"stop": args.stop, "ignore_eos": args.ignore_eos}
    if not args.quiet and sys.stderr.isatty():
        say(f"loading {bundle.folder} ...")
    with bundle.load(backend, running) as model:
        if args.interactive:
            from neuro_sim.interactive import talk

            talk(model, options, args.quiet)
            return 0
        seen = {"quiet": args.quiet, "stream": not args.json, "must_finish": must_finish, "stop": args.stop}
        with Display(bundle.text, len(prompts), **seen) as display:
            sites = "all" if args.verify else args.trace
            done = generate(model, prompts, **options, trace=sites, notify=display.update)
        if not args.json:
            display.finish(done.result)
        trace_failed = _write_traces(args, wanted, done) if wanted else None
        if args.output:
            try:
                done.save(args.output, **({} if trace_failed or not wanted else _name_trace(args)))
            except OSError as error:
                raise cannot_write(args.output, "--output", error) from error
        if trace_failed:
            raise trace_failed
        verified = done.verify() if args.verify and done.complete else None
    if args.json:
        put(_json_line(done, verified), must_finish)
    if not args.quiet:
        for line in stats_lines(done.result, model.load_seconds) if args.stats else ():
            say(line)
        say(status_line(done.result, columns()))
        for number, sequence in enumerate(done.sequences, start=1):
            if sequence.stopped == "context":
                made, limit = len(sequence.generated_tokens), bundle.shape.max_position_embeddings
                say(f"{PROG}: prompt {number}: {made} new tokens filled its context of {limit}")
        hits = saturations(done.activity)
        if hits:
            say(f"{PROG}: warning: {hits} membranes hit the 24-bit limit; the model is scaled too high")
        if verified:
            say(f"verified: {verified}")
    if not done.complete:
        kept = f"; what was done is in {args.output}" if args.output else ""
        say(f"{PROG}: interrupted after {done.activity.tokens} tokens{kept}")
        return 130
    if args.verify and verified is None:
        kept = f"; the run itself is complete in {args.output}" if args.output else ""
        say(f"{PROG}: verification interrupted, nothing is proven{kept}")
        return 130
    return 0


def _check_interactive(args: argparse.Namespace) -> None:
    names = ("prompts", "output", "trace", "json", "verify", "stats")
    if args.interactive and (odd := [name for name in names if getattr(args, name)]):
        raise ConfigError(f"--interactive writes nothing but text; drop --{odd[0].replace('prompts', 'prompt')}")


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, or would overwrite each other, before anything is computed."""
    if args.output:
        check_writable(args.output, "--output", in_folder=True)
    if not args.trace:
        return
    if args.trace_file is None:
        output = args.output or Path("run.json")
        args.trace_file = output.with_name(f"{output.stem}.trace.npz")
    if args.trace_file.suffix != ".npz":
        raise ConfigError(f"--trace-file {args.trace_file}: the name must end in .npz")
    for file in (args.trace_file, _picture(args.trace_file)):
        check_writable(file, "--trace-file", in_folder=True)
        if args.output and file.resolve() == args.output.resolve():
            raise ConfigError(f"--output {args.output} is where the trace or its picture goes; give another name")


def _picture(trace_file: Path) -> Path:
    return trace_file.with_suffix(".png")


def _read_prompts(args: argparse.Namespace, text: Text) -> list[list[int]]:
    given = args.prompts
    if not given:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: use --prompt TEXT, --prompt-file FILE, or pipe text into stdin")
        given = [("--prompt-file", "-")]
    prompts = []
    for option, value in given:
        if option == "--prompt-tokens":
            prompts.append(_token_numbers(value))
        else:
            found = _prompt_text(option, value)
            prompts += map(text.encode, _lines(found, value) if option == "--prompts" else [found])
    return prompts


def _lines(text: str, file: str) -> list[str]:
    """The prompts of a file with one on each line, plain or as objects; empty lines are none."""
    from spikeopd.files import parse_json

    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        prompt: Any = line
        if line.startswith("{"):
            try:
                prompt = parse_json(line).get("prompt")
            except ValueError as error:
                reason = short(error)
                raise InputError(f"--prompts {file}: line {number} begins like JSON and is none ({reason})") from None
            if not isinstance(prompt, str):
                raise InputError(f'--prompts {file}: line {number} has no text under "prompt"')
        if line.strip():
            found.append(prompt)
    if not found:
        raise InputError(f"--prompts {file}: no line holds a prompt")
    return found


def _token_numbers(given: str) -> list[int]:
    try:
        return [int(part) for group in given.split(",") for part in (group.split() or [""])]
    except ValueError:
        raise ConfigError(f"--prompt-tokens {given!r}: give whole numbers, for example 2,100,4") from None


def _prompt_text(option: str, value: str) -> str:
    """The text of --prompt or --prompt-file. Bytes that are no text came through as surrogates and are refused."""
    where = "--prompt" if option == "--prompt" else "stdin" if value == "-" else f"{option} {value}"
    try:
        found = value if option == "--prompt" else _read_stdin() if value == "-" else _read_file(value)
        found.encode("utf-8")
    except UnicodeError as error:
        raise InputError(f"{where}: the prompt is not UTF-8 text ({error})") from error
    except (OSError, ValueError) as error:  # no such file; a name that no file can have
        raise InputError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
    return found


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("stdin is closed; there is no prompt to read")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # a prompt is UTF-8, whatever the terminal speaks
    return _bounded(sys.stdin)


def _read_file(name: str) -> str:
    with open(name, encoding="utf-8") as file:
        return _bounded(file)


def _bounded(file: TextIO) -> str:
    """A prompt may come through a pipe, whose length nobody knows before."""
    text = file.read(PROMPT_LIMIT + 1)
    if len(text) > PROMPT_LIMIT:
        raise InputError(f"{file.name}: more than {PROMPT_LIMIT} characters are no prompt")
    return text


def _write_traces(args: argparse.Namespace, wanted: frozenset[tuple[int, str]], done: Generation) -> InputError | None:
    """Write spikes and picture. What went wrong comes back, so that the run itself is written first."""
    from neuro_sim.raster import SelectedTrace, plot_raster
    from spikeopd.contracts import save_trace

    chosen = []
    for trace in done.traces:
        sites = {key: spikes for key, spikes in trace.sites.items() if key in wanted}
        chosen.append(SelectedTrace(sites=sites, tokens=trace.tokens, wanted=wanted))
    bundle = done.model.bundle
    heads = bundle.shape.num_attention_heads
    try:
        save_trace(args.trace_file, chosen, heads)
    except OSError as error:
        return cannot_write(args.trace_file, "--trace-file", error)
    try:
        labels = [bundle.text.label(token) for token in chosen[0].tokens]
        plot_raster(_picture(args.trace_file), chosen[0], heads, labels)
    except (BackendMissing, InputError, OSError) as error:  # the spikes are written; the picture is extra
        say(f"{PROG}: no raster plot: {error}")
    return None


def _name_trace(args: argparse.Namespace) -> dict[str, str]:
    """The trace as run.json names it: relative to its own folder, with the hash that tells it from a later one."""
    from spikeopd.files import sha256

    try:
        name = args.trace_file.resolve().relative_to(args.output.resolve().parent).as_posix()
    except ValueError:
        say(f"{PROG}: {args.trace_file} is not below the folder of {args.output}, which therefore does not name it")
        return {}
    return {"trace": name, "trace_sha256": sha256(args.trace_file)}


def _json_line(done: Generation, verified: str | None) -> str:
    import json

    sequences = [
        {
            "prompt_tokens": sequence.prompt_tokens,
            "generated_tokens": sequence.generated_tokens,
            "text": text,
            "stopped": sequence.stopped,
        }
        for sequence, text in zip(done.sequences, done.texts, strict=True)
    ]
    data = {"backend": done.model.backend, "precision": done.model.precision, "complete": done.complete}
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")  # a terminal that would lose letters
    data |= {"verified": verified, **done.summary(), "sequences": sequences}
    return json.dumps(data, ensure_ascii=plain) + "\n"


if __name__ == "__main__":
    sys.exit(main())
