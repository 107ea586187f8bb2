"""spikeopd-serve: the command's text for the same seed, through OpenAI's own client, beside 63 others, and abused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from random_models import random_model, random_shape
from tokenizers import Tokenizer

import neuro_sim
from export.bundle_writer import BundleOptions, write_bundle
from neuro_sim.api import Model
from neuro_sim.serve import protocol
from neuro_sim.serve.cli import main
from neuro_sim.serve.metrics import Metrics
from neuro_sim.serve.protocol import BadRequest, Limits
from neuro_sim.serve.scheduler import News, QueueFull, Scheduler, make_jobs
from spikeopd.sampling import Sampling

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    path = tmp_path_factory.mktemp("serve")
    tokenizer.save(str(path / "tokenizer.json"))
    options = BundleOptions(target="lava", tokenizer=path / "tokenizer.json", tokens={"bos": 0, "eos": 0})
    model = random_model(random_shape(vocab=tokenizer.get_vocab_size(), positions=600), seed=5)
    return write_bundle(model, path / "bundle", options)


@pytest.fixture(scope="module")
def model(written: Path) -> Iterator[Model]:
    with neuro_sim.load(written, threads=1) as loaded:
        yield loaded


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, model: Model, **options: Any) -> None:
        from neuro_sim.serve.app import Server
        from neuro_sim.serve.connection import Impatient

        self.server = Server(model, "tiny", **options)
        options = {"log_level": "warning", "ws": "none", "http": Impatient}
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.server.app, port=0, **options))
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)

    def __enter__(self) -> Running:
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        import urllib.error
        import urllib.request

        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, given)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def open(self, body: dict[str, Any]) -> socket.socket:
        """A connection with a request on its way, and nobody who reads."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [f"Content-Length: {len(data)}", "", ""]
        connection.sendall("\r\n".join(head).encode() + data)
        return connection

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module")
def running(model: Model) -> Iterator[Running]:
    with Running(model, waiting=80) as server:
        yield server


BODY = {"prompt": "abc", "max_tokens": 12, "temperature": 1.5, "top_p": 1, "seed": 3, "ignore_eos": True}


def expected(model: Model, prompt: str = "abc", tokens: int = 12, **options: Any) -> Any:
    options = {"temperature": 1.5, "seed": 3, "ignore_eos": True, **options}
    return neuro_sim.generate(model, prompt, max_new_tokens=tokens, **options)


@pytest.mark.slow  # its import alone takes seconds
def test_openais_client_gets_the_text_of_the_command(running: Running, model: Model) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
    with client:
        assert [one.id for one in client.models.list()] == ["tiny"]
        own = {"ignore_eos": True}
        options = {"model": "tiny", "max_tokens": 12, "temperature": 1.5, "top_p": 1, "seed": 3, "extra_body": own}
        whole, same = client.completions.create(prompt="abc", **options), expected(model)
        assert whole.choices[0].text == same.text and whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 12 and whole.usage.prompt_tokens == 4
        summary = same.summary()
        assert whole.usage.sops == round(summary["sops_per_token"] * 15)
        assert whole.usage.pj == pytest.approx(summary["pj_per_token"] * 15, rel=1e-6)
        chunks = list(
            client.completions.create(prompt="abc", stream=True, stream_options={"include_usage": True}, **options)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == same.text
        assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "length"
        messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
        chat = client.chat.completions.create(messages=messages, **options)
        assert chat.choices[0].message.content == expected(model, "ab\nc").text
        pieces = client.chat.completions.create(messages=messages, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model="other", prompt="a")


def test_sixty_four_clients_at_once(running: Running, model: Model) -> None:
    def one(number: int) -> str:
        body = {**BODY, "prompt": "abcdefgh"[: 1 + number % 8], "max_tokens": 3 + number % 5, "seed": number}
        status, answer = running.ask("/v1/completions", body)
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(64) as clients:
        got = list(clients.map(one, range(64)))
    for number in range(64):
        assert got[number] == expected(model, "abcdefgh"[: 1 + number % 8], 3 + number % 5, seed=number).text


def test_many_sequences_of_one_request(running: Running, model: Model) -> None:
    status, answer = running.ask("/v1/completions", {**BODY, "prompt": ["abc", "b"], "n": 2, "echo": True})
    both = neuro_sim.generate(
        model, ["abc", "abc", "b", "b"], max_new_tokens=12, temperature=1.5, seed=3, ignore_eos=True
    )
    given = ["abc", "abc", "b", "b"]
    assert status == 200
    assert [one["text"] for one in answer["choices"]] == [a + b for a, b in zip(given, both.texts, strict=True)]
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]


def test_a_stop_string_ends_the_text_before_it(running: Running, model: Model) -> None:
    text = expected(model, tokens=12).text
    stop = text[5:7]
    cut = text[: text.index(stop)]
    status, answer = running.ask("/v1/completions", {**BODY, "stop": [stop]})
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (cut, "stop")
    assert answer["spikeopd"]["stopped"] == ["stop"] and expected(model, stop=stop).text == cut
    assert "".join(neuro_sim.stream(model, "abc", max_new_tokens=12, temperature=1.5, seed=3, stop=stop)) == cut


def test_without_a_seed_the_answer_names_its_own(running: Running) -> None:
    body = {key: value for key, value in BODY.items() if key != "seed"}
    _, first = running.ask("/v1/completions", body)
    _, again = running.ask("/v1/completions", {**body, "seed": first["spikeopd"]["seed"]})
    assert first["choices"] == again["choices"]


def test_spikes_of_every_token(running: Running, model: Model) -> None:
    from neuro_sim.serve.spikes import Watch

    _, text = running.ask("/v1/completions", {**BODY, "stream": True, "spikeopd": {"spikes": True}})
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    seen = [one for chunk in chunks for one in chunk["spikeopd"]["tokens"]]
    run = neuro_sim.generate(model, "abc", max_new_tokens=12, temperature=1.5, seed=3, ignore_eos=True, trace="all")
    assert [one["position"] for one in seen] == list(range(15)) and [one["token"] for one in seen[3:]] == run.tokens
    assert "".join(one["text"] for one in seen) == "".join(chunk["choices"][0]["text"] for chunk in chunks) == run.text
    series = run.to_run()["per_token"]
    assert [sum(one["sops"].values()) for one in seen] == series["sops"]
    watch = Watch(model.bundle.shape, model.bundle.text)
    trace = run.traces[0]
    import base64

    import numpy as np

    shape = model.bundle.shape
    bits = np.unpackbits(np.frombuffer(base64.b64decode(seen[5]["raster"]), np.uint8))
    sites = [(layer, site) for layer in range(shape.num_hidden_layers) for site in watch.sites]
    flat = np.concatenate([trace.sites[key][5][:, watch._chosen[key[1]]].ravel() for key in sites])
    assert (bits[: flat.size] == flat).all()
    counts = np.frombuffer(base64.b64decode(seen[5]["attention"][1]), np.uint8)
    assert (
        counts.tolist()
        == trace.sites[1, "a"][5].reshape(shape.num_steps, shape.num_attention_heads, 6).sum((0, 1)).tolist()
    )


def test_a_client_that_leaves_frees_its_lane(running: Running, model: Model) -> None:
    scheduler, long = running.server.scheduler, {**BODY, "max_tokens": 580}
    for stream in (True, False):
        connection = running.open({**long, "stream": stream})
        running.wait(lambda: scheduler.active)
        connection.close()
        running.wait(lambda: not scheduler.active)
    assert 'sequences_total{reason="cancelled"}' in running.ask("/metrics")[1]
    assert not running.server.mailboxes


def test_a_slow_reader_holds_nothing_up(running: Running, model: Model) -> None:
    with closing(running.open({**BODY, "max_tokens": 300, "stream": True, "spikeopd": {"spikes": True}})) as slow:
        running.wait(lambda: running.server.scheduler.active)
        assert running.ask("/v1/completions", BODY)[1]["choices"][0]["text"] == expected(model).text
        running.wait(lambda: not running.server.scheduler.active)  # decoded to its end though nobody read
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(1 << 16)
    assert received.count(b'"raster"') == 303


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 5000, 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        ({}, 400, "prompt must be text"),
        ({"prompt": []}, 400, "prompt must be text"),
        ({"prompt": [0, 10**6]}, 400, "outside the vocabulary"),
        ({"prompt": "a" * 1000}, 400, "this model's context holds 600"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "max_tokens must be a whole number from 0 to 1024"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature must be a number"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature must be a number"),
        ({"prompt": "a", "top_p": 0}, 400, "top-p must be above 0"),
        ({"prompt": "a", "n": 9}, 400, "n must be"),
        ({"prompt": ["a"] * 9}, 400, "9 sequences"),
        ({"prompt": "a", "stop": [""]}, 400, "stop strings"),
        ({"prompt": "a", "logprobs": 3}, 400, "logprobs is not supported"),
        ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream must be true or false"),
        ({"prompt": "\ud800"}, 400, "half of a character"),
        (b'"' + b"a" * (1 << 20) + b'"', 413, "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_what_is_refused_and_in_which_words(running: Running, body: Any, status: int, words: str) -> None:
    got, answer = running.ask("/v1/completions", body)
    assert got == status and words in answer["error"]["message"], answer


def test_other_refusals(running: Running) -> None:
    assert running.ask("/v1/completions", BODY, **{"Content-Type": "text/plain"})[0] == 415
    assert running.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]})[0] == 400
    assert running.ask("/nothing")[0] == 404 and running.ask("/v1/models/other")[0] == 404
    assert running.ask("/..%2f..%2fetc%2fpasswd")[0] == 404
    assert running.ask("/health") == (200, {"status": "ok", "model": "tiny"})
    assert running.ask("/v1/models/tiny")[1]["spikeopd"]["context"] == 600


def test_key_host_and_queue(model: Model) -> None:
    limits = Limits(seconds=0.4)
    with Running(model, key="secret", hosts=["127.0.0.1"], batch=1, waiting=1, limits=limits) as server:
        assert server.ask("/health")[0] == 200 and server.ask("/v1/models")[0] == 401
        assert server.ask("/v1/completions", BODY, Authorization="Bearer wrong")[0] == 401
        right = {"Authorization": "Bearer secret"}
        assert server.ask("/v1/completions", BODY, **right)[0] == 200
        assert server.ask("/v1/models", None, Host="evil.example", **right)[0] == 400
        # One is decoded, one waits, the third is sent away; all who stay are ended by the limit on time.
        blocker = threading.Event()
        feed, server.server.scheduler.engine = server.server.scheduler.engine, _Slow(model.decoder, blocker)
        results: list[tuple[int, Any]] = []
        ask = lambda: results.append(server.ask("/v1/completions", {**BODY, "max_tokens": 400}, **right))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        blocker.set()
        server.server.scheduler.engine = feed
        codes = sorted(code for code, _ in results)
        assert codes == [200, 200, 429], results
        assert {answer["spikeopd"]["stopped"][0] for code, answer in results if code == 200} == {"time"}


class _Slow:
    """The engine at two blocks a second."""

    def __init__(self, decoder: Any, ready: threading.Event) -> None:
        self.lanes, self.plan, self.ready, self._engine = (
            decoder.engine.lanes,
            decoder.engine.plan,
            ready,
            decoder.engine,
        )

    def feed(self, *given: Any) -> Any:
        self.ready.wait(0.15)
        return self._engine.feed(*given)


def test_an_engine_that_fails_is_told_to_everybody(model: Model) -> None:
    news: News = {}
    scheduler = Scheduler(model, news.update, batch=2, waiting=4)
    engine = SimpleNamespace(lanes=4, plan=scheduler.engine.plan, feed=lambda *given: 1 / 0)
    scheduler.engine = engine
    jobs = make_jobs(model, [[1], [2], [3]], Sampling())
    scheduler.submit(jobs)
    scheduler.start()
    scheduler._thread.join(10)
    assert [update.ended for update in news.values()] == ["error"] * 3 and "ZeroDivisionError" in scheduler.problem
    with pytest.raises(QueueFull):
        scheduler.submit(make_jobs(model, [[1]], Sampling()))


def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics()
    metrics.about(things_total="Things")
    metrics.add("things_total", 2, 'kind="a"')
    metrics.observe("wait_seconds", 0.02)
    metrics.gauges["level"] = lambda: 3
    lines = metrics.render().splitlines()
    assert lines[:3] == [
        "# HELP spikeopd_things_total Things",
        "# TYPE spikeopd_things_total counter",
        'spikeopd_things_total{kind="a"} 2',
    ]
    assert "spikeopd_level 3" in lines and 'spikeopd_wait_seconds_bucket{le="0.05"} 1' in lines
    assert 'spikeopd_wait_seconds_bucket{le="0.01"} 0' in lines and "spikeopd_wait_seconds_count 1" in lines


def test_parse_refuses_what_is_no_object(model: Model) -> None:
    with pytest.raises(BadRequest, match="spikeopd must be an object"):
        protocol.parse({"prompt": "a", "spikeopd": 3}, False, "m", model.bundle.text, Limits(), Sampling())


@pytest.mark.slow
def test_the_command_serves_and_stops(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import re
    import signal

    (tmp_path / "key").write_text("k\n")
    command = [sys.executable, "-m", "neuro_sim.serve.cli", str(written), "--port", "0", "--threads", "1"]
    done = subprocess.Popen([*command, "--api-key-file", str(tmp_path / "key")], stderr=subprocess.PIPE, text=True)
    assert done.stderr is not None
    assert "loading" in done.stderr.readline()
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", done.stderr.readline())[1])  # type: ignore[index]
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.02)
    done.send_signal(signal.SIGTERM)
    assert done.wait(120) == 0 and done.stderr.read() == "spikeopd-serve: stopped\n"
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([str(written), "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another with --port" in capsys.readouterr().err
    assert main([str(written), "--batch", "0"]) == 2 and main([str(tmp_path / "no")]) == 2
    (tmp_path / "key").write_text("")
    assert main([str(written), "--api-key-file", str(tmp_path / "key")]) == 2
    assert "the file is empty" in capsys.readouterr().err


def ended(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
def test_a_client_that_asks_nothing_is_sent_away(running, monkeypatch, sent):
    monkeypatch.setattr("neuro_sim.serve.connection.SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(sent)
        assert ended(connection)
    with socket.create_connection(("127.0.0.1", running.port)) as connection:  # also after an answer
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + sent)
        assert ended(connection)


def test_a_client_that_does_not_read_is_sent_away_and_a_slow_answer_is_not(running, monkeypatch):
    monkeypatch.setattr("neuro_sim.serve.connection.SECONDS", 0.1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", running.port))
    body = {"prompt": ["abc"] * 8, "max_tokens": 500, "stream": True, "spikeopd": {"spikes": True}, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    running.wait(lambda: running.server.mailboxes)
    running.wait(lambda: not running.server.mailboxes)  # its answer was given up, or was made whole
    running.wait(lambda: not running.uvicorn.server_state.connections)
    connection.close()
    status, answer = running.ask("/v1/completions", BODY | {"max_tokens": 500, "n": 8})
    assert status == 200 and answer["usage"]["completion_tokens"] == 8 * 500
