"""The rate target: its value by hand, its warm-up, and that it changes nothing it should not."""

import math

import pytest
import torch
from safetensors.torch import load_file
from training_setup import Killed, gradients, keep_gradient, kill_at, small_config, small_setup, worst

from spikeopd.errors import ConfigError
from spikeopd.methods import opd, spad
from spikeopd.methods.adaptation import Adaptation
from spikeopd.methods.sparsity import RateTarget, rate_target_loss
from spikeopd.models.teacher import freeze
from spikeopd.runlog import RunLog, read_metrics


def test_loss_by_hand():
    rates, targets = torch.tensor([0.2, 0.05, 0.0]), torch.tensor([0.1, 0.1, 0.1])
    assert rate_target_loss(rates, targets).item() == pytest.approx(math.log(2) ** 2 / 3)
    assert rate_target_loss(rates[1:], targets[1:]).item() == 0


def test_slope_in_spikes_by_hand():
    """Slots 10 and 40: 20 spikes are a rate of 0.4, four times the target; the slope is 2 c ln 4 / 20 for all."""
    dial = RateTarget((0.1,), 3.0, 0.0, (10, 40))
    pull = dial.at(0, torch.tensor([5.0, 15.0]))
    assert pull.rate == 0.4 and pull.loss == pytest.approx(3 * math.log(4) ** 2)
    assert pull.slope.tolist() == pytest.approx([6 * math.log(4) / 20] * 2)
    layers = RateTarget((0.1, 0.9), 1.0, 0.0, (10, 20, 20)).at(0, torch.tensor([9.0, 4.0, 8.0]))
    assert layers.slope.tolist() == pytest.approx([0.0, math.log(2) / 4, 0.0])  # S_E is no layer, layer 2 is below


def test_the_target_falls_during_the_warm_up():
    dial, spikes = RateTarget((0.01,), 1.0, 4.0, (50, 50)), torch.tensor([10.0, 10.0])
    losses = [dial.at(update, spikes).loss for update in range(6)]
    due = [max(0.0, math.log(0.2 / 0.01 ** min(1.0, (u + 1) / 4))) ** 2 for u in range(6)]
    assert losses == pytest.approx(due) and losses[0] == 0 < losses[1] < losses[3] == losses[5]


def test_off_is_what_was_and_a_target_that_nothing_exceeds_changes_nothing(tmp_path):
    weights = []
    for name, target in (("off", "[]"), ("never", "[1.0]")):
        setup = small_setup("stage1.updates=3", "stage1.deploy_updates=1", "stage2.updates=2",
                            f"stage1.rate_target={target}", f"stage2.rate_target={target}")  # fmt: skip
        with RunLog(tmp_path / name, quiet=True) as log:
            spad.run(setup, log)
            opd.run(setup, log, str(tmp_path / name / "stage1" / "final"))
        weights.append(load_file(tmp_path / name / "final" / "model.safetensors"))
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert all(("stage1/rate_loss" in line or "stage2/rate_loss" in line) == (name == "never") for line in lines)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("target", ["[0.02]", "[0.02,0.05]"])
@pytest.mark.parametrize("neuron", ["lif", "quantised"])
def test_stage1_gradient_does_not_depend_on_the_micro_batch(monkeypatch, tmp_path, target, neuron):
    kept, found = keep_gradient(monkeypatch), []
    options = ("stage1.updates=1", "stage1.rate_warmup=0", f"stage1.rate_target={target}", f"model.neuron={neuron}")
    for micro, accumulation in ((4, 1), (2, 2)):
        split = (f"stage1.micro_batch_size={micro}", f"stage1.gradient_accumulation_steps={accumulation}")
        with RunLog(tmp_path / str(micro), quiet=True) as log:
            spad.run(small_setup("stage1.deploy_updates=0", *options, *split), log)
        found.append(dict(kept, line=read_metrics(tmp_path / str(micro) / "metrics.jsonl")[-1]))
    scale = max(value.abs().max().item() for value in found[0]["gradient"].values())
    assert worst(found[0]["gradient"], found[1]["gradient"]) <= 1e-6 * max(1.0, scale)
    rates = [each["line"]["stage1/network_rate"] for each in found]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12) and rates[0] > 0.02  # whole numbers of spikes
    assert found[0]["line"]["stage1/rate_loss"] > 0


def test_stage2_gradient_does_not_depend_on_the_micro_batch_and_holds_the_term():
    found = {}
    for target in ("[]", "[0.02]"):
        for micro in (4, 2):
            setup = small_setup(f"stage2.micro_batch_size={micro}", f"stage2.rate_target={target}",
                                "stage2.rate_warmup=0", "stage1.deploy_updates=0")  # fmt: skip
            student = spad.initial_student(setup)
            policy = opd.DistilledPolicy(student, 7, opd.chosen_divergence(setup.config.stage2))
            run = Adaptation(setup, RunLog("unused", active=False), policy, freeze(spad.initial_student(setup)))
            values = opd.descend(run, opd.visit(run, 3))
            found[target, micro] = gradients(run.objective), values
    (first, values), (other, again) = found["[0.02]", 4], found["[0.02]", 2]
    scale = max(value.abs().max().item() for value in first.values())
    assert worst(first, other) <= 1e-6 * max(1.0, scale) and values["loss"] == pytest.approx(again["loss"], rel=1e-5)
    plain, without = found["[]", 4]
    assert values["loss"] == pytest.approx(without["loss"] + values["rate_loss"]) and values["rate"] == without["rate"]
    assert worst(plain, first) > 1e-3 and "rate_loss" not in without


def test_resumes_bit_for_bit(tmp_path, monkeypatch):
    options = ("stage1.rate_target=[0.05]", "stage2.rate_target=[0.05]", "stage1.deploy_updates=2")

    def both(folder, resume=False):
        with RunLog(folder, quiet=True) as log:
            setup = small_setup(*options)
            spad.run(setup, log, resume=resume)
            opd.run(setup, log, str(folder / "stage1" / "final"), resume=resume)

    both(tmp_path / "whole")
    kill_at(monkeypatch, "stage1", 3)
    with pytest.raises(Killed):
        both(tmp_path / "broken")
    monkeypatch.undo()
    both(tmp_path / "broken", resume=True)
    a, b = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_rates_fall_to_the_target(tmp_path):
    rates = []
    for target in ("[]", "[0.08]"):
        setup = small_setup("stage1.updates=24", "stage1.deploy_updates=0", "stage1.rate_warmup=0.2",
                            "stage1.learning_rate=1e-2", "train.save_every=100", "stage1.rate_target=[1.0]",
                            *([f"stage1.rate_target={target}"] if target != "[]" else []))  # fmt: skip
        with RunLog(tmp_path / target.strip("[]"), quiet=True) as log:
            spad.run(setup, log)
        rates.append(read_metrics(tmp_path / target.strip("[]") / "metrics.jsonl")[-1]["stage1/network_rate"])
    assert rates[1] < 0.6 * rates[0] and rates[1] < 0.12


def test_options_are_checked():
    with pytest.raises(ConfigError, match="stage1.rate_target: 3 rates for 2 layers; give one, or one for each layer"):
        small_config("stage1.rate_target=[0.1,0.1,0.1]")
    with pytest.raises(ConfigError, match="stage2.rate_target: has no part in stage2.method=sft; leave it out"):
        small_config("stage2.rate_target=[0.1]", "stage2.method=sft")
    with pytest.raises(ConfigError, match="stage1.rate_target: expected a list of numbers above 0 and at most 1"):
        small_config("stage1.rate_target=[0]")
    assert small_config("stage1.rate_target=0.1").stage1.rate_target == (0.1,)
