"""The start of a student: what it takes from the teacher, and calibration."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from spikeopd.config import BLOCKS
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.initialise import MASS, attention_by_distance, calibrate, start_from_teacher, widen
from spikeopd.models.teacher import eager_attention

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


@pytest.mark.parametrize("init", ["random", "teacher"])
@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_after_calibration_every_site_works_in_every_layer(block, init):
    """Rates within a band, hardly a neuron dead: also the attention map, R, and what reads the residual stream."""
    student, teacher = make_pair(num_hidden_layers=2, **BLOCKS[block])
    start_from_teacher(student, teacher, blocks=init == "teacher")
    ids = torch.randint(4, 97, (16, 48), generator=torch.Generator().manual_seed(3))
    calibrate(student, ids)
    recorder = Recorder()
    with torch.no_grad():
        student(ids, recorder=recorder)
    for (layer, site), spikes in recorder.spikes.items():
        if site == "a":
            rate = spikes.sum().item() / (spikes[..., 0, 0].numel() * 48 * 49 / 2)
            assert 0.02 < rate < 0.3, (layer, site, rate)
        else:
            assert 0.05 < spikes.mean() < 0.5, (layer, site, spikes.mean())
            assert (spikes.flatten(0, 2).sum(0) == 0).float().mean() < 0.1, (layer, site)


@pytest.mark.parametrize("precision", ["none", "int8"])
def test_a_widened_student_is_the_same_function_with_neurons_that_can_learn(precision):
    student, teacher = make_pair(**BLOCKS["plus"])
    start_from_teacher(student, teacher, blocks=True)
    ids = torch.randint(4, 97, (8, 48), generator=torch.Generator().manual_seed(3))
    calibrate(student, ids)
    student.config.deploy_precision = precision
    wide, _ = make_pair(**BLOCKS["plus"] | {"distances": 24}, ffn_dim=96)
    widen(wide, student, ids)
    assert wide.config.deploy_precision == precision
    recorder = Recorder(sites=["f"])
    with torch.no_grad():
        assert torch.equal(wide(ids, recorder=recorder).logits, student(ids).logits)
    for layer, block in enumerate(wide.model.layers):
        assert not block.fc2.weight[:, 64:].any()
        assert 0.1 < recorder.spikes[layer, "f"][..., 64:].mean() < 0.4
    wide(ids, labels=ids).loss.backward()
    for block in wide.model.layers:
        assert block.fc2.weight.grad[:, 64:].abs().amax(0).gt(0).float().mean() > 0.8


def test_attention_by_distance_by_hand():
    student, teacher = make_pair(**BLOCKS["plus"] | {"distances": 5})
    ids = torch.randint(4, 97, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), eager_attention(teacher):
        maps = teacher(ids, output_attentions=True).attentions
    usual = teacher.config._attn_implementation
    found = attention_by_distance(teacher, ids, student.config)
    assert teacher.config._attn_implementation == usual and len(found) == 2
    for layer, profile in enumerate(found):
        for head in range(2):
            for distance in range(5):
                pairs = [
                    maps[layer][row, head, i, j].item()
                    for row in range(2) for i in range(4, 16) for j in range(i + 1) if min(i - j, 4) == distance
                ]  # fmt: skip
                assert profile[head, distance].item() == pytest.approx(sum(pairs) / len(pairs), rel=1e-4)


def test_heads_begin_by_looking_where_the_teachers_look():
    student, teacher = make_pair(**BLOCKS["plus"])
    start_from_teacher(student, teacher, blocks=True)
    ids = torch.randint(4, 97, (8, 64), generator=torch.Generator().manual_seed(3))
    # One head looks at the token before, one back over sixteen.
    near, far = torch.zeros(16), torch.full((16,), 1 / 16)
    near[1] = 0.2
    calibrate(student, ids, attention=[torch.stack((near, far))] * 2)
    recorder = Recorder(sites=["a"])
    with torch.no_grad():
        student(ids, recorder=recorder)
    for layer in range(2):
        rates = recorder.spikes[layer, "a"].mean((0, 1))
        for head, wanted in enumerate((near, far)):
            for distance in range(15):
                rate = torch.diagonal(rates[head], -distance).mean().item()
                asked = min(MASS * wanted[distance].item(), 0.9)
                assert rate == pytest.approx(asked, abs=0.1), (layer, head, distance)


def test_attention_that_inhibits_begins_by_taking_away_what_a_token_gives_on_average():
    student, teacher = make_pair(**BLOCKS["plus"] | {"attention": "inhibiting"})
    start_from_teacher(student, teacher, blocks=True)
    ids = torch.randint(4, 97, (8, 48), generator=torch.Generator().manual_seed(3))
    calibrate(student, ids)
    recorder = Recorder(sites=["v", "r"])
    with torch.no_grad():
        student(ids, recorder=recorder)
    for layer, block in enumerate(student.model.layers):
        assert torch.allclose(block.inhibition, recorder.spikes[layer, "v"].mean((0, 1, 2)), atol=1e-6)
        assert 0.05 < block.inhibition.mean() < 0.5 and 0.05 < recorder.spikes[layer, "r"].mean() < 0.5
