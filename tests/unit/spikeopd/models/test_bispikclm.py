"""The student: causality, padding, incremental decoding, attention scaling, and what Hugging Face users expect."""

import math
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spikeopd.config import BLOCKS, MODEL_PRESETS
from spikeopd.errors import InputError
from spikeopd.models.attention import coincidences, pack_spikes, unpack_spikes, weighted_values
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.initialise import calibrate
from spikeopd.models.neurons import lif
from spikeopd.models.projection import SpikeLinear
from spikeopd.registry import NEURONS

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97,
             max_position_embeddings=80)  # fmt: skip


def make_student(seed=0, **changes):
    torch.manual_seed(seed)
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**{**SMALL, **changes})).eval()
    calibrate(student, torch.randint(4, 97, (8, 24)))
    return student


@pytest.fixture(scope="module", params=sorted(BLOCKS))
def block(request):
    return BLOCKS[request.param]


@pytest.fixture(scope="module")
def student(block):
    return make_student(**block)


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
    assert len(spikes) == 1 + 2 * len(student.config.layer_sites)
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
def test_incremental_decoding_equals_the_full_forward_spike_for_spike(seed, block, ids):
    student = make_student(seed, **block)
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
    q, k = ((torch.rand(4, 2, 3, 9, 16, generator=generator) < 0.3).float() for _ in range(2))
    counts = coincidences(q, k) * torch.ones(9, 9).tril()
    scale, thresholds = math.sqrt(16), torch.tensor([0.5, 0.75, 1.0]).view(-1, 1, 1)
    a, scaled = lif(counts, thresholds * scale, 0.9), lif(counts / scale, thresholds, 0.9)
    assert torch.equal(a, scaled) and 0 < a.mean() < 1
    assert torch.equal(counts, counts.round()), "coincidences are integers"


def test_attention_by_hand():
    # One head, one step, two tokens, d_h = 2. Q1.K0 = 1, Q1.K1 = 2, Q0.K1 is masked.
    q = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    k = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    v = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).view(1, 1, 1, 2, 2)
    counts = coincidences(q, k) * torch.ones(2, 2).tril()
    a = lif(counts, torch.tensor([1.0]))
    z = weighted_values(a, v)
    assert counts.view(2, 2).tolist() == [[1, 0], [1, 2]]
    assert a.view(2, 2).tolist() == [[1, 0], [1, 1]]
    assert z.view(2, 2).tolist() == [[0, 1], [1, 2]]
    assert lif(z, torch.tensor([2.0])).view(2, 2).tolist() == [[0, 0], [0, 1]]


def one_block(ids, student):
    """The plus block of a student of one layer, written again from its equations, token by token and step by step."""
    config, base = student.config, student.model
    (block,) = base.layers
    heads, steps = config.num_attention_heads, config.num_steps
    head_dim = config.hidden_size // heads

    def neurons(current, threshold):
        u = s = torch.zeros_like(current[0])
        spikes = []
        for step in current:
            u = config.alpha * u + step - threshold * s
            s = (u >= threshold).to(u.dtype)
            spikes.append(s)
        return torch.stack(spikes)

    def project(module, x):
        weight, bias = module.on_grid()
        return x @ weight.T + bias

    embedded = base.embed_tokens.weight[ids] + base.embed_positions.weight[2 : 2 + len(ids)]
    h = (base.embed_gain * embedded + base.embed_bias).expand(steps, -1, -1)
    x = neurons(h + base.bias_embed, base.log_threshold_embed.exp())
    q, k, v = (neurons(project(m, x), config.threshold) for m in (block.q_proj, block.k_proj, block.v_proj))
    z = torch.zeros_like(v)
    for head in range(heads):
        part = slice(head * head_dim, (head + 1) * head_dim)
        for i in range(len(ids)):
            for j in range(i + 1):
                counts = (q[:, i, part] * k[:, j, part]).sum(-1)
                bias = block.bias_a[head, min(i - j, config.distances - 1)]
                a = neurons(counts + bias, block.log_threshold_a.exp()[head])
                z[:, i, part] += a[:, None] * v[:, j, part]
    r = neurons(z + block.bias_r, block.log_threshold_r.exp())
    h = h + project(block.out_proj, r)
    f = neurons(project(block.fc1, neurons(h + block.bias_x, block.log_threshold_x.exp())), config.threshold)
    h = h + project(block.fc2, f)
    features = base.final_layer_norm(h.mean(0)) * base.logit_scale.exp()
    return student.lm_head(features), neurons(h + block.bias_h, block.log_threshold_h.exp())


def test_the_plus_block_follows_its_equations(ids):
    student = make_student(**{**BLOCKS["plus"], "num_hidden_layers": 1, "distances": 4})
    with torch.no_grad():
        for parameter in student.model.layers[0].parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        output, spikes = spikes_of(student, ids[:1, :12])
        logits, x = one_block(ids[0, :12], student)
    assert torch.equal(spikes[0, "h"][:, 0], x) and 0 < x.mean() < 1
    assert torch.allclose(output.logits[0], logits, atol=1e-5)


def test_a_distance_bias_alone_fires_a_pair():
    student = make_student(**BLOCKS["plus"])
    block = student.model.layers[0]
    with torch.no_grad():
        block.bias_a.fill_(-100.0)
        block.bias_a[1, 3] = 2 * block.log_threshold_a[1].exp()
        _, spikes = spikes_of(student, torch.full((1, 8), 5))
    expected = torch.diag(torch.ones(5), -3).expand(4, 8, 8)
    assert torch.equal(spikes[0, "a"][:, 0, 1], expected) and spikes[0, "a"][:, 0, 0].sum() == 0


def test_pairs_that_causality_forbids_train_no_threshold(student, ids):
    """What the first token fires depends on itself alone, and so must its gradient."""
    gradients = []
    for length in (1, 12):
        recorder = Recorder(sites=("r",))
        student.model(ids[:, :length], use_cache=False, recorder=recorder)
        weights = torch.arange(32.0).cos()
        (recorder.spikes[1, "r"][:, :, 0] * weights).sum().backward()
        gradients.append([block.log_threshold_a.grad.clone() for block in student.model.layers])
        student.zero_grad()
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(*gradients, strict=True))
    assert any(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_every_parameter_gets_a_gradient_from_the_output_alone(student, ids):
    """Data parallelism waits for each of them, also for those of the last S_H that the residual readout bypasses."""
    student.train()(ids, labels=ids, use_cache=False).loss.backward()
    missing = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    student.zero_grad(set_to_none=True)
    student.eval()
    assert not missing


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


def test_factorised_embedding_like_opt_350m(block, ids):
    student = make_student(word_embed_proj_dim=16, **block)
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
    threshold = student.model.layers[1].neurons("h").threshold
    assert torch.equal(recorder.membranes[1, "h"] >= threshold, recorder.spikes[1, "h"].bool())


def test_gradient_checkpointing_gives_the_same_gradient(block, ids):
    gradients = []
    for on in (False, True):
        student = make_student(**block).train()
        if on:
            student.gradient_checkpointing_enable()
        recorder = Recorder(sites=("f",))
        loss = student(ids, labels=ids, recorder=recorder, use_cache=False).loss + recorder.spikes[0, "f"].mean()
        loss.backward()
        gradients.append(student.model.layers[0].fc1.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-7) and gradients[0].abs().sum() > 0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("deploy", ["none", "int8"])
def test_a_block_compiles_whole_to_the_same_spikes_and_gradients(block, deploy, backend, ids, tmp_path, monkeypatch):
    """fullgraph: a break in the graph would raise."""
    if deploy != "none" and block["readout"] != "residual":
        pytest.skip("the paper's readout has no integer form")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    student = make_student(**block, deploy_precision=deploy).train()
    layer, seen = student.model.layers[1], []
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    student(ids)
    hook.remove()
    x, h, *others = seen[0]
    torch.compiler.reset()
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        student.zero_grad()
        source = h.detach().clone().requires_grad_()
        spikes, after, *_ = function(x.detach(), source, *others)
        (spikes.sum() + after.square().sum()).backward()
        slopes = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        results.append(([spikes.detach(), after.detach()], [source.grad, *slopes]))
    (found, gradients), (compiled, others) = results
    assert all(map(torch.equal, found, compiled)) and len(gradients) == len(others) > 10
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_snapped_weights_follow_their_parameter():
    layer = SpikeLinear(4, 4, BiSpikCLMConfig(grid_bits=14))
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
    with pytest.raises(InputError, match="readout is 'spikes'; give rate or residual"):
        BiSpikCLMConfig(readout="spikes")


@pytest.mark.parametrize("preset", sorted(MODEL_PRESETS))
def test_presets_build_without_memory(preset, block):
    sizes = dict(MODEL_PRESETS[preset])
    with torch.device("meta"):
        student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**sizes, **block))
    block = student.model.layers[0]
    assert block.fc1.weight.shape == (sizes["ffn_dim"], sizes["hidden_size"])
    assert student.lm_head.weight.shape[1] == sizes.get("word_embed_proj_dim", sizes["hidden_size"])


def silent(current, threshold, alpha, xi, scaled, unit):
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
    with pytest.raises(InputError, match="neuron 'izh' does not exist; give one of lif, quantised, silent"):
        BiSpikCLMConfig(**shape, neuron="izh")
