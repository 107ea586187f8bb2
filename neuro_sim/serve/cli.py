"""spikeopd-serve: an OpenAI-compatible server for an exported bundle, and a page that shows its spikes."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spikeopd.arguments import add_version
from spikeopd.errors import BackendMissing, ConfigError, InputError, install_command, run_command, say

PROG = "spikeopd-serve"
KEY_VARIABLE = "SPIKEOPD_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")
EXAMPLES = f"""\
examples:
  {PROG} bundle
  {PROG} bundle --port 9000 --batch 32 --time-limit 30
"""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(PROG, _main, argv)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Serve an exported bundle: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, "
        "and a page at / that shows the spikes. One process, one engine; sequences are decoded side by side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by spikeopd-export")
    add_version(parser)
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine alone)")
    network.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)")
    network.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"clients must send this key (also: ${KEY_VARIABLE})"
    )
    network.add_argument("--name", help="of the model, as clients say it (default: the folder's name)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--batch", type=int, default=16, metavar="N", help="sequences side by side (default: 16)")
    limits.add_argument("--queue", type=int, default=64, metavar="N", help="sequences that may wait (default: 64)")
    limits.add_argument(
        "--max-new-tokens", type=int, default=1024, metavar="N", help="most that a request gets (default: 1024)"
    )
    limits.add_argument(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="of a request, waiting included (default: 120)",
    )
    limits.add_argument("--body-limit", type=int, default=1024, metavar="KIB", help="of a request (default: 1024)")
    limits.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="for answers under way when stopped (default: 30)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of the event engine (default: all cores)")
    parser.add_argument("--quiet", action="store_true", help="no lines on stderr but errors")
    return parser


def _main(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    key = _read_key(args.api_key_file)
    _check(args)
    from neuro_sim.api import Bundle
    from neuro_sim.backends import Running

    bundle = Bundle(args.bundle)
    if bundle.precision == "float32":
        raise ConfigError("serving needs the event engine, which is for integers; export the bundle with int8")
    try:
        import uvicorn

        from neuro_sim.serve.app import Server
        from neuro_sim.serve.connection import Impatient
        from neuro_sim.serve.protocol import Limits
    except ModuleNotFoundError as error:
        raise BackendMissing(f"serving needs starlette and uvicorn ({error}); {install_command('serve')}") from error
    listening = _listen(args.host, args.port)
    port = listening.getsockname()[1]
    name = args.name or bundle.folder.resolve().name
    tell = (lambda line: None) if args.quiet else say
    tell(f"loading {bundle.folder} ...")
    limits = Limits(args.max_new_tokens, args.time_limit, 8, args.body_limit << 10)
    hosts = [*LOCAL, "[::1]"] if args.host in LOCAL else None  # against names of others that lead here
    with bundle.load("event", Running(args.threads)) as model:
        server = Server(model, name, limits=limits, batch=args.batch, waiting=args.queue, key=key, hosts=hosts)
        config = uvicorn.Config(
            server.app,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=Impatient,
            ws="none",
            timeout_graceful_shutdown=max(1, round(args.grace)),
            limit_concurrency=args.batch + args.queue + 256,
        )
        running = uvicorn.Server(config)
        # uvicorn's own handlers raise the signal again; a server that was asked to stop and did has ended well.
        running.capture_signals = lambda: _signals(running.handle_exit)  # type: ignore[method-assign]
        server.fail = lambda: setattr(running, "should_exit", True)
        shown = f"[{args.host}]" if ":" in args.host else args.host
        tell(f"{name} at http://{shown}:{port}  (page: /  API: /v1  Ctrl-C ends it)")
        if key is None and args.host not in LOCAL:
            tell(f"{PROG}: anybody who reaches {args.host} may use it; give a key in ${KEY_VARIABLE}")
        running.run(sockets=[listening])
        if server.scheduler.problem:
            say(f"{PROG}: the engine failed: {server.scheduler.problem}")
            return 1
    tell(f"{PROG}: stopped")
    return 0


@contextmanager
def _signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT and SIGTERM: answers under way are finished; the second one stops at once."""
    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}"
        for name, low in (("batch", 1), ("queue", 0), ("max_new_tokens", 1), ("body_limit", 1))
        if getattr(args, name) < low
    ]
    if not 0 <= args.port < 1 << 16:
        problems.append(f"--port must lie between 0 and 65535, got {args.port}")
    if not args.time_limit > 0 or not args.grace >= 0:
        problems.append("--time-limit and --grace are seconds above 0")
    if problems:
        raise ConfigError("; ".join(problems))


def _read_key(file: Path | None) -> str | None:
    """From a file or the environment: on a command line everybody on the machine could read it."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text("utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from error
    if not key:
        raise InputError(f"--api-key-file {file}: the file is empty")
    return key


def _listen(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a port in use is told at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); choose another with --port or --host"
        ) from error
    return listening


if __name__ == "__main__":
    sys.exit(main())
