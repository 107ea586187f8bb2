"""spikeopd-run-lava: decode text with an exported bundle on the event engine, on Lava, or with the dense oracle."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeopd.errors import BackendMissing, ConfigError, InputError, run_command

if TYPE_CHECKING:
    from neuro_sim.decode import Decoder, Result, Sampling
    from neuro_sim.display import Text
    from spikeopd.contracts import SpikeModel, SpikeTrace

PROG = "spikeopd-run-lava"
LAVA_SMALL = 4_000_000  # int8 weights up to which Lava is the default where it is installed
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
    text.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    text.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="one prompt per file, - is stdin"
    )
    text.add_argument("--prompt-tokens", action="append", default=[], metavar="IDS", help="token numbers: 2,100,4")
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
                        help="where to write them, and a picture beside (default: trace.npz by RUN.json)")  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    run = parser.add_argument_group("running")
    run.add_argument("--threads", type=int, metavar="N", help="of the event engine (default: all cores)")
    run.add_argument("--verify", action="store_true",
                     help="decode a second time on another backend and compare spikes, tokens and counts")  # fmt: skip
    run.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
                     help="how long Lava may take for one token (default: 60)")  # fmt: skip
    return parser


def _main(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    from neuro_sim.bundle import load_bundle, manifest_shape, read_manifest
    from neuro_sim.decode import Sampling, check_prompts, generate
    from neuro_sim.display import Display, status_line
    from neuro_sim.raster import parse_sites
    from neuro_sim.runfile import build_run, bundle_identity, saturations, write_run

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, args.max_new_tokens)
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {args.threads}")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be more than 0 seconds, got {args.timeout}")
    if args.trace_file and not args.trace:
        raise ConfigError("--trace-file needs --trace SITES, for example --trace all")
    manifest = read_manifest(args.bundle)
    special = _special_tokens(manifest)
    wanted = parse_sites(args.trace, manifest_shape(manifest).num_hidden_layers) if args.trace else frozenset()
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
        traces = _make_traces(wanted, args.verify, len(prompts))
        with Display(text, len(prompts), quiet=args.quiet, stream=not args.json) as display:
            result = generate(decoder, prompts, sampling, eos, display.update, traces)
        if not args.json:
            display.finish(result)
        trace_file = _write_traces(args, wanted, traces, decoder.model, text) if wanted else None
        if args.output:
            run = build_run(
                result, decoder.model, backend=backend, bundle=bundle_identity(args.bundle), sampling=sampling,
                load_seconds=load_seconds, threads=_threads(decoder), trace=_relative(trace_file, args.output),
            )  # fmt: skip
            write_run(args.output, run)
        verified = None
        if args.verify and result.complete:
            verified = _verify(args, backend, decoder, prompts, sampling, eos, result, traces, stack)
    if args.json:
        _print_json(backend, decoder, result, text, verified)
    if not args.quiet:
        print(status_line(result), file=sys.stderr)
        hits = saturations(result.activity)
        if hits:
            print(
                f"{PROG}: warning: {hits} membranes hit the 24-bit limit; the model is scaled too high", file=sys.stderr
            )
        if verified:
            print(f"verified: {verified}", file=sys.stderr)
    if not result.complete:
        kept = f"; what was done is in {args.output}" if args.output else ""
        print(f"{PROG}: interrupted after {result.activity.tokens} tokens{kept}", file=sys.stderr)
        return 130
    return 0


def _special_tokens(manifest: dict[str, Any]) -> dict[str, int | None]:
    """Numbers of the begin and end tokens, where the model has them."""
    tokens = manifest.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    return {name: tokens.get(name) for name in ("bos", "eos")}


def _read_tokenizer(bundle: Path, args: argparse.Namespace) -> Text:
    from neuro_sim.display import Text

    file = bundle / "tokenizer.json"
    if not file.is_file():
        if args.prompt_tokens and not (args.prompt or args.prompt_file):
            return Text(None)
        raise InputError(f"{file}: no tokenizer in this bundle; give token numbers with --prompt-tokens")
    from tokenizers import Tokenizer

    try:
        return Text(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{file}: not a tokenizer ({error}); export the bundle again") from error


def _read_prompts(args: argparse.Namespace, text: Text, bos: int | None) -> list[list[int]]:
    texts = list(args.prompt)
    for name in args.prompt_file:
        try:
            texts.append(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompt-file {name}: {error}") from error
    prompts = []
    for given in args.prompt_tokens:
        try:
            prompts.append([int(part) for part in given.replace(",", " ").split()])
        except ValueError:
            raise ConfigError(f"--prompt-tokens {given!r}: give whole numbers, for example 2,100,4") from None
    if not texts and not prompts:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: use --prompt TEXT, --prompt-file FILE, or pipe text into stdin")
        texts.append(sys.stdin.read())
    encoded = []
    for item in texts:
        assert text.tokenizer is not None
        ids = list(text.tokenizer.encode(item).ids)
        encoded.append(ids if bos is None or ids[:1] == [bos] else [bos, *ids])
    return encoded + prompts


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
        print(f"{PROG}: backend {backend}: {reason}", file=sys.stderr)
    if backend == "lava":
        from neuro_sim.lava.compat import require_lava

        require_lava()
        from neuro_sim.lava.decoder import LavaDecoder

        precision: Any = args.precision or ("fixed" if model.precision == "int8" else "float")
        return backend, stack.enter_context(LavaDecoder(model, precision=precision, timeout=args.timeout))
    if backend == "dense":
        from neuro_sim.dense import DenseDecoder

        return backend, DenseDecoder(model)
    from neuro_sim.engine import EventDecoder

    engine = EventDecoder(model, threads=args.threads)
    stack.callback(engine.close)
    return backend, engine


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
) -> Path:
    from neuro_sim.raster import SelectedTrace, plot_raster, save_trace

    chosen = []
    for trace in traces:
        assert trace is not None
        sites = {key: spikes for key, spikes in trace.sites.items() if key in wanted}
        chosen.append(SelectedTrace(sites=sites, tokens=trace.tokens, wanted=wanted))
    file = args.trace_file or (args.output or Path("run.json")).with_name("trace.npz")
    heads = model.shape.num_attention_heads
    save_trace(file, chosen, heads)
    try:
        labels = [text.label(token) for token in chosen[0].tokens]
        plot_raster(file.with_suffix(".png"), chosen[0], heads, labels)
    except (BackendMissing, InputError) as error:  # the spikes are written; the picture is extra
        print(f"{PROG}: no raster plot: {error}", file=sys.stderr)
    return Path(file)


def _relative(trace: Path | None, run: Path) -> str | None:
    """The trace's name as run.json gives it: relative to the folder of run.json."""
    import os

    return None if trace is None else Path(os.path.relpath(trace.resolve(), run.resolve().parent)).as_posix()


def _verify(
    args: argparse.Namespace, backend: str, decoder: Decoder, prompts: list[list[int]], sampling: Sampling,
    eos: int | None, result: Result, traces: Sequence[SpikeTrace | None], stack: ExitStack,
) -> str:  # fmt: skip
    """Run again elsewhere and compare: event against the oracle, the others against event."""
    from neuro_sim.decode import generate
    from neuro_sim.dense import DenseDecoder
    from neuro_sim.engine import EventDecoder
    from neuro_sim.verify import agreement, compare
    from spikeopd.contracts import SpikeTrace

    integer = decoder.model.precision == "int8"
    name, reference = ("event", None) if integer and backend != "event" else ("dense", None)
    if name == "event":
        reference = EventDecoder(decoder.model, threads=args.threads)
        stack.callback(reference.close)
    elif backend == "dense":
        raise ConfigError(
            "--verify: a float32 bundle on the dense backend has nothing to be compared with; use --backend lava"
        )
    other: Any = reference or DenseDecoder(decoder.model)
    their_traces = [SpikeTrace() for _ in prompts]
    theirs = generate(other, prompts, sampling, eos, None, their_traces)
    my_traces = [trace for trace in traces if trace is not None]
    if not integer:
        return agreement(backend, my_traces, name, their_traces)
    return compare(backend, result, my_traces, name, theirs, their_traces)


def _print_json(backend: str, decoder: Decoder, result: Result, text: Text, verified: str | None) -> None:
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
    print(json.dumps({**data, "verified": verified, **summary(result), "sequences": sequences}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
