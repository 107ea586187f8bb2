"""Ways to damage a bundle, for the fast robustness tests and the long fuzz. Every mutation is drawn from one seed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "int8", "float64", "../../etc/passwd", "/dev/zero", "model.nir", "\ud800", "x" * 5000, [], [1], [-1, 3],
    [10**9, 10**9], {}, {"constant": 0}, {"file": "model.nir"}, [[[]]],
]  # fmt: skip


def reseal(folder: Path, manifest: dict[str, Any]) -> None:
    """Make the hashes agree again, as a hostile writer would."""
    for name, entry in manifest.get("files", {}).items():
        if isinstance(entry, dict) and (folder / name).is_file():
            data = (folder / name).read_bytes()
            entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def mutate(source: Path, target: Path, seed: int) -> str:
    """Copy a bundle and damage the copy; returns what was done."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    rng = random.Random(seed)
    kind = rng.choice(sorted(MUTATIONS))
    MUTATIONS[kind](target, rng)
    return kind


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        for key in value:
            found += _paths(value[key], (*prefix, key))
    elif isinstance(value, list):
        for place in range(len(value)):
            found += _paths(value[place], (*prefix, place))
    return found


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _replace_fields(folder: Path, rng: random.Random) -> None:
    manifest = _manifest(folder)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        path = rng.choice(_paths(manifest))
        parent: Any = manifest
        for step in path[:-1]:
            parent = parent[step]
        if rng.random() < 0.2:
            del parent[path[-1]]
        elif isinstance(parent[path[-1]], int) and rng.random() < 0.5:
            parent[path[-1]] = parent[path[-1]] * rng.choice([2, 3, 1000, -1]) + rng.choice([-1, 0, 1])
        else:
            parent[path[-1]] = rng.choice(HOSTILE)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _flip_model(folder: Path, rng: random.Random) -> None:
    _flip(folder / _model_file(folder), rng)


def _flip_model_resealed(folder: Path, rng: random.Random) -> None:
    _flip(folder / _model_file(folder), rng)
    reseal(folder, _manifest(folder))


def _flip_manifest(folder: Path, rng: random.Random) -> None:
    _flip(folder / "manifest.json", rng)


def _truncate(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path for path in folder.iterdir()))
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data) + 1)])


def _truncate_resealed(folder: Path, rng: random.Random) -> None:
    file = folder / _model_file(folder)
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data) + 1)])
    reseal(folder, _manifest(folder))


def _inflate_shape(folder: Path, rng: random.Random) -> None:
    """A consistent lie about the sizes, in the shape and in every array that depends on it."""
    manifest = _manifest(folder)
    field = rng.choice(sorted(name for name, value in manifest["shape"].items() if isinstance(value, int)))
    old, new = manifest["shape"][field], rng.choice([1, 2**20, 2**24, 2**30, manifest["shape"][field] + 1])
    manifest["shape"][field] = new
    for entry in manifest["arrays"].values():
        if "shape" in entry:
            entry["shape"] = [new if n == old else n for n in entry["shape"]]
            if rng.random() < 0.5:
                entry["strides"] = [0] * len(entry["shape"])
    reseal(folder, manifest)


def _wrong_tokens(folder: Path, rng: random.Random) -> None:
    """Special tokens that no vocabulary has; every one of them has to be refused."""
    manifest = _manifest(folder)
    outside = [manifest["shape"]["vocab_size"], -1, 2**63, 1.0, True, None, "</s>", "2", [2], {"id": 2}, float("nan")]
    manifest["tokens"] = rng.choice([{rng.choice(["bos", "eos", "pad"]): rng.choice(outside)}, [2], "</s>", 2, None])
    reseal(folder, manifest)


def _remove_file(folder: Path, rng: random.Random) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def _model_file(folder: Path) -> str:
    return "model.nir" if (folder / "model.nir").exists() else "arrays.h5"


def _flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(bytes(data))


MUTATIONS = {
    "fields": _replace_fields,
    "fields again": _replace_fields,
    "flipped model": _flip_model,
    "flipped model, hashes mended": _flip_model_resealed,
    "flipped manifest": _flip_manifest,
    "truncated": _truncate,
    "truncated, hashes mended": _truncate_resealed,
    "inflated shape": _inflate_shape,
    "file removed": _remove_file,
    "wrong tokens": _wrong_tokens,
}
