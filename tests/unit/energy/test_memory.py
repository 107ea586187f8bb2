"""The bill with memory inside: hand arithmetic, counts of a run, the twin's closed form, break-even bands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_models import INHIBITING, PLUS, random_shape
from random_runs import make_run

from energy.costs import MEMORY, OPERATIONS, PLACEMENTS
from energy.flops import SPIKEGPT, dense_shape, keys_of_sequence, opt_macs, opt_shape
from energy.memory import (
    CONVENTIONS,
    EVENTS,
    PARTS,
    Work,
    bill,
    cheaper_bands,
    counted_work,
    estimated_work,
    spikegpt_tally,
    student_tally,
    teacher_tally,
    total,
    twin_bits,
    twin_tally,
    uniform_curve,
)
from energy.models import uniform_rates
from spikeopd.contracts import ModelShape
from spikeopd.contracts.run import parse_run

CORES = PLACEMENTS["cores"]  # 2.5 pJ a byte for weights and cache, 1.25 for what belongs to neurons
# Two neurons in every group, one layer, one head, two words, T_s = 2; one token, which sees itself alone.
TWO = ModelShape(2, 1, 1, 2, 2, 8, 2, 2)
# Neuron 0 of the embedding fires in both steps and reaches 3 matrices of 2 outputs; nothing else fires.
_NOTHING = dict.fromkeys(("coincidence", "av", "output", "residual", "ffn_in", "ffn_out"), 0.0)
ONE_SPIKER = Work(TWO, 1, 1, {"qkv": 12.0, **_NOTHING}, {"qkv": 6.0, **_NOTHING}, 2.0, 1.0, 2 / 40)
# Head: 4 MACs 1.2, 4 + 4 bytes of weights 20, 4 addresses 0.4
HEAD = 21.6


def test_two_neurons_by_hand_per_spike() -> None:
    """Slots: nine groups of 2, f of 2, one of the map: 21 a step, 42 in all."""
    by_hand = {
        "ac": 12 * 0.1,
        "update": 42 * 3.2,
        "weight_read": 12 * 2.5,
        "cache_write": 8 / 8 * 2.5,  # 2 keys and 2 values, a bit for each of two steps
        "sum_read": 12 * 3 * 1.25,
        "sum_write": 12 * 3 * 1.25,
        "state_read": 42 * 3 * 1.25,
        "state_write": 42 * 3 * 1.25,
        "stream_read": 8 * 3 * 1.25,  # two sublayers, two neurons, two steps
        "stream_write": 8 * 3 * 1.25,
        "spike_read": 2 * 2 * 1.25,  # 16-bit addresses
        "spike_write": 2 * 2 * 1.25,
        "address": 12 * 0.1,
    }
    tally = student_tally(ONE_SPIKER, "spike")
    assert {e.event: e.energy_pj for e in bill(tally, CORES) if e.place == "blocks"} == pytest.approx(by_hand)
    assert total(tally, CORES) == pytest.approx(644.3 + HEAD)


def test_two_neurons_by_hand_per_token() -> None:
    by_hand = {
        "ac": 12 * 0.1,
        "update": 42 * 3.2,
        "weight_read": 6 * 2.5,  # the row once
        "cache_read": 4 / 8 * 2.5,  # two bits of the one key's two elements
        "cache_write": 8 / 8 * 2.5,
        "stream_read": 8 * 3 * 1.25,
        "stream_write": 8 * 3 * 1.25,
        "spike_read": 34 / 8 * 1.25,  # a bit per slot outside keys and values
        "spike_write": 34 / 8 * 1.25,
        "address": (3 + 12 + 6) * 0.1,  # rows fetched, outputs, the attention's inputs and outputs
    }
    tally = student_tally(ONE_SPIKER, "token")
    assert {e.event: e.energy_pj for e in bill(tally, CORES) if e.place == "blocks"} == pytest.approx(by_hand)
    assert total(tally, CORES) == pytest.approx(227.075 + HEAD)


def test_the_twin_of_two_neurons_by_hand() -> None:
    """Two bits hold 0, 1 and 2. Dense: 24 weights, 4 gains, 2 + 2 products of the attention; 21 activations."""
    dense = twin_tally(ONE_SPIKER)
    assert dense.blocks["mac"] == 32 and dense.blocks["weight_read"] == 28 and dense.bits["spike_read"] == 2
    by_hand = 32 * 0.3 + 21 * 3.2 + 8 * 3.75 + 28 * 2.5 + 2 * 2.5 + 34 * 2 / 8 * 1.25 + 30 * 0.1
    assert total(dense, CORES) == pytest.approx(by_hand + HEAD) == pytest.approx(217.025)
    # Zeros skipped: the one active input is one event of 16 + 2 bits and 6 MACs, each with its sum read and written.
    by_hand = 6 * 0.3 + 21 * 3.2 + 8 * 3.75 + 6 * 2.5 + 2.5 + 12 * 3.75 + 2 * 18 / 8 * 1.25 + 6 * 0.1
    assert total(twin_tally(ONE_SPIKER, "spike"), CORES) == pytest.approx(by_hand + HEAD) == pytest.approx(189.325)


@pytest.mark.parametrize(("steps", "bits"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (15, 4), (16, 5)])
def test_twin_bits_hold_every_count(steps: int, bits: int) -> None:
    assert twin_bits(steps) == bits and 2**bits >= steps + 1 > 2 ** (bits - 1)


@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_counts_are_those_of_the_run(form: dict) -> None:
    run = parse_run(make_run(random_shape(**form), prompts=(4, 3), generated=(3, 4), drive=2.0), "x")
    activity, work = run.activity(), counted_work(run)
    sops = {name: int(table.sum()) for name, table in activity.sops.items()}
    attention = sops["coincidence"] + sops["av"]
    spike, token = (student_tally(work, convention) for convention in CONVENTIONS)
    assert spike.blocks["weight_read"] == spike.blocks["ac"] - attention == sum(sops.values()) - attention > 0
    assert spike.blocks["cache_read"] == attention
    fetched = sum(activity.bytes[name] for name in ("qkv", "output", "ffn_in", "ffn_out"))
    assert token.blocks["weight_read"] == fetched + activity.bytes.get("residual", 0) // 4
    assert token.blocks["cache_write"] / 8 == activity.bytes["kv_write"]
    # the engine rounds the selected value bits of each layer and token down to bytes
    assert 0 <= token.blocks["cache_read"] / 8 - activity.bytes["kv_read"] <= activity.tokens * 2
    assert spike.blocks["state_read"] == spike.blocks["update"] == sum(int(t.sum()) for t in activity.cells.values())
    delivered = sum(int(table.sum()) for site, table in activity.spikes.items() if site not in "kv")
    assert spike.blocks["spike_write"] == pytest.approx(delivered)
    assert work.rate == pytest.approx(
        sum(int(t.sum()) for s, t in activity.spikes.items() if s != "a")
        / sum(int(t.sum()) for s, t in activity.cells.items() if s != "a")
    )


def test_a_float_run_has_the_same_synapses() -> None:
    """Bytes of a float run are four times those of the same weights in int8; the bill is of the deployable model."""
    raw = make_run(drive=2.0)
    wide = make_run(drive=2.0) | {"precision": "float32"}
    for phase in wide["phases"].values():
        for name in ("qkv", "output", "ffn_in", "ffn_out"):
            phase["bytes"][name] *= 4
    wide["per_token"]["bytes"] = _even(raw, wide)
    assert counted_work(parse_run(wide, "w")).reached == counted_work(parse_run(raw, "r")).reached


def _even(raw: dict, wide: dict) -> list[int]:
    """Per-token bytes that sum to the phases' new totals: the surplus on each phase's first token."""
    values, phases = list(raw["per_token"]["bytes"]), raw["per_token"]["phase"]
    for name in wide["phases"]:
        extra = sum(wide["phases"][name]["bytes"].values()) - sum(raw["phases"][name]["bytes"].values())
        if name in phases:
            values[phases.index(name)] += extra
    return values


def test_dense_models_in_closed_form() -> None:
    shape, tokens, keys = replace(opt_shape("opt-125m"), num_steps=4), 10, keys_of_sequence(10)
    work = estimated_work(shape, uniform_rates(shape, 0.2), tokens, keys)
    macs = sum(opt_macs(shape, tokens, keys).values())
    teacher = teacher_tally("t", dense_shape(shape), tokens, keys, "int8")
    assert teacher.blocks["mac"] + teacher.outer["mac"] == macs
    assert teacher.blocks["weight_read"] == 12 * (4 * 768**2 + 2 * 768 * 3072) * tokens
    assert teacher.blocks["cache_read"] == 12 * 2 * 768 * keys
    twin = twin_tally(work)
    assert twin.blocks["mac"] == teacher.blocks["mac"] + 12 * 2 * 768 * tokens  # gains
    assert twin.outer == teacher.outer == student_tally(work, "spike").outer
    floats = teacher_tally("t", dense_shape(shape), tokens, keys, "fp32")
    assert total(floats, CORES, "memory", "head") == 4 * total(teacher, CORES, "memory", "head")
    assert total(floats, CORES, "operations") == pytest.approx(4.6 * macs)


def test_spikegpt_by_hand() -> None:
    blocks, head = 18 * 13 * 768**2, 768 * 50277
    tally = spikegpt_tally(SPIKEGPT["spikegpt-216m"], 10, 0.17, "token")
    assert total(tally, CORES) == pytest.approx(10 * (0.17 * blocks * (0.1 + 2.5) + head * (0.3 + 2.5)))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_parts_and_places_add_up(convention: str) -> None:
    tally = student_tally(ONE_SPIKER, convention)
    whole = total(tally, CORES)
    assert sum(total(tally, CORES, part) for part in PARTS) == pytest.approx(whole)
    assert sum(total(tally, CORES, place=place) for place in ("blocks", "head")) == pytest.approx(whole)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_the_curve_is_the_bill_at_every_rate(placement, form: dict) -> None:
    shape = random_shape(**form)
    for tally_of in (
        lambda work: student_tally(work, "spike"),
        lambda work: student_tally(work, "token"),
        twin_tally,
        lambda work: twin_tally(work, "spike"),
        lambda work: twin_tally(work, "token"),
    ):
        curve = uniform_curve(shape, 6, 21, placement, tally_of)
        for rate in (0.0, 0.07, 0.3, 1.0):
            work = estimated_work(shape, uniform_rates(shape, rate), 6, 21)
            assert curve(rate) == pytest.approx(total(tally_of(work), placement), rel=1e-12)


def test_bands_by_hand() -> None:
    assert cheaper_bands(lambda r: r, lambda r: 0.25) == [(0.0, pytest.approx(0.25))]
    assert cheaper_bands(lambda r: 2.0, lambda r: 1.0) == []
    assert cheaper_bands(lambda r: 1.0, lambda r: 2.0) == [(0.0, 1.0)]
    parabola = cheaper_bands(lambda r: (r - 0.2) * (r - 0.6), lambda r: 0.0)
    assert parabola == [(pytest.approx(0.2), pytest.approx(0.6))]


def test_the_break_even_rate_follows_from_one_weight() -> None:
    """Per spike, one weight: 0.1 + 2.5 + 2 × 3.75 + 0.1 = 10.2 pJ a spike, T_s times, against 0.3 + 2.5 of the twin."""
    shape = replace(opt_shape("opt-1.3b"), num_steps=4)
    context, keys = 512, keys_of_sequence(512)
    curves = [
        uniform_curve(shape, context, keys, CORES, tally_of)
        for tally_of in (lambda work: student_tally(work, "spike"), twin_tally)
    ]
    ((low, high),) = cheaper_bands(curves[0], curves[1])
    assert low == 0 and high == pytest.approx(2.8 / (4 * 10.2), rel=0.05)  # 6.9 %; neurons and attention take the rest


def test_every_price_has_source_node_and_boundary() -> None:
    for price in (*OPERATIONS.values(), *MEMORY.values()):
        assert price.citation and price.boundary and price.node_nm > 0, price.name
    assert all(store in (None, "weights", "cache", "local") and part in PARTS for part, store, _ in EVENTS.values())
    priced = {"ac", "mac_int8", "mac_fp32", "update", "address"}
    assert set(OPERATIONS) == priced
    assert OPERATIONS["mac_fp32"].pj == 4.6 and OPERATIONS["mac_int8"].pj == pytest.approx(0.2 + 0.1)


def test_the_reads_of_a_teacher_that_is_no_opt_are_not_guessed() -> None:
    from energy.flops import parse_teacher
    from energy.memory import teacher_tally
    from spikeopd.errors import InputError

    raw = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
           "intermediate_size": 6, "vocab_size": 20, "max_position_embeddings": 8}  # fmt: skip
    with pytest.raises(InputError, match="teacher: what a llama reads and writes is not counted; compare with an OPT"):
        teacher_tally("teacher", parse_teacher(raw, "config"), 4, 10, "int8")
