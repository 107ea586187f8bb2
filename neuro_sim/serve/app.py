"""The routes of spikeopd-serve and their guards: size, time, key, host; streams end when the client leaves."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from neuro_sim.api import Model
from neuro_sim.serve import protocol
from neuro_sim.serve.metrics import Metrics
from neuro_sim.serve.protocol import Answer, BadRequest, Limits
from neuro_sim.serve.scheduler import Job, News, QueueFull, Scheduler, Update, make_jobs
from neuro_sim.serve.spikes import Watch
from spikeopd import __version__
from spikeopd.errors import InputError
from spikeopd.sampling import Sampling

ASSETS = {
    "": ("index.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
# The page runs its own script and talks to its own server; nothing inline, nothing foreign, nobody frames it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
BODY_SECONDS = 30.0
ABOUT = {
    "requests_total": "Answered requests by route and status",
    "prompt_tokens_total": "Prompt tokens of ended sequences",
    "completion_tokens_total": "New tokens of ended sequences",
    "sops_total": "Synaptic operations of ended sequences",
    "macs_total": "Dense multiply-accumulates of ended sequences (embedding and head)",
    "energy_picojoules_total": "Energy of ended sequences: counts at the prices of the paper's Appendix E",
    "sequences_total": "Ended sequences by reason",
    "sequences_active": "Sequences being decoded",
    "sequences_waiting": "Sequences in the queue",
    "engine_busy_seconds": "Seconds the engine's thread has worked",
    "first_token_seconds": "From a request's arrival to its first new token",
    "request_seconds": "From a request's arrival to the end of its answer",
}


class Server:
    """A model behind routes. `app` is what an ASGI server runs."""

    def __init__(
        self,
        model: Model,
        name: str,
        *,
        limits: Limits | None = None,
        defaults: Sampling | None = None,
        batch: int = 16,
        waiting: int = 64,
        key: str | None = None,
        hosts: list[str] | None = None,
    ) -> None:
        self.model, self.name, self.key = model, name, key
        self.limits, self.defaults = limits or Limits(), defaults or model.bundle.sampling
        self.watch, self.metrics = Watch(model.bundle.shape, model.bundle.text), Metrics()
        self.scheduler = Scheduler(model, self._deliver, batch, waiting)
        self.mailboxes: dict[Job, asyncio.Queue[tuple[Job, Update]]] = {}
        self.metrics.about(**ABOUT)
        self.metrics.gauges |= {
            "sequences_active": lambda: len(self.scheduler.active),
            "sequences_waiting": lambda: len(self.scheduler.queue),
            "engine_busy_seconds": lambda: self.scheduler.busy_seconds,
        }
        self.fail: Callable[[], None] = lambda: None  # called when the engine's thread died
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self._guarded(self.show_metrics)),
                Route("/v1/models", self._guarded(self.models)),
                Route("/v1/models/{name}", self._guarded(self.one_model)),
                Route("/v1/completions", self._guarded(partial(self.complete, chat=False)), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(partial(self.complete, chat=True)), methods=["POST"]),
                Route("/", self.page),
                Route("/{file}", self.page),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts or ["*"], www_redirect=False)],
            exception_handlers={BadRequest: _refuse, HTTPException: _refuse_http},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        self.scheduler.start()
        yield
        await asyncio.to_thread(self.scheduler.stop)

    # --- from the engine's thread to the event loop ---

    def _deliver(self, news: News) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._spread, news)

    def _spread(self, news: News) -> None:
        for job, update in news.items():
            if update.ended:
                usage = job.usage
                self.metrics.add("sequences_total", 1, f'reason="{update.ended}"')
                self.metrics.add("prompt_tokens_total", usage.prompt_tokens)
                self.metrics.add("completion_tokens_total", usage.completion_tokens)
                self.metrics.add("sops_total", usage.sops)
                self.metrics.add("macs_total", usage.macs)
                self.metrics.add("energy_picojoules_total", usage.pj)
            mailbox = self.mailboxes.get(job)
            if mailbox is not None:
                mailbox.put_nowait((job, update))
        if self.scheduler.problem:
            self.fail()

    # --- routes ---

    def _guarded(
        self, route: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def guarded(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if self.key is not None and not hmac.compare_digest(given.encode(), self.key.encode()):
                raise BadRequest("a key is needed: Authorization: Bearer KEY", None, 401, "authentication_error")
            return await route(request)

        return guarded

    async def health(self, request: HttpRequest) -> Response:
        problem = self.scheduler.problem
        return JSONResponse(
            {"status": "error" if problem else "ok", "model": self.name}, status_code=500 if problem else 200
        )

    async def show_metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.metrics.render(), media_type="text/plain; version=0.0.4")

    def _describe(self) -> dict[str, Any]:
        shape = self.model.bundle.shape
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "spikeopd",
            "spikeopd": {
                "version": __version__,
                "context": shape.max_position_embeddings,
                "max_new_tokens": self.limits.max_new_tokens,
                "vocabulary": shape.vocab_size,
                "precision": self.model.precision,
                **self.watch.layout(),
            },
        }

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.name:
            raise BadRequest(f"this is {self.name!r}", "model", 404)
        return JSONResponse(self._describe())

    async def page(self, request: HttpRequest) -> Response:
        asset = ASSETS.get(request.path_params.get("file", ""))
        if asset is None:
            raise BadRequest(f"no such page: {request.url.path[:80]}", None, 404)
        content = files("neuro_sim.serve").joinpath("page", asset[0]).read_bytes()
        return Response(content, media_type=asset[1], headers=PAGE_HEADERS)

    async def complete(self, http: HttpRequest, chat: bool) -> Response:
        route = http.url.path
        try:
            body = await asyncio.wait_for(self._body(http), BODY_SECONDS)
            request = protocol.parse(body, chat, self.name, self.model.bundle.text, self.limits, self.defaults)
            jobs = self._submit(request)
        except (BadRequest, asyncio.TimeoutError, ClientDisconnect) as error:
            wrong = error if isinstance(error, BadRequest) else BadRequest("the request took too long", None, 408)
            self.metrics.add("requests_total", 1, f'route="{route}",status="{wrong.status}"')
            raise wrong from None
        answer, mailbox = Answer(request, self.name), self.mailboxes[jobs[0]]
        self.metrics.add("requests_total", 1, f'route="{route}",status="200"')
        if request.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(
                self._stream(answer, jobs, mailbox), media_type="text/event-stream", headers=headers
            )
        return await self._whole(http, answer, jobs, mailbox)

    async def _body(self, http: HttpRequest) -> Any:
        # A form or a script of another site cannot send this type without asking first, and CORS is off.
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise BadRequest("send application/json", None, 415)
        body = b""
        async for part in http.stream():
            body += part
            if len(body) > self.limits.body_bytes:
                raise BadRequest(f"the body has more than {self.limits.body_bytes} bytes", None, 413)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None

    def _submit(self, request: protocol.Request) -> list[Job]:
        try:
            jobs = make_jobs(self.model, request.prompts, request.sampling, request.stop, request.ignore_eos)
        except InputError as error:
            raise BadRequest(str(error), "messages" if request.chat else "prompt") from None
        mailbox: asyncio.Queue[tuple[Job, Update]] = asyncio.Queue()
        for job in jobs:
            job.seconds = self.limits.seconds
            job.stream = request.stream
            job.watch = self.watch.token if request.spikes and request.stream else None
            self.mailboxes[job] = mailbox
        try:
            self.scheduler.submit(jobs)
        except QueueFull as error:
            self._forget(jobs)
            status = 503 if self.scheduler.problem else 429
            raise BadRequest(str(error), None, status, "overloaded_error") from None
        return jobs

    def _forget(self, jobs: list[Job]) -> None:
        """At the end of every answer, however it came: a job that nobody listens to is decoded no further."""
        for job in jobs:
            self.mailboxes.pop(job, None)
        self.scheduler.cancel([job for job in jobs if job.ended is None])
        self.metrics.observe("request_seconds", self._since(jobs))

    def _since(self, jobs: list[Job]) -> float:
        return time.monotonic() - jobs[0].arrived

    async def _whole(
        self, http: HttpRequest, answer: Answer, jobs: list[Job], mailbox: asyncio.Queue[tuple[Job, Update]]
    ) -> Response:
        texts = dict(zip(jobs, answer.request.echoes, strict=True))
        left, problem = set(jobs), ""
        gone = asyncio.ensure_future(_until_disconnected(http))
        try:
            while left:
                news = asyncio.ensure_future(mailbox.get())
                await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
                if not news.done():
                    news.cancel()
                    return Response(status_code=499)  # nobody reads it
                job, update = news.result()
                texts[job] += update.text
                if update.ended:
                    left.discard(job)
                    problem = problem or update.problem
        finally:
            gone.cancel()
            self._forget(jobs)
        if problem:
            raise BadRequest(f"the engine failed: {problem}", None, 500, "server_error")
        return JSONResponse(answer.whole(list(texts.values()), _ends(jobs), [job.usage for job in jobs]))

    async def _stream(
        self, answer: Answer, jobs: list[Job], mailbox: asyncio.Queue[tuple[Job, Update]]
    ) -> AsyncIterator[bytes]:
        """Server-sent events. News that piled up while the client was slow goes out in one write."""
        left, started = set(jobs), False
        order = {job: index for index, job in enumerate(jobs)}
        try:
            first = [answer.chunk(order[job], answer.request.echoes[order[job]], None, True, ()) for job in jobs]
            if answer.request.chat or any(answer.request.echoes):
                yield _events(first)
            while left:
                news = [await mailbox.get()]
                while not mailbox.empty():
                    news.append(mailbox.get_nowait())
                if not started and any(job.generated for job in jobs):
                    started = True
                    self.metrics.observe("first_token_seconds", self._since(jobs))
                chunks = []
                for job, update in news:
                    if update.text or update.ended or update.spikes:
                        chunks.append(answer.chunk(order[job], update.text, update.ended, False, update.spikes))
                    if update.ended:
                        left.discard(job)
                    if update.problem:
                        chunks.append(BadRequest("the engine failed", None, 500, "server_error").to_dict())
                if chunks:
                    yield _events(chunks)
            if answer.request.include_usage:
                yield _events([answer.last(_ends(jobs), [job.usage for job in jobs])])
            yield b"data: [DONE]\n\n"
        finally:
            self._forget(jobs)


def _ends(jobs: list[Job]) -> list[Any]:
    return [job.ended for job in jobs]


def _events(chunks: list[dict[str, Any]]) -> bytes:
    return "".join(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in chunks).encode()


async def _until_disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.to_dict(), status_code=error.status, headers=headers)


async def _refuse_http(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _refuse(request, BadRequest(error.detail, None, error.status_code))
