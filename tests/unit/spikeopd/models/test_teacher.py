"""The frozen teacher: what it exports, and that mismatches fail when built."""

from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from spikeopd.errors import InputError
from spikeopd.models.teacher import (
    check_pair,
    check_vocabulary,
    fingerprint,
    freeze,
    load_teacher,
    output_table,
    run_teacher,
)
from spikeopd.text.tokenizer import load_tokenizer

SMALL = dict(vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, ffn_dim=32,
             max_position_embeddings=32, attn_implementation="eager")  # fmt: skip


@pytest.mark.parametrize("width", [16, 8])
def test_outputs_have_the_width_of_their_place(width):
    """8: a factorised token table as in OPT-350M, whose last hidden state is otherwise the projected one."""
    torch.manual_seed(0)
    teacher = freeze(OPTForCausalLM(OPTConfig(word_embed_proj_dim=width, do_layer_norm_before=width == 16, **SMALL)))
    ids = torch.randint(4, 64, (2, 9))
    output = run_teacher(teacher, ids, internals=True)
    assert output.embeddings.shape == (2, 9, 16) and [h.shape for h in output.hidden] == [(2, 9, 16)] * 3
    assert [a.shape for a in output.attentions] == [(2, 2, 9, 9)] * 3
    assert output.features.shape == (2, 9, width)
    assert torch.allclose(output_table(teacher)(output.features), teacher(ids).logits, atol=1e-6)
    assert torch.allclose(output.attentions[0].sum(-1), torch.ones(2, 2, 9), atol=1e-6)
    last = teacher.get_decoder().layers[-1]
    hooks = len(last._forward_hooks)  # transformers keeps some of its own
    run_teacher(teacher, ids, internals=True)
    assert len(last._forward_hooks) == hooks


def test_shipped_teacher_knows_its_text():
    teacher = load_teacher("tiny", tokenizer_size=load_tokenizer("tiny").vocab_size)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training
    tokenizer = load_tokenizer("tiny")
    ids = torch.tensor([tokenizer.encode("Return a new list containing the elements of the sequence.")])
    loss = teacher(ids, labels=ids).loss
    assert loss < 4.5  # uniform would be log 1024 = 6.9
    assert fingerprint(teacher) == fingerprint(load_teacher("tiny"))


def test_vocabulary_checks():
    check_vocabulary(50272, 50265, "OPT")  # padding rows are fine
    with pytest.raises(InputError, match="1000 rows but the tokenizer has 1024"):
        check_vocabulary(1000, 1024, "x")
    with pytest.raises(InputError, match="share one tokenizer"):
        check_vocabulary(50272, 1024, "x")
    with pytest.raises(InputError, match="model.vocab_size=1024"):
        check_pair(load_teacher("tiny"), 1040)


def test_missing_places_say_what_is_wanted(tmp_path):
    with pytest.raises(InputError, match="no config.json"):
        load_teacher(str(tmp_path))
    with pytest.raises(InputError, match="no file"):
        load_teacher(str(tmp_path / "model.gguf"))
    assert Path(tmp_path).exists()
