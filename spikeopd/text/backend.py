"""tokenizer.json as a stranger may have written it, as a `tokenizers.Tokenizer` or as one in a process of its own.

The library runs whatever the file says: patterns that take for ever, tables that make it panic, padding and truncation
that change a prompt. So the file is bounded and normalised first. If it is made of parts whose cost is known, it runs
here; anything else runs in a worker under limits of time and memory, and what goes wrong there is one line here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spikeopd.errors import InputError, short
from spikeopd.files import read_json

FILE_LIMIT = 64 << 20  # bytes; a vocabulary of 250,000 entries takes a third of it
LONGEST_TEXT = 64  # characters of a text that a part inserts, removes or looks for
LONGEST_TOKEN = 1024  # characters of an entry of the vocabulary
LARGEST_ID = 1 << 24  # of a token
ADDED_TEXT = 1 << 20  # characters of all added tokens, which are looked for in every text at once
CPU_SECONDS = 10.0  # for any call, and a second more for every 100,000 characters
WALL_SECONDS = 120.0  # a worker that waits for a busy machine is not to blame
MEMORY = 2 << 30  # bytes of address space of a worker
ANSWER = 64 << 20  # bytes that a worker may answer

MODELS = ("BPE", "WordPiece", "WordLevel", "Unigram")
# Parts that read a text once, whatever they are told.
PLAIN = {
    "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip", "BertNormalizer",
    "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits",
    "CharDelimiterSplit", "UnicodeScripts", "TemplateProcessing", "BertProcessing", "RobertaProcessing", "Fuse",
    "ByteFallback", "WordPiece", "BPEDecoder", "CTC", "Prepend", "Replace", "Split",
}  # fmt: skip
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How many characters a part can make of one; several of them multiply. The others keep the length, or nearly.
GROWTH = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 3}
MOST_GROWTH, MOST_PARTS = 128, 24
# Patterns that are known to take one pass: GPT-2's, and those of the families around Llama 3 and Qwen 2.
PATTERNS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS % digits}" for digits in ("", "{1,3}")),
}


def read_backend(file: Path, mend: str = "save it again") -> Any:
    """The tokenizer of a file. Has the methods of `tokenizers.Tokenizer` that `CALLS` names."""
    try:
        content = read_json(file, FILE_LIMIT)
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError("no object with a `model`")
        # A prompt is neither filled up nor cut, whatever the file says; lengths are the caller's business.
        content = content | {"padding": None, "truncation": None}
        _check_tokens(content)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a tokenizer file ({short(error)}); {mend}") from error
    return make_backend(content, file, mend)


def make_backend(content: dict[str, Any], file: Path, mend: str = "save it again") -> Any:
    """The tokenizer that a checked tokenizer.json describes: here if its parts allow it, else in a worker."""
    if not is_plain(content):
        return Guarded(file, json.dumps(content), mend)
    from tokenizers import Tokenizer

    with rust_errors(f"{file}: not a tokenizer file", mend):
        return Tokenizer.from_str(json.dumps(content))


@contextlib.contextmanager
def rust_errors(what: str, mend: str) -> Iterator[None]:
    """The Rust side raises plain Exception, and its panics are not even that."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InputError(f"{what} ({short(error)}); {mend}") from error


def _check_tokens(content: dict[str, Any]) -> None:
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or len(added) > 1 << 16:
        raise ValueError("`added_tokens` is no list of at most 65536 tokens")
    for token in added:
        text = token.get("content") if isinstance(token, dict) else None
        if not isinstance(text, str) or not text or len(text) > LONGEST_TOKEN:
            raise ValueError(f"an added token is {short(repr(text), 40)}")
    if sum(len(token["content"]) for token in added) > ADDED_TEXT:
        raise ValueError(f"`added_tokens` have more than {ADDED_TEXT} characters")
    vocabulary = content["model"].get("vocab")
    numbers = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    for number in (*numbers, *(token.get("id") for token in added)):
        if type(number) is int and not 0 <= number < LARGEST_ID:  # saving it lists every number that is left out
            raise ValueError(f"a token has the number {short(number, 40)}")
    entries = vocabulary if isinstance(vocabulary, dict) else vocabulary if isinstance(vocabulary, list) else ()
    for entry in entries:  # a dict of texts, or a list of (text, score)
        text = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(text, str) and len(text) > LONGEST_TOKEN:
            raise ValueError(f"an entry of the vocabulary has {len(text)} characters")


def is_plain(content: dict[str, Any]) -> bool:
    """Whether every part is one whose time and memory are bounded by its text, so that it needs no worker."""
    model = content["model"]
    sections = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    try:
        bounded = not model.get("dropout") and (model.get("max_input_chars_per_word") or 0) <= 200
        # The library cuts tokens by the length of these without looking, and panics.
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        known = model.get("type", "BPE") in MODELS and (model.get("type") == "WordPiece" or not affixes)
        return known and bounded and all(_plain_section(content.get(section)) for section in sections)
    except (TypeError, AttributeError):  # a field of another type than its part has: the library may say what is wrong
        return False


def _plain_section(section: Any) -> bool:
    """Parts work on what the one before made, so their growth multiplies."""
    parts = _parts(section, 0)
    growth = 1
    for part in parts:
        if len(parts) > MOST_PARTS or growth > MOST_GROWTH or not _plain_part(part):
            return False
        if part["type"] == "Replace":
            pattern = part.get("pattern") or {}
            growth *= max(1, -(-len(part.get("content") or "") // len(pattern.get("String") or "x")))
        growth *= GROWTH.get(part["type"], 1)
    return growth <= MOST_GROWTH


def _parts(part: Any, depth: int) -> list[Any]:
    """The parts of a section in a row, sequences opened."""
    if part is None:
        return []
    names = ("normalizers", "pretokenizers", "processors", "decoders")
    if not isinstance(part, dict) or part.get("type") != "Sequence" or depth > 4:
        return [part]
    inner = [entry for key in names for entry in part.get(key, ())]
    found = []
    for entry in inner[: MOST_PARTS + 1]:
        found += _parts(entry, depth + 1)
        if len(found) > MOST_PARTS:
            break
    return found


def _plain_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in PLAIN:
        return False
    pattern = part.get("pattern")
    if pattern is not None:
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if regex not in PATTERNS and not (isinstance(text, str) and 0 < len(text) <= LONGEST_TEXT):
            return False
    if part["type"] == "TemplateProcessing":
        sizes = [len(part.get(key) or ()) for key in ("single", "pair", "special_tokens")]
        return max(sizes) <= 16 and all(len(token["ids"]) <= 16 for token in part["special_tokens"].values())
    return all(len(part.get(key) or "") <= LONGEST_TEXT for key in ("prepend", "content", "prefix", "suffix"))


# --- a tokenizer in a process of its own -----------------------------------------------------------------------------

CALLS = ("encode", "encode_batch_fast", "decode", "token_to_id", "id_to_token", "get_vocab_size", "get_vocab", "to_str")


# Python would look for modules in the working folder first, which may be the stranger's.
_SERVE = "import sys; sys.path[:] = [p for p in sys.path if p]; from spikeopd.text.backend import serve; serve()"


class Guarded:
    """A `tokenizers.Tokenizer` that runs in a worker; each of `CALLS` may take CPU_SECONDS and MEMORY."""

    def __init__(self, file: Path, content: str, mend: str) -> None:
        self.file, self.mend, self.content = file, mend, content
        self._worker = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic writes its stack there
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._ask(content, len(content))

    def encode(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(ids=self._call("encode", text, add_special_tokens=add_special_tokens))

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[SimpleNamespace]:
        found = self._call("encode_batch_fast", texts, add_special_tokens=add_special_tokens)
        return [SimpleNamespace(ids=ids) for ids in found]

    def begin_with(self, token: str) -> Guarded:
        """The same tokenizer with `token` in front of every text, and nothing else around it."""
        text, number = {"Sequence": {"id": "A", "type_id": 0}}, self.token_to_id(token)
        begin, second = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
        template = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, begin, second]}
        template["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}  # type: ignore[assignment]
        content = json.loads(self.content) | {"post_processor": template}
        return Guarded(self.file, json.dumps(content), self.mend)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return lambda *arguments, **named: self._call(name, *arguments, **named)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        request = json.dumps([method, arguments, named])
        return self._ask(request, len(request))

    def _ask(self, request: str, size: int) -> Any:
        worker = self._worker
        assert worker.stdin is not None and worker.stdout is not None
        seconds = CPU_SECONDS + size / 1e5
        timer = _ends_after(worker, WALL_SECONDS + 10 * seconds)
        try:
            worker.stdin.write(f"{seconds}\n{request}\n".encode())
            worker.stdin.flush()
            line = worker.stdout.readline(ANSWER)
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if not line:
            code = worker.wait()
            late = -code in (signal.SIGPROF, signal.SIGKILL)
            raise self._wrong(f"it took more than {seconds:.0f} s" if late else "it needs too much memory or crashes")
        if not line.endswith(b"\n"):
            worker.kill()
            raise self._wrong("what it answers is too long")
        answer = json.loads(line)
        if "error" in answer:
            raise self._wrong(answer["error"])
        return answer["value"]

    def _wrong(self, reason: str) -> InputError:
        return InputError(f"{self.file}: the tokenizer cannot be used ({short(reason)}); {self.mend}")

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()


def _ends_after(worker: subprocess.Popen[bytes], seconds: float) -> Any:
    import threading

    timer = threading.Timer(seconds, worker.kill)
    timer.daemon = True
    timer.start()
    return timer


def serve() -> None:
    """The worker: a tokenizer.json, then calls, each after the CPU seconds it may take; one line of JSON as answer."""
    import resource

    from tokenizers import Tokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Any = None
    while seconds := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # its signal ends the process, wherever it is
        request = sys.stdin.readline()
        try:
            if tokenizer is None:
                value: Any = None
                tokenizer = Tokenizer.from_str(request)
            else:
                method, arguments, named = json.loads(request)
                value = getattr(tokenizer, method)(*arguments, **named)
                value = [one.ids for one in value] if method == "encode_batch_fast" else getattr(value, "ids", value)
            answer = json.dumps({"value": value})
        except BaseException as error:  # a panic is not an Exception
            answer = json.dumps({"error": short(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
