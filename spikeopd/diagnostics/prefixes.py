"""The prefix bank (App. B, shared-prefix protocol): generated once, replayed unchanged through every checkpoint.

Row n holds a corpus window cut into prompt [P] and corpus continuation [K], and one continuation [K] of the same prompt
sampled by the offline checkpoint. Prefix s_t of either source is (prompt, first t - 1 tokens of the continuation):
matched by prompt, position and length; at t = 1 both are the prompt.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spikeopd.contracts.npz import open_npz, read_array
from spikeopd.errors import InputError, short
from spikeopd.files import parse_json, write_bytes
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM
from spikeopd.models.teacher import fingerprint
from spikeopd.rollout import rollout, uniforms
from spikeopd.text.tokens import TokenData, batch

Tokens = NDArray[np.int64]
FORMAT = 1
BANK_LIMIT = 256 << 20  # bytes; a thousand prompts of two thousand tokens take a sixteenth of it


@dataclass(frozen=True)
class PrefixBank:
    """prompts [N, P]; self_tokens, corpus_tokens [N, K]; about: who generated it, from what."""

    prompts: Tokens
    self_tokens: Tokens
    corpus_tokens: Tokens
    about: dict[str, Any]

    def inputs(self, source: str) -> Tokens:
        """What is fed to see every prefix of a source, [N, P + K - 1]; the last K positions are s_1 … s_K."""
        continuation = self.self_tokens if source == "self" else self.corpus_tokens
        return np.concatenate((self.prompts, continuation[:, :-1]), axis=1)

    @property
    def length(self) -> int:
        return int(self.self_tokens.shape[1])


@dataclass(frozen=True)
class BankOptions:
    prompts: int = 256
    prompt_length: int = 480
    length: int = 32
    temperature: float = 1.0
    seed: int = 0


def describe(student: BiSpikCLMForCausalLM, data: TokenData, options: BankOptions) -> dict[str, Any]:
    """What a bank is made from: two with the same description are the same."""
    return {
        "format": FORMAT,
        "student": fingerprint(student),
        "source": data.source,
        "split": data.split,
        "data": data.fingerprint,
        **asdict(options),
    }


def generate_bank(
    student: BiSpikCLMForCausalLM, data: TokenData, options: BankOptions, *, rows: int = 64
) -> PrefixBank:
    """Draw corpus windows and let the student continue their beginnings. rows: at a time; it changes nothing."""
    prompt, length = options.prompt_length, options.length
    whole = batch(data, batch_size=options.prompts, length=prompt + length, seed=options.seed, step=0)
    uniform = uniforms(options.seed, 0, options.prompts, length)
    parts = [
        rollout(student, ids.to(student.device), u, options.temperature).sequences[:, -length:].cpu()
        for ids, u in zip(
            torch.split(torch.from_numpy(whole[:, :prompt]), rows), torch.split(uniform, rows), strict=True
        )
    ]
    about = describe(student, data, options)
    return PrefixBank(whole[:, :prompt], torch.cat(parts).numpy(), whole[:, prompt:], about)


def save_bank(bank: PrefixBank, path: Path | str) -> Path:
    buffer = io.BytesIO()
    about = np.frombuffer(json.dumps(bank.about, sort_keys=True).encode(), dtype=np.uint8)
    np.savez(buffer, prompts=bank.prompts, self_tokens=bank.self_tokens, corpus_tokens=bank.corpus_tokens, about=about)
    return write_bytes(path, buffer.getvalue())


def load_bank(path: Path | str) -> PrefixBank:
    with open_npz(path, "prefix bank", BANK_LIMIT) as archive:
        room, stored = BANK_LIMIT, {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in MEMBERS:
                stored[name] = read_array(archive, info, room, MEMBERS[name])
                room -= stored[name].nbytes
        if lacking := sorted(MEMBERS.keys() - stored.keys()):
            raise ValueError(f"no array {lacking[0]!r}")
        about = parse_json(stored.pop("about").tobytes().decode("utf-8"))
    prompts, self_tokens, corpus_tokens = (stored[name].astype(np.int64) for name in MEMBERS if name != "about")
    arrays = (prompts, self_tokens, corpus_tokens)
    if not isinstance(about, dict) or about.get("format") != FORMAT or len({len(array) for array in arrays}) != 1:
        raise InputError(f"prefix bank {path}: not a bank of format {FORMAT}; remove it to generate it anew")
    if any(array.size and not 0 <= array.min() <= array.max() < 1 << 31 for array in arrays):
        raise InputError(f"prefix bank {path}: holds numbers that are no tokens; remove it to generate it anew")
    return PrefixBank(prompts, self_tokens, corpus_tokens, about)


def _no_tokens(dtype: np.dtype[np.generic], sizes: tuple[int, ...]) -> str:
    return "" if dtype.kind in "iu" and len(sizes) == 2 else f"expected rows of tokens, found {dtype} {short(sizes)}"


def _no_text(dtype: np.dtype[np.generic], sizes: tuple[int, ...]) -> str:
    return "" if dtype == np.uint8 and len(sizes) == 1 else f"expected bytes, found {dtype} {short(sizes)}"


MEMBERS = {"prompts": _no_tokens, "self_tokens": _no_tokens, "corpus_tokens": _no_tokens, "about": _no_text}
