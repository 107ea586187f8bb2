"""spikeopd-run-lava --interactive: a text continued in turns, line by line, with its history."""

from __future__ import annotations

import sys
from typing import Any

from neuro_sim.api import Model, stream
from neuro_sim.decode import Result
from neuro_sim.display import columns, put, status_line
from neuro_sim.text import continue_chat
from spikeopd.errors import InputError, say

HELP = "Each line continues the text so far. /new forgets it, /quit or Ctrl-D ends, Ctrl-C stops a reply."


def talk(model: Model, options: dict[str, Any], quiet: bool = False) -> None:
    """Read lines until the end; the model continues all that was said and what it said itself."""
    history: list[str] = []
    if not quiet:
        say(HELP)
    while (line := _read_line()) is not None:
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip() == "/new":
            history = []
        elif line:
            try:
                history = _turn(model, [*history, line], options, quiet)
            except InputError as error:  # this line does not fit; the next one may
                say(f"{error}")


def _turn(model: Model, history: list[str], options: dict[str, Any], quiet: bool) -> list[str]:
    """One reply, streamed. The history with it, without what the context had no room for."""
    text, room = model.bundle.text, model.bundle.shape.max_position_embeddings
    wanted = max(1, min(int(options["max_new_tokens"]), room // 2))
    while len(history) > 1 and len(text.encode(continue_chat(history))) + wanted > room:
        history = history[1:]
    reply = ""
    replying = stream(model, continue_chat(history), **options)
    try:
        for piece in replying:
            reply += piece
            put(piece, must_finish=False)
    except KeyboardInterrupt:
        pass  # the reply ends here; the conversation does not
    put("\n", must_finish=False)
    result: Result = replying.result.result
    if not quiet:
        say(status_line(result, columns()))
    return [*history, reply]


def _read_line() -> str | None:
    """None at the end, also after Ctrl-C at the prompt."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            import readline  # noqa: F401 - gives `input` its line editing

            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except (EOFError, KeyboardInterrupt):
        return None
