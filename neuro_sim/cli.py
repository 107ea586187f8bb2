"""spikeopd-run-lava: decode text with an exported bundle on the event engine, on Lava, or with the dense oracle."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.errors import (
    BackendMissing,
    ConfigError,
    InputError,
    cannot_write,
    check_writable,
    run_command,
    say,
)

if TYPE_CHECKING:
    from neuro_sim.decode import Decoder, Result, Sampling
    from neuro_sim.display import Text
    from spikeopd.contracts import SpikeModel, SpikeTrace

PROG = "spikeopd-run-lava"
LAVA_SMALL = 4_000_000  # int8 weights up to which Lava is the default where it is installed
MAX_THREADS = 256
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
    parser.add_argument("--backend", choices=("event", "lava", "dense"),
                        help="event: compiled and fast; lava: Lava processes; dense: the slow oracle "
                        "(default: lava for a small model where it is installed, else event)")  # fmt: skip
    parser.add_argument("--precision", choices=("fixed", "float"),
                        help="fixed: integers, spike for spike the same on every backend; float: for float32 bundles, "
                        "and on Lava for any (default: what the bundle holds)")  # fmt: skip
    text = parser.add_argument_group("prompts", "several may be given; without any, stdin is read")
    # One list for all three, so that the results come in the order of the command line.
    prompt: dict[str, Any] = {"action": _AddPrompt, "dest": "prompts", "default": []}
    text.add_argument("--prompt", metavar="TEXT", **prompt)
    text.add_argument("--prompt-file", metavar="FILE", help="one prompt per file, - is stdin", **prompt)
    text.add_argument("--prompt-tokens", metavar="IDS", help="token numbers: 2,100,4", **prompt)
    choice = parser.add_argument_group("generation")
    choice.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    choice.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    choice.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default: 0)")
    choice.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (default: 1)")
    choice.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    choice.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="RUN.json", help="write tokens, counts and timing")
    output.add_argument("--trace", metavar="SITES", help="record spikes: all, embed, 0.q, *.h (comma list)")
    output.add_argument("--trace-file", type=Path, metavar="FILE.npz",
                        help="where to write them, and a picture beside (default: RUN.trace.npz beside "
                        "RUN.json)")  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    run = parser.add_argument_group("running")
    run.add_argument("--threads", type=int, metavar="N", help="of the event engine (default: all cores)")
    run.add_argument("--verify", action="store_true",
                     help="decode a second time on another backend and compare spikes, tokens and counts")  # fmt: skip
    run.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
                     help="how long Lava may take for one token, and to build each of its processes "
                     "(default: 60)")  # fmt: skip
    return parser


class _AddPrompt(argparse.Action):
    """Collects (option, value) pairs."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (option_string, values)])


def _main(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    from neuro_sim.decode import Sampling, check_prompts, generate
    from neuro_sim.display import Display, put, status_line
    from neuro_sim.raster import parse_sites
    from neuro_sim.runfile import build_run, bundle_identity, saturations
    from spikeopd.contracts import write_run
    from spikeopd.contracts.bundle import load_bundle, manifest_shape, read_manifest

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, args.max_new_tokens)
    if args.threads is not None and not 1 <= args.threads <= MAX_THREADS:
        raise ConfigError(f"--threads must be at least 1 and at most {MAX_THREADS}, got {args.threads}")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be more than 0 seconds, got {args.timeout}")
    if args.trace_file and not args.trace:
        raise ConfigError("--trace-file needs --trace SITES, for example --trace all")
    _check_outputs(args)
    manifest = read_manifest(args.bundle)
    special = _special_tokens(manifest)
    wanted = parse_sites(args.trace, manifest_shape(manifest)) if args.trace else frozenset()
    text = _read_tokenizer(Path(args.bundle), args)
    prompts = _read_prompts(args, text, special["bos"])
    started = time.perf_counter()
    model = load_bundle(args.bundle)
    check_prompts(model, prompts)
    eos = None if args.ignore_eos else special["eos"]
    with ExitStack() as stack:
        backend, decoder = _open_backend(model, args, stack)
        del model  # the engine holds its own view; the table must not stay in memory twice
        load_seconds = time.perf_counter() - started
        if args.verify and backend == "dense" and decoder.model.precision != "int8":
            raise ConfigError(
                "--verify: a float32 bundle on the dense backend has nothing to be compared with; use --backend lava"
            )
        traces = _make_traces(wanted, args.verify, len(prompts))
        must_finish = bool(args.output or wanted or args.verify)
        with Display(text, len(prompts), quiet=args.quiet, stream=not args.json, must_finish=must_finish) as display:
            result = generate(decoder, prompts, sampling, eos, display.update, traces)
        if not args.json:
            display.finish(result)
        trace_failed = _write_traces(args, wanted, traces, decoder.model, text) if wanted else None
        if args.output:
            run = build_run(
                result, decoder.model, backend=backend, bundle=bundle_identity(args.bundle), sampling=sampling,
                load_seconds=load_seconds, threads=_threads(decoder),
                **({} if trace_failed or not wanted else _name_trace(args)),
            )  # fmt: skip
            try:
                write_run(args.output, run)
            except OSError as error:
                raise cannot_write(args.output, "--output", error) from error
        if trace_failed:
            raise trace_failed
        verified = None
        if args.verify and result.complete:
            verified = _verify(args, backend, decoder, prompts, sampling, eos, result, traces, stack)
    if args.json:
        put(_json_line(backend, decoder, result, text, verified), must_finish)
    if not args.quiet:
        say(status_line(result))
        hits = saturations(result.activity)
        if hits:
            say(f"{PROG}: warning: {hits} membranes hit the 24-bit limit; the model is scaled too high")
        if verified:
            say(f"verified: {verified}")
    if not result.complete:
        kept = f"; what was done is in {args.output}" if args.output else ""
        say(f"{PROG}: interrupted after {result.activity.tokens} tokens{kept}")
        return 130
    if args.verify and verified is None:
        kept = f"; the run itself is complete in {args.output}" if args.output else ""
        say(f"{PROG}: verification interrupted, nothing is proven{kept}")
        return 130
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, or would overwrite each other, before anything is computed."""
    if args.output:
        check_writable(args.output, "--output")
    if not args.trace:
        return
    if args.trace_file is None:
        output = args.output or Path("run.json")
        args.trace_file = output.with_name(f"{output.stem}.trace.npz")
    if args.trace_file.suffix != ".npz":
        raise ConfigError(f"--trace-file {args.trace_file}: the name must end in .npz")
    for file in (args.trace_file, _picture(args.trace_file)):
        check_writable(file, "--trace-file")
        if args.output and file.resolve() == args.output.resolve():
            raise ConfigError(f"--output {args.output} is where the trace or its picture goes; give another name")


def _picture(trace_file: Path) -> Path:
    return trace_file.with_suffix(".png")


def _special_tokens(manifest: dict[str, Any]) -> dict[str, int | None]:
    """Numbers of the begin and end tokens, where the model has them."""
    tokens = manifest.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    return {name: tokens.get(name) for name in ("bos", "eos")}


def _read_tokenizer(bundle: Path, args: argparse.Namespace) -> Text:
    from neuro_sim.display import Text

    file = bundle / "tokenizer.json"
    if not file.is_file():
        if args.prompts and all(option == "--prompt-tokens" for option, _ in args.prompts):
            return Text(None)
        raise InputError(f"{file}: no tokenizer in this bundle; give token numbers with --prompt-tokens")
    from tokenizers import Tokenizer

    try:
        return Text(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{file}: not a tokenizer ({error}); export the bundle again") from error


def _read_prompts(args: argparse.Namespace, text: Text, bos: int | None) -> list[list[int]]:
    given = args.prompts
    if not given:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("no prompt: use --prompt TEXT, --prompt-file FILE, or pipe text into stdin")
        given = [("--prompt-file", "-")]
    return [
        _token_numbers(value) if option == "--prompt-tokens" else _encode(_prompt_text(option, value), text, bos)
        for option, value in given
    ]


def _token_numbers(given: str) -> list[int]:
    try:
        return [int(part) for part in given.replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--prompt-tokens {given!r}: give whole numbers, for example 2,100,4") from None


def _prompt_text(option: str, value: str) -> str:
    """The text of --prompt or --prompt-file. Bytes that are no text came through as surrogates and are refused."""
    where = "--prompt" if option == "--prompt" else "stdin" if value == "-" else f"--prompt-file {value}"
    try:
        found = value if option == "--prompt" else _read_stdin() if value == "-" else Path(value).read_text("utf-8")
        found.encode("utf-8")
    except UnicodeError as error:
        raise InputError(f"{where}: the prompt is not UTF-8 text ({error})") from error
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}") from error
    return found


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("stdin is closed; there is no prompt to read")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # a prompt is UTF-8, whatever the terminal speaks
    return sys.stdin.read()


def _encode(prompt: str, text: Text, bos: int | None) -> list[int]:
    assert text.tokenizer is not None
    ids = list(text.tokenizer.encode(prompt).ids)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _open_backend(model: SpikeModel, args: argparse.Namespace, stack: ExitStack) -> tuple[str, Decoder]:
    """The decoder to use; says on stderr why, when the user did not choose it."""
    backend, reason = args.backend, ""
    if backend is None:
        backend, reason = _default_backend(model)
    if args.precision == "fixed" and model.precision != "int8":
        raise ConfigError("--precision fixed needs an integer bundle; export it with --precision int8")
    if args.precision == "float" and model.precision == "int8" and backend != "lava":
        raise ConfigError("--precision float with an integer bundle runs on Lava only; add --backend lava")
    if backend == "event" and model.precision != "int8":
        backend, reason = "dense", "the event engine is for integers and this bundle is float32"
    if reason and not args.quiet:
        say(f"{PROG}: backend {backend}: {reason}")
    if backend == "lava":
        from neuro_sim.lava.compat import require_lava

        require_lava()
        from neuro_sim.lava.decoder import LavaDecoder

        precision: Any = args.precision or ("fixed" if model.precision == "int8" else "float")
        return backend, stack.enter_context(LavaDecoder(model, precision=precision, timeout=args.timeout))
    if backend == "dense":
        from neuro_sim.dense import DenseDecoder

        return backend, DenseDecoder(model)
    return backend, _event_decoder(model, args.threads, stack)


def _event_decoder(model: SpikeModel, threads: int | None, stack: ExitStack) -> Decoder:
    from neuro_sim.event.engine import EventDecoder

    try:
        engine = EventDecoder(model, threads=threads)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ConfigError(f"--threads {threads}: this machine does not allow so many; give fewer") from error
    stack.callback(engine.close)
    return engine


def _default_backend(model: SpikeModel) -> tuple[str, str]:
    shape = model.shape
    d, f = shape.hidden_size, shape.ffn_dim
    weights = shape.num_hidden_layers * (4 * d * d + 2 * d * f) + shape.vocab_size * shape.word_embed_proj_dim
    if weights > LAVA_SMALL:
        return "event", f"the model has {weights / 1e6:.1f} M weights, too many for Lava's pace"
    try:
        from neuro_sim.lava.compat import require_lava

        require_lava()
    except (ImportError, BackendMissing) as error:
        return "event", str(error)
    return (
        "lava",
        f"Lava is installed and the model is small ({weights / 1e6:.2f} M weights); --backend event is faster",
    )


def _threads(decoder: Any) -> int:
    engine = getattr(decoder, "engine", None)
    return int(engine.threads) if engine is not None else 1


def _make_traces(wanted: frozenset[tuple[int, str]], everything: bool, count: int) -> list[SpikeTrace | None]:
    from neuro_sim.raster import SelectedTrace
    from spikeopd.contracts import SpikeTrace

    if everything:
        return [SpikeTrace() for _ in range(count)]
    return [SelectedTrace(wanted=wanted) if wanted else None for _ in range(count)]


def _write_traces(
    args: argparse.Namespace,
    wanted: frozenset[tuple[int, str]],
    traces: Sequence[SpikeTrace | None],
    model: SpikeModel,
    text: Text,
) -> InputError | None:
    """Write spikes and picture. What went wrong comes back, so that the run itself is written first."""
    from neuro_sim.raster import SelectedTrace, plot_raster
    from spikeopd.contracts import save_trace

    chosen = []
    for trace in traces:
        assert trace is not None
        sites = {key: spikes for key, spikes in trace.sites.items() if key in wanted}
        chosen.append(SelectedTrace(sites=sites, tokens=trace.tokens, wanted=wanted))
    heads = model.shape.num_attention_heads
    try:
        save_trace(args.trace_file, chosen, heads)
    except OSError as error:
        return cannot_write(args.trace_file, "--trace-file", error)
    try:
        labels = [text.label(token) for token in chosen[0].tokens]
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


def _verify(
    args: argparse.Namespace, backend: str, decoder: Decoder, prompts: list[list[int]], sampling: Sampling,
    eos: int | None, result: Result, traces: Sequence[SpikeTrace | None], stack: ExitStack,
) -> str | None:  # fmt: skip
    """Run again elsewhere and compare: event against the oracle, the others against event. None if interrupted."""
    from neuro_sim.decode import generate
    from neuro_sim.dense import DenseDecoder
    from neuro_sim.verify import agreement, compare
    from spikeopd.contracts import SpikeTrace

    integer = decoder.model.precision == "int8"
    name = "event" if integer and backend != "event" else "dense"
    event = name == "event"
    other: Any = _event_decoder(decoder.model, args.threads, stack) if event else DenseDecoder(decoder.model)
    their_traces = [SpikeTrace() for _ in prompts]
    theirs = generate(other, prompts, sampling, eos, None, their_traces)
    if not theirs.complete:
        return None
    my_traces = [trace for trace in traces if trace is not None]
    if not integer:
        return agreement(backend, my_traces, name, their_traces)
    return compare(backend, result, my_traces, name, theirs, their_traces)


def _json_line(backend: str, decoder: Decoder, result: Result, text: Text, verified: str | None) -> str:
    import json

    from neuro_sim.runfile import summary

    sequences = [
        {
            "prompt_tokens": sequence.prompt_tokens,
            "generated_tokens": sequence.generated_tokens,
            "text": text.decode(sequence.generated_tokens),
            "stopped": sequence.stopped,
        }
        for sequence in result.sequences
    ]
    data = {"backend": backend, "precision": decoder.model.precision, "complete": result.complete}
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")  # a terminal that would lose letters
    data |= {"verified": verified, **summary(result), "sequences": sequences}
    return json.dumps(data, ensure_ascii=plain) + "\n"


if __name__ == "__main__":
    sys.exit(main())
