"""The integer forward pass in floats: against integers of Python and numpy, and against an independent writing of the
contract's equations.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.config import BLOCKS
from spikeopd.contracts import DECAY_BITS, MEMBRANE_MAX, MEMBRANE_MIN, Embedding, normalise_counts
from spikeopd.errors import InputError
from spikeopd.models import grid, grid_cpu, lif_cpu
from spikeopd.models.bispikclm import BEHIND, BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.models.initialise import calibrate
from spikeopd.models.neurons import lif, lif_membrane

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97,
             max_position_embeddings=80)  # fmt: skip


def make_student(**changes):
    torch.manual_seed(0)
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**{**SIZES, **BLOCKS["plus"], **changes})).eval()
    calibrate(student, torch.randint(4, 97, (8, 24)))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    student.config.deploy_precision = "int8"
    return student


def test_power_of_two_by_hand():
    values = torch.tensor([1.0, 1.1, 0.5, 0.51, 3.0, 4.0, 2.0**-30, 1e-3], dtype=torch.float64)
    expected = [1.0, 2.0, 0.5, 1.0, 4.0, 4.0, 2.0**-30, 2.0**-9]
    assert grid.power_of_two_above(values).tolist() == expected


@given(st.floats(2.0**-1000, 2.0**1000))
def test_power_of_two_is_frexps(value):
    mantissa, exponent = math.frexp(value)
    expected = math.ldexp(1.0, exponent - (mantissa == 0.5))
    assert grid.power_of_two_above(torch.tensor([value], dtype=torch.float64)).item() == expected


def integer_neuron(current, threshold, a):
    """The contract's neuron with Python's integers; current [T], spikes [T]."""
    v, s, out = 0, 0, []
    for step in current:
        decayed = (abs(v) * a >> DECAY_BITS) * (1 if v >= 0 else -1)
        v = min(max(decayed + step - threshold * s, MEMBRANE_MIN), MEMBRANE_MAX)
        s = int(v >= threshold)
        out.append((v, s))
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**24), 2**24), min_size=6, max_size=6),
    st.integers(1, 2**21),
    st.integers(-20, 3),
    st.floats(0.05, 1.0),
    st.sampled_from([True, False]),
    st.sampled_from([(1,), (5,), (2, 1, 1)]),
)
def test_the_neuron_is_the_integer_one(steps, threshold, exponent, alpha, compiled, shape):
    unit = 2.0**exponent
    expected = integer_neuron(steps, threshold, round(4096 * alpha))
    current = (torch.tensor(steps, dtype=torch.float64) * unit).float().view(6, 1, 1, 1, 1).expand(6, 1, 2, 3, 5)
    thresholds, units = torch.full(shape, threshold * unit), torch.full(shape, unit)
    enabled, lif_cpu.ENABLED = lif_cpu.ENABLED, compiled
    try:
        fired = [lif(current, thresholds, alpha, unit=units)]
        with torch.no_grad():
            fired.append(lif(current, thresholds, alpha, unit=units))
    finally:
        lif_cpu.ENABLED = enabled
    membrane = lif_membrane(current, thresholds, alpha, units)
    for spikes in fired:
        assert (spikes.flatten(1) == torch.tensor([s for _, s in expected])[:, None]).all()
    assert (membrane.flatten(1).double() / unit == torch.tensor([v for v, _ in expected])[:, None]).all()


def test_both_paths_give_the_same_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    current = torch.round(torch.randn(4, 3, 5, 16, generator=generator) * 1000) * 2**-10
    results = []
    for enabled in (True, False):
        monkeypatch.setattr(lif_cpu, "ENABLED", enabled)
        c, v = current.clone().requires_grad_(), torch.full((16,), 0.75, requires_grad=True)
        spikes = lif(c, v, scaled=True, unit=torch.tensor([2.0**-10]))
        (spikes * current.cos()).sum().backward()
        results.append((spikes.detach(), c.grad, v.grad))
    assert torch.equal(results[0][0], results[1][0]) and 0 < results[0][0].mean() < 1
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)
    assert torch.allclose(results[0][2], results[1][2], rtol=1e-4, atol=1e-4)


def test_weights_thresholds_and_biases_lie_on_their_grids():
    student = make_student()
    block = student.model.layers[0]
    with torch.no_grad():
        block.fc1.weight[3].zero_()  # a neuron without weights takes the scale its threshold asks for
        block.q_proj.bias[5] = 1000.0  # one whose bias would not fit takes a coarser one
    for site, name in BEHIND.items():
        if site in ("o", "y"):
            continue
        module = getattr(block, name)
        scale, (weight, bias), neurons = module.scale(), module.on_grid(), module.neurons()
        integers = weight.double() / scale[:, None]
        assert torch.equal(integers, integers.round()) and integers.abs().max() <= 127
        assert ((weight - module.weight).abs() <= scale[:, None] / 2).all(), "nothing is clipped"
        for values, least in ((bias, -grid.SITE_LIMIT), (neurons.threshold, 1)):
            units = values.double() / neurons.unit
            assert torch.equal(units, units.round()) and units.min() >= least and units.max() <= grid.SITE_LIMIT
        half = torch.log2(scale)
        assert torch.equal(half, half.round())
    assert block.q_proj.neurons().unit[5] > block.q_proj.neurons().unit.median()
    write = block.fc2.scale()
    assert (write >= 2.0**-12).all()
    for site, unit in (("a", 2.0**-10), ("r", 2.0**-10), ("x", 2.0**-12), ("h", 2.0**-12)):
        for values in block.neurons(site)[:2]:
            assert torch.equal(values / unit, (values / unit).round()), site


def integer_student(student, ids):
    """Logits and spikes of one sequence from numpy integers, written from the contract's equations."""
    config, base = student.config, student.model
    heads, steps = config.num_attention_heads, config.num_steps
    head_dim, a = config.hidden_size // heads, round(4096 * config.alpha)

    def integers(tensor, unit):
        exact = tensor.detach().double().numpy() / np.asarray(unit, dtype=np.float64)
        assert (exact == np.rint(exact)).all()
        return exact.astype(np.int64)

    def neurons(drive, threshold):
        v, s, out = np.zeros_like(drive[0]), np.zeros_like(drive[0]), []
        for step in drive:
            decayed = np.sign(v) * ((np.abs(v) * a) >> DECAY_BITS)
            v = np.clip(decayed + step - threshold * s, MEMBRANE_MIN, MEMBRANE_MAX)
            s = (v >= threshold).astype(np.int64)
            out.append(s)
        return np.stack(out)

    def project(module, x):
        scale, (weight, bias), site = module.scale().numpy(), module.on_grid(), module.neurons()
        unit = site.unit.numpy()
        current = (x @ integers(weight, scale[:, None]).T << 6) + integers(bias, unit)
        return neurons(current, integers(site.threshold, unit))

    def write(module, x):
        shift = np.log2(module.scale().numpy() * 4096).astype(np.int64)
        weight, bias = module.on_grid()
        return (x @ integers(weight, module.scale().numpy()[:, None]).T << shift) + integers(bias, 2.0**-12)

    units = grid.row_units(base.embed_tokens.weight)
    row_scale, row_bits = grid.mantissas(units)
    channel_gain, gain_bits = grid.mantissas(base.embed_gain)
    table = grid.integer_rows(base.embed_tokens.weight, units).numpy().astype(np.int8)
    position = np.rint((base.embed_gain * base.embed_positions.weight + base.embed_bias).detach().double() * 4096)
    embedding = Embedding(table, row_scale.numpy().astype(np.int32), channel_gain.numpy().astype(np.int32),
                          row_bits + gain_bits - 12, position.numpy()[2:].astype(np.int16))  # fmt: skip
    h = np.stack([embedding.current(int(token), place) for place, token in enumerate(ids)]).astype(np.int64)
    h = np.broadcast_to(h, (steps, *h.shape))
    spikes = {}

    def residual(site, found):
        return neurons(h + integers(found.bias, 2.0**-12), integers(found.threshold, 2.0**-12))

    x = spikes[-1, "embed"] = residual("embed", base.neurons())
    for index, block in enumerate(base.layers):
        q, k, v = (project(module, x) for module in (block.q_proj, block.k_proj, block.v_proj))
        found = block.neurons("a")
        threshold, bias = integers(found.threshold, 2.0**-10).ravel(), integers(found.bias, 2.0**-10)
        z = np.zeros_like(v)
        for head in range(heads):
            part = slice(head * head_dim, (head + 1) * head_dim)
            for i in range(len(ids)):
                for j in range(i + 1):
                    counts = (q[:, i, part] * k[:, j, part]).sum(-1) << 10
                    fired = neurons(counts + bias[head, min(i - j, config.distances - 1)], threshold[head])
                    z[:, i, part] += fired[:, None] * v[:, j, part]
        found = block.neurons("r")
        r = neurons((z << 10) + integers(found.bias, 2.0**-10), integers(found.threshold, 2.0**-10))
        h = h + write(block.out_proj, r)
        spikes[index, "x"] = residual("x", block.neurons("x"))
        f = project(block.fc1, spikes[index, "x"])
        h = h + write(block.fc2, f)
        x = spikes[index, "h"] = residual("h", block.neurons("h"))
        spikes |= {(index, site): value for site, value in (("q", q), ("k", k), ("v", v), ("r", r), ("f", f))}
    norm = base.final_layer_norm
    gamma, beta = norm.weight.detach().double().numpy(), norm.bias.detach().double().numpy()
    s_y = 2.0 ** math.floor(math.log2(8191 / (8 * np.abs(gamma) + np.abs(beta)).max()))
    logits = []
    for n in h.sum(0):
        mu, inv = normalise_counts(n, steps * 4096, norm.eps)
        y = np.clip(np.rint(s_y * ((n / (4096 * steps) - mu) * inv * gamma + beta)), -8191, 8191).astype(np.int64)
        factor = math.exp(float(base.logit_scale)) * units.numpy() / s_y
        logits.append(factor * (table.astype(np.int64) @ y) + student.lm_head.bias.detach().double().numpy())
    return np.stack(logits), spikes


@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_student_is_its_integers_spike_for_spike_and_bit_for_bit(num_steps):
    student = make_student(num_steps=num_steps, distances=5)
    ids = torch.randint(4, 97, (1, 20), generator=torch.Generator().manual_seed(3))
    recorder = Recorder()
    with torch.no_grad():
        logits = student(ids, recorder=recorder).logits
        expected, spikes = integer_student(student, ids[0])
    for key, value in spikes.items():
        assert np.array_equal(recorder.spikes[key][:, 0].numpy(), value), key
        assert value.any(), key
    assert logits.dtype == torch.float64 and np.array_equal(logits[0].numpy(), expected)


def test_decoding_and_padding_change_no_bit_of_the_logits():
    student = make_student()
    ids = torch.randint(4, 97, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        full, past, parts = student(ids).logits, None, []
        for t in range(24):
            output = student(ids[:, t : t + 1], past_key_values=past, use_cache=True)
            past = output.past_key_values
            parts.append(output.logits)
        padded = torch.cat([torch.ones(2, 5, dtype=torch.long), ids], 1)
        mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 24, dtype=torch.long)], 1)
        shifted = student(padded, attention_mask=mask).logits[:, 5:]
    assert torch.equal(torch.cat(parts, 1), full) and torch.equal(shifted, full)


def test_training_passes_a_gradient_to_every_parameter_and_fires_what_evaluation_fires():
    student = make_student()
    ids = torch.randint(4, 97, (4, 24), generator=torch.Generator().manual_seed(4))
    recorders = Recorder(), Recorder()
    with torch.no_grad():
        exact = student(ids, recorder=recorders[0]).logits
    output = student.train()(ids, labels=ids, recorder=recorders[1])
    assert all(torch.equal(recorders[1].spikes[key], value) for key, value in recorders[0].spikes.items())
    assert torch.allclose(output.logits.double(), exact, atol=1e-4)
    output.loss.backward()
    unused = {"bias_h", "log_threshold_h"}  # of the last layer, which drive nothing: zeros
    for name, parameter in student.named_parameters():
        if name.startswith("model.layers.1.") and name.split(".")[-1] in unused:
            continue
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_what_cannot_be_deployed_so_is_refused():
    with pytest.raises(InputError, match="deploy_precision needs readout 'residual'"):
        BiSpikCLMConfig(deploy_precision="int8")
    with pytest.raises(InputError, match="deploy_precision is 'int3'; give none or int8"):
        BiSpikCLMConfig(deploy_precision="int3")


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1e-3, 1.0, 300.0]))
def test_the_compiled_table_is_the_plain_one(seed, rows, width, size):
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * size
    table[0] = 0
    units = grid.row_units(table)
    assert grid_cpu.usable(table)
    plain = (grid.integer_rows(table, units) * units[:, None]).to(table.dtype)
    assert torch.equal(grid.snapped_rows(table, units), plain)
