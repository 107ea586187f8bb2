"""The student: causality, padding, incremental decoding, attention scaling, and what Hugging Face users expect."""

import math
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spikeopd.config import MODEL_PRESETS
from spikeopd.errors import InputError
from spikeopd.models.attention import pack_spikes, spiking_attention, unpack_spikes
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder, SpikeLinear
from spikeopd.models.initialise import calibrate
from spikeopd.models.neurons import lif
from spikeopd.registry import NEURONS

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97,
             max_position_embeddings=80)  # fmt: skip


def make_student(seed=0, **changes):
    torch.manual_seed(seed)
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**{**SMALL, **changes})).eval()
    calibrate(student, torch.randint(4, 97, (8, 24)))
    return student


@pytest.fixture(scope="module")
def student():
    return make_student()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, 97, (2, 64), generator=torch.Generator().manual_seed(5))


def spikes_of(student, ids, **kwargs):
    recorder = Recorder()
    with torch.no_grad():
        output = student(ids, recorder=recorder, **kwargs)
    return output, recorder.spikes


def test_every_site_is_alive_and_binary(student, ids):
    _, spikes = spikes_of(student, ids)
    assert len(spikes) == 1 + 2 * 10
    for (layer, site), value in spikes.items():
        assert set(value.unique().tolist()) <= {0.0, 1.0}, (layer, site)
        assert 0.005 < value.mean() < 0.9, (layer, site)


def test_later_tokens_never_change_an_earlier_logit(student, ids):
    changed = ids.clone()
    changed[:, 40:] = (changed[:, 40:] + 11) % 90 + 4
    with torch.no_grad():
        a, b = student(ids).logits, student(changed).logits
    assert torch.equal(a[:, :40], b[:, :40])
    assert not torch.equal(a[:, 40:], b[:, 40:])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_incremental_decoding_equals_the_full_forward_spike_for_spike(seed, ids):
    student = make_student(seed)
    full, spikes = spikes_of(student, ids)
    past, steps = None, []
    for t in range(64):
        output, recorded = spikes_of(student, ids[:, t : t + 1], past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append((output.logits, recorded))
    for key, value in spikes.items():
        if key[1] == "a":  # rows grow with the context
            for t in range(64):
                assert torch.equal(steps[t][1][key][..., 0, :], value[..., t, : t + 1]), (key, t)
        else:
            assert torch.equal(torch.cat([recorded[key] for _, recorded in steps], 2), value), key
    assert torch.allclose(torch.cat([logits for logits, _ in steps], 1), full.logits, atol=1e-5)


def test_the_cache_holds_one_bit_per_spike(student, ids):
    with torch.no_grad():
        cache = student(ids, use_cache=True).past_key_values
    keys = cache.layers[0].keys
    assert keys.dtype == torch.uint8
    assert keys.numel() * 8 == 4 * 2 * 64 * 32  # steps x batch x tokens x hidden


def test_packing_round_trip():
    x = (torch.rand(3, 2, 2, 5, 11) > 0.5).float()
    assert torch.equal(unpack_spikes(pack_spikes(x), 3, 11, x.dtype), x)


def test_left_padding_changes_nothing(student, ids):
    plain, spikes = spikes_of(student, ids[:, :20])
    padded = torch.cat([torch.ones(2, 7, dtype=torch.long), ids[:, :20]], 1)
    mask = torch.cat([torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)], 1)
    output, shifted = spikes_of(student, padded, attention_mask=mask)
    for key, value in spikes.items():
        if key[1] == "a":
            assert torch.equal(shifted[key][..., 7:, 7:], value)
            assert shifted[key][..., :7].sum() == 0 and shifted[key][..., :7, :].sum() == 0
        else:
            assert torch.equal(shifted[key][:, :, 7:], value), key
    assert torch.allclose(output.logits[:, 7:], plain.logits, atol=1e-5)


def test_splitting_a_batch_cannot_flip_a_spike(student, ids):
    _, whole = spikes_of(student, ids)
    for row in range(2):
        _, part = spikes_of(student, ids[row : row + 1])
        for key, value in part.items():
            assert torch.equal(value[:, 0], whole[key][:, row]), key


def test_scaled_and_unscaled_attention_give_identical_spikes():
    """App. F.2: counts / sqrt(d) against v_A equals counts against sqrt(d) v_A, for a d whose root is exact."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((torch.rand(4, 2, 3, 9, 16, generator=generator) < 0.3).float() for _ in range(3))
    mask = torch.ones(9, 9).tril()[None, None]
    scale = math.sqrt(16)
    thresholds = torch.tensor([0.5, 0.75, 1.0])
    a, _, counts, _ = spiking_attention(q, k, v, mask, thresholds * scale, torch.full((3,), 2.0), 0.9, 2.0)
    scaled = lif(counts / scale, thresholds.view(-1, 1, 1), 0.9) * mask
    assert torch.equal(a, scaled) and 0 < a.mean() < 1
    # coincidences are integers
    assert torch.equal(counts, counts.round())


def test_attention_by_hand():
    # One head, one step, two tokens, d_h = 2. Q1.K0 = 1, Q1.K1 = 2, Q0.K1 is masked.
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    k = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    v = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    mask = torch.ones(2, 2).tril()[None, None]
    a, r, counts, z = spiking_attention(q, k, v, mask, torch.tensor([1.0]), torch.tensor([2.0]), 0.9, 2.0)
    assert counts.view(2, 2).tolist() == [[1, 0], [1, 2]]
    assert a.view(2, 2).tolist() == [[1, 0], [1, 1]]
    assert z.view(2, 2).tolist() == [[0, 1], [1, 2]]
    assert r.view(2, 2).tolist() == [[0, 0], [0, 1]]


def test_generate_greedy_sampling_and_padded_batches(student, ids):
    greedy = student.generate(ids[:, :10], max_new_tokens=8, do_sample=False)
    alone = student.generate(ids[:1, :10], max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(greedy[0, : alone.shape[1]], alone[0])
    torch.manual_seed(0)
    sampled = student.generate(ids[:, :10], max_new_tokens=8, do_sample=True, top_k=20, top_p=0.9)
    assert sampled.shape[1] <= 18
    padded = torch.cat([torch.ones(2, 3, dtype=torch.long), ids[:, :10]], 1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)], 1)
    again = student.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(again[:, 13:], greedy[:, 10:])
    beams = student.generate(ids[:, :10], max_new_tokens=4, num_beams=2)
    assert beams.shape == (2, 14)


def test_save_load_through_auto_classes(student, ids, tmp_path):
    student.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert type(AutoConfig.from_pretrained(tmp_path)) is BiSpikCLMConfig
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, student(ids).logits)


def test_factorised_embedding_like_opt_350m(ids):
    student = make_student(word_embed_proj_dim=16)
    assert student.model.project_in.weight.shape == (32, 16) and student.lm_head.weight.shape == (97, 16)
    _, spikes = spikes_of(student, ids)
    assert spikes[1, "h"].mean() > 0


def test_recorder_costs_nothing_when_off_and_leaks_nothing(student, ids):
    recorder = Recorder(sites=("h",), layers=(1,), membranes_of=("h",), tokens=slice(-3, None))
    with torch.no_grad():
        student(ids, recorder=recorder)
        kept = recorder.spikes[1, "h"].clone()
        student(ids.flip(1))
    assert set(recorder.spikes) == {(1, "h")} and set(recorder.membranes) == {(1, "h")}
    assert recorder.spikes[1, "h"].shape == (4, 2, 3, 32) and torch.equal(kept, recorder.spikes[1, "h"])
    assert torch.equal(recorder.membranes[1, "h"] >= 0.7, recorder.spikes[1, "h"].bool())


def test_gradient_checkpointing_gives_the_same_gradient(ids):
    gradients = []
    for on in (False, True):
        student = make_student().train()
        if on:
            student.gradient_checkpointing_enable()
        recorder = Recorder(sites=("f",))
        loss = student(ids, labels=ids, recorder=recorder, use_cache=False).loss + recorder.spikes[0, "f"].mean()
        loss.backward()
        gradients.append(student.model.layers[0].fc1.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-7) and gradients[0].abs().sum() > 0


def test_snapped_weights_follow_their_parameter():
    layer = SpikeLinear(4, 4, 14)
    x = torch.eye(4)
    with torch.no_grad():
        first = layer(x)
        layer.weight.add_(1.0)
        assert torch.allclose(layer(x), first + 1.0, atol=1e-3)
    assert torch.equal(layer(x), layer(x).mul(2**14).round().div(2**14))


def test_too_long_and_impossible_shapes_say_what_to_do(student):
    with pytest.raises(InputError, match="81 tokens is longer than the position table of 80"):
        student(torch.full((1, 81), 5))
    with pytest.raises(InputError, match="hidden_size 30 is not a multiple of num_attention_heads 4"):
        BiSpikCLMConfig(hidden_size=30, num_attention_heads=4)
    with pytest.raises(InputError, match="num_steps is 0"):
        BiSpikCLMConfig(num_steps=0)


@pytest.mark.parametrize("preset", sorted(MODEL_PRESETS))
def test_presets_build_without_memory(preset):
    sizes = dict(MODEL_PRESETS[preset])
    with torch.device("meta"):
        student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**sizes))
    block = student.model.layers[0]
    assert block.fc1.weight.shape == (sizes["ffn_dim"], sizes["hidden_size"])
    assert student.lm_head.weight.shape[1] == sizes.get("word_embed_proj_dim", sizes["hidden_size"])


def silent(current, threshold, alpha, xi):
    """A neuron that never fires, chosen by name below."""
    return torch.zeros_like(current) * threshold


def test_the_neuron_that_is_named_fires(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "silent_neuron", sys.modules[__name__])
    monkeypatch.setitem(NEURONS, "silent", "silent_neuron:silent")
    shape = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**shape, neuron="silent"))
    student.save_pretrained(tmp_path)
    recorder = Recorder()
    BiSpikCLMForCausalLM.from_pretrained(tmp_path)(torch.arange(10)[None], recorder=recorder)
    assert len(recorder.spikes) == 11 and not any(spikes.any() for spikes in recorder.spikes.values())
    assert "neuron" not in BiSpikCLMConfig(**shape).to_dict() and BiSpikCLMConfig(**shape).neuron == "lif"
    with pytest.raises(InputError, match="neuron 'izh' does not exist; give one of lif, silent"):
        BiSpikCLMConfig(**shape, neuron="izh")
