"""Tokenizers without transformers: load a Hugging Face directory, or train the tiny byte-level BPE of the default.

Read: `tokenizer.json`, or the `vocab.json` + `merges.txt` of OPT. Written: a directory that
`transformers.AutoTokenizer` and `tokenizers.Tokenizer.from_file` read too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spikeopd.errors import InputError, short
from spikeopd.files import read_json, read_text, write_json, write_text
from spikeopd.text.backend import FILE_LIMIT, Guarded, read_backend, rust_errors
from spikeopd.text.sources import Source, open_source

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# OPT's layout: </s> begins and ends a text, and the first four ids are these.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
OPT_ROLES = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
TINY = "tiny"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "vocab.json",
    "merges.txt",
)
# How documents are framed: `bos` and `eos` are one separator around and between documents, `both` a pair around each.
Framing = Literal["auto", "bos", "eos", "both"]


class Tokenizer:
    """A tokenizers.Tokenizer and the roles of its special tokens.

    `bos_token_id` begins every document and `eos_token_id` ends it, in training, evaluation, export and decoding alike:
    the tokenizer's own tokens of these names, or with the framings `bos` and `eos` one of them for both.

    `encode` adds what the tokenizer's own template asks for (OPT and tiny: `</s>` in front), as transformers does;
    `add_special_tokens=False` leaves it out. A student's template (`framed`) puts `bos_token_id` in front.
    """

    def __init__(self, backend: Backend, roles: dict[str, str], origin: str, framing: Framing = "both") -> None:
        self.backend, self.origin, self.framing = backend, origin, framing
        bos, eos = roles.get("bos_token"), roles.get("eos_token")
        if (bos or eos) and framing in ("bos", "eos") and not {"bos": bos, "eos": eos}[framing]:
            raise InputError(
                f"{origin}: data.framing={framing} needs a {framing}_token, which this tokenizer does not name; name "
                "it in tokenizer_config.json or use data.framing=auto"
            )
        begin = {"bos": bos, "eos": eos}.get(framing, bos or eos)
        end = {"bos": bos, "eos": eos}.get(framing, eos or bos)
        named = {"bos_token": begin, "eos_token": end}
        self.roles = {**roles, **{role: token for role, token in named.items() if token}}
        self.eos_token_id = self._role_id("eos_token")
        self.bos_token_id = self._role_id("bos_token")
        self.pad_token_id = self._role_id("pad_token") if roles.get("pad_token") else self.eos_token_id

    def framed(self) -> Tokenizer:
        """The same tokenizer with a template that puts the begin token in front of every text, and nothing behind."""
        if _added(self.backend) == ([self.bos_token_id], []):
            return self
        begin = self.roles["bos_token"]
        if isinstance(self.backend, Guarded):
            return Tokenizer(self.backend.begin_with(begin), self.roles, self.origin)
        backend = type(self.backend).from_str(self.backend.to_str())
        return Tokenizer(_begin_with(backend, begin), self.roles, self.origin)

    def _role_id(self, role: str) -> int:
        token = self.roles.get(role)
        number = self.backend.token_to_id(token) if token else None
        if number is None:
            raise InputError(
                f"{self.origin}: the tokenizer has no {role} ({short(repr(token))}); name it in tokenizer_config.json"
            )
        return int(number)

    @property
    def vocab_size(self) -> int:
        """Entries, special tokens included. A model may have more rows (OPT: 50265 entries, 50272 rows)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with rust_errors(f"{self.origin}: the tokenizer fails", "save it again"):
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        with rust_errors(f"{self.origin}: the tokenizer fails", "save it again"):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        with rust_errors(f"{self.origin}: the tokenizer fails", "save it again"):
            return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that map text to the same ids, whichever files they were read from."""
        content = json.loads(self.backend.to_str())
        merges = [" ".join(m) if isinstance(m, list) else m for m in content["model"].get("merges", [])]
        parts: Any = [
            content["model"].get("type"),
            sorted(self.backend.get_vocab(with_added_tokens=True).items()),
            merges,
            _essentials(content.get("normalizer")),
            _essentials(content.get("pre_tokenizer")),
            [self.bos_token_id, self.eos_token_id, self.pad_token_id],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, directory: Path | str) -> Path:
        """Write `tokenizer.json` and `tokenizer_config.json`, each atomically, framed as this one is."""
        directory = Path(directory)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.roles,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        }
        if self.bos_token_id != self.eos_token_id:
            config["framing"] = "both"
        write_text(directory / "tokenizer.json", self.framed().backend.to_str(pretty=False) + "\n")
        write_json(directory / "tokenizer_config.json", config)
        return directory


def load_tokenizer(path_or_name: Path | str = TINY, framing: Framing = "auto") -> Tokenizer:
    """Load `tiny` (shipped), a directory, a file like `tokenizer.json`, or a model of the Hugging Face hub by name.

    The roles of special tokens stand in tokenizer_config.json of the directory, or beside the file.
    """
    if str(path_or_name) == TINY:
        with resources.as_file(resources.files("spikeopd") / "assets" / TINY) as directory:
            return _from_directory(directory, TINY, framing)
    path = Path(path_or_name).expanduser()
    if path.is_file():
        # The named file, whatever its name: another tokenizer.json may lie beside it.
        return _with_roles(read_backend(path), path.parent, str(path), framing)
    if path.is_dir():
        return _from_directory(path, str(path), framing)
    return _from_directory(_download(str(path_or_name)), str(path_or_name), framing)


def train_tokenizer(source: Source | str, vocab_size: int, output: Path | str) -> Tokenizer:
    """Train a byte-level BPE on the training part of a source and save it; the same text gives the same bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise InputError(f"vocab_size {vocab_size} is too small; byte-level BPE needs at least {smallest} entries")
    source = open_source(source) if isinstance(source, str) else source
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(source.documents("train"), trainer)
    if backend.get_vocab_size() < vocab_size:
        raise InputError(
            f"{source.name}: the text gives only {backend.get_vocab_size()} entries, {vocab_size} were asked for; "
            "use more text or a smaller vocab_size"
        )
    tokenizer = Tokenizer(_finish(backend, OPT_ROLES), dict(OPT_ROLES), origin=str(output))
    tokenizer.save(output)
    return tokenizer


def _finish(backend: Backend, roles: dict[str, str]) -> Backend:
    """Decode bytes, and put the beginning-of-text token in front for readers that use the file directly."""
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()
    return _begin_with(backend, roles["bos_token"])


def _begin_with(backend: Backend, bos: str) -> Backend:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def _added(backend: Backend) -> tuple[list[int], list[int]]:
    """Ids that the template puts in front of a text and behind it."""
    with rust_errors("the tokenizer's template fails", "save it again"):
        plain, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def _own_framing(backend: Backend, roles: dict[str, str], settings: dict[str, Any]) -> Framing:
    """How the model behind a tokenizer saw documents: what its settings or else its template put around a text.

    Where they put nothing, one end token stands between documents, as in the training of GPT-2, GPT-NeoX and Qwen.
    """
    bos, eos = roles.get("bos_token"), roles.get("eos_token")
    if settings.get("framing") in ("bos", "eos", "both"):
        return settings["framing"]  # type: ignore[no-any-return] # one of the three
    if not bos or not eos or bos == eos:
        return "eos" if eos else "bos"
    before, behind = _added(backend)
    begins = settings.get("add_bos_token", backend.token_to_id(bos) in before)
    ends = settings.get("add_eos_token", backend.token_to_id(eos) in behind)
    return "both" if begins and ends else "bos" if begins else "eos"


def _with_roles(backend: Backend, directory: Path, origin: str, framing: Framing) -> Tokenizer:
    settings = _settings(directory, backend)
    roles = {role: settings[role] for role in OPT_ROLES if isinstance(settings.get(role), str)}
    return Tokenizer(backend, roles, origin, _own_framing(backend, roles, settings) if framing == "auto" else framing)


def _from_directory(directory: Path, origin: str, framing: Framing) -> Tokenizer:
    if (directory / "tokenizer.json").is_file():
        return _with_roles(read_backend(directory / "tokenizer.json"), directory, origin, framing)
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        settings = _settings(directory)
        roles = {**OPT_ROLES, **{role: settings[role] for role in OPT_ROLES if isinstance(settings.get(role), str)}}
        backend = _opt_backend(directory)
        if backend.token_to_id(roles["bos_token"]) is None:
            raise InputError(f"{origin}: the vocabulary has no token {short(repr(roles['bos_token']))}, the bos_token")
        _finish(backend, roles)
        return Tokenizer(backend, roles, origin, "both" if framing == "auto" else framing)
    raise InputError(
        f"{origin}: no tokenizer here; expected tokenizer.json, or vocab.json and merges.txt (OPT), in the directory"
    )


def _opt_backend(directory: Path) -> Backend:
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    with rust_errors(f"{directory}: vocab.json and merges.txt cannot be read", "fetch them again"):
        for name in ("vocab.json", "merges.txt"):
            read_text(directory / name, FILE_LIMIT)
        backend = Backend(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in known])
    return backend


def _settings(directory: Path, backend: Backend | None = None) -> dict[str, Any]:
    """tokenizer_config.json, with bos/eos/pad/unk as strings (they may be objects with `content`).

    GPT-2's names no roles at all: then the ids in the model's config.json say which tokens begin and end a text.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_object(directory / name).items():
            settings[key] = value.get("content") if key in OPT_ROLES and isinstance(value, dict) else value
    if backend is not None and not {"bos_token", "eos_token"} & settings.keys():
        model = _read_object(directory / "config.json")
        for role in ("bos_token", "eos_token"):
            found = model.get(f"{role}_id")
            found = found[0] if isinstance(found, list) and found else found
            if type(found) is int and 0 <= found < 1 << 32:
                settings[role] = backend.id_to_token(found)
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not valid JSON ({short(error)}); save the tokenizer again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object; save the tokenizer again")
    return content


def _essentials(part: Any) -> Any:
    """A normaliser or pre-tokenizer without the settings that do not change ids."""
    if isinstance(part, dict):
        return {k: _essentials(v) for k, v in part.items() if k not in ("trim_offsets", "use_regex")}
    return [_essentials(v) for v in part] if isinstance(part, list) else part


def _download(name: str) -> Path:
    reason = "no such directory"
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        try:
            import huggingface_hub

            return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(TOKENIZER_FILES), etag_timeout=10))
        except Exception as error:  # the hub client raises a dozen unrelated kinds
            reason = f"no such directory, and the Hugging Face hub did not give it ({type(error).__name__})"
    raise InputError(f"tokenizer '{name}': {reason}; give '{TINY}', a local directory or a reachable model name")
