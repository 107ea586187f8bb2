"""The bundle that comes with the package: found by name, intact, small, without torch, and it tells a story."""

import hashlib
import json
import re
import subprocess
import sys

import pytest

import neuro_sim
from spikeopd.contracts.bundle import load_bundle, read_manifest, shipped_bundles

FOLDER = shipped_bundles()["stories"]


def test_it_is_there_with_its_card_and_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 12_000_000
    card = (FOLDER / "README.md").read_text("utf-8")
    for part in ("license: mit", "stories15M", "TinyStories", "sha256", "spikeopd-train", "perplexity"):
        assert part in card, part
    listed = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", card, re.MULTILINE)}
    files = [path for path in FOLDER.iterdir() if path.name != "README.md"]
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_its_files_are_what_the_manifest_says():
    manifest = read_manifest("stories")
    model = load_bundle("stories")  # checks every hash
    assert manifest["precision"] == model.precision == "int8"
    assert (model.shape.num_hidden_layers, model.shape.hidden_size, model.shape.vocab_size) == (6, 288, 6464)
    assert manifest["tokens"]["bos"] == manifest["tokens"]["eos"] == 1


def test_one_command_prints_a_story_without_torch():
    code = (
        "import sys\n"
        "from neuro_sim.cli import main\n"
        "code = main(['stories', '--prompt', 'One day, Tim', '--max-new-tokens', '24', '--quiet', '--json'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)["sequences"][0]["text"]
    words = text.split()
    assert len(words) > 8 and sum(word.strip('.,!?"').isalpha() for word in words) > 0.8 * len(words)


def test_every_backend_tells_the_same_story():
    found = []
    for backend in ("event", "dense"):
        with neuro_sim.load("stories", backend, threads=1) as model:
            found.append(neuro_sim.generate(model, "Once upon a time", max_new_tokens=6).tokens)
    assert found[0] == found[1]


@pytest.mark.slow
def test_it_is_better_than_chance_by_far():
    from spikeopd.evaluation.models import open_model
    from spikeopd.evaluation.scoring import make_item, score

    model = open_model("stories")
    ids = model.tokenizer.encode("Once upon a time, there was a little girl named Lily. She loved to play outside.")
    (result,) = score(model.scorer, [make_item(ids[:1], ids[1:], 256)])
    assert -result.total / (len(ids) - 1) < 3.0  # nats per token; chance is 8.8
