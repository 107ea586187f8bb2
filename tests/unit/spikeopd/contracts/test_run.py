"""Every refusal of a run.json names the field, and a good one is read whole."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from random_models import PLUS, random_shape
from random_runs import EXAMPLE, example_run, make_run, write_run

from spikeopd.contracts import LAYER_COMPONENTS, LAYER_SITES
from spikeopd.contracts.run import load_run, parse_run
from spikeopd.errors import InputError

RUN = make_run(prompts=(4, 3), generated=(3, 3), drive=2.0)


def edited(path: str, change) -> dict:
    """RUN with the value at a dotted path replaced by change(value), or removed if change is None."""
    run = copy.deepcopy(RUN)
    *parents, last = path.split(".")
    place = run
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if change is None:
        del place[last]
    else:
        key = int(last) if last.isdigit() else last
        place[key] = change(place[key])
    return run


def test_good_runs_are_read(tmp_path) -> None:
    run = load_run(write_run(tmp_path / "good.json", RUN), "a name")
    assert run.name == "a name"
    assert run.activity().tokens == 4 + 3 + 2 + 2
    assert run.keys("prompt") == (1 + 2 + 3 + 4) + (1 + 2 + 3)
    assert run.keys("generation") == (5 + 6) + (4 + 5)
    assert run.contexts() == {0: 6, 1: 5}
    assert run.keys_unmasked() == 6 * 6 + 5 * 5
    for width in (None, 8):
        parse_run(make_run(random_shape(width=width), prompts=(3, 1, 2), generated=(0, 1, 4)), "shape")


def test_the_second_form_is_read_and_bound() -> None:
    """Its own sites and components, and no others; the version must be one that can say what the model is."""
    raw = make_run(random_shape(**PLUS), prompts=(4, 3), generated=(3, 3), drive=2.0)
    run = parse_run(raw, "x")
    assert raw["schema"] == "spikeopd.run/2" and run.shape == random_shape(**PLUS)
    activity = run.activity()
    assert not {"o", "y"} & set(activity.spikes) and "residual" not in activity.sops
    for name in ("output", "ffn_out"):
        broken = copy.deepcopy(raw)
        broken["phases"]["prompt"]["sops"][name] = bump(raw["phases"]["prompt"]["sops"][name])
        with pytest.raises(InputError, match=f"phases.prompt.sops.{name}"):
            parse_run(broken, "x")
    with pytest.raises(InputError, match="field 'schema': version 1 has the paper's block alone"):
        parse_run(raw | {"schema": "spikeopd.run/1"}, "x")
    assert parse_run(RUN | {"schema": "spikeopd.run/2"}, "x").shape.paper_block


def test_an_interrupted_run_is_valid() -> None:
    run = copy.deepcopy(RUN)
    run["complete"] = False
    run["sequences"][1]["generated_tokens"] += [1, 2, 3]
    assert not parse_run(run, "x").complete


REQUIRED = [
    "schema", "complete", "backend", "precision", "model", "sequences", "phases", "per_token",
    "model.hidden_size", "model.num_steps", "model.word_embed_proj_dim",
    "sequences.0.prompt_tokens", "sequences.1.generated_tokens", "phases.prompt", "phases.generation",
    "phases.prompt.tokens", "phases.prompt.spikes", "phases.prompt.cells", "phases.prompt.saturations",
    "phases.prompt.sops", "phases.prompt.sops_unmasked", "phases.prompt.additions", "phases.prompt.macs",
    "phases.prompt.bytes", "phases.generation.macs.head_active", "phases.generation.bytes.kv_read",
    *(f"phases.prompt.spikes.{site}" for site in ("embed", *LAYER_SITES)),
    *(f"phases.prompt.sops.{name}" for name in LAYER_COMPONENTS),
    *(f"per_token.{name}" for name in ("sequence", "position", "phase", "spikes", "sops", "macs", "bytes")),
]  # fmt: skip


def field_of(path: str) -> str:
    return path.replace("sequences.0.", "sequences[0].").replace("sequences.1.", "sequences[1].")


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_field_is_named(path: str) -> None:
    with pytest.raises(InputError) as error:
        parse_run(edited(path, None), "run.json")
    assert f"field '{field_of(path)}': is missing" in str(error.value)


def bump(rows):
    rows = copy.deepcopy(rows)
    rows[0][0] += 1
    return rows


INCONSISTENT = [
    ("schema", lambda v: "other/1", "schema"),
    ("complete", lambda v: "yes", "complete"),
    ("backend", lambda v: 3, "backend"),
    ("sequences", lambda v: [], "sequences"),
    ("trace", lambda v: 4, "trace"),
    ("model.hidden_size", lambda v: -1, "hidden_size"),
    ("model.ffn_dim", lambda v: 10**30, "ffn_dim"),
    ("model.num_steps", lambda v: 2.5, "num_steps"),
    ("phases.prompt.tokens", lambda v: v + 1, "phases.prompt.tokens"),
    ("phases.prompt.spikes.q", lambda v: v[:-1], "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.q", lambda v: [row[:-1] for row in v], "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.q.0.0", lambda v: -1, "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.q.0.0", lambda v: 1.5, "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.q.0.0", lambda v: True, "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.q.0.0", lambda v: 10**30, "phases.prompt.spikes.q"),
    ("phases.prompt.spikes.k.0.0", lambda v: 10**6, "phases.prompt.spikes.k"),
    ("phases.prompt.saturations.k.0.0", lambda v: 10**6, "phases.prompt.saturations.k"),
    ("phases.prompt.cells.f", bump, "phases.prompt.cells.f"),
    ("phases.prompt.cells.a", bump, "phases.prompt.cells.a"),
    ("phases.prompt.sops.qkv", bump, "phases.prompt.sops.qkv"),
    ("phases.prompt.sops.av", bump, "phases.prompt.sops.av"),
    ("phases.generation.sops.output", bump, "phases.generation.sops.output"),
    ("phases.generation.sops.residual", bump, "phases.generation.sops.residual"),
    ("phases.generation.sops.ffn_in", bump, "phases.generation.sops.ffn_in"),
    ("phases.generation.sops.ffn_out", bump, "phases.generation.sops.ffn_out"),
    ("phases.generation.sops.coincidence.0.0", lambda v: 10**7, "phases.generation.sops.coincidence"),
    ("phases.generation.sops_unmasked.0.0", lambda v: 10**7, "phases.generation.sops_unmasked"),
    ("phases.generation.sops_unmasked.0.0", lambda v: 0, "phases.generation.sops_unmasked"),
    ("phases.prompt.additions.qkv", lambda v: [[0 * x for x in row] for row in v], "phases.prompt.additions.qkv"),
    ("phases.prompt.additions.av.0.0", lambda v: 10**7, "phases.prompt.additions.av"),
    ("phases.prompt.macs.embed", lambda v: v + 1, "phases.prompt.macs.embed"),
    ("phases.prompt.macs.head", lambda v: v - 1, "phases.prompt.macs.head"),
    ("phases.prompt.macs.head_active", lambda v: 10**9, "phases.prompt.macs.head_active"),
    ("phases.prompt.bytes.qkv", lambda v: v + 1, "per_token.bytes"),
    ("phases.prompt.bytes.qkv", lambda v: -5, "phases.prompt.bytes.qkv"),
    ("per_token.spikes.0", lambda v: v + 1, "per_token.spikes"),
    ("per_token.sops.0", lambda v: v + 1, "per_token.sops"),
    ("per_token.macs.0", lambda v: v + 1, "per_token.macs"),
    ("per_token.spikes", lambda v: v[:-1], "per_token.spikes"),
    ("per_token.phase.0", lambda v: "thinking", "per_token.phase"),
    ("per_token.phase.0", lambda v: "generation", "per_token.phase"),
    ("per_token.sequence.0", lambda v: 9, "per_token.sequence"),
    ("per_token.position.0", lambda v: 1, "per_token.position"),
    ("per_token.position.0", lambda v: 10**6, "per_token.position"),
    ("sequences.0.prompt_tokens", lambda v: v[:-1], "per_token.phase"),
    ("sequences.0.generated_tokens", lambda v: [*v, 1], "per_token.phase"),
    ("sequences.0.prompt_tokens.0", lambda v: 10**6, "sequences[0].prompt_tokens"),
    ("sequences.0.prompt_tokens.0", lambda v: -1, "sequences[0].prompt_tokens"),
    ("sequences.0.prompt_tokens", lambda v: "text", "sequences[0].prompt_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "field"), INCONSISTENT, ids=lambda v: v if isinstance(v, str) else "")
def test_an_inconsistent_field_is_named(path: str, change, field: str) -> None:
    run = edited(path, change) if path != "trace" else copy.deepcopy(RUN) | {"trace": 4}
    with pytest.raises(InputError) as error:
        parse_run(run, "run.json")
    message = str(error.value)
    assert field in message and "\n" not in message and message.startswith("run.json")


def test_every_count_of_a_phase_is_bound() -> None:
    """No single number under spikes, cells, sops or macs can be raised by one unnoticed."""
    silent = []
    for table in ("spikes", "cells", "sops", "additions"):
        for name in RUN["phases"]["prompt"][table]:
            run = edited(f"phases.prompt.{table}.{name}", bump)
            try:
                parse_run(run, "x")
                silent.append(f"{table}.{name}")
            except InputError:
                pass
    # Additions of the attention are only bounded by its operations; saturations cost nothing.
    assert set(silent) <= {"additions.coincidence", "additions.av"}


@pytest.mark.parametrize("name", ["../other.npz", "/etc/trace.npz", "sub/../../x.npz", "C:\\x.npz", "..\\x.npz", ""])
def test_a_trace_lies_beside_its_run(name: str) -> None:
    if name:
        with pytest.raises(InputError, match="field 'trace'"):
            parse_run(RUN | {"trace": name}, "x")
    else:
        assert parse_run(RUN | {"trace": name}, "x").trace is None


def test_a_trace_may_lie_in_a_folder_below(tmp_path) -> None:
    run = load_run(write_run(tmp_path / "run.json", RUN | {"trace": "sub/t.npz", "trace_sha256": "0" * 64}))
    assert run.trace == tmp_path / "sub" / "t.npz" and run.trace_sha256 == "0" * 64
    with pytest.raises(InputError, match="field 'trace_sha256'"):
        parse_run(RUN | {"trace": "t.npz", "trace_sha256": 5}, "x")


def test_unreadable_files(tmp_path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_run(tmp_path / "none.json")
    for name, content in {"text": b"hello", "binary": b"\xff\xfe\x00", "list": b"[]", "deep": b"[" * 100_000}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            load_run(tmp_path / name)
    with pytest.raises(InputError):
        load_run(tmp_path)


def test_the_packaged_example_is_what_the_oracle_makes() -> None:
    assert json.loads(EXAMPLE.read_text()) == json.loads(json.dumps(example_run()))


@pytest.mark.parametrize("backend", ["dense", pytest.param("event", marks=pytest.mark.slow)])
def test_what_the_simulator_writes_is_accepted(tmp_path, backend: str) -> None:
    """neuro_sim's own run.json, stopped by the context. The event engine compiles first, so it is slow."""
    from random_models import random_model

    from neuro_sim.decode import Sampling, generate
    from neuro_sim.dense import DenseDecoder
    from neuro_sim.event.engine import EventDecoder
    from neuro_sim.runfile import build_run
    from spikeopd.contracts import write_run as write

    model = random_model(random_shape(positions=8), drive=2.0)
    decoder = DenseDecoder(model) if backend == "dense" else EventDecoder(model)
    result = generate(decoder, [[1, 2, 3], [4], [5, 6]], Sampling(max_new_tokens=20))
    raw = build_run(result, model, backend=backend, bundle={"name": "b", "sha256": "0"}, sampling=Sampling(),
                    load_seconds=0.0, threads=1)  # fmt: skip
    run = load_run(write(tmp_path / "run.json", raw))
    assert run.backend == backend and run.contexts() == {0: 8, 1: 8, 2: 8}


def test_phase_masks() -> None:
    run = parse_run(RUN, "x")
    assert int(run.per_token.mask("prompt").sum()) == 7
    assert np.array_equal(run.per_token.mask(None), np.ones(11, bool))
