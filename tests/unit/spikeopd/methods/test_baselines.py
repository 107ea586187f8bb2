"""Each control against a calculation by hand, and by what it must not use."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_setup import Killed, gradients, keep_gradient, kill_at, small_setup, worst

from spikeopd import quality, registry
from spikeopd.config import SECTIONS
from spikeopd.errors import ConfigError
from spikeopd.losses import forward_kl, jsd, spike_loss
from spikeopd.methods import adaptation, opd, spad
from spikeopd.methods.adaptation import Adaptation, with_stage2
from spikeopd.methods.alignment import BRANCHES, SpADObjective, TeacherShape, branch_sizes, branch_weights
from spikeopd.methods.baselines import common, continued_spad, eopd, lightning_opd, oprd, sft, teacher_only
from spikeopd.models.bispikclm import Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.options import option_table
from spikeopd.quality import RATE_SITES
from spikeopd.registry import METHODS
from spikeopd.runlog import RunLog, read_metrics


class Used(Exception):
    pass


def forbid(monkeypatch, *places):
    def fail(*_, **__):
        raise Used

    for module, name in places:
        monkeypatch.setattr(module, name, fail)


def other(student):
    """A second policy near the first."""
    torch.manual_seed(5)
    copied = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return copied.requires_grad_(False)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    setup = small_setup()
    spad.initial_student(setup).save_pretrained(folder)
    return str(folder)


def method(name):
    return registry.load(METHODS[name].target)


def run_method(name, folder, start, *overrides):
    setup = small_setup(f"stage2.method={name}", "stage2.updates=2", *overrides)
    with RunLog(folder, quiet=True) as log:
        return setup, method(name)(setup, log, start)


def adaptation_of(setup, policy, reference=None):
    """A run of one update whose log is nowhere."""
    return Adaptation(setup, RunLog("unused", active=False), policy, reference or other(policy.student))


def replay_policy(student, chunk=7):
    return lightning_opd.ReplayPolicy(student, chunk, forward_kl)


def unfinished(monkeypatch, *kinds):
    """The loop without its measures before and after, so that what an update uses is seen alone; returns its log."""
    logged = []
    for kind in kinds or (Adaptation,):
        monkeypatch.setattr(kind, "measure", lambda self: {"perplexity": 1.0, "self_kl": 1.0})
        monkeypatch.setattr(kind, "finish", lambda self: {})
        monkeypatch.setattr(kind, "_save", lambda self: None)
    monkeypatch.setattr(RunLog, "metrics", lambda self, stage, update, values: logged.append(values))
    return logged


# --- all of them -----------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_configuration_offers_and_all_of_it_can_be_imported():
    table = option_table(SECTIONS)
    assert table["stage2.method"].choices is METHODS
    for name, entry in METHODS.items():
        assert callable(method(name)) and entry.about
        assert all(key in table or key in SECTIONS for key in entry.reads), name
    # An option whose help begins with names belongs to those, and the table says so.
    for key, option in table.items():
        named, colon, _ = option.help.partition(": ")
        readers = {name for name in METHODS if name in named.split(", ")} if colon else set()
        assert all(key in METHODS[name].reads for name in readers), key


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_from_one_checkpoint_and_changes_the_student(tmp_path, start, name):
    _, summary = run_method(name, tmp_path, start)
    assert summary["method"] == name
    assert summary["updates"] == 2 * METHODS[name].update_factor
    assert all(math.isfinite(value) for value in summary["final"].values())
    before, after = load_file(f"{start}/model.safetensors"), load_file(tmp_path / "final" / "model.safetensors")
    assert before.keys() == after.keys(), "training-only maps must not be stored"
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "name",
    ["lightning_opd", "oprd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("continued_spad", "eopd"))],
)
def test_methods_with_state_resume_bit_for_bit(tmp_path, start, name):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def go(folder, resume=False):
        with RunLog(folder, quiet=True) as log:
            method(name)(small_setup(f"stage2.method={name}"), log, start, resume=resume)

    go(whole)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "stage2", 2)
        go(broken)
    go(broken, resume=True)
    a, b = (load_file(folder / "final" / "model.safetensors") for folder in (whole, broken))
    assert all(torch.equal(a[key], b[key]) for key in a)


# --- Vanilla and its two variants ------------------------------------------------------------------------------------


def test_vanilla_variants_state_what_they_change(monkeypatch):
    seen = {}
    monkeypatch.setattr(opd, "run", lambda setup, log, path, *, resume: seen.update(options=setup.config.stage2) or {})
    setup = small_setup("stage2.learning_rate=3e-3", "stage2.updates=5")
    for name, rate, updates, clip, divergence in (
        ("vanilla_opd", 3e-3, 5, None, "forward_kl"),
        ("small_lr_opd", 1e-3, 10, None, "forward_kl"),
        ("clipped_opd", 3e-3, 5, 1.0, "forward_kl"),
        ("gkd", 3e-3, 5, None, "jsd"),
        ("reverse_kl", 3e-3, 5, None, "reverse_kl"),
    ):
        method(name)(setup, None, "")
        options = seen["options"]
        assert (options.learning_rate, options.updates, options.max_grad_norm) == (pytest.approx(rate), updates, clip)
        assert (options.teacher_coef, options.ref_coef, options.spike_coef) == (1.0, 0.0, 0.0), name
        assert options.divergence == divergence and updates == 5 * METHODS[name].update_factor


def test_clipping_bounds_the_gradient_that_acts(tmp_path, start, monkeypatch):
    acted = []
    original = torch.optim.Adam.step

    def step(self, *args):
        acted.append(sum(p.grad.square().sum().item() for group in self.param_groups for p in group["params"]
                         if p.grad is not None) ** 0.5)  # fmt: skip
        return original(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    assert teacher_only.MAX_NORM == 1.0
    monkeypatch.setattr(teacher_only, "MAX_NORM", 0.01)  # the gradients of this small setup are smaller
    run_method("clipped_opd", tmp_path, start)
    norms = [line["stage2/grad_norm"] for line in read_metrics(tmp_path)]
    assert max(norms) > 0.01 and acted == pytest.approx([min(norm, 0.01) for norm in norms], rel=1e-3)


@pytest.mark.parametrize("name", ["vanilla_opd", "gkd", "reverse_kl"])
def test_teacher_only_methods_never_run_the_reference_or_the_spike_loss(tmp_path, start, monkeypatch, name):
    forbid(monkeypatch, (opd, "reverse_kl"), (opd, "spike_coefficients"))
    run_method(name, tmp_path, start)
    assert all(line["stage2/ref"] == 0 and line["stage2/spk"] == 0 for line in read_metrics(tmp_path))


# --- divergences by hand ---------------------------------------------------------------------------------------------

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]


def logits(p):
    return torch.tensor(p, dtype=torch.float64).log()[None]


def test_gkd_by_hand():
    b = 0.3
    m = [b * p + (1 - b) * q for p, q in zip(P, Q, strict=True)]
    kl = [sum(x * math.log(x / y) for x, y in zip(a, m, strict=True)) for a in (P, Q)]
    divergence = opd.chosen_divergence(small_setup("stage2.divergence=jsd", f"stage2.jsd_beta={b}").config.stage2)
    assert divergence(logits(Q), logits(P)).item() == pytest.approx(b * kl[0] + (1 - b) * kl[1])
    assert divergence(logits(Q), logits(P)).item() == pytest.approx(jsd(logits(Q), logits(P), b).item())


def test_reverse_kl_by_hand():
    divergence = opd.chosen_divergence(small_setup("stage2.divergence=reverse_kl").config.stage2)
    expected = sum(q * math.log(q / p) for p, q in zip(P, Q, strict=True))
    assert divergence(logits(Q), logits(P)).item() == pytest.approx(expected)


def test_eopd_switches_by_the_teachers_entropy():
    """Position 0: low entropy, reverse KL. Position 1: high entropy, forward KL over the two likeliest tokens."""
    low, high = [0.98, 0.01, 0.01], P
    teacher, student = torch.cat((logits(low), logits(high))), torch.cat((logits(Q), logits(Q)))
    h = [-sum(p * math.log(p) for p in row) for row in (low, high)]
    assert eopd.entropy(teacher).tolist() == pytest.approx(h) and h[0] < 0.5 < h[1]
    expected_low = sum(q * math.log(q / p) for p, q in zip(low, Q, strict=True))
    expected_high = sum(p * math.log(p / q) for p, q in list(zip(high, Q, strict=True))[:2])
    assert eopd.entropy_switched(student, teacher, 0.5, 2).item() == pytest.approx(expected_low + expected_high)
    assert eopd.entropy_switched(student, teacher, 9.0, 2).item() == pytest.approx(
        expected_low + sum(q * math.log(q / p) for p, q in zip(high, Q, strict=True))
    )
    assert eopd.top_forward_kl(student, teacher, 50).item() == pytest.approx(forward_kl(student, teacher).item())


def test_eopd_threshold_is_the_quantile_of_one_scored_minibatch(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2")
    student = spad.initial_student(setup)
    batches = []
    original = common.calibration_rollouts
    monkeypatch.setattr(eopd, "calibration_rollouts", lambda *a: batches.append(original(*a)) or batches[-1])
    limit = eopd.entropy_threshold(setup, student)
    ((sequences,),) = batches
    with torch.no_grad():
        log_p = setup.teacher(sequences[:, :-1]).logits[:, -6:].log_softmax(-1)
    entropies = np.sort((-(log_p.exp() * log_p).sum(-1)).flatten().numpy())
    assert len(entropies) == 4 * 6
    assert limit == pytest.approx(np.quantile(entropies, 0.8), rel=1e-5)


def test_eopd_keeps_the_spike_loss_and_has_no_reference_policy(tmp_path, start, monkeypatch):
    forbid(monkeypatch, (opd, "reverse_kl"))
    seen = []
    original = opd.score

    def watching(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    monkeypatch.setattr(opd, "score", watching)
    run_method("eopd", tmp_path, start)
    assert seen and all(part.reference is None and part.reference_spikes is not None for part in seen)
    lines = read_metrics(tmp_path)
    assert all(line["stage2/ref"] == 0 for line in lines) and lines[-1]["stage2/spk"] > 0


# --- corpus methods --------------------------------------------------------------------------------------------------


def corpus(setup):
    return adaptation.prompt_rows(setup, 0, 16)


def policy_of(module, setup):
    student = spad.initial_student(setup)
    if module is sft:
        return sft.LabelledPolicy(student, setup.config.train.kl_chunk_tokens)
    return continued_spad.fit_alignment(setup, policy := continued_spad.make_policy(setup, student)) or policy


def one_update(monkeypatch, module, setup):
    """(loss and gradient of the first update, its log, the policy)"""
    policy = policy_of(module, setup)
    with monkeypatch.context() as patch:
        logged, kept = unfinished(patch), keep_gradient(patch)
        module.adapt(adaptation_of(setup, policy))
    return kept, logged, policy


def test_sft_is_cross_entropy_with_the_corpus_and_its_gradient(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2", "stage2.updates=1")
    kept, (values,), objective = one_update(monkeypatch, sft, setup)
    ids = corpus(setup)
    loss = torch.nn.functional.cross_entropy(objective.student(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert worst(kept["gradient"], gradients(objective)) <= 1e-6


@pytest.mark.parametrize(("module", "name"), [(sft, "sft"), (continued_spad, "continued_spad")])
def test_corpus_methods_use_no_rollout_label_and_no_reference(monkeypatch, module, name):
    setup = small_setup("stage2.updates=1")
    policy = policy_of(module, setup)
    run = adaptation_of(setup, policy)
    logged = unfinished(monkeypatch)
    forbid(monkeypatch, (adaptation, "rollout"), (common, "rollout"), (opd, "reverse_kl"), (opd, "spike_coefficients"))
    forbid(monkeypatch, (run.reference, "forward"), (run.reference.model, "forward"))
    if name == "sft":
        forbid(monkeypatch, (setup.teacher, "forward"), (setup.teacher.model, "forward"))
    before = [p.detach().clone() for p in policy.student.parameters()]
    module.adapt(run)
    assert "adj" not in logged[0]
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.student.parameters(), strict=True))


def test_continued_spad_is_the_stage_1_objective(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2", "stage2.updates=1")
    kept, (values,), objective = one_update(monkeypatch, continued_spad, setup)
    stage1 = SpADObjective(objective.student, 256, TeacherShape(32, 2, 2), setup.config.stage1.kd_temperature)
    stage1.alignment.load_state_dict(objective.alignment.state_dict())
    ids = corpus(setup)
    sizes = branch_sizes(objective.student.config, TeacherShape(32, 2, 2), 4, 16)
    scale = (branch_weights(setup.config.stage1) / sizes).tolist()
    target = run_teacher(setup.teacher, ids, internals=True)
    total, sums = stage1.sums(ids, target, output_table(setup.teacher), scale)
    means = sums / sizes
    total.backward()
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert [values.get(name, 0.0) for name in BRANCHES] == pytest.approx(means.tolist(), rel=1e-4)
    mine = {name: value for name, value in kept["gradient"].items() if name.startswith("student.")}
    theirs = {name: value for name, value in gradients(stage1).items() if name.startswith("student.")}
    assert worst(mine, theirs) <= 1e-6


def test_continued_spad_clips_as_stage_1_does(monkeypatch, tmp_path):
    """The objective of Stage 1 with its clip: the norm of the step's gradient is at most stage1.max_grad_norm."""
    setup, seen = small_setup("stage2.updates=1", "stage1.max_grad_norm=0.01"), []
    spad.initial_student(setup).save_pretrained(tmp_path / "student")
    original = torch.optim.Adam.step

    def step(self, *arguments, **named):
        parts = [p.grad.square().sum() for group in self.param_groups for p in group["params"] if p.grad is not None]
        seen.append(torch.stack(parts).sum().sqrt().item())
        return original(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with RunLog(tmp_path / "run", quiet=True) as log:
        continued_spad.run(setup, log, str(tmp_path / "student"))
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_fitted_maps_are_least_squares():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]]) + torch.tensor([0.25, -1.0])
    layer = torch.nn.Linear(3, 2)
    common.fit_linear(layer, x, y, ridge=0.0)
    assert layer.weight.tolist() == [pytest.approx([1.0, 0.5, 3.0]), pytest.approx([-2.0, 0.0, 1.0], abs=1e-6)]
    assert layer.bias.tolist() == pytest.approx([0.25, -1.0])


def test_continued_spad_starts_with_maps_that_fit():
    setup = small_setup()
    fitted, random = policy_of(continued_spad, setup), continued_spad.make_policy(setup, spad.initial_student(setup))
    ids, head = corpus(setup), output_table(setup.teacher)
    with torch.no_grad():
        target = run_teacher(setup.teacher, ids, internals=True, middle=True)
        (_, a), (_, b) = (made.sums(ids, target, head, [1.0] * len(BRANCHES)) for made in (fitted, random))
    for name in ("EA", "SFA_cont"):
        assert a[BRANCHES.index(name)] < 0.9 * b[BRANCHES.index(name)], name
    assert a[BRANCHES.index("STA")] == b[BRANCHES.index("STA")]


# --- OPRD ------------------------------------------------------------------------------------------------------------


def test_oprd_is_the_mean_square_of_mapped_time_averages(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2", "stage2.method=oprd", "stage2.updates=1")
    setup = with_stage2(setup, ref_coef=0.0, spike_coef=0.0)
    objective = oprd.make_policy(setup, spad.initial_student(setup))
    seen, original = [], opd.visit
    with monkeypatch.context() as patch:
        logged, kept = unfinished(patch), keep_gradient(patch)
        forbid(patch, (quality, "visited_kl"), (opd, "reverse_kl"), (opd, "spike_coefficients"))
        patch.setattr(opd, "visit", lambda *a: seen.append(original(*a)) or seen[-1])
        oprd.adapt(adaptation_of(setup, objective))
    (values,) = logged
    sequences = torch.cat([part.sequences for part in seen[0]])
    recorder = Recorder(("h",))
    objective.student(sequences[:, :-1], recorder=recorder)
    hidden = setup.teacher(sequences[:, :-1], output_hidden_states=True).hidden_states
    errors = [
        (objective.maps[layer](recorder.spikes[layer, "h"].mean(0)[:, -6:]) - hidden[layer + 1][:, -6:]).square().mean()
        for layer in range(2)
    ]
    loss = objective.coefficient * sum(errors) / 2
    loss.backward()
    assert values["mse"] == pytest.approx(sum(errors).item() / 2, rel=1e-5)
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert worst(kept["gradient"], gradients(objective)) <= 1e-6 * max(1.0, objective.coefficient)


def test_oprd_coefficient_matches_the_gradient_norm_of_full_kl_and_stays(tmp_path, start):
    setup = small_setup("stage2.method=oprd", "stage2.calibration_batches=1")
    objective = oprd.make_policy(setup, spad.initial_student(setup))
    assert not objective.student.model.logit_scale.requires_grad, "the head is no part of this loss"
    objective.student.requires_grad_(True)
    (sequences,) = common.calibration_rollouts(setup, objective.student, 1)
    with torch.no_grad():
        p = setup.teacher(sequences[:, :-1]).logits[:, -6:]
        targets = oprd.teacher_hidden(setup, sequences, objective.matched)
    norms = []
    for loss in (
        forward_kl(objective.student(sequences[:, :-1]).logits[:, -6:], p) / 24,
        objective.square_errors(sequences, targets) / (24 * 2 * 32),
    ):
        objective.zero_grad()
        loss.backward()
        norms.append(sum(p.grad.square().sum() for p in objective.student.parameters() if p.grad is not None) ** 0.5)
    assert objective.coefficient == pytest.approx((norms[0] / norms[1]).item(), rel=1e-3)
    run_method("oprd", tmp_path, start)
    values = {line["stage2/coefficient"] for line in read_metrics(tmp_path)}
    assert len(values) == 1


# --- Lightning -------------------------------------------------------------------------------------------------------


def test_lightning_takes_a_teacher_in_bfloat16(tmp_path):
    """The buffer is float32 on disk; the teacher's output table is not."""
    setup = small_setup("stage2.updates=1")
    setup.teacher.to(torch.bfloat16)
    student = spad.initial_student(setup)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, student, tmp_path / "buffer", log)
    run = adaptation_of(setup, replay_policy(student))
    values = opd.descend(run, lightning_opd.replay(run, buffer, 0))
    assert math.isfinite(values["loss"]) and values["opd"] > 0


def test_lightning_loss_on_stored_prefixes_equals_the_formula(tmp_path):
    setup = with_stage2(small_setup("stage2.micro_batch_size=2"), ref_coef=0.0)
    start = spad.initial_student(setup)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, start, tmp_path / "buffer", log)
    assert len(buffer.sequences) == 4 * 4
    active = other(start).requires_grad_(True)
    objective = replay_policy(active)
    run = adaptation_of(setup, objective, start)
    values = opd.descend(run, lightning_opd.replay(run, buffer, 3))
    mine_gradient = gradients(objective)
    objective.zero_grad(set_to_none=True)
    rows = buffer.draw(4, 0, 3)
    assert sorted(set(rows)) == sorted(rows)
    sequences = torch.from_numpy(np.array(buffer.sequences[rows]))
    mine, reference = (Recorder(RATE_SITES["all"], tokens=slice(-6, None)) for _ in range(2))
    q = objective.student(sequences[:, :-1], recorder=mine, use_cache=False).logits[:, -6:]
    with torch.no_grad():
        p = setup.teacher(sequences[:, :-1]).logits[:, -6:]
        start(sequences[:, :-1], recorder=reference, use_cache=False)

    sites = [site for site in objective.student.config.layer_sites if site != "a"]

    def rates(record):
        return torch.stack([
            sum(record.spikes[layer, site].sum() for site in sites)
            / sum(record.spikes[layer, site].numel() for site in sites) for layer in range(2)
        ])  # fmt: skip

    spk = spike_loss(rates(mine), rates(reference))
    total = forward_kl(q, p) / 24 + 0.30 * spk
    total.backward()
    assert values["spk"] == pytest.approx(spk.item(), rel=1e-3) and values["spk"] > 0
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5) and values["ref"] == 0
    assert worst(mine_gradient, gradients(objective)) <= 1e-6


def test_lightning_never_refreshes(tmp_path, monkeypatch):
    """After the buffer is made, no update may roll out, ask the teacher's body or the reference."""
    setup = with_stage2(small_setup("stage2.updates=3"), ref_coef=0.0)
    student = spad.initial_student(setup)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, student, tmp_path / "buffer", log)
    before = (tmp_path / "buffer" / "sequences.npy").read_bytes()
    run = adaptation_of(setup, replay_policy(student))
    logged, reference = unfinished(monkeypatch), run.reference
    forbid(monkeypatch, (adaptation, "rollout"), (lightning_opd, "rollout"), (lightning_opd, "run_teacher"),
           (opd, "run_teacher"), (setup.teacher.model, "forward"), (reference.model, "forward"))  # fmt: skip
    lightning_opd.adapt(run, buffer)
    assert len(logged) == 3 and not any("adj" in values for values in logged)
    assert len({tuple(buffer.draw(4, 0, update)) for update in range(3)}) == 3
    assert (tmp_path / "buffer" / "sequences.npy").read_bytes() == before


def test_a_damaged_buffer_is_made_again_and_said(tmp_path, capsys):
    """Its trajectories would be trained on."""
    setup = small_setup("stage2.updates=2")
    student, folder = spad.initial_student(setup), tmp_path / "buffer"
    with RunLog(tmp_path, quiet=True) as log:
        lightning_opd.open_buffer(setup, student, folder, log)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        data = bytearray(before["sequences.npy"])
        data[-8] ^= 1
        (folder / "sequences.npy").write_bytes(bytes(data))
        lightning_opd.open_buffer(setup, student, folder, log)
        assert "sequences.npy: sha256 differs); its trajectories are made again" in capsys.readouterr().err
        lightning_opd.open_buffer(setup, student, folder, log)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not capsys.readouterr().err


def test_lightning_buffer_keeps_to_its_budget(tmp_path):
    setup = small_setup("stage2.buffer_gib=5e-6", "stage2.updates=50")
    row = 4 * 6 * 32 + 8 * 16 + 8 * 2
    assert lightning_opd.trajectories(setup) == int(5e-6 * 2**30) // row == 5
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, spad.initial_student(setup), tmp_path / "buffer", log)
    stored = json.loads((tmp_path / "buffer" / "buffer.json").read_text())
    assert len(buffer.sequences) == 5 and stored["bytes"] == 5 * row
    with pytest.raises(ConfigError, match="stage2.buffer_gib"):
        lightning_opd.trajectories(small_setup("stage2.buffer_gib=1e-7"))
