"""The Python interface, on a bundle in a folder: load, generate, stream, and what comes out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_models import PLUS, random_model, random_shape
from tokenizers import Tokenizer

import neuro_sim
from export.bundle_writer import BundleOptions, write_bundle
from neuro_sim import backends
from neuro_sim.backends import Backend, Running, pick_backend
from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import SpikeModel, bundle, load_run, parse_run
from spikeopd.errors import ConfigError, InputError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, model: SpikeModel, tokenizer: Tokenizer) -> Path:
    path = tmp_path_factory.mktemp("api")
    tokenizer.save(str(path / "tokenizer.json"))
    options = BundleOptions(target="lava", tokenizer=path / "tokenizer.json", tokens={"bos": 0, "eos": 0})
    return write_bundle(model, path / "bundle", options)


def test_the_package_imports_nothing_before_it_is_used() -> None:
    code = "import sys, neuro_sim; print('numpy' in sys.modules, set(neuro_sim.__all__) <= set(dir(neuro_sim)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "False",
        "True",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        neuro_sim.nothing  # noqa: B018


def test_load_and_generate(written: Path, model: SpikeModel) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        assert (loaded.backend, loaded.precision, loaded.threads) == ("event", "int8", 1)
        result = neuro_sim.generate(loaded, "abc", max_new_tokens=5, temperature=0.7, seed=3, ignore_eos=True)
    assert len(result.tokens) == 5 and result.complete
    assert result.text == loaded.bundle.text.decode(result.tokens)
    assert result.activity.tokens == 4 + 4 and result.sequences[0].prompt_tokens[0] == 0
    numbers = result.sequences[0].prompt_tokens
    oracle = neuro_sim.generate(
        neuro_sim.load(written, "dense"), numbers, max_new_tokens=5, temperature=0.7, seed=3, ignore_eos=True
    )
    assert oracle.tokens == result.tokens and oracle.activity.to_dict() == result.activity.to_dict()


def test_a_shipped_bundle_is_found_by_its_name(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(written, tmp_path / "shipped" / "tales")
    (tmp_path / "shipped" / "not-a-bundle").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(bundle, "SHIPPED", tmp_path / "shipped")
    assert list(bundle.shipped_bundles()) == ["tales"]
    by_name, by_path = (neuro_sim.load(found, threads=1) for found in ("tales", written))
    assert neuro_sim.generate(by_name, "abc", max_new_tokens=3).text == (
        neuro_sim.generate(by_path, "abc", max_new_tokens=3).text
    )
    with pytest.raises(InputError, match=r"bundle tails: no such folder; make one with .* Shipped: tales\."):
        neuro_sim.load("tails")
    (tmp_path / "elsewhere" / "tales").mkdir()  # a folder of that name comes first
    with pytest.raises(InputError, match="tales"):
        neuro_sim.load("tales")


def test_several_prompts(written: Path) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        alone = [neuro_sim.generate(loaded, prompt, max_new_tokens=3).texts[0] for prompt in ("a", [0, 5, 7])]
        both = neuro_sim.generate(loaded, ["a", [0, 5, 7]], max_new_tokens=3)
    assert both.texts == alone
    with pytest.raises(InputError, match="2 sequences; look at texts"):
        _ = both.text


def test_the_run_is_checked_and_saved(written: Path, tmp_path: Path) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        result = neuro_sim.generate(loaded, "abc", max_new_tokens=3, seed=9)
    run = result.to_run()
    assert parse_run(run, "here").activity().to_dict() == result.activity.to_dict()
    assert run["sampling"]["seed"] == 9 and run["bundle"]["name"] == "bundle"
    assert load_run(result.save(tmp_path / "run.json")).backend == "event"
    assert result.summary()["generated_tokens"] == len(result.tokens)


def test_stream_gives_the_same_text_in_pieces(written: Path) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        whole = neuro_sim.generate(loaded, "abc", max_new_tokens=12, temperature=1.5, ignore_eos=True)
        stream = neuro_sim.stream(loaded, "abc", max_new_tokens=12, temperature=1.5, ignore_eos=True)
        assert not stream.result.complete
        pieces = list(stream)
        assert len(pieces) > 1 and "".join(pieces) == whole.text
        assert stream.result.complete and stream.result.tokens == whole.tokens
        assert stream.result.to_run()["phases"] == whole.to_run()["phases"]
        for _ in (broken := neuro_sim.stream(loaded, "abc", max_new_tokens=12, ignore_eos=True)):
            break
        assert not broken.result.complete and broken.result.to_run()["sequences"][0]["stopped"] == "interrupted"


def test_spikes_are_kept_and_compared(written: Path) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        some = neuro_sim.generate(loaded, "ab", max_new_tokens=2, trace="embed,*.h")
        assert set(some.traces[0].sites) == {(-1, "embed"), (0, "h"), (1, "h")}
        everything = neuro_sim.generate(loaded, "ab", max_new_tokens=2, trace="all")
        assert "event = dense" in str(everything.verify())
        silent = neuro_sim.generate(loaded, "ab", max_new_tokens=2)
        with pytest.raises(ConfigError, match='generate with trace="all"'):
            silent.verify()


def test_the_second_form_of_the_block(tmp_path: Path, hold: Callable[[SpikeModel], None]) -> None:
    hold(random_model(random_shape(**PLUS), seed=2))
    (tmp_path / "manifest.json").write_text("{}")
    with neuro_sim.load(tmp_path, threads=1) as loaded:
        result = neuro_sim.generate(loaded, [1, 2, 3], max_new_tokens=6, temperature=1.0, trace="all")
        assert "event = dense" in str(result.verify())
        assert result.text == " ".join(map(str, result.tokens))  # no tokenizer: the numbers themselves
        with pytest.raises(InputError, match="tokenizer.json: no tokenizer in this bundle"):
            neuro_sim.generate(loaded, "text")
    run = result.to_run()
    assert run["schema"] == "spikeopd.run/2" and run["model"]["residual_write"] == "current"


def test_a_backend_is_a_function_and_a_line(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def loud(model: SpikeModel, running: Running) -> DenseDecoder:
        made.append(running)
        return DenseDecoder(model)

    monkeypatch.setitem(neuro_sim.BACKENDS, "loud", Backend("tells what it was given", loud))
    from neuro_sim.cli import build_parser

    assert "loud: tells what it was given" in " ".join(build_parser().format_help().split())
    loaded = neuro_sim.load(written, "loud", timeout=3.0)
    assert made[0].timeout == 3.0
    assert neuro_sim.generate(loaded, "a", max_new_tokens=1).to_run()["backend"] == "loud"


def test_which_backend_is_picked(model: SpikeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model.shape
    assert pick_backend(shape, "int8", "event") == ("event", "")
    assert pick_backend(shape, "float32", "event")[0] == "dense"
    with pytest.raises(ConfigError, match="backend 'gpu' is not known; choose one of event, lava, dense"):
        pick_backend(shape, "int8", "gpu")
    monkeypatch.setattr(backends, "LAVA_SMALL", 10)
    assert pick_backend(shape, "int8")[0] == "event"


def test_weights_come_straight_to_their_place(written: Path) -> None:
    with neuro_sim.load(written, threads=1) as loaded:
        layer = loaded.decoder.model.layers[1]
        assert layer.w_v.ctypes.data == layer.w_q.ctypes.data + 2 * 64
        again = neuro_sim.backends.event(loaded.decoder.model, Running(threads=1))
        assert np.shares_memory(again.model.layers[1].w_q, layer.w_q)
