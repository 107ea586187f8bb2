"""Every reader of the project, with a good file for it: what tests/hostile.py damages.

A reader may refuse (SpikeOPDError, one short line) or read; anything else is a failure of the project.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from random_models import INHIBITING, PLUS, random_model, random_shape

SHAPE = random_shape()


@dataclass(frozen=True)
class Reader:
    """file: the one that is damaged; make: writes a good folder; read: what a command does with it.

    each: one of so many mutations is tried, where reading is slow. fresh: it changes its folder.
    """

    file: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    each: int = 1
    fresh: bool = False


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


def _sealed(folder: Path) -> None:
    import torch

    from spikeopd import checkpoint

    objective, adam = _module()
    objective(torch.ones(1, 2)).sum().backward()
    adam.step()
    checkpoint.save(folder, 2, objective, adam, {"extra": {}, "identity": {}})


def _module() -> Any:
    import torch

    torch.manual_seed(0)
    objective = torch.nn.Linear(2, 2)
    return objective, torch.optim.Adam(objective.parameters())


def _weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    _config(folder)
    rows = SHAPE.vocab_size + SHAPE.max_position_embeddings + SHAPE.hidden_size * SHAPE.num_hidden_layers
    save_file({"a": np.zeros((rows, SHAPE.hidden_size), np.float32)}, folder / "model.safetensors")


def _opt_tokenizer(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "<pad>": 1, "</s>": 2, "b": 3, "ab": 4}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


def _ids(folder: Path) -> None:
    _tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 2, "eos_token_id": [2], "vocab_size": 1024}))


def _packed(folder: Path) -> None:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one two"}\n{"text": "three"}\n', mtime=0))


def _parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"] * 40}), folder / "rows.parquet")


def _result(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({"key": "k", "kind": "train", "student": "final", "onset": None}))


def _environment(folder: Path) -> None:
    (folder / "config.yaml").write_text("train: {seed: 1}\n")
    (folder / "env.json").write_text(json.dumps({"argv": [], "resumed": [{"argv": []}]}))


def _teacher(folder: Path) -> None:
    shutil.copy(str(resources.files("spikeopd") / "assets" / "tiny" / "config.json"), folder / "config.json")


def _request(folder: Path) -> None:
    _tokenizer(folder)
    body = {"model": "m", "prompt": [[1, 2], "text"], "echo": True, "n": 2, "stop": ["x"], "temperature": 0.5,
            "seed": 1, "max_tokens": 4, "stream": False, "stream_options": {"include_usage": True},
            "spikeopd": {"spikes": True},
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}  # fmt: skip
    (folder / "request.json").write_text(json.dumps(body))


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

    return newest_good(folder, _module()[0], lambda line: None)


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


def _read_sealed(folder: Path) -> Any:
    """As somebody would write it who knows of the checksums."""
    from spikeopd import checkpoint
    from spikeopd.files import write_sums

    if (folder / "update-000002").is_dir():
        with contextlib.suppress(OSError):
            (folder / "update-000002" / "SHA256SUMS").unlink(missing_ok=True)
            if all(path.is_file() and path.stat().st_size < 1 << 30 for path in (folder / "update-000002").iterdir()):
                write_sums(folder / "update-000002")
    found = checkpoint.newest_good(folder, _module()[0], lambda line: None)
    return checkpoint.load(found, *_module())


def _read_sealed_cache(folder: Path) -> Any:
    from spikeopd.text.tokens import _seal

    meta = folder / "meta.json"
    if meta.is_file() and meta.stat().st_size < 1 << 20:
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            (tokens,) = folder.glob("*.npy")
            said = json.loads(meta.read_text())
            meta.write_text(json.dumps(said | {"sha256": _seal(said, tokens)}))
    return _read_cache(folder)


def _read_weights(folder: Path) -> Any:
    from spikeopd.students import check_sizes, read_config

    return check_sizes(folder, read_config(folder), "student")


def _read_packed(folder: Path) -> Any:
    from spikeopd.text.sources import open_source

    return list(open_source(f"jsonl:{folder / 'rows.jsonl.gz'}").documents("all"))


def _read_parquet(folder: Path) -> Any:
    from spikeopd.text.sources import open_source

    return list(open_source(f"parquet:{folder / 'rows.parquet'}").documents("all"))


def _read_scored(folder: Path) -> Any:
    from spikeopd.evaluation.bundle_model import _bundle_tokenizer

    found = _bundle_tokenizer(folder, {"tokens": {"bos": 2, "eos": 2}}).framed()
    return found.decode(found.encode("some text, 123\n"))


def _read_result(folder: Path) -> Any:
    from spikeopd.studies.runs import read_result

    return read_result(SimpleNamespace(folder=lambda pool: pool), folder)  # type: ignore[arg-type]


def _read_environment(folder: Path) -> Any:
    from spikeopd.runlog import RunLog

    with RunLog(folder, quiet=True) as log:
        log.start("train: {seed: 1}\n", {"argv": []}, resume=True)


def _read_request(folder: Path) -> Any:
    """A body as it comes to spikeopd-serve, to both of its routes."""
    from neuro_sim.serve import protocol
    from neuro_sim.text import read_text
    from spikeopd.errors import InputError
    from spikeopd.sampling import Sampling

    text = read_text(folder, {"shape": {"max_position_embeddings": 64}, "tokens": {"bos": 2}})
    try:
        data = b""
        if (folder / "request.json").is_file():  # a body comes through a socket, bounded
            with open(folder / "request.json", "rb") as file:
                data = file.read((1 << 20) + 1)
        body = json.loads(data)
        for chat in (False, True):
            answer = protocol.Answer(protocol.parse(body, chat, "m", text, protocol.Limits(), Sampling()), "m")
            json.dumps(answer.chunk(0, "x", None, True, ()), ensure_ascii=False).encode()
    except protocol.BadRequest as error:
        json.dumps(error.to_dict(), ensure_ascii=False).encode()
        raise InputError(str(error)) from error
    except (ValueError, RecursionError, OSError) as error:  # as the server's own guard has it
        raise InputError("the body is not JSON") from error


def _read_teacher(folder: Path) -> Any:
    from spikeopd.models.teacher import load_teacher_config

    return load_teacher_config(str(folder))


def _whole_teacher(folder: Path) -> None:
    from teacher_families import save_teacher

    save_teacher("llama", folder)


def _read_whole_teacher(folder: Path) -> Any:
    from spikeopd.models.teacher import load_teacher

    return load_teacher(str(folder))


def _whole_student(folder: Path) -> None:
    from small_students import small_student

    small_student(layers=1).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.8, "top_p": 0.9}))


def _read_whole_student(folder: Path) -> Any:
    from spikeopd.students import load_student

    return load_student(folder)


def _read_generation(folder: Path) -> Any:
    from export.checkpoint import generation_values

    return generation_values(folder)


def _other_bundle(precision: str, target: str = "nir", **form: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from export.bundle_writer import BundleOptions, write_bundle

        model = random_model(random_shape(layers=1, **form), precision=precision)  # type: ignore[arg-type]
        write_bundle(model, folder / "b", BundleOptions(target=target))  # type: ignore[arg-type]

    return make


def _llama2c(folder: Path) -> None:
    from spikeopd.llama2c import HEADER

    rng = np.random.default_rng(0)
    sizes = (8, 12, 1, 2, 2, 262, 4)
    weights = rng.normal(size=262 * 8 + 4 * 64 + 3 * 96 + 3 * 8 + 2 * 4 * 2).astype("<f4")
    (folder / "m.bin").write_bytes(HEADER.pack(*sizes) + weights.tobytes())
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), b"a", b"b", b"ab"]
    pieces = b"".join(struct.pack("<fi", -number, len(token)) + token for number, token in enumerate(tokens))
    (folder / "t.bin").write_bytes(struct.pack("<i", 6) + pieces)


def _read_llama2c(folder: Path) -> Any:
    from spikeopd.llama2c import convert_llama2c

    shutil.rmtree(folder / "out", ignore_errors=True)
    return convert_llama2c(folder / "m.bin", folder / "out", folder / "t.bin")


def _corpus(folder: Path) -> None:
    from spikeopd.corpus import _same_settings, _write_part

    _same_settings(folder, {"teacher": "t", "documents": 2, "batch_size": 2})
    _write_part(folder / "0.jsonl", [{"text": "one", "complete": True, "tokens": 3}] * 2)


def _read_corpus(folder: Path) -> Any:
    from spikeopd.corpus import _read_part, _same_settings

    _same_settings(folder, {"teacher": "t", "documents": 2, "batch_size": 2})
    return _read_part(folder / "0.jsonl", 2, lambda line: None)


def _read_unsealed_corpus(folder: Path) -> Any:
    (folder / "0.sha256").unlink(missing_ok=True)
    return _read_corpus(folder)


def _read_cut(folder: Path) -> Any:
    """As `spikeopd-train vocabulary` does."""
    from spikeopd.files import parse_json
    from spikeopd.text.backend import make_backend
    from spikeopd.text.tokenizer import load_tokenizer
    from spikeopd.text.vocabulary import cut

    found = load_tokenizer(folder)
    content, _ = cut(parse_json(found.backend.to_str()), found.encode("some text, 123\n"), "t", 64)
    return make_backend(content, folder)


def _network(folder: Path) -> None:
    from neuro_sim.sanafe.description import write_network
    from neuro_sim.sanafe.network import build_network
    from neuro_sim.sanafe.placement import place

    network = build_network(random_model(random_shape(layers=1)), 2)
    write_network(folder, network, place(network, spread=False))


def _read_network(folder: Path) -> Any:
    from neuro_sim.sanafe.description import read_network

    return read_network(folder)


SLOW = {"each": 10, "fresh": True}
twin = _other_bundle("int8", "arrays", neuron="quantised")
READERS = {
    "run.json": Reader("run.json", _run, _read_run),
    "cost table": Reader("costs.json", _costs, _read_costs),
    "rates": Reader("rates.json", _rates, _read_rates),
    "shape of a model": Reader("config.json", _config, _read_shape),
    "student": Reader("config.json", _config, _read_student),
    "shard index": Reader("model.safetensors.index.json", _index, _read_index),
    "tokenizer": Reader("tokenizer.json", _tokenizer, _read_tokenizer, each=100),
    "tokenizer of a bundle": Reader("tokenizer.json", _tokenizer, _read_text, each=100),
    "roles of a tokenizer": Reader("tokenizer_config.json", _tokenizer, _read_tokenizer),
    "manifest": Reader("b/manifest.json", _bundle, _read_bundle),
    "recipe": Reader("recipe.yaml", _recipe, _read_recipe),
    "rows of text": Reader("rows.jsonl", _rows, _read_rows),
    "rows of a benchmark": Reader("arc_easy.jsonl", _benchmark, _read_benchmark),
    "metrics": Reader("metrics.jsonl", _metrics, _read_metrics),
    "checkpoint": Reader("update-000002/state.json", _checkpoint, _read_checkpoint, fresh=True),
    "token cache": Reader("meta.json", _cache, _read_cache, **SLOW),
    "trace": Reader("trace.npz", _trace, _read_trace),
    "prefix bank": Reader("bank.npz", _bank, _read_bank),
    "checkpoint, sealed": Reader("update-000002/state.json", _sealed, _read_sealed, **SLOW),
    "weights of a checkpoint, sealed": Reader(
        "update-000002/objective.safetensors", _sealed, _read_sealed, each=10, fresh=True
    ),
    "moments of a checkpoint, sealed": Reader(
        "update-000002/optimizer.safetensors", _sealed, _read_sealed, each=10, fresh=True
    ),
    "token cache, sealed": Reader("meta.json", _cache, _read_sealed_cache, **SLOW),
    "weights": Reader("model.safetensors", _weights, _read_weights),
    "vocabulary": Reader("vocab.json", _opt_tokenizer, _read_tokenizer),
    "merges": Reader("merges.txt", _opt_tokenizer, _read_tokenizer),
    "ids of roles": Reader("config.json", _ids, _read_tokenizer),
    "tokenizer of a scored bundle": Reader("tokenizer.json", _tokenizer, _read_scored, each=100),
    "packed rows": Reader("rows.jsonl.gz", _packed, _read_packed),
    "rows of parquet": Reader("rows.parquet", _parquet, _read_parquet),
    "result of a study": Reader("result.json", _result, _read_result),
    "environment of a run": Reader("env.json", _environment, _read_environment, fresh=True),
    "request to the server": Reader("request.json", _request, _read_request),
    "configuration of a teacher": Reader("config.json", _teacher, _read_teacher, each=10),
    "teacher": Reader("config.json", _whole_teacher, _read_whole_teacher, each=40),
    "weights of a teacher": Reader("model.safetensors", _whole_teacher, _read_whole_teacher, each=40),
    "sampling of a teacher": Reader("generation_config.json", _whole_teacher, _read_whole_teacher, each=40),
    "student, whole": Reader("config.json", _whole_student, _read_whole_student, each=40),
    "weights of a student": Reader("model.safetensors", _whole_student, _read_whole_student, each=40),
    "sampling of a student": Reader("generation_config.json", _whole_student, _read_generation),
    "manifest of 4 bits": Reader("b/manifest.json", _other_bundle("int4"), _read_bundle),
    "manifest with attention that inhibits": Reader(
        "b/manifest.json", _other_bundle("int8", **INHIBITING), _read_bundle
    ),
    "manifest of the better block": Reader("b/manifest.json", _other_bundle("int8", **PLUS), _read_bundle),
    "manifest of the twin": Reader(
        "b/manifest.json", _other_bundle("int8", "arrays", neuron="quantised"), _read_bundle
    ),
    "model of llama2.c": Reader("m.bin", _llama2c, _read_llama2c, each=20),
    "tokens of llama2.c": Reader("t.bin", _llama2c, _read_llama2c, each=20),
    "settings of a corpus": Reader("settings.json", _corpus, _read_corpus),
    "batch of a corpus": Reader("0.jsonl", _corpus, _read_corpus),
    "batch of a corpus, sealed": Reader("0.jsonl", _corpus, _read_unsealed_corpus),
    "tokenizer that is cut": Reader("tokenizer.json", _tokenizer, _read_cut, each=100),
    "network of a simulator": Reader("network.json", _network, _read_network),
    "arrays of a simulator": Reader("network.npz", _network, _read_network),
}
