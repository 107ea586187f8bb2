"""Perplexity, KL to a teacher and rates by hand and against plain implementations; rollout statistics: test_rollout."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import OPTConfig, OPTForCausalLM

from spikeopd import quality
from spikeopd.errors import InputError
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM
from spikeopd.models.teacher import output_table
from spikeopd.rollout import rollout, uniforms
from spikeopd.students import find_student, load_student

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    teacher = OPTForCausalLM(OPTConfig(**SMALL, max_position_embeddings=64, word_embed_proj_dim=32)).eval()
    return BiSpikCLMForCausalLM(BiSpikCLMConfig(**SMALL, max_position_embeddings=64)).eval(), teacher


def test_perplexity_by_hand():
    assert quality.perplexity(3 * math.log(8), 3) == pytest.approx(8)
    assert quality.perplexity(1e9, 2) == math.inf
    assert quality.perplexity(1e9, 2, most=50.0) == math.exp(50)
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])) + 3.0  # a constant changes no probability
    assert np.exp(quality.log_likelihoods(logits, np.array([1, 2]))) == pytest.approx([0.25, 0.7])


def test_teacher_kl_by_hand():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    assert quality.teacher_kl(q, p).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-6)
    assert quality.teacher_kl(p, p).item() == 0


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_on_text_is_the_plain_computation(pair, rows):
    student, teacher = pair
    ids = torch.randint(4, 97, (5, 12), generator=torch.Generator().manual_seed(0))
    head = output_table(teacher)
    found = quality.on_text(lambda part, t: quality.token_sums(student, part, t, head, 7), teacher, ids, rows)
    with torch.no_grad():
        mine, theirs = student(ids).logits[:, :-1], teacher(ids).logits[:, :-1]
        nats = F.cross_entropy(mine.flatten(0, 1), ids[:, 1:].flatten())
        kl = (theirs.softmax(-1) * (theirs.log_softmax(-1) - mine.log_softmax(-1))).sum(-1).mean()
    assert found["perplexity"] == pytest.approx(nats.exp().item(), rel=1e-5)
    assert found["teacher_kl"] == pytest.approx(kl.item(), rel=1e-4)


def test_on_own_text_is_the_plain_computation_and_does_not_depend_on_rows(pair):
    student, teacher = pair
    prompts, uniform = torch.randint(4, 97, (5, 9), generator=torch.Generator().manual_seed(1)), uniforms(0, 0, 5, 6)
    head = output_table(teacher)

    def measure(rows):
        return quality.on_own_text(
            lambda part, u: rollout(student, part, u, 1.0, (0, 1)),
            lambda sequences, t: quality.visited_kl(student, sequences, t, head, 4),
            teacher, prompts, uniform, rows,
        )  # fmt: skip

    found, spikes = measure(64)
    again, others = measure(2)
    assert again == pytest.approx(found) and torch.equal(spikes, others)
    made = rollout(student, prompts, uniform, 1.0, (0, 1))
    with torch.no_grad():
        mine, theirs = (model(made.sequences[:, :-1]).logits[:, -6:] for model in (student, teacher))
    assert found["self_kl"] == pytest.approx(quality.teacher_kl(mine, theirs).mean().item(), rel=1e-4)
    assert quality.rollout_statistics(made.sequences[:, -6:].numpy()).items() <= found.items()
    rates = spikes / quality.rate_slots(student.config, "all", 30)
    assert quality.rate_slots(student.config, "output", 30) == 30 * student.config.num_steps * 32
    assert ((rates >= 0) & (rates <= 1)).all() and rates.sum() > 0


def test_the_teachers_own_perplexity_is_the_plain_computation(pair):
    _, teacher = pair
    ids = torch.randint(3, 97, (5, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        nats = F.cross_entropy(teacher(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    assert quality.teacher_perplexity(teacher, ids, chunk=7, rows=2) == pytest.approx(math.exp(nats), rel=1e-5)


def test_without_attention_a_token_depends_on_itself_and_its_position_alone(pair):
    student, _ = pair
    one = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(3))
    other = torch.cat(((one[:, :-1] + 1) % 90 + 3, one[:, -1:]), 1)  # another prefix, the same last token
    with torch.no_grad():
        before = student(one).logits
        assert not torch.equal(before[:, -1], student(other).logits[:, -1]), "attention must matter here"
        with quality.without_attention(student):
            assert torch.equal(student(one).logits[:, -1], student(other).logits[:, -1])
        assert torch.equal(student(one).logits, before), "and is back afterwards"


def test_a_bundle_is_judged_without_torch():
    code = "import sys, spikeopd.quality, spikeopd.students; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_load_student_takes_a_run_folder_or_a_directory(pair, tmp_path):
    student, teacher = pair
    student.save_pretrained(tmp_path / "run" / "final")
    for path in (tmp_path / "run", tmp_path / "run" / "final"):
        loaded = load_student(path)
        assert not loaded.training and loaded.dtype == torch.float32
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in student.state_dict().items())
    assert load_student(tmp_path / "run", dtype=torch.bfloat16).dtype == torch.bfloat16
    weights = tmp_path / "run" / "final" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000])
    with pytest.raises(InputError, match="model.safetensors is corrupt"):
        load_student(tmp_path / "run")
    weights.rename(weights.with_name("pytorch_model.bin"))  # a pickle by name: it is not even opened
    with pytest.raises(InputError, match="pytorch_model.bin is a pickle"):
        load_student(tmp_path / "run")
    teacher.save_pretrained(tmp_path / "opt")
    with pytest.raises(InputError, match="model_type is 'opt'"):
        load_student(tmp_path / "opt")
    with pytest.raises(InputError, match="no config.json there; give the folder that spikeopd-train wrote"):
        find_student(tmp_path)
