"""One sampler: by hand, its streams, and the same text from a bundle through the command, the evaluation and Python."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spikeopd.errors import ConfigError
from spikeopd.sampling import (
    USUAL,
    Sampling,
    _nucleus,
    asked_for,
    choose,
    from_generation_config,
    generators,
    row_generators,
    uniforms,
)


class Given:
    """A generator that gives one number."""

    def __init__(self, number):
        self.number = number

    def random(self):
        return self.number


def test_a_token_is_chosen_by_its_share_at_every_temperature():
    logits = np.log(np.array([0.2, 0.5, 0.3]))
    drawn = [choose(logits, Sampling(1.0), Given(u)) for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)]
    assert drawn == [0, 0, 1, 1, 2, 2]
    cold = [choose(logits, Sampling(1e-320), Given(u)) for u in (0.0, 0.5, 0.999)]
    assert cold == [1, 1, 1], "near zero it is the greedy choice"
    assert choose(logits, Sampling(), Given(0.9)) == 1
    # top-k 2 leaves 0.5 and 0.3; top-p 0.6 needs both, 0.4 only the first
    assert [choose(logits, Sampling(1.0, 2), Given(u)) for u in (0.0, 0.62, 0.63)] == [1, 1, 2]
    assert [choose(logits, Sampling(1.0, 0, 0.6), Given(u)) for u in (0.62, 0.63)] == [1, 2]
    assert choose(logits, Sampling(1.0, 0, 0.4), Given(0.999)) == 1


@given(st.integers(0, 2**63 - 1), st.integers(0, 20), st.integers(1, 6))
def test_numbers_one_by_one_are_the_numbers_at_once(seed, row, length):
    one, two = (row_generators(seed, row + 1)[row] for _ in range(2))
    assert [one.random() for _ in range(length)] == two.random(length).tolist()
    whole = uniforms(seed, row, 3, length)
    assert whole.shape == (3, length) and ((whole >= 0) & (whole < 1)).all()


def test_the_streams_are_those_of_every_version():
    """Seeds are written into results: the numbers behind them must not move."""
    assert generators([[5, 6]], 3)[0].random() == np.random.default_rng([3, 0, 5, 6]).random()
    philox = np.random.Generator(np.random.Philox(key=np.array([7 ^ 0xE7A1, 2], dtype=np.uint64)))
    assert np.array_equal(row_generators(7, 3)[2].random(4), philox.random(4))
    philox = np.random.Generator(np.random.Philox(key=np.array([7 ^ 0x5B1CE, 2], dtype=np.uint64)))
    assert np.array_equal(uniforms(7, 2, 3, 4), philox.random((3, 4)))


def test_a_bundle_says_the_same_in_command_evaluation_and_python(tmp_path, capsys):
    pytest.importorskip("torch")
    from small_students import small_student

    from export.bundle_writer import BundleOptions, write_bundle
    from export.quantize import lower
    from neuro_sim.cli import main as run_lava
    from neuro_sim.decode import generate
    from neuro_sim.event.engine import EventDecoder
    from spikeopd.contracts.bundle import load_bundle
    from spikeopd.evaluation.cli import main as evaluate
    from spikeopd.text.tokenizer import load_tokenizer
    from spikeopd.text.tokens import batch, prepare

    load_tokenizer("tiny").save(tmp_path / "tokenizer")
    options = BundleOptions(tokenizer=tmp_path / "tokenizer" / "tokenizer.json", tokens={"bos": 2, "eos": 2})
    write_bundle(lower(small_student(vocab=1024), "int8").model, tmp_path / "bundle", options)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The {n} following functions are defined." for n in range(40)))
    words = [
        "--num-prompts",
        "3",
        "--prompt-length",
        "9",
        "--max-new-tokens",
        "8",
        "--samples",
        "3",
        "--temperature",
        "0.9",
    ]
    where = ["--source", f"text:{text}", "--split", "all", "--seed", "4", "--json", "--quiet"]
    assert evaluate(["rollouts", str(tmp_path / "bundle"), *words, *where, "--output", str(tmp_path / "eval")]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    data = prepare(f"text:{text}", load_tokenizer(tmp_path / "tokenizer"), "all")
    prompts = batch(data, batch_size=3, length=9, seed=4, step=0).tolist()
    assert all(
        load_tokenizer("tiny").decode(row) == sample["prompt"] for row, sample in zip(prompts, samples, strict=True)
    )

    sampling = Sampling(0.9, seed=4, max_new_tokens=8)
    python = generate(EventDecoder(load_bundle(tmp_path / "bundle")), prompts, sampling)
    assert [s.generated_tokens for s in python.sequences] == [sample["tokens"] for sample in samples]

    given = [word for row in prompts for word in ("--prompt-tokens", ",".join(map(str, row)))]
    code = run_lava([str(tmp_path / "bundle"), *given, "--max-new-tokens", "8", "--temperature", "0.9", "--seed", "4",
                     "--ignore-eos", "--output", str(tmp_path / "run.json"), "--quiet"])  # fmt: skip
    assert code == 0
    found = json.loads((tmp_path / "run.json").read_text())["sequences"]
    assert [sequence["generated_tokens"] for sequence in found] == [sample["tokens"] for sample in samples]


def test_min_p_and_the_penalty_on_repetition():
    logits = np.log([0.2, 0.5, 0.3])
    assert choose(logits, Sampling(1.0, min_p=0.5), Given(0.999)) == 2  # 0.2 is below half of 0.5
    assert choose(logits, Sampling(1.0, min_p=1.0), Given(0.999)) == 1
    told = np.array([2.0, 1.9, -1.0])
    assert choose(told, Sampling(repetition_penalty=1.1), Given(0.0), ([0], [])) == 1  # 2 / 1.1 < 1.9
    assert choose(told, Sampling(repetition_penalty=1.1), Given(0.0), ([0], [1])) == 0
    assert told.tolist() == [2.0, 1.9, -1.0]
    below = np.array([-1.0, -1.05])
    assert choose(below, Sampling(repetition_penalty=1.1), Given(0.0), ([], [0])) == 1  # a negative one is multiplied
    with pytest.raises(ConfigError, match="min-p must lie between 0"):
        Sampling(min_p=2)


def test_what_a_generation_config_asks_for():
    assert from_generation_config({}) == USUAL == Sampling(0.8, top_p=0.95)
    assert from_generation_config({"do_sample": False, "temperature": 3}) == Sampling()
    assert asked_for({"seed": 3}, USUAL) == Sampling(0.8, top_p=0.95, seed=3)
    assert asked_for({"temperature": 0.5, "top_k": None}, USUAL) == Sampling(0.5)
    assert asked_for({"top_k": 4}, USUAL) == Sampling(0.8, 4)
    assert from_generation_config({"top_k": 5, "eos_token_id": 2}) == Sampling(1.0, 5)


@given(
    arrays(np.float64, st.integers(1, 3000), elements=st.sampled_from([0.0, 1e-9, 0.01, 0.2, 0.2000001, 0.7, 1.0])),
    st.floats(0.01, 0.999),
)
def test_the_nucleus_is_that_of_the_whole_sorted_vocabulary(weights, share):
    weights[0] = 1.0  # the largest of exp(x - max)
    limit = share * weights.sum()
    order = np.lexsort((np.arange(weights.size), -weights))
    reached = np.cumsum(weights[order]) >= limit
    whole = np.sort(order[: int(np.argmax(reached)) + 1])
    assert np.array_equal(_nucleus(weights, limit, count=8), whole)
    assert np.array_equal(_nucleus(weights, limit), whole)
