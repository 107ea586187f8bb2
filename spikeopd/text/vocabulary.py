"""Cut a tokenizer to the tokens that a text uses, without changing how that text is split.

BPE applies the merge of lowest rank that fits, and never undoes one: every merge made inside a text builds a part of a
final token. Keeping the used tokens with all parts of their own derivations, and the merges among these, therefore
leaves every step of the text's encoding as it was. Unigram takes the best path, which used pieces alone make up. Text
that needs what was cut is spelled in smaller pieces, down to bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from spikeopd.errors import InputError

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def cut(
    content: Mapping[str, Any], used: Iterable[int], origin: str = "tokenizer", multiple: int = 1
) -> tuple[dict[str, Any], list[int]]:
    """(a tokenizer.json with the `used` ids, special tokens, bytes and what they are made of; the old ids kept, in
    order: new id i was kept[i]).

    content: a parsed tokenizer.json. multiple: more tokens, lowest ids first, until so many divide the number: output
    tables are multiplied faster in whole blocks. Refused: one that could not spell a character after the cut.
    """
    model = content["model"]
    kind = model.get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise InputError(f"{origin}: a {kind} vocabulary cannot be cut; BPE and Unigram can")
    pieces = _pieces(model)
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    names = {number: piece for piece, number in pieces.items()} | added
    unknown = sorted(set(used) - names.keys())
    if unknown:
        raise InputError(f"{origin}: has no token {unknown[0]}, which the text uses; it belongs to another tokenizer")
    alphabet = _alphabet(content, pieces)
    if not alphabet:
        raise InputError(
            f"{origin}: cannot spell any text in bytes (neither byte fallback nor a byte-level alphabet), so a cut "
            "would make characters unreadable"
        )
    keep = {names[number] for number in used} | set(alphabet) | set(added.values())
    if model.get("unk_token"):
        keep.add(model["unk_token"])
    if kind == "Unigram" and model.get("unk_id") is not None:
        keep.add(names[model["unk_id"]])
    if kind == "BPE":
        ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
        for piece in sorted(keep & pieces.keys()):
            keep |= derivation(piece, ranks) & pieces.keys()
        for piece in sorted(pieces.keys() - keep, key=pieces.__getitem__):
            if len(keep) % multiple == 0:
                break
            if derivation(piece, ranks) <= keep | {piece}:
                keep.add(piece)
    kept = sorted(number for number, name in names.items() if name in keep)
    place = {old: new for new, old in enumerate(kept)}
    try:
        return _rewritten(content, pieces, place), kept
    except KeyError as error:
        raise InputError(f"{origin}: its template names token {error}, which it lacks; save it again") from error


def derivation(piece: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Every token that BPE passes through on the way from the characters of `piece`."""
    parts = list(piece)
    seen = set(parts)
    while len(parts) > 1:
        rank, index = min((ranks.get(pair, 1 << 60), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False)))
        if rank == 1 << 60:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        seen.add(parts[index])
    return seen


def _pieces(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: number for number, entry in enumerate(vocab)}


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _alphabet(content: Mapping[str, Any], pieces: Mapping[str, int]) -> Sequence[str]:
    """Tokens that spell any byte; empty if there are none."""
    if content["model"].get("byte_fallback") and all(byte in pieces for byte in BYTES):
        return BYTES
    if '"ByteLevel"' in repr(content.get("pre_tokenizer")).replace("'", '"'):
        from tokenizers import pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        return letters if all(letter in pieces for letter in letters) else ()
    return ()


def _rewritten(content: Mapping[str, Any], pieces: Mapping[str, int], place: Mapping[int, int]) -> dict[str, Any]:
    new = deepcopy(dict(content))
    model = new["model"]
    inside = {piece: place[number] for piece, number in pieces.items() if number in place}
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = dict(sorted(inside.items(), key=lambda item: item[1]))
    else:
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in place]
        if model.get("unk_id") is not None:
            model["unk_id"] = place[model["unk_id"]]
    if "merges" in model:
        whole = zip(model["merges"], _merges(content["model"]), strict=True)
        model["merges"] = [merge for merge, (a, b) in whole if a in inside and b in inside and a + b in inside]
    for token in new.get("added_tokens") or ():
        token["id"] = place[token["id"]]
    _renumber(new.get("post_processor"), place)
    return new


def _renumber(part: Any, place: Mapping[int, int]) -> None:
    """Ids inside templates: {"ids": [1]} of TemplateProcessing, ["</s>", 2] of the older processors."""
    if isinstance(part, list):
        for entry in part:
            _renumber(entry, place)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == "ids":
                part[key] = [place[number] for number in value]
            elif key in ("sep", "cls") and isinstance(value, list):
                part[key] = [value[0], place[value[1]]]
            else:
                _renumber(value, place)
