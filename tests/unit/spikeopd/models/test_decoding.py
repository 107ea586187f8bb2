"""The compiled decoder of rollouts gives what the student's forward gives: tokens, spikes and logits, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd import quality
from spikeopd.models import lif_cpu, products
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.decoding import Decoder, _dense
from spikeopd.rollout import rollout, uniforms

pytestmark = pytest.mark.skipif(not products.fast(), reason="the decoder needs int8 products of the CPU")


def make(seed=0, spread=0.2, **options):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48, "vocab_size": 97}
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**{**shape, "max_position_embeddings": 64, **options})).eval()
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            parameter += spread * parameter.abs().mean() * torch.randn_like(parameter)
            if name.endswith("inhibition"):
                parameter.uniform_(-0.1, 0.6)
            parameter.clamp_(-1.9, 1.9)  # of 2 and more, sixteen bits do not hold a weight
    return student


def check(student, rows=3, length=5, k=6, scope="all", seed=0):
    prompts = torch.randint(4, student.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    layers = tuple(range(-1, student.config.num_hidden_layers))
    u = uniforms(seed, 0, rows, k)
    assert Decoder.of(student, rows, length + k) is not None
    plain = rollout(student, prompts, u, 1.3, layers, scope, compiled=False)
    fast = rollout(student, prompts, u, 1.3, layers, scope)
    assert torch.equal(fast.sequences, plain.sequences) and torch.equal(fast.spikes, plain.spikes)
    return plain.sequences


@settings(max_examples=20, deadline=None)
@given(
    deploy=st.sampled_from(("none", "int8", "int4")),
    write=st.sampled_from(("spike", "current")),
    neurons=st.sampled_from(("shared", "own")),
    distances=st.sampled_from((0, 1, 4)),
    attention=st.sampled_from(("sum", "inhibiting")),
    steps=st.integers(1, 4),
    width=st.sampled_from(((16, 1), (36, 3), (32, 4), (72, 1))),
    rows=st.integers(1, 4),
    scope=st.sampled_from(("all", "output")),
    seed=st.integers(0, 99),
)
def test_tokens_and_spikes_of_every_block(
    deploy, write, neurons, distances, attention, steps, width, rows, scope, seed
):  # fmt: skip
    size, heads = width
    student = make(
        seed, hidden_size=size, num_attention_heads=heads, deploy_precision=deploy, residual_write=write,
        neurons=neurons, distances=distances, attention=attention, num_steps=steps,
        readout="rate" if deploy == "none" and seed % 2 else "residual",
    )  # fmt: skip
    check(student, rows, length=1 + seed % 5, scope=scope, seed=seed)


@pytest.mark.parametrize("deploy", ["none", "int8"])
def test_logits_are_the_same_numbers(deploy):
    student = make(deploy_precision=deploy, readout="residual", neurons="own", distances=4, residual_write="current")
    ids = torch.randint(4, 97, (3, 9), generator=torch.Generator().manual_seed(0))
    decoder = Decoder.of(student, 3, 9)
    with torch.no_grad():
        past = student(ids[:, :4], use_cache=True).past_key_values
        decoder.read_prefix(past)
        for t in range(4, 9):
            recorder = Recorder(layers=(0,))
            found = student(ids[:, t : t + 1], past_key_values=past, use_cache=True, recorder=recorder)
            logits = decoder.step(ids[:, t : t + 1])
            assert logits.dtype == found.logits.dtype and torch.equal(logits, found.logits[:, -1])
            for site in quality.rate_sites(student.config, "all"):
                counted = recorder.spikes[0, site].sum((0, 2, 3)).tolist()
                assert decoder.counts[1, Decoder.SITES.index(site)].tolist() == counted, site


def test_weights_of_two_bytes_and_of_one():
    wide, narrow = make(grid_bits=14), make(grid_bits=4)
    for student, planes in ((wide, 2), (narrow, 1)):
        layer = student.model.layers[0]
        assert _dense(layer.q_proj, layer.k_proj, layer.v_proj).integers.shape == (32, planes * 96)
        check(student)


def test_rows_shared_out_to_threads(monkeypatch):
    monkeypatch.setattr(lif_cpu, "_WORTH_A_THREAD", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(make(deploy_precision="int8", readout="residual"), rows=5)
    finally:
        torch.set_num_threads(threads)


def test_the_students_own_forward_serves_where_the_decoder_cannot(monkeypatch):
    student = make()
    with quality.without_attention(student):
        assert Decoder.of(student, 1, 8) is None
    assert Decoder.of(student, 1, 8) is not None
    assert Decoder.of(make(grid_bits=None), 1, 8) is None  # float weights: the order of a sum would show
    assert Decoder.of(make(neuron="quantised", num_steps=4), 1, 8) is None
    assert Decoder.of(make().double(), 1, 8) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert Decoder.of(student, 1, 8) is None
    monkeypatch.setattr(products, "fast", lambda: False)
    assert Decoder.of(student, 1, 8) is None
