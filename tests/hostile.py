"""Files as no friend writes them, for every reader: whole documents, single fields, and random mutations.

`READERS` names each reader with a good file and a function that reads a folder with it; `corpus(reader)` yields the
variants. A reader may refuse (SpikeOPDError, one short line) or read; anything else is a failure of the project.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from bundle_mutations import HOSTILE, _paths
from random_models import random_model, random_shape

SHAPE = random_shape()
LAUGHS = "a: &a [x, x]\n" + "".join(f"k{n}: &k{n} [*{'a' if n == 0 else f'k{n - 1}'}, *a]\n" for n in range(40))

DOCUMENTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(4096),
    "not utf-8": b"\xff\xfe\x00\xd8",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "number": b"-1e999",
    "nan": b"NaN",
    "string": b'"x"',
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "5,000 digits": b"9" * 5000,
    "5,000 digits in a field": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"schema": "\\ud800"}',
    "surrogate key": b'{"\\udc00": 1}',
    "control characters": b'{"schema": "\\u001b]0;x\\u0007\\u009b2J"}',
    "long string": b'{"schema": "' + b"x" * 1_000_000 + b'"}',
    "long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "many keys": json.dumps({str(n): n for n in range(50_000)}).encode(),
    "repeated keys": b'{"schema": 1, "schema": 2}',
    "torn": b'{"schema": "spikeopd',
    "bom": b"\xef\xbb\xbf{}",
    "yaml laughs": LAUGHS.encode(),
    "yaml object": b"!!python/object/apply:os.system ['touch ran']",
    "pickle": b"cos\nsystem\n(S'touch ran'\ntR.",
    "zip": b"PK\x03\x04" + bytes(100),
    "html": b"<!--<script>alert(1)</script>",
}


@dataclass(frozen=True)
class Reader:
    """file: the one that is damaged; make: writes a good folder; read: what a command does with it."""

    file: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]


def _run(folder: Path) -> None:
    shutil.copy(str(resources.files("energy") / "data" / "example_run.json"), folder / "run.json")


def _costs(folder: Path) -> None:
    table = {"title": "t", "node_nm": 45, "citation": "c", "prices_pj": {"mac": 4.6, "ac": 0.9}}
    (folder / "costs.json").write_text(json.dumps(table))


def _rates(folder: Path) -> None:
    (folder / "rates.json").write_text(json.dumps(dict.fromkeys(SHAPE.layer_components, 0.1)))


def _config(folder: Path) -> None:
    config = {"model_type": "bispikclm", "alpha": 0.9, "threshold": 0.7, "xi": 2.0, **SHAPE.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")


def _index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (folder / "x.safetensors").write_bytes(b"")


def _tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(str(resources.files("spikeopd") / "assets" / "tiny" / name), folder / name)


def _bundle(folder: Path) -> None:
    from export.bundle_writer import write_bundle

    write_bundle(random_model(random_shape(layers=1)), folder / "b")


def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("base: tiny\nstage1:\n  updates: 3\ntrain: {seed: 1, stage: both}\n")


def _rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')


def _benchmark(folder: Path) -> None:
    (folder / "arc_easy.jsonl").write_text(
        json.dumps({"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A", "id": "1"}) + "\n"
    )


def _metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"stage": "stage1", "update": 1}\n')


def _checkpoint(folder: Path) -> None:
    from spikeopd.files import write_sums

    (folder / "update-000002").mkdir()
    (folder / "update-000002" / "state.json").write_text('{"update": 2, "param_groups": []}')
    write_sums(folder / "update-000002")


def _cache(folder: Path) -> None:
    _read_cache(folder)
    (meta,) = folder.glob("train-*.json")
    meta.rename(folder / "meta.json")
    (folder / "name").write_text(meta.name)


def _trace(folder: Path) -> None:
    spikes = np.zeros((2, SHAPE.num_steps, SHAPE.hidden_size), bool)
    np.savez(folder / "trace.npz", **{"0/tokens": np.arange(2), "0/0.q": spikes, "0/embed": spikes})


def _bank(folder: Path) -> None:
    from spikeopd.diagnostics.prefixes import FORMAT

    about = np.frombuffer(json.dumps({"format": FORMAT}).encode(), np.uint8)
    tokens = np.zeros((2, 3), np.int64)
    np.savez(folder / "bank.npz", prompts=tokens, self_tokens=tokens, corpus_tokens=tokens, about=about)


def _read_run(folder: Path) -> Any:
    from spikeopd.contracts import load_run

    return load_run(folder / "run.json")


def _read_costs(folder: Path) -> Any:
    from energy.costs import load_costs

    return load_costs(str(folder / "costs.json"))


def _read_rates(folder: Path) -> Any:
    from energy.rates import load_rates

    return load_rates(str(folder / "rates.json"), SHAPE)


def _read_shape(folder: Path) -> Any:
    from energy.flops import load_shape

    return load_shape(str(folder / "config.json"))


def _read_student(folder: Path) -> Any:
    from spikeopd.students import is_student, read_config

    is_student(folder)
    return read_config(folder)


def _read_index(folder: Path) -> Any:
    from spikeopd.students import check_weights

    return check_weights(folder, "model")


def _read_tokenizer(folder: Path) -> Any:
    from spikeopd.text.tokenizer import load_tokenizer

    found = load_tokenizer(folder)
    return found.decode(found.encode("some text, 123\n"))


def _read_text(folder: Path) -> Any:
    from neuro_sim.text import read_text

    text = read_text(folder, {"shape": {"max_position_embeddings": 64}, "tokens": {"bos": 2}})
    return text.decode(text.encode("some text, 123\n"))


def _read_bundle(folder: Path) -> Any:
    from spikeopd.contracts.bundle import load_bundle

    return load_bundle(folder / "b")


def _read_recipe(folder: Path) -> Any:
    from spikeopd.config import load_config

    return load_config(folder / "recipe.yaml")


def _read_rows(folder: Path) -> Any:
    from spikeopd.text.sources import open_source

    return list(open_source(f"jsonl:{folder / 'rows.jsonl'}").documents("all"))


def _read_benchmark(folder: Path) -> Any:
    from spikeopd.evaluation.tasks import check_records, choose

    return check_records(choose(["arc_easy"])[0], folder / "arc_easy.jsonl")


def _read_metrics(folder: Path) -> Any:
    from spikeopd.runlog import read_metrics

    return read_metrics(folder)


def _read_checkpoint(folder: Path) -> Any:
    from spikeopd.checkpoint import newest_good

    return newest_good(folder, lambda line: None)


def _read_cache(folder: Path) -> Any:
    from spikeopd.text.tokenizer import load_tokenizer
    from spikeopd.text.tokens import prepare

    class Source:
        name, unbounded = "given", False

        def documents(self, split: str) -> Iterator[str]:
            yield "one text"

        def fingerprint(self) -> str:
            return "given"

    if (folder / "name").is_file():
        (folder / "meta.json").replace(folder / (folder / "name").read_text())
    return prepare(Source(), load_tokenizer(), "train", folder)


def _read_trace(folder: Path) -> Any:
    from spikeopd.contracts import load_trace

    return load_trace(folder / "trace.npz", shape=SHAPE)


def _read_bank(folder: Path) -> Any:
    from spikeopd.diagnostics.prefixes import load_bank

    return load_bank(folder / "bank.npz")


READERS = {
    "run.json": Reader("run.json", _run, _read_run),
    "cost table": Reader("costs.json", _costs, _read_costs),
    "rates": Reader("rates.json", _rates, _read_rates),
    "shape of a model": Reader("config.json", _config, _read_shape),
    "student": Reader("config.json", _config, _read_student),
    "shard index": Reader("model.safetensors.index.json", _index, _read_index),
    "tokenizer": Reader("tokenizer.json", _tokenizer, _read_tokenizer),
    "tokenizer of a bundle": Reader("tokenizer.json", _tokenizer, _read_text),
    "roles of a tokenizer": Reader("tokenizer_config.json", _tokenizer, _read_tokenizer),
    "manifest": Reader("b/manifest.json", _bundle, _read_bundle),
    "recipe": Reader("recipe.yaml", _recipe, _read_recipe),
    "rows of text": Reader("rows.jsonl", _rows, _read_rows),
    "rows of a benchmark": Reader("arc_easy.jsonl", _benchmark, _read_benchmark),
    "metrics": Reader("metrics.jsonl", _metrics, _read_metrics),
    "checkpoint": Reader("update-000002/state.json", _checkpoint, _read_checkpoint),
    "token cache": Reader("meta.json", _cache, _read_cache),
    "trace": Reader("trace.npz", _trace, _read_trace),
    "prefix bank": Reader("bank.npz", _bank, _read_bank),
}


def corpus(name: str, good: bytes) -> Iterator[tuple[str, bytes]]:
    """(what it is, content) of every variant of one reader's file."""
    yield from DOCUMENTS.items()
    try:
        content = json.loads(good)
    except ValueError:
        return
    places = _paths(content)
    rng = random.Random(name)
    for path in places if len(places) <= 12 else rng.sample(places, 12):
        for value in HOSTILE:
            yield f"{'.'.join(map(str, path))[:60]} = {value!r:.30}", _changed(content, path, value)


def mutated(good: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or exchanged, or one field of a JSON file replaced."""
    kind = rng.randrange(6)
    if kind >= 3 and good[:1] == b"{":
        try:
            content = json.loads(good)
            return _changed(content, rng.choice(_paths(content)), rng.choice(HOSTILE))
        except ValueError:
            pass
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice([1, 5, 1000])]
        else:
            data[at:at] = rng.choice(
                [b"[", b"{", b'"', b"9" * 400, b"\\ud800", b"-", b"\0", b": ", b"*a", bytes(data[:50])]
            )
    return bytes(data)


def _changed(content: Any, path: tuple[Any, ...], value: Any) -> bytes:
    copy = json.loads(json.dumps(content))
    parent = copy
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return json.dumps(copy).encode()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()
