"""Requests and answers in the form of OpenAI's API: every field checked, what cannot be honoured refused by name."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuro_sim.serve.scheduler import Ended, Usage
from neuro_sim.text import Text, continue_chat
from spikeopd.errors import ConfigError, InputError, short
from spikeopd.sampling import Sampling, asked_for

Json = dict[str, Any]
FINISH: dict[Ended, str] = {"eos": "stop", "stop": "stop", "error": "error"}  # everything else: "length"
# Fields that change what comes back and that this server does not have, with the values that ask for nothing.
MISSING: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
    "modalities": (None, ["text"]),
}
MAX_STOPS, MAX_STOP_LENGTH = 8, 256


class BadRequest(Exception):
    """What the client is told, with the status of HTTP, the field and OpenAI's kind of error."""

    def __init__(
        self, message: str, field: str | None = None, status: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.field, self.status, self.kind = field, status, kind

    def to_dict(self) -> Json:
        return {"error": {"message": str(self), "type": self.kind, "param": self.field, "code": None}}


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    max_new_tokens: int = 1024
    seconds: float = 120.0
    sequences: int = 8
    body_bytes: int = 1 << 20


@dataclass(frozen=True)
class Request:
    """A checked request; one sequence for each entry of `prompts`."""

    chat: bool
    prompts: list[list[int]]
    echoes: list[str]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    ignore_eos: bool = False
    spikes: bool = False


def parse(body: Any, chat: bool, name: str, text: Text, limits: Limits, defaults: Sampling) -> Request:
    """A request to /v1/completions or /v1/chat/completions."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("model", name) != name:
        message = f"model {short(repr(body['model']), 80)} is not served here; this is {name!r}"
        raise BadRequest(message, "model", 404)
    for field, nothing in MISSING.items():
        if body.get(field) not in nothing:
            raise BadRequest(f"{field} is not supported by this server; leave it out", field)
    own = body.get("spikeopd") or {}
    if not isinstance(own, dict):
        raise BadRequest("spikeopd must be an object", "spikeopd")
    texts = [_chat_text(body.get("messages"))] if chat else _several(body.get("prompt"))
    count = _number(body, "n", 1, 1, limits.sequences, whole=True)
    if len(texts) * count > limits.sequences:
        raise BadRequest(f"{len(texts) * count} sequences; one request may have {limits.sequences}", "prompt")
    field = "messages" if chat else "prompt"
    if any(isinstance(one, str) and not _is_unicode(one) for one in texts):
        raise BadRequest(f"{field} is not text: it holds half of a character (a lone surrogate)", field)
    echo = not chat and _flag(body, "echo")
    try:
        prompts = [text.encode(one) if isinstance(one, str) else one for one in texts]
        echoes = [(one if isinstance(one, str) else text.decode(one)) if echo else "" for one in texts]
    except InputError as error:  # also numbers that are no tokens
        raise BadRequest(str(error), field) from None
    return Request(
        chat=chat,
        prompts=[prompt for prompt in prompts for _ in range(count)],
        echoes=[one for one in echoes for _ in range(count)],
        sampling=_sampling(body, limits, defaults),
        stop=_stop(body.get("stop")),
        stream=_flag(body, "stream"),
        include_usage=_flag(_object(body, "stream_options"), "include_usage"),
        ignore_eos=_flag(body, "ignore_eos"),
        spikes=_flag(own, "spikes"),
    )


def _sampling(body: Json, limits: Limits, defaults: Sampling) -> Sampling:
    most = limits.max_new_tokens
    asked = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    try:
        given = {
            "temperature": _number(body, "temperature", None, 0, 100),
            "top_k": _number(body, "top_k", None, 0, 1 << 31, whole=True),
            "top_p": _number(body, "top_p", None, 0, 1),
            "min_p": _number(body, "min_p", None, 0, 1),
            "repetition_penalty": _number(body, "repetition_penalty", None, 0, 100),
            # Without a seed every answer is another one, as clients expect; the answer names the seed it had.
            "seed": _number(body, "seed", secrets.randbelow(1 << 31), 0, (1 << 63) - 1, whole=True),
            "max_new_tokens": _number(body, asked, min(most, defaults.max_new_tokens), 0, most, whole=True),
        }
        return asked_for(given, defaults)
    except ConfigError as error:
        raise BadRequest(str(error)) from None


def _number(body: Json, field: str, default: Any, low: float, high: float, whole: bool = False) -> Any:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise BadRequest(f"{field} must be {kind} from {low} to {high}, got {short(repr(value), 60)}", field)
    return value


def _flag(body: Json, field: str) -> bool:
    value = body.get(field, False)
    if value not in (True, False, None):
        raise BadRequest(f"{field} must be true or false", field)
    return bool(value)


def _object(body: Json, field: str) -> Json:
    value = body.get(field) or {}
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be an object", field)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STOPS:
        raise BadRequest(f"stop must be a string or a list of up to {MAX_STOPS}", "stop")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in strings):
        raise BadRequest(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(strings)


def _several(prompt: Any) -> list[str | list[int]]:
    """A string, a list of strings, a list of token numbers, or a list of those."""
    if isinstance(prompt, str) or _is_tokens(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_tokens(one) for one in prompt):
        return prompt
    raise BadRequest("prompt must be text or token numbers, or a list of either", "prompt")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _chat_text(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return continue_chat([_content(message) for message in messages])


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    if not isinstance(content, str):
        raise BadRequest("every message needs a content of text", "messages")
    return content


class Answer:
    """The JSON of one answer, whole or as it comes."""

    def __init__(self, request: Request, model: str) -> None:
        self.request, self.model = request, model
        self.id = ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    def whole(self, texts: Sequence[str], ended: Sequence[Ended], usages: Sequence[Usage]) -> Json:
        choices = [
            {"index": index, "finish_reason": finish(why), "logprobs": None}
            | ({"message": {"role": "assistant", "content": text}} if self.request.chat else {"text": text})
            for index, (text, why) in enumerate(zip(texts, ended, strict=True))
        ]
        kind = "chat.completion" if self.request.chat else "text_completion"
        return self._object(kind) | {"choices": choices, "usage": usage(usages), "spikeopd": self._own(ended)}

    def chunk(self, index: int, text: str, ended: Ended | None, first: bool, spikes: Sequence[Json]) -> Json:
        choice: Json = {"index": index, "finish_reason": finish(ended), "logprobs": None}
        if self.request.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        answer = self._object(kind) | {"choices": [choice]}
        return answer | {"spikeopd": {"tokens": spikes}} if spikes else answer

    def last(self, ended: Sequence[Ended], usages: Sequence[Usage]) -> Json:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return self._object(kind) | {"choices": [], "usage": usage(usages), "spikeopd": self._own(ended)}

    def _object(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _own(self, ended: Sequence[Ended]) -> Json:
        """What OpenAI's form has no place for: the seed that gives this text again, and why each sequence ended."""
        return {"seed": self.request.sampling.seed, "stopped": list(ended)}


def finish(ended: Ended | None) -> str | None:
    return None if ended is None else FINISH.get(ended, "length")


def usage(parts: Sequence[Usage]) -> Json:
    prompt, made = sum(part.prompt_tokens for part in parts), sum(part.completion_tokens for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "sops": sum(part.sops for part in parts),
        "macs": sum(part.macs for part in parts),
        "pj": round(sum(part.pj for part in parts), 1),
    }
