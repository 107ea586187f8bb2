"""Autoregressive decoding shared by every backend: feed, sample, stop, count.

A backend is a `Decoder`: it feeds one token at a time. The event engine can do more (`prefill` a prompt in blocks,
`batch` several sequences side by side), and `generate` uses that where it finds it; the tokens are the same.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from neuro_sim.text import Pieces
from spikeopd.contracts import Activity, ModelShape, SpikeModel, SpikeTrace
from spikeopd.errors import InputError
from spikeopd.sampling import Sampling as Sampling
from spikeopd.sampling import choose as choose
from spikeopd.sampling import generators as generators

Array = NDArray[Any]
Stopped = Literal["length", "eos", "stop", "context", "interrupted"]
PHASES = ("prompt", "generation")
MAX_BATCH = 32  # sequences decoded side by side; more are taken in turns
PROMPT_CHUNK = 128  # prompt tokens fed before the progress is reported and Ctrl-C is looked at


class Decoder(Protocol):
    """What every backend offers. `trace`, if set, receives the spikes."""

    model: SpikeModel
    trace: SpikeTrace | None

    def reset(self) -> None: ...

    def step(self, token: int) -> tuple[Array, Activity]: ...

    def close(self) -> None: ...


class Batch(Protocol):
    """Sequences decoded side by side."""

    def prefill(self, sequence: int, tokens: Sequence[int]) -> tuple[Array, list[Activity]]: ...

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> tuple[Array, list[Activity]]: ...


@dataclass
class Generated:
    """One sequence. `fed` counts the tokens that went through the network."""

    prompt_tokens: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    stopped: Stopped = "interrupted"
    fed: int = 0


@dataclass
class Result:
    """What a run produced and what it cost. Valid at every moment, also after an interruption."""

    sequences: list[Generated]
    phases: dict[str, Activity]
    per_token: dict[str, list[Any]]
    seconds: dict[str, float]
    complete: bool = False
    graded: bool = False  # of a quantised twin, whose synapses multiply
    chip: dict[str, Any] | None = None  # what a backend that simulates a chip measured

    @property
    def activity(self) -> Activity:
        """All events of the run."""
        return Activity.total(self.phases[phase] for phase in PHASES)


Notify = Callable[[Result, int, int | None], None]  # result so far, sequence, new token (None: prompt progress)
Event = tuple[int, int | None]  # sequence, new token (None: prompt progress)
Events = Iterator[Event]


class _OneSequence:
    """A plain decoder seen as a batch of one."""

    def __init__(self, decoder: Decoder, trace: SpikeTrace | None) -> None:
        self.decoder = decoder
        decoder.reset()
        decoder.trace = trace

    def prefill(self, sequence: int, tokens: Sequence[int]) -> tuple[Array, list[Activity]]:
        results = [self.decoder.step(token) for token in tokens]
        return results[-1][0], [activity for _, activity in results]

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> tuple[Array, list[Activity]]:
        logits, activity = self.decoder.step(tokens[0])
        return logits[None], [activity]


class Interruption:
    """Set by the first Ctrl-C, so that the current token is finished; the second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, signum: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        if self.requested:
            raise KeyboardInterrupt


@contextmanager
def postponed_interrupt() -> Iterator[Interruption]:
    """Within, Ctrl-C takes effect between tokens. Only the main thread can set that up; elsewhere nothing changes."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption.handle)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def check_prompts(shape: ModelShape, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse what cannot be fed, before anything is."""
    if not prompts:
        raise InputError("nothing to decode: give at least one prompt")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {index} has no tokens; give it some text")
        if len(prompt) > shape.max_position_embeddings:
            limit = shape.max_position_embeddings
            raise InputError(f"prompt {index} has {len(prompt)} tokens; this model's context holds {limit}")
        wrong = [token for token in prompt if not 0 <= token < shape.vocab_size]
        if wrong:
            raise InputError(f"prompt {index}: token {wrong[0]} is outside the vocabulary of {shape.vocab_size}")


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    eos_token_id: int | None = None,
    notify: Notify | None = None,
    traces: Sequence[SpikeTrace | None] | None = None,
    pieces: Sequence[Pieces] = (),
) -> Result:
    """Continue every prompt until a stop: `length`, `eos`, `stop` (a string of the caller's, met by one of `pieces`),
    `context` (no room left), or `interrupted` (Ctrl-C)."""
    loop = Loop(decoder, prompts, sampling or Sampling(), eos_token_id, traces, pieces)
    with postponed_interrupt() as interruption:
        try:
            for index, token in loop.events(interruption):
                if notify:
                    notify(loop.result, index, token)
            loop.result.complete = True
        except KeyboardInterrupt:
            loop.result.complete = False
        finally:
            loop.finish()
    return loop.result


class Loop:
    """Decoding as an iteration: `events` yields (sequence, new token), or (sequence, None) as a prompt is fed.

    `result` is valid between any two events; `finish` belongs at the end, wherever that is.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        eos: int | None,
        traces: Sequence[SpikeTrace | None] | None = None,
        pieces: Sequence[Pieces] = (),
    ) -> None:
        shape = decoder.model.shape
        check_prompts(shape, prompts)
        self.decoder, self.sampling, self.eos, self.pieces = decoder, sampling, eos, pieces
        self.traces = list(traces or [None] * len(prompts))
        columns = ("sequence", "position", "phase", "spikes", "sops", "macs", "bytes")
        self.result = Result(
            sequences=[Generated(list(prompt)) for prompt in prompts],
            phases={phase: Activity.zeros(shape) for phase in PHASES},
            per_token={name: [] for name in columns},
            seconds=dict.fromkeys(PHASES, 0.0),
            graded=shape.graded,
        )
        if begin := getattr(decoder, "begin", None):  # some backends are built for a length
            begin(max(map(len, prompts)) + max(0, sampling.max_new_tokens - 1))
        self.random = generators(prompts, sampling.seed)
        # Query spikes per sequence and phase: what unmasked attention costs is known only when the length is.
        self.queries = np.zeros((len(prompts), len(PHASES), shape.num_hidden_layers, shape.steps), np.int64)

    def events(self, interruption: Interruption | None = None) -> Events:
        interruption = interruption or Interruption()
        count = len(self.result.sequences)
        make_batch = getattr(self.decoder, "batch", None)
        width = MAX_BATCH if make_batch else 1
        for first in range(0, count, width):
            members = list(range(first, min(count, first + width)))
            traces = [self.traces[index] for index in members]
            batch: Batch = make_batch(traces) if make_batch else _OneSequence(self.decoder, traces[0])
            yield from self.group(batch, members, interruption)

    def group(self, batch: Batch, members: list[int], interruption: Interruption) -> Events:
        """Prompts one after the other, then one token of every unfinished sequence at a time."""
        pending: dict[int, int] = {}  # place in the batch -> token to feed next
        for place, index in enumerate(members):
            logits = np.empty(0)
            for logits in self.prompt(batch, place, index, interruption):  # noqa: B007 - the last ones count
                yield index, None
            yield from self.accept(pending, place, index, logits)
        while pending:
            interruption.check()
            places, tokens = list(pending), list(pending.values())
            started = time.perf_counter()
            logits, activities = batch.step(places, tokens)
            self.result.seconds["generation"] += time.perf_counter() - started
            for place, activity in zip(places, activities, strict=True):
                self.count(members[place], "generation", activity)
            for row, place in enumerate(places):
                yield from self.accept(pending, place, members[place], logits[row])

    def prompt(self, batch: Batch, place: int, index: int, interruption: Interruption) -> Iterator[Array]:
        """Feed a prompt in chunks; yields the logits after each."""
        tokens = self.result.sequences[index].prompt_tokens
        for start in range(0, len(tokens), PROMPT_CHUNK):
            interruption.check()
            started = time.perf_counter()
            logits, activities = batch.prefill(place, tokens[start : start + PROMPT_CHUNK])
            self.result.seconds["prompt"] += time.perf_counter() - started
            for activity in activities:
                self.count(index, "prompt", activity)
            yield logits

    def accept(self, pending: dict[int, int], place: int, index: int, logits: Array) -> Events:
        """Choose the sequence's next token, or end it."""
        sequence = self.result.sequences[index]
        pending.pop(place, None)
        if len(sequence.generated_tokens) >= self.sampling.max_new_tokens:
            sequence.stopped = "length"
            return
        started = time.perf_counter()
        seen = (sequence.prompt_tokens, sequence.generated_tokens)
        token = choose(logits, self.sampling, self.random[index], seen)
        self.result.seconds["generation"] += time.perf_counter() - started
        sequence.generated_tokens.append(token)
        if token == self.eos:
            sequence.stopped = "eos"
        elif self.pieces and self.met_stop(index):
            sequence.stopped = "stop"
        elif len(sequence.generated_tokens) >= self.sampling.max_new_tokens:
            sequence.stopped = "length"
        elif sequence.fed >= self.decoder.model.shape.max_position_embeddings:
            sequence.stopped = "context"
        else:
            pending[place] = token
        yield index, token

    def met_stop(self, index: int) -> bool:
        pieces = self.pieces[index]
        pieces.next(self.result.sequences[index].generated_tokens)
        return pieces.stopped

    def count(self, index: int, phase: str, activity: Activity) -> None:
        sequence, rows = self.result.sequences[index], self.result.per_token
        self.result.phases[phase].add(activity)
        self.queries[index, PHASES.index(phase)] += activity.spikes["q"]
        rows["sequence"].append(index)
        rows["position"].append(sequence.fed)
        rows["phase"].append(phase)
        rows["spikes"].append(sum(int(spikes.sum()) for spikes in activity.spikes.values()))
        rows["sops"].append(sum(int(sops.sum()) for sops in activity.sops.values()))
        rows["macs"].append(activity.macs["embed"] + activity.macs["head"])
        rows["bytes"].append(sum(activity.bytes.values()))
        sequence.fed += 1

    def finish(self) -> None:
        """sops_unmasked, now that the lengths are known: every query spike of a sequence against all of its tokens."""
        if measured := getattr(self.decoder, "measured", None):
            self.result.chip = measured()
        for index, sequence in enumerate(self.result.sequences):
            for place, phase in enumerate(PHASES):
                self.result.phases[phase].sops_unmasked += self.queries[index, place] * sequence.fed
