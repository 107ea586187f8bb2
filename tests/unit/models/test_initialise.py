"""The start of a student: what it takes from the teacher, and calibration."""

import torch
from transformers import OPTConfig, OPTForCausalLM

from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM
from spikeopd.models.initialise import start_from_teacher

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97,
             max_position_embeddings=80)  # fmt: skip


def make_pair(**changes):
    torch.manual_seed(0)
    teacher = OPTForCausalLM(OPTConfig(**SIZES, word_embed_proj_dim=32)).eval()
    return BiSpikCLMForCausalLM(BiSpikCLMConfig(**{**SIZES, **changes})).eval(), teacher


def test_a_spike_moves_the_residual_stream_the_way_the_teacher_does():
    """gain * (row of W) must have the sign of the teacher's row, whatever sign the gain was drawn with."""
    student, teacher = make_pair()
    start_from_teacher(student, teacher, blocks=True)
    for block, layer in zip(student.model.layers, teacher.model.decoder.layers, strict=True):
        assert (block.gain_o < 0).any() and (block.gain_y < 0).any(), "the case needs gains of both signs"
        for gain, mine, theirs in (
            (block.gain_o, block.out_proj, layer.self_attn.out_proj),
            (block.gain_y, block.fc2, layer.fc2),
        ):
            assert torch.equal(torch.sign(gain[:, None] * mine.weight), torch.sign(theirs.weight))
