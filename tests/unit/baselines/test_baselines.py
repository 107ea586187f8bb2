"""Each control against a calculation by hand, and by what it must not use."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_setup import small_setup

from spikeopd.config import METHODS as NAMES
from spikeopd.errors import ConfigError
from spikeopd.losses import forward_kl, jsd, spike_loss
from spikeopd.methods import loop, opd, spad
from spikeopd.methods.alignment import BRANCHES, TeacherShape, branch_sizes, branch_weights
from spikeopd.methods.baselines import METHODS, clipped_opd, common, continued_spad, eopd, gkd, lightning_opd, oprd, sft
from spikeopd.methods.baselines import reverse_kl as reverse
from spikeopd.models.bispikclm import Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.rollout import RATE_SITES, rate_sites
from spikeopd.runlog import RunLog, read_metrics


class Used(Exception):
    pass


def forbid(monkeypatch, *places):
    def fail(*_, **__):
        raise Used

    for module, name in places:
        monkeypatch.setattr(module, name, fail)


def gradients(objective):
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def worst(a, b):
    assert a.keys() == b.keys() and a
    return max((a[name] - b[name]).abs().max().item() for name in a)


def keep_gradient(monkeypatch, *modules):
    kept = {}

    def finish(setup, objective, *_):
        kept.update(gradients(objective))
        objective.zero_grad(set_to_none=True)
        return 0.0

    for module in modules:
        monkeypatch.setattr(module, "finish_update", finish)
    return kept


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


def run_method(name, folder, start, *overrides):
    setup = small_setup(f"stage2.method={name}", "stage2.updates=2", *overrides)
    with RunLog(folder, quiet=True) as log:
        return setup, METHODS[name](setup, log, start, resume=False)


# --- all of them -----------------------------------------------------------------------------------------------------


def test_table_and_configuration_name_the_same_methods():
    assert tuple(METHODS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_method_runs_from_one_checkpoint_and_changes_the_student(tmp_path, start, name):
    _, summary = run_method(name, tmp_path, start)
    assert summary["method"] == name
    assert summary["updates"] == (4 if name == "small_lr_opd" else 2)
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
    for folder, updates in ((whole, 4), (broken, 2), (broken, 4)):
        setup = small_setup(f"stage2.method={name}", f"stage2.updates={updates}")
        # A shorter first run stands for an interrupted one; the buffer is made for the whole.
        if name == "lightning_opd" and updates == 2:
            setup = small_setup(f"stage2.method={name}", "stage2.updates=4")
            original = lightning_opd.update_step

            def dying(*arguments, original=original):
                if arguments[-1] == 2:
                    raise Used
                return original(*arguments)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(Used), RunLog(folder, quiet=True) as log:
                patch.setattr(lightning_opd, "update_step", dying)
                METHODS[name](setup, log, start, resume=False)
            continue
        with RunLog(folder, quiet=True) as log:
            METHODS[name](setup, log, start, resume=folder == broken and updates == 4)
    a, b = (load_file(folder / "final" / "model.safetensors") for folder in (whole, broken))
    assert all(torch.equal(a[key], b[key]) for key in a)


# --- Vanilla and its two variants ------------------------------------------------------------------------------------


def test_vanilla_variants_state_what_they_change(monkeypatch):
    seen = {}
    monkeypatch.setattr(opd, "run", lambda setup, log, path, *, resume: seen.update(options=setup.config.stage2) or {})
    setup = small_setup("stage2.learning_rate=3e-3", "stage2.updates=5")
    for name, rate, updates, clip in (
        ("vanilla_opd", 3e-3, 5, None), ("small_lr_opd", 1e-3, 10, None), ("clipped_opd", 3e-3, 5, 1.0),
    ):  # fmt: skip
        METHODS[name](setup, None, "")
        options = seen["options"]
        assert (options.learning_rate, options.updates, options.max_grad_norm) == (pytest.approx(rate), updates, clip)
        assert (options.teacher_coef, options.ref_coef, options.spike_coef) == (1.0, 0.0, 0.0), name


def test_clipping_bounds_the_gradient_that_acts(tmp_path, start, monkeypatch):
    acted = []
    original = torch.optim.Adam.step

    def step(self, *args):
        acted.append(sum(p.grad.square().sum().item() for group in self.param_groups for p in group["params"]
                         if p.grad is not None) ** 0.5)  # fmt: skip
        return original(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    assert clipped_opd.MAX_NORM == 1.0
    monkeypatch.setattr(clipped_opd, "MAX_NORM", 0.01)  # the gradients of this small setup are smaller
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
    setup = small_setup(f"stage2.jsd_beta={b}")
    made = gkd.objective(setup, spad.initial_student(setup))
    assert made.divergence(logits(Q), logits(P)).item() == pytest.approx(b * kl[0] + (1 - b) * kl[1])
    assert made.divergence(logits(Q), logits(P)).item() == pytest.approx(jsd(logits(Q), logits(P), b).item())


def test_reverse_kl_by_hand():
    setup = small_setup()
    made = reverse.objective(setup, spad.initial_student(setup))
    expected = sum(q * math.log(q / p) for p, q in zip(P, Q, strict=True))
    assert made.divergence(logits(Q), logits(P)).item() == pytest.approx(expected)


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
    return opd.prompt_rows(setup, 0, 16)


def test_sft_is_cross_entropy_with_the_corpus_and_its_gradient(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2")
    objective, optimizer = loop.make_optimizer(setup, sft.objective(setup, spad.initial_student(setup)), 1e-3)
    kept = keep_gradient(monkeypatch, common)
    values = sft.update_step(setup, objective, optimizer, objective.student, 0)
    ids = corpus(setup)
    loss = torch.nn.functional.cross_entropy(objective.student(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert worst(dict(kept), gradients(objective)) <= 1e-6


@pytest.mark.parametrize(("module", "name"), [(sft, "sft"), (continued_spad, "continued_spad")])
def test_corpus_methods_use_no_rollout_label_and_no_reference(monkeypatch, module, name):
    setup = small_setup()
    objective, optimizer = loop.make_optimizer(setup, module.objective(setup, spad.initial_student(setup)), 1e-3)
    forbid(monkeypatch, (opd, "rollout"), (common, "rollout"), (opd, "reverse_kl"), (opd, "spike_coefficients"))
    if name == "sft":
        forbid(monkeypatch, (setup.teacher, "forward"), (setup.teacher.model, "forward"))

    class Unused:
        config = objective.student.config

    before = [p.detach().clone() for p in objective.student.parameters()]
    values = module.update_step(setup, objective, optimizer, Unused(), 0)
    assert "adj" not in values
    assert any(not torch.equal(a, b) for a, b in zip(before, objective.student.parameters(), strict=True))


def test_continued_spad_is_the_stage_1_objective(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2")
    objective, optimizer = loop.make_optimizer(
        setup, continued_spad.objective(setup, spad.initial_student(setup)), 1e-3
    )
    kept = keep_gradient(monkeypatch, common)
    values = continued_spad.update_step(setup, objective, optimizer, objective.student, 0)
    stage1 = spad.SpADObjective(objective.student, TeacherShape(32, 2, 2), setup.config.stage1, 256)
    stage1.alignment.load_state_dict(objective.alignment.state_dict())
    ids = corpus(setup)
    sums = stage1.sums(ids, run_teacher(setup.teacher, ids, internals=True), output_table(setup.teacher))
    means = sums / branch_sizes(objective.student.config, TeacherShape(32, 2, 2), 4, 16)
    total = (means * branch_weights(setup.config.stage1)).sum()
    total.backward()
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert [values[name] for name in BRANCHES] == pytest.approx(means.tolist(), rel=1e-4)
    mine = {name: value for name, value in dict(kept).items() if name.startswith("student.")}
    theirs = {name: value for name, value in gradients(stage1).items() if name.startswith("student.")}
    assert worst(mine, theirs) <= 1e-6


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
    student = spad.initial_student(setup)
    fitted, random = continued_spad.objective(setup, student), continued_spad.ContinuedObjective(setup, student)
    ids, head = corpus(setup), output_table(setup.teacher)
    with torch.no_grad():
        target = run_teacher(setup.teacher, ids, internals=True)
        a, b = (made.sums(ids, target, head) for made in (fitted, random))
    for name in ("EA", "SFA_cont"):
        assert a[BRANCHES.index(name)] < 0.9 * b[BRANCHES.index(name)], name
    assert a[BRANCHES.index("STA")] == b[BRANCHES.index("STA")]


# --- OPRD ------------------------------------------------------------------------------------------------------------


def test_oprd_is_the_mean_square_of_mapped_time_averages(monkeypatch):
    setup = small_setup("stage2.micro_batch_size=2", "stage2.method=oprd")
    made = oprd.objective(setup, spad.initial_student(setup))
    objective, optimizer = loop.make_optimizer(setup, made, 1e-3)
    kept = keep_gradient(monkeypatch, oprd)
    forbid(monkeypatch, (opd, "forward_kl"), (opd, "reverse_kl"), (opd, "spike_coefficients"))
    seen = []
    original = opd.visit
    monkeypatch.setattr(opd, "visit", lambda *a: seen.append(original(*a)) or seen[-1])
    setup = common.teacher_only(setup)
    values = oprd.update_step(setup, objective, optimizer, objective.student, 0)
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
    assert worst(dict(kept), gradients(objective)) <= 1e-6 * max(1.0, objective.coefficient)


def test_oprd_coefficient_matches_the_gradient_norm_of_full_kl_and_stays(tmp_path, start):
    setup = small_setup("stage2.method=oprd", "stage2.calibration_batches=1")
    objective = oprd.objective(setup, spad.initial_student(setup))
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
    reference = copy.deepcopy(student)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, student, tmp_path / "buffer", log)
    objective, optimizer = loop.make_optimizer(setup, lightning_opd.ReplayObjective(student, 7), 1e-3)
    values = lightning_opd.update_step(setup, objective, optimizer, reference, buffer, 0)
    assert math.isfinite(values["loss"]) and values["opd"] > 0


def test_lightning_loss_on_stored_prefixes_equals_the_formula(tmp_path, monkeypatch):
    setup = common.with_stage2(small_setup("stage2.micro_batch_size=2"), ref_coef=0.0)
    start = spad.initial_student(setup)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, start, tmp_path / "buffer", log)
    assert len(buffer.sequences) == 4 * 4
    active = other(start).requires_grad_(True)
    objective, optimizer = loop.make_optimizer(setup, lightning_opd.ReplayObjective(active, 7), 1e-3)
    kept = keep_gradient(monkeypatch, lightning_opd)
    values = lightning_opd.update_step(setup, objective, optimizer, start, buffer, 3)
    rows = buffer.draw(4, 0, 3)
    assert sorted(set(rows)) == sorted(rows)
    sequences = torch.from_numpy(np.array(buffer.sequences[rows]))
    mine, reference = (Recorder(RATE_SITES["all"], tokens=slice(-6, None)) for _ in range(2))
    q = objective.student(sequences[:, :-1], recorder=mine, use_cache=False).logits[:, -6:]
    with torch.no_grad():
        p = setup.teacher(sequences[:, :-1]).logits[:, -6:]
        start(sequences[:, :-1], recorder=reference, use_cache=False)

    def rates(record):
        sites = rate_sites(start.config, "all")
        return torch.stack([
            sum(record.spikes[layer, site].sum() for site in sites)
            / sum(record.spikes[layer, site].numel() for site in sites) for layer in range(2)
        ])  # fmt: skip

    spk = spike_loss(rates(mine), rates(reference))
    total = forward_kl(q, p) / 24 + 0.30 * spk
    total.backward()
    assert values["spk"] == pytest.approx(spk.item(), rel=1e-3) and values["spk"] > 0
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5) and values["ref"] == 0
    assert worst(dict(kept), gradients(objective)) <= 1e-6


def test_lightning_never_refreshes(tmp_path, monkeypatch):
    """After the buffer is made, no update may roll out, ask the teacher's body or the reference."""
    setup = common.with_stage2(small_setup(), ref_coef=0.0)
    student = spad.initial_student(setup)
    with RunLog(tmp_path, quiet=True) as log:
        buffer = lightning_opd.open_buffer(setup, student, tmp_path / "buffer", log)
    before = (tmp_path / "buffer" / "sequences.npy").read_bytes()
    objective, optimizer = loop.make_optimizer(setup, lightning_opd.ReplayObjective(student, 256), 1e-3)
    reference = other(student)
    forbid(monkeypatch, (opd, "rollout"), (lightning_opd, "rollout"), (lightning_opd, "run_teacher"),
           (opd, "run_teacher"), (setup.teacher.model, "forward"), (reference.model, "forward"))  # fmt: skip
    drawn = []
    for update in range(3):
        values = lightning_opd.update_step(setup, objective, optimizer, reference, buffer, update)
        drawn.append(tuple(buffer.draw(4, 0, update)))
        assert "adj" not in values
    assert len(set(drawn)) == 3
    assert (tmp_path / "buffer" / "sequences.npy").read_bytes() == before


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
