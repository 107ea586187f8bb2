"""A saved student as the hub and transformers meet it: the Auto classes, a card, a generation config."""

import subprocess
import sys

import pytest
import yaml

from spikeopd.card import model_card, write_cards
from spikeopd.config import load_config

SUMMARY = {"stage1": {"updates": 3, "start": {"perplexity": 99.5}, "final": {"perplexity": 12.25, "teacher_kl": 0.5}}}


def metadata(card):
    return yaml.safe_load(card.split("---")[1])


def test_a_card_tells_where_the_student_comes_from():
    card = model_card("mine", load_config("tiny"), SUMMARY)
    told = metadata(card)
    assert told["license"] == "apache-2.0" and "bispikclm" in told["tags"] and "base_model" not in told
    assert "# mine" in card and "| stage1 | 99.5 | 12.25 | 0.5 |" in card and "`python-docs`" in card
    assert "Stage 2" not in card.partition("## Training")[2]
    other = model_card("x", load_config("opt-125m"), SUMMARY | {"stage2": {"updates": 7, "final": {}}})
    assert metadata(other)["base_model"] == "facebook/opt-125m" and metadata(other)["license"] == "other"
    assert "7 updates on its own generations" in other and "| stage2 | – | – | – |" in other


def test_cards_lie_beside_finished_students(tmp_path):
    (tmp_path / "stage1" / "final").mkdir(parents=True)
    (tmp_path / "stage1" / "final" / "config.json").write_text("{}")
    write_cards(tmp_path, load_config("tiny"), SUMMARY)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("README.md")] == ["stage1/final/README.md"]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("import spikeopd, transformers", "AutoConfig"),
        pytest.param("import transformers, spikeopd", "AutoConfig", marks=pytest.mark.slow),
        pytest.param("import spikeopd, transformers", "AutoModelForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_importing_spikeopd_is_light_and_enough(order, first, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bispikclm", "num_steps": 3}')
    code = f"""
import sys
{order}
assert "torch" not in sys.modules and "numba" not in sys.modules, "light"
from transformers import {first}
from transformers import AutoConfig
print(AutoConfig.from_pretrained({str(tmp_path)!r}).steps)
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM is transformers.AutoModelForCausalLM
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, vocab_size=30)
config = AutoConfig.for_model("bispikclm", **sizes)
print(type(AutoModelForCausalLM.from_config(config)).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["3", "BiSpikCLMForCausalLM"], done.stderr[-800:]


def test_a_card_keeps_the_folders_of_its_maker_to_itself():
    config = load_config("tiny", {"data.source": "jsonl:/home/me/secret/corpus.jsonl#text"})
    card = model_card("mine", config, SUMMARY)
    assert "`jsonl:corpus.jsonl#text`" in card and "secret" not in card
