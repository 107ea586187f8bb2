"""examples/nir_reader.py: a stranger's reader, nir and numpy alone, decodes as the engine does."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_students import INHIBITING, PLUS, small_student, tokens

from export.bundle_writer import BundleOptions, write_bundle
from export.quantize import lower
from neuro_sim.decode import generate
from neuro_sim.event.engine import EventDecoder
from spikeopd.models.teacher import resolve
from spikeopd.sampling import Sampling
from spikeopd.text.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "nir_reader.py"
FORMS = {
    "paper": {},
    "plus": PLUS,
    "inhibiting": INHIBITING,
    "factorised": {"width": 8},
    "factorised plus": {**PLUS, "width": 8},
}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("nir_reader", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_needs_nothing_else():
    tree = ast.parse(EXAMPLE.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"json", "pathlib", "sys", "nir", "numpy"}


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("form", FORMS)
def test_every_logit_is_the_engines(example, form, precision, tmp_path):
    model = lower(small_student(**FORMS[form]), precision).model
    write_bundle(model, tmp_path / "b")
    reader, engine = example.Reader(str(tmp_path / "b" / "model.nir")), EventDecoder(model)
    for token in tokens(6, seed=3):
        logits, _ = engine.step(token)
        assert np.array_equal(reader.token(token), logits)


@pytest.mark.parametrize("form", ["paper", "plus"])
def test_it_writes_the_same_tokens_as_a_program_of_its_own(form, tmp_path):
    model, prompt = lower(small_student(**FORMS[form]), "int8").model, tokens(5, seed=1)
    (free,) = generate(EventDecoder(model), [prompt], Sampling(max_new_tokens=8)).sequences
    eos = free.generated_tokens[5]
    write_bundle(model, tmp_path / "b", BundleOptions(tokens={"bos": 0, "eos": eos}))
    words = [sys.executable, str(EXAMPLE), str(tmp_path / "b"), " ".join(map(str, prompt)), "8"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PATH": ""}).stdout
    (stopped,) = generate(EventDecoder(model), [prompt], Sampling(max_new_tokens=8), eos).sequences
    assert [int(word) for word in out.split()] == stopped.generated_tokens and len(stopped.generated_tokens) <= 6


def test_tokens_become_the_same_text(example):
    tokenizer = load_tokenizer("tiny")
    numbers = tokenizer.encode("Return a new list,\n  déjà vu — 😀.")
    file = Path(resolve("tiny")) / "tokenizer.json"
    assert example.text(file, numbers) == tokenizer.decode(numbers) == "Return a new list,\n  déjà vu — 😀."


def test_another_form_of_the_file_is_refused(example, tmp_path):
    write_bundle(lower(small_student(), "float32").model, tmp_path / "b")
    with pytest.raises(SystemExit, match="takes the default export"):
        example.Reader(str(tmp_path / "b" / "model.nir"))
