"""Text to token numbers and back, as a bundle has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spikeopd.errors import InputError
from spikeopd.text.backend import LONGEST_TOKEN, read_backend, rust_errors

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Text:
    """A bundle's tokenizer and its begin and end tokens. Without a tokenizer, text is the numbers themselves.

    context: tokens the model takes, if known; a prompt that cannot fit is refused before it is tokenised.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        bos: int | None = None,
        eos: int | None = None,
        file: Path | str = "tokenizer.json",
        context: int | None = None,
    ) -> None:
        self.tokenizer, self.bos, self.eos, self.file, self.context = tokenizer, bos, eos, file, context

    def encode(self, text: str) -> list[int]:
        """Token numbers of a prompt behind the token that began every document in training; nothing follows them."""
        if self.tokenizer is None:
            raise InputError(f"{self.file}: no tokenizer in this bundle; give token numbers with --prompt-tokens")
        # No token stands for more characters than this, spaces that some tokens swallow apart.
        if self.context is not None and len(text) > self.context * LONGEST_TOKEN:
            raise InputError(f"the prompt has {len(text)} characters; the model takes {self.context} tokens")
        with rust_errors(f"{self.file}: the tokenizer fails", "export the bundle again"):
            ids = list(self.tokenizer.encode(text, add_special_tokens=self.bos is None).ids)
        return ids if self.bos is None else [self.bos, *ids]

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        with rust_errors(f"{self.file}: the tokenizer fails", "export the bundle again"):
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def label(self, token: int) -> str:
        """The token for a picture: its text if that can be printed, else its number."""
        text = self.decode([token]) if self.tokenizer is not None else ""
        printable = text.strip() and text.isprintable() and UNFINISHED not in text
        return text.replace("$", r"\$") if printable else f"#{token}"


class Pieces:
    """The text of one sequence piece by piece, as its tokens come, up to the first of the `stop` strings.

    `stopped` tells that one was met; neither it nor what follows is ever given.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self.text, self.stop = text, tuple(stop)
        self.stopped = False
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        # Only a window is decoded again: the tokens behind those of the last piece (a space in front may be dropped).
        self._before, self._given = 0, 0

    def next(self, tokens: Sequence[int], final: bool = False) -> str:
        """What is new. A character may span tokens, so an unfinished one waits until the end."""
        if self.stopped:
            return ""
        old, text = (self.text.decode(tokens[self._before : end]) for end in (self._given, len(tokens)))
        piece = ""
        if len(text) > len(old) and (final or not text.endswith(UNFINISHED)):
            piece, self._before, self._given = text[len(old) :], self._given, len(tokens)
        if not self.stop:
            return piece
        whole = self.held + piece
        # Of several the one that is complete first, however the text is cut into pieces.
        ends = [(place + len(stop), place) for stop in self.stop if (place := whole.find(stop)) >= 0]
        self.stopped = bool(ends)
        ready = min(ends)[1] if ends else len(whole) if final else len(whole) - _beginning(whole, self.stop)
        self.held = whole[ready:]
        return whole[:ready]


def _beginning(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop)) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)


def continue_chat(messages: Sequence[str]) -> str:
    """The plain template of a model that knows no roles: what was said, line after line, to be continued."""
    return "\n".join(messages)


def read_text(folder: Path, manifest: Mapping[str, Any]) -> Text:
    """The tokenizer of a bundle; a bundle may have none."""
    special = manifest.get("tokens") or {}
    bos, eos, file = special.get("bos"), special.get("eos"), folder / "tokenizer.json"
    context = manifest["shape"]["max_position_embeddings"]
    if not file.is_file():
        return Text(None, bos, eos, file, context)
    return Text(read_backend(file, "export the bundle again"), bos, eos, file, context)
