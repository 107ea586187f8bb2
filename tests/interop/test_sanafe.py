"""The model on SANA-FE's Loihi, in its own environment: every spike, every event, and the bill to the last event.

`make sanafe` makes the environment. The students are of the tiny recipe's shape and both forms of the block, as they
are before training: calibrated, so that every site fires.
"""

from __future__ import annotations

import dataclasses
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
from priced_chip import PRICES, PricedInterpreter
from random_models import INHIBITING, PLUS, random_model, random_shape

import energy
from export.quantize import lower
from neuro_sim.decode import Sampling, generate
from neuro_sim.dense import DenseDecoder
from neuro_sim.event.engine import EventDecoder
from neuro_sim.sanafe.decoder import NetworkDecoder
from neuro_sim.sanafe.process import ADAPTER, ChipProcess, find_python
from neuro_sim.verify import compare
from spikeopd.config import load_config
from spikeopd.contracts import SpikeTrace, first_difference
from spikeopd.contracts.chip import CHIP_TOTALS
from spikeopd.errors import BackendMissing, CheckFailed
from spikeopd.models.initialise import build_student, calibrate

pytestmark = pytest.mark.interop
PROMPTS, NEW = ([17, 230, 41, 7], [99, 5, 640, 12, 388]), 30  # 33 and 34 tokens are fed
TIMEOUT = 600.0


@pytest.fixture(autouse=True)
def installed():
    try:
        find_python()
    except BackendMissing as error:
        pytest.skip(str(error))


@cache
def tiny(block):
    torch.manual_seed(0)
    student = build_student(load_config("tiny" if block == "plus" else "tiny-paper").model).eval()
    calibrate(student, torch.randint(4, 1024, (8, 32)))
    return lower(student).model


def on_chip(network):
    return ChipProcess(network, TIMEOUT)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("block", ["plus", "paper"])
def test_spikes_tokens_and_counts_are_those_of_the_event_engine(block, temperature):
    model, sampling = tiny(block), Sampling(temperature=temperature, seed=7, max_new_tokens=NEW)
    traces = {name: [SpikeTrace(), SpikeTrace()] for name in ("sanafe", "event")}
    decoder = NetworkDecoder(model, on_chip)
    try:
        mine = generate(decoder, PROMPTS, sampling, traces=traces["sanafe"])
    finally:
        decoder.close()
    theirs = generate(EventDecoder(model), PROMPTS, sampling, traces=traces["event"])
    line = compare("sanafe", mine, traces["sanafe"], "event", theirs, traces["event"])
    assert line.startswith("sanafe = event: 67 tokens") and mine.chip["tokens"] == 67
    own = sum(count for role, count in mine.chip["roles"].items() if role not in mine.chip["extras"])
    assert own == sum(int(table.sum()) for table in theirs.activity.sops.values())
    assert mine.chip["totals"]["events"] == sum(mine.chip["roles"].values())
    assert mine.chip["placement"]["violations"] == [] and mine.chip["placement"]["chips"] == 1


@pytest.mark.parametrize("block", ["plus", "paper"])
def test_a_wrong_decay_is_found_and_named(block):
    model, traces = tiny(block), [SpikeTrace(), SpikeTrace()]
    wrong = dataclasses.replace(model, decay=model.decay - 16)
    decoder = NetworkDecoder(wrong, on_chip, traces[0], slots=4)
    oracle = DenseDecoder(model, traces[1])
    try:
        for token in PROMPTS[0]:
            decoder.step(token)
            oracle.step(token)
    finally:
        decoder.close()
    assert "token" in str(first_difference(*traces)) and "neuron" in str(first_difference(*traces))


@pytest.mark.parametrize("form", [{}, PLUS, INHIBITING], ids=["paper", "plus", "inhibiting"])
def test_its_bill_is_ours_to_the_last_event(form):
    """Energies, messages, hops and updates of the simulator equal counts times prices, computed without it."""
    model = random_model(random_shape(heads=2, head_dim=32, layers=2, ffn=96, **form), seed=3, drive=1.5)
    records = {}
    for name, execute in (("sanafe", on_chip), ("priced", PricedInterpreter)):
        decoder = NetworkDecoder(model, execute)
        decoder.begin(6)
        for token in (3, 7, 1, 9):
            decoder.step(token)
        records[name] = decoder.measured()
        decoder.close()
    mine, theirs = records["priced"], records["sanafe"]
    assert theirs["prices_pj"] == PRICES
    for name in CHIP_TOTALS:
        if name != "seconds":
            assert mine["totals"][name] == pytest.approx(theirs["totals"][name], rel=1e-9), name
    assert mine["links"] == theirs["links"] and len(mine["links"]) > 3
    assert theirs["totals"]["seconds"] > 1e-6


def test_what_goes_wrong_inside_is_one_line(tmp_path):
    network = NetworkDecoder(random_model(random_shape()), slots=2)._network()[0]
    chip = ChipProcess(network, TIMEOUT)
    try:
        with pytest.raises(CheckFailed, match="SANA-FE says: IndexError"):
            chip.run({"embed": np.zeros(3)})  # too few
    finally:
        chip.close()
    assert not chip._folder.path.exists()
    quick = ChipProcess(network, 1e-9)
    with pytest.raises(CheckFailed, match=r"SANA-FE did not answer for 1e-09 seconds \(--timeout\)"):
        quick.run({})
    quick.close()
    told = subprocess.run([find_python(), "-I", ADAPTER, tmp_path], capture_output=True, text=True)
    assert told.returncode == 1 and '"error": "FileNotFoundError' in told.stdout


def test_a_run_reaches_the_report(tmp_path):
    from export.bundle_writer import write_bundle
    from neuro_sim.cli import main

    write_bundle(tiny("plus"), tmp_path / "bundle")
    arguments = [str(tmp_path / "bundle"), "--backend", "sanafe", "--prompt-tokens", "17,230", "--max-new-tokens", "2"]
    assert main([*arguments, "--timeout", "600", "--verify", "--output", str(tmp_path / "run.json"), "--quiet"]) == 0
    chip = energy.report(tmp_path / "run.json", costs="loihi").data["chip"]
    assert chip["simulator"].startswith("SANA-FE 2") and chip["energy_per_token_pj"] > chip["counted_per_token_pj"] > 0
