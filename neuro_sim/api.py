"""Run an exported bundle from Python: `load`, then `generate` or `stream`. docs/engine.md and docs/formats.md."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from neuro_sim.backends import BACKENDS, Running, pick_backend
from neuro_sim.decode import Decoder, Loop, Notify, Result, Sampling, postponed_interrupt
from neuro_sim.decode import generate as decode
from neuro_sim.raster import SelectedTrace, parse_sites
from neuro_sim.runfile import build_run, bundle_identity, summary
from neuro_sim.text import Pieces, Text, read_text
from neuro_sim.verify import agreement, compare
from spikeopd import contracts
from spikeopd.contracts import Activity, ModelShape, Precision, SpikeModel, SpikeTrace, bundle, is_integer, parse_run
from spikeopd.errors import ConfigError, InputError
from spikeopd.sampling import from_generation_config

Prompt = str | Sequence[int]  # text, or token numbers


class Bundle:
    """An exported folder, or a shipped one by its name, opened but not loaded: its manifest, sizes and tokenizer."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = bundle.bundle_folder(folder)
        self.manifest = bundle.read_manifest(self.folder)
        self.shape: ModelShape = bundle.manifest_shape(self.manifest)
        self.precision: Precision = self.manifest["precision"]
        self.sampling = from_generation_config(self.manifest.get("generation", {}))  # what the commands start from
        self.text = read_text(self.folder, self.manifest)

    def load(self, backend: str | None = None, running: Running | None = None) -> Model:
        """The model on a backend of `neuro_sim.BACKENDS`; None chooses one, see `pick_backend`."""
        running = running or Running()
        name, _ = pick_backend(self.shape, self.precision, backend, running.precision)
        started = time.perf_counter()
        loaded = bundle.load_bundle(self.folder, place=BACKENDS[name].place)
        return Model(self, name, BACKENDS[name].open(loaded, running), running, started)


class Model(AbstractContextManager["Model"]):
    """A bundle on a backend, ready to decode. Close it, or use it in a `with`, to end its threads or processes.

    bundle        where it came from, with its sizes (`bundle.shape`) and tokenizer (`bundle.text`)
    backend       the name it has in `neuro_sim.BACKENDS`
    decoder       the backend itself: `logits, activity = decoder.step(token)`
    load_seconds  how long it took to get here
    """

    def __init__(self, source: Bundle, backend: str, decoder: Decoder, running: Running, started: float) -> None:
        self.bundle, self.backend, self.decoder, self.running = source, backend, decoder, running
        self.load_seconds = time.perf_counter() - started

    @property
    def precision(self) -> Precision:
        """What runs: Lava may run an integer bundle in float32."""
        return self.decoder.model.precision

    @property
    def threads(self) -> int:
        return int(getattr(self.decoder, "threads", 1))

    def close(self) -> None:
        self.decoder.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.bundle.folder} on {self.backend}, {self.precision}>"


class Generation:
    """What `generate` produced and what it cost; `energy.report` takes it as it is.

    text, tokens      of the only sequence, without its prompt; `texts` and `sequences` if there are several
    activity          every event of the run (`spikeopd.contracts.Activity`)
    complete          False after Ctrl-C; everything here is valid all the same
    traces            the spikes of each sequence, if `trace` was given
    """

    def __init__(
        self,
        model: Model,
        result: Result,
        sampling: Sampling,
        eos: int | None,
        traces: Sequence[SpikeTrace | None],
        stop: Sequence[str] = (),
    ) -> None:
        self.model, self.result, self.sampling, self.eos, self.stop = model, result, sampling, eos, stop
        self.sequences = result.sequences
        self.traces = [trace for trace in traces if trace is not None]

    @property
    def texts(self) -> list[str]:
        text = self.model.bundle.text
        return [Pieces(text, self.stop).next(sequence.generated_tokens, final=True) for sequence in self.sequences]

    @property
    def text(self) -> str:
        return self.texts[self._only()]

    @property
    def tokens(self) -> list[int]:
        return self.sequences[self._only()].generated_tokens

    @property
    def activity(self) -> Activity:
        return self.result.activity

    @property
    def complete(self) -> bool:
        return self.result.complete

    def summary(self) -> dict[str, float]:
        """Speed, events, energy by the paper's Appendix E and firing rate, per token."""
        return summary(self.result)

    def to_run(self, trace: str | None = None, trace_sha256: str | None = None) -> dict[str, Any]:
        """run.json as plain data, checked. trace: the file of the spikes as run.json is to name it, with its hash."""
        model = self.model
        run = build_run(
            self.result,
            model.decoder.model,
            backend=model.backend,
            bundle=bundle_identity(model.bundle.folder),
            sampling=self.sampling,
            load_seconds=model.load_seconds,
            threads=model.threads,
            trace=trace,
            trace_sha256=trace_sha256,
        )
        parse_run(run, "this run")
        return run

    def save(self, path: Path | str, trace: str | None = None, trace_sha256: str | None = None) -> Path:
        """Write run.json, for `spikeopd-energy` and for whoever comes later."""
        return contracts.write_run(path, self.to_run(trace, trace_sha256))

    def verify(self) -> str | None:
        """Decode again on another backend and compare: event with the oracle, the others with event.

        One line if all is equal, `CheckFailed` with the first difference if not, None after Ctrl-C. Needs trace="all".
        Float precision owes no equality: the line then says how many spikes are equal.
        """
        if len(self.traces) < len(self.sequences):
            raise ConfigError('verify compares spikes; generate with trace="all"')
        mine = self.model
        integer = is_integer(mine.precision)
        name = other_backend(mine.backend, mine.precision)
        their_traces = [SpikeTrace() for _ in self.traces]
        decoder = BACKENDS[name].open(plain_model(mine.decoder), mine.running)
        try:
            prompts = [sequence.prompt_tokens for sequence in self.sequences]
            pieces = make_pieces(mine.bundle.text, self.stop, len(prompts))
            theirs = decode(decoder, prompts, self.sampling, self.eos, None, their_traces, pieces)
        finally:
            decoder.close()
        if not theirs.complete:
            return None
        if not integer:
            return agreement(mine.backend, self.traces, name, their_traces)
        return compare(mine.backend, self.result, self.traces, name, theirs, their_traces)

    def _only(self) -> int:
        if len(self.sequences) != 1:
            raise InputError(f"this run has {len(self.sequences)} sequences; look at texts and sequences")
        return 0


def plain_model(decoder: Any) -> SpikeModel:
    """A decoder's model as every backend reads it; the event engine keeps weights of 4 bits in a form of its own."""
    model: SpikeModel = getattr(decoder, "plain_model", None) or decoder.model
    return model


def other_backend(backend: str, precision: Precision) -> str:
    """The backend that another one is compared with."""
    if backend == "dense" and not is_integer(precision):
        raise ConfigError(
            "--verify: a float32 bundle on the dense backend has nothing to be compared with; use --backend lava"
        )
    return "event" if is_integer(precision) and backend != "event" else "dense"


def load(
    folder: Path | str,
    backend: str | None = "event",
    *,
    threads: int | None = None,
    precision: Precision | None = None,
    timeout: float = 60.0,
) -> Model:
    """Load an exported bundle.

    backend    a name of `neuro_sim.BACKENDS`: event, lava or dense; None: lava for a small model where it is installed,
               else event. float32 bundles run on dense where event was asked for
    threads    of the event engine (default: all cores)
    precision  float32 runs an integer bundle as its float twin, on Lava
    timeout    seconds Lava may take for one token
    """
    return Bundle(folder).load(backend, Running(threads, precision, timeout))


def generate(
    model: Model,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    trace: str | None = None,
    notify: Notify | None = None,
) -> Generation:
    """Continue a prompt (text or token numbers), or several side by side.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token, repetition_penalty 1 changes nothing. A
    text ends before the first of the strings `stop`. The same bundle, prompt and seed give the same tokens on every
    integer backend, on any number of threads, alone or beside other prompts.
    trace: sites whose spikes to keep: "all", or a list like "embed,0.q,*.h". notify is called for every new token.
    """
    prompts = [_tokens(model, one) for one in _several(prompt)]
    sampling = Sampling(temperature, top_k, top_p, seed, max_new_tokens, min_p, repetition_penalty)
    eos = None if ignore_eos else model.bundle.text.eos
    traces, stop = make_traces(trace, model.bundle.shape, len(prompts)), check_stop(stop)
    pieces = make_pieces(model.bundle.text, stop, len(prompts))
    result = decode(model.decoder, prompts, sampling, eos, notify, traces, pieces)
    return Generation(model, result, sampling, eos, traces, stop)


class Stream:
    """The text of one sequence, piece by piece as it is decoded: `for piece in stream(...)`, once.

    `result` is the `Generation` so far, complete when the iteration has ended.
    """

    def __init__(
        self, model: Model, tokens: list[int], sampling: Sampling, eos: int | None, stop: tuple[str, ...]
    ) -> None:
        pieces = make_pieces(model.bundle.text, stop, 1)
        self._loop = Loop(model.decoder, [tokens], sampling, eos, pieces=pieces)
        self._pieces = Pieces(model.bundle.text, stop)
        self.result = Generation(model, self._loop.result, sampling, eos, [], stop)

    def __iter__(self) -> Iterator[str]:
        events = self._loop.events()
        try:
            while True:
                with postponed_interrupt() as interruption:  # Ctrl-C takes effect between tokens
                    event = next(events, None)
                interruption.check()
                piece = self._pieces.next(self.result.tokens, final=event is None)
                if piece:
                    yield piece
                if event is None:
                    self._loop.result.complete = True
                    return
        finally:
            self._loop.finish()


def stream(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
) -> Stream:
    """Like `generate` for one prompt, but text comes as it is decoded: `for piece in neuro_sim.stream(...)`."""
    sampling = Sampling(temperature, top_k, top_p, seed, max_new_tokens, min_p, repetition_penalty)
    eos = None if ignore_eos else model.bundle.text.eos
    return Stream(model, _tokens(model, prompt), sampling, eos, check_stop(stop))


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(strings):
        raise ConfigError("stop: an empty string would stop before the first token; leave it out")
    return strings


def make_pieces(text: Text, stop: Sequence[str], count: int) -> list[Pieces]:
    """What looks for stop strings, one for each sequence; nothing where there are none."""
    return [Pieces(text, stop) for _ in range(count if stop else 0)]


def make_traces(sites: str | None, shape: ModelShape, count: int) -> list[SpikeTrace | None]:
    wanted = parse_sites(sites, shape) if sites else frozenset()
    return [SelectedTrace(wanted=wanted) if wanted else None for _ in range(count)]


def _several(prompt: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def _tokens(model: Model, prompt: Prompt) -> list[int]:
    return model.bundle.text.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
