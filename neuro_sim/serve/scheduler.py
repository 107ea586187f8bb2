"""Continuous batching: one thread feeds blocks of lanes to the event engine; sequences join and leave between blocks.

A block holds one token of every sequence that is being continued, and fills the lanes left over with prompt tokens.
Sequences do not influence each other: each gets the tokens that `neuro_sim.generate` gives it for the same seed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from neuro_sim.decode import check_prompts
from neuro_sim.text import Pieces
from spikeopd.contracts import APPENDIX_E_PJ, Activity, SpikeTrace
from spikeopd.errors import SpikeOPDError
from spikeopd.sampling import Sampling, choose, generators

if TYPE_CHECKING:
    import numpy as np

    from neuro_sim.api import Model
    from neuro_sim.event.plan import Cache

DELIVERY_SECONDS = 0.03  # news is collected for this long: faster than anybody reads, and a small model overtakes it
Ended = Literal["length", "eos", "stop", "context", "time", "cancelled", "error"]


class QueueFull(SpikeOPDError):
    """As many requests wait as may."""


@dataclass
class Usage:
    """What a sequence has cost so far. Events of every token that was fed, as `summary` of a run counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    fed: int = 0
    sops: int = 0
    macs: int = 0

    @property
    def pj(self) -> float:
        """By the paper's Appendix E."""
        return APPENDIX_E_PJ["ac"] * self.sops + APPENDIX_E_PJ["mac"] * self.macs

    def count(self, activity: Activity) -> None:
        self.fed += 1
        self.sops += sum(int(sops.sum()) for sops in activity.sops.values())
        self.macs += activity.macs["embed"] + activity.macs["head"]


@dataclass
class Update:
    """News of one job: text that is new, what `watch` made of each token that was fed, its end."""

    text: str = ""
    spikes: list[dict[str, Any]] = field(default_factory=list)
    ended: Ended | None = None
    problem: str = ""


Watcher = Callable[[SpikeTrace, Activity, int], dict[str, Any]]  # spikes and events of a token, its position


@dataclass(eq=False)
class Job:
    """One sequence to be continued.

    stream  there is news while it is decoded, not at its end alone
    watch   makes what `Update.spikes` carries from a token's spikes; None: spikes are not recorded
    """

    prompt: list[int]
    sampling: Sampling
    pieces: Pieces
    eos: int | None
    random: np.random.Generator
    seconds: float = 60.0
    stream: bool = True
    watch: Watcher | None = None
    generated: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    cache: Cache | None = None
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    ended: Ended | None = None

    def due(self, most: int) -> list[int]:
        """The tokens to feed next, at most this many."""
        fed = self.usage.fed
        return self.prompt[fed : fed + most] if fed < len(self.prompt) else self.generated[-1:]

    @property
    def prefilling(self) -> bool:
        return self.usage.fed < len(self.prompt)


def make_jobs(
    model: Model, prompts: Sequence[list[int]], sampling: Sampling, stop: Sequence[str] = (), ignore_eos: bool = False
) -> list[Job]:
    """Jobs with the random streams that `generate` gives these prompts."""
    check_prompts(model.bundle.shape, prompts)
    text = model.bundle.text
    eos = None if ignore_eos else text.eos
    return [
        Job(list(prompt), sampling, Pieces(text, stop), eos, random)
        for prompt, random in zip(prompts, generators(prompts, sampling.seed), strict=True)
    ]


News = dict[Job, Update]


class Scheduler:
    """batch: sequences decoded side by side; waiting: how many more may queue.

    deliver: called in the engine's thread with the news of all jobs; must not block.
    """

    def __init__(self, model: Model, deliver: Callable[[News], None], batch: int = 16, waiting: int = 64) -> None:
        self.model, self.engine = model, model.decoder.engine  # type: ignore[attr-defined]
        self.deliver, self.batch, self.limit = deliver, min(batch, self.engine.lanes), waiting
        self.active: list[Job] = []
        self.queue: deque[Job] = deque()
        self.problem = ""  # why the engine's thread ended, if it did
        self.busy_seconds = 0.0
        self._news: News = {}
        self._delivered = 0.0
        self._caches: list[Cache] = []
        self._changed, self._stopping = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of them or none."""
        with self._changed:
            if self._stopping or self.problem:
                raise QueueFull("the server is stopping")
            if len(self.queue) + len(jobs) > self.limit + max(0, self.batch - len(self.active)):
                raise QueueFull(f"{len(self.queue)} requests wait already; try again later")
            self.queue.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after the block it is in; what is still being decoded is cancelled."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                started = time.perf_counter()
                self._leave()
                if self.active:
                    self._feed()
                self.busy_seconds += time.perf_counter() - started
                self._tell()
        except Exception as error:  # the clients are told, and `problem` ends the server
            self.problem = f"{type(error).__name__}: {error}"
        with self._changed:
            left, self.active, self.queue = [*self.active, *self.queue], [], deque()
        for job in left:
            self._end(job, "error" if self.problem else "cancelled")
        self._tell()

    def _tell(self) -> None:
        """Deliver what is new: at once what has ended, the rest now and then."""
        now = time.monotonic()
        ended = any(update.ended for update in self._news.values())
        if not self._news or not ended and now - self._delivered < DELIVERY_SECONDS:
            return
        news, self._news, self._delivered = self._news, {}, now
        for job, update in news.items():
            update.text += job.pieces.next(job.generated, final=bool(update.ended))
        self.deliver(news)

    def _wait(self) -> bool:
        """Sleep until there is something to do; take what waits into the batch."""
        with self._changed:
            while not (self._stopping or self.active or self.queue):
                self._changed.wait()
            while self.queue and len(self.active) < self.batch:
                self.active.append(self.queue.popleft())
            return not self._stopping

    def _leave(self) -> None:
        """End what was cancelled or has used up its time, also in the queue."""
        now = time.monotonic()
        with self._changed:
            gone = [job for job in (*self.active, *self.queue) if job.cancelled or now - job.arrived > job.seconds]
            for job in gone:
                (self.active if job in self.active else self.queue).remove(job)
        for job in gone:
            self._end(job, "cancelled" if job.cancelled else "time")

    def _end(self, job: Job, ended: Ended) -> None:
        job.ended = ended
        if job.cache is not None:
            self._caches.append(job.cache)
            job.cache = None
        update = self._news.setdefault(job, Update())
        update.ended, update.problem = ended, self.problem

    def _feed(self) -> None:
        lanes = []  # job, token, its position
        room = self.engine.lanes - sum(not job.prefilling for job in self.active)
        for job in self.active:
            if job.cache is None:
                job.cache = self._caches.pop() if self._caches else self._empty()
                job.usage.prompt_tokens = len(job.prompt)
            tokens = job.due(room)
            room -= len(tokens) if job.prefilling else 0
            lanes += [(job, token, job.usage.fed + place) for place, token in enumerate(tokens)]
        wanted = [position + 1 >= len(job.prompt) for job, _, position in lanes]
        traces = [SpikeTrace() if job.watch else None for job, _, _ in lanes]
        logits, activities = self.engine.feed(
            [token for _, token, _ in lanes],
            [job.cache for job, _, _ in lanes],
            [position for _, _, position in lanes],
            wanted,
            traces,
        )
        row = 0
        for (job, _, position), activity, trace, want in zip(lanes, activities, traces, wanted, strict=True):
            job.usage.count(activity)
            text = ""
            if want:
                text = self._accept(job, logits[row])
                row += 1
            if job.watch and trace:
                chosen = job.generated[-1] if want and job.generated else None
                seen = job.watch(trace, activity, position) | {"token": chosen, "text": text}
                self._news.setdefault(job, Update()).spikes.append(seen)
        self.active = [job for job in self.active if job.ended is None]

    def _empty(self) -> Cache:
        from neuro_sim.event.plan import Cache

        return Cache.empty(self.engine.plan)

    def _accept(self, job: Job, logits: Any) -> str:
        """Choose the job's next token, or end it: the rules of `decode.Loop.accept`. Its text, where that is known."""
        most, text = job.sampling.max_new_tokens, ""
        if len(job.generated) >= most:
            self._end(job, "length")
            return text
        token = choose(logits, job.sampling, job.random, (job.prompt, job.generated))
        job.generated.append(token)
        job.usage.completion_tokens += 1
        if job.pieces.stop or job.watch:
            text = job.pieces.next(job.generated)
            self._news.setdefault(job, Update()).text += text
        elif job.stream:
            self._news.setdefault(job, Update())  # its text is made when it is delivered
        if token == job.eos:
            self._end(job, "eos")
        elif job.pieces.stopped:
            self._end(job, "stop")
        elif len(job.generated) >= most:
            self._end(job, "length")
        elif job.usage.fed >= self.model.bundle.shape.max_position_embeddings:
            self._end(job, "context")
        return text
