"""Both stages on a small random setup: the losses, what may change, splitting, resuming, stopping."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_setup import Killed, gradients, keep_gradient, kill_at, small_setup, worst

from spikeopd.config import load_config
from spikeopd.errors import CheckFailed, ConfigError, InputError
from spikeopd.losses import forward_kl, jsd, reverse_kl, spike_loss
from spikeopd.methods import opd, spad
from spikeopd.methods import setup as preparing
from spikeopd.methods.adaptation import Adaptation
from spikeopd.methods.alignment import BRANCHES, TeacherShape, branch_sizes, branch_weights
from spikeopd.methods.run import CollapseGuard, Run
from spikeopd.methods.setup import check_shares
from spikeopd.models.bispikclm import Recorder
from spikeopd.models.neurons import rate_proxy
from spikeopd.models.teacher import fingerprint, freeze, output_table, run_teacher
from spikeopd.quality import RATE_SITES, CollapseDetector, layer_spikes
from spikeopd.registry import DIVERGENCES
from spikeopd.runlog import RunLog, read_metrics

# --- Stage 1 ---------------------------------------------------------------------------------------------------------


def test_stage1_branches_equal_an_independent_calculation():
    setup = small_setup()
    objective = spad.make_objective(setup, spad.initial_student(setup))
    student, config = objective.student, objective.student.config
    ids = torch.randint(4, 1024, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target = run_teacher(setup.teacher, ids, internals=True, middle=True)
        _, sums = objective.sums(ids, target, output_table(setup.teacher), [1.0] * len(BRANCHES))
        means = dict(zip(BRANCHES, (sums / branch_sizes(config, TeacherShape(32, 2, 2), 3, 16)).tolist(), strict=True))
        recorder = Recorder()
        logits = student(ids, recorder=recorder).logits
        teacher = setup.teacher(ids, output_hidden_states=True, output_attentions=True)
    rate = {key: value.mean(0) for key, value in recorder.spikes.items()}
    lower = torch.ones(16, 16).tril().bool()
    embedding = (objective.alignment.embedding(rate[-1, "embed"]) - teacher.hidden_states[0]).square().mean()
    assert means["EA"] == pytest.approx(embedding.item(), rel=1e-4)
    saa_rate, saa_cont, sfa_rate, sfa_cont, rsa, rsa_mid = [], [], [], [], [], []
    streams = layer_outputs(student.model.layers, 1, student, ids)
    blocks, layers = student.model.layers, setup.teacher.model.decoder.layers
    before = [embedding_stream(student, ids), *streams]
    writes = layer_outputs([block.out_proj for block in blocks], 0, student, ids)
    attended = layer_outputs([layer.self_attn for layer in layers], 0, setup.teacher, ids)
    for layer, stream in enumerate(layer_outputs(setup.teacher.model.decoder.layers, 0, setup.teacher, ids)):
        rsa.append((normal(streams[layer].mean(0)) - normal(stream)).square().mean())
        mine, theirs = before[layer] + writes[layer], teacher.hidden_states[layer] + attended[layer]
        rsa_mid.append((normal(mine.mean(0)) - normal(theirs)).square().mean())
        a, a_t = rate[layer, "a"][..., lower], teacher.attentions[layer][..., lower]
        saa_cont.append((a - a_t).square().mean())
        # The neuron of the student's own module: its learned threshold, in the unit of a map in [0, 1].
        block, own = student.model.layers[layer], []
        for head in range(2):
            v_a = block.log_threshold_a[head].exp().item() / 16**0.5
            own.append((a[:, head] - rate_proxy(a_t[:, head], 4, v_a)).square().mean())
        saa_rate.append(sum(own) / 2)
        h, h_t = rate[layer, "h"], teacher.hidden_states[layer + 1]
        sfa_rate.append((h - rate_proxy(h_t + block.bias_h, 4, block.log_threshold_h.exp())).square().mean())
        sfa_cont.append((torch.nn.functional.layer_norm(h, (32,)) - h_t).square().mean())
    for name, values in (
        ("SAA_rate", saa_rate),
        ("SAA_cont", saa_cont),
        ("SFA_rate", sfa_rate),
        ("SFA_cont", sfa_cont),
        ("RSA", rsa),
        ("RSA_mid", rsa_mid),
    ):
        assert means[name] == pytest.approx(sum(values).item() / 2, rel=1e-4), name
    q, p = (logits[:, :-1] / 2).log_softmax(-1), (teacher.logits[:, :-1] / 2).log_softmax(-1)
    assert means["STA"] == pytest.approx(4 * (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    hard = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert means["HTA"] == pytest.approx(hard.item(), rel=1e-5)


def normal(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def embedding_stream(student, ids):
    places = torch.arange(ids.shape[1])[None].expand_as(ids)
    with torch.no_grad():
        return student.model.embedding_current(ids, places)[None]


def layer_outputs(layers, place, model, ids):
    """What each layer returns at `place` of its tuple, whatever a norm behind it makes of that."""
    found = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[place] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_stage1_weights_are_the_papers():
    weights = dict(zip(BRANCHES, branch_weights(load_config("tiny-paper").stage1).tolist(), strict=True))
    assert weights == {"EA": 0.2, "SAA_rate": 0.05, "SAA_cont": 0.05, "SFA_rate": 0.05, "SFA_cont": 0.05,
                       "RSA": 0.0, "RSA_mid": 0.0, "STA": 0.3, "HTA": 0.3}  # fmt: skip


@pytest.mark.parametrize("deploy", [0, 1])
def test_stage1_gradient_does_not_depend_on_the_micro_batch(monkeypatch, tmp_path, deploy):
    kept, found = keep_gradient(monkeypatch), []
    for micro, accumulation in ((4, 1), (2, 2), (1, 4)):
        split = (f"stage1.micro_batch_size={micro}", f"stage1.gradient_accumulation_steps={accumulation}")
        with RunLog(tmp_path / str(micro), quiet=True) as log:
            spad.run(small_setup("stage1.updates=1", f"stage1.deploy_updates={deploy}", *split), log)
        found.append(dict(kept))
    for other in found[1:]:
        assert worst(found[0]["gradient"], other["gradient"]) <= 1e-6
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "weights",
    [
        [1.0] * 9,
        [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.3],
        [0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 1.0, 0.0],
    ],
)
def test_stage1_checkpointing_changes_no_gradient_and_every_parameter_has_one(weights):
    """SAA and SFA are made inside the block, so they are recomputed with it; a branch without a weight leaves zeros."""
    setup = small_setup()
    objective = spad.make_objective(setup, spad.initial_student(setup)).train()
    ids = torch.randint(4, 1024, (2, 12), generator=torch.Generator().manual_seed(0))
    target = run_teacher(setup.teacher, ids, internals=True, middle=True)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            objective.student.gradient_checkpointing_enable()
        objective.zero_grad()
        loss, sums = objective.sums(ids, target, output_table(setup.teacher), weights)
        loss.backward()
        found.append((loss.item(), sums, {name: p.grad.clone() for name, p in objective.named_parameters()}))
        assert loss.item() == pytest.approx((sums * torch.tensor(weights)).sum().item(), rel=1e-5)
        assert [value != 0 for value in sums.tolist()] == [weight != 0 for weight in weights]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and torch.allclose(found[0][1], found[1][1], rtol=1e-6)
    for name, gradient in found[0][2].items():
        assert torch.allclose(gradient, found[1][2][name], rtol=1e-5, atol=1e-7), name


# --- Stage 2 ---------------------------------------------------------------------------------------------------------


def adaptation_of(setup, student, reference):
    policy = opd.DistilledPolicy(student, 7, opd.chosen_divergence(setup.config.stage2))
    return Adaptation(setup, RunLog("unused", active=False), policy, reference)


def stage2(setup):
    student = spad.initial_student(setup)
    torch.manual_seed(9)
    reference = spad.initial_student(setup)
    with torch.no_grad():  # another policy, so that the anchor has something to say
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return adaptation_of(setup, student, freeze(reference))


def test_stage2_loss_and_gradient_equal_the_papers_formula():
    """Against one forward pass over the whole batch with plain means and autograd through the rates."""
    setup = small_setup("stage2.micro_batch_size=2")
    run = stage2(setup)
    objective, reference = run.objective, run.reference
    parts = opd.visit(run, 0)
    values = opd.descend(run, parts)
    mine = gradients(objective)
    objective.zero_grad(set_to_none=True)
    sequences = torch.cat([part.sequences for part in parts])
    k, options = 6, setup.config.stage2
    recorder, other = (Recorder(RATE_SITES["all"], tokens=slice(-k, None)) for _ in range(2))
    q = objective.student(sequences[:, :-1], recorder=recorder, use_cache=False).logits[:, -k:]
    with torch.no_grad():
        p = setup.teacher(sequences[:, :-1]).logits[:, -k:]
        r = reference(sequences[:, :-1], recorder=other, use_cache=False).logits[:, -k:]

    def rates(record):
        sites = [site for site in objective.student.config.layer_sites if site != "a"]
        spikes = [sum(record.spikes[layer, site].sum() for site in sites) for layer in range(2)]
        size = sum(record.spikes[0, site].numel() for site in sites)
        return torch.stack(spikes) / size

    l_opd, l_ref = forward_kl(q, p) / (4 * k), reverse_kl(q, r) / (4 * k)
    l_spk = spike_loss(rates(recorder), rates(other))
    total = 1.00 * l_opd + 0.75 * l_ref + 0.30 * l_spk
    total.backward()
    assert values["opd"] == pytest.approx(l_opd.item(), rel=1e-5)
    assert values["ref"] == pytest.approx(l_ref.item(), rel=1e-4) and values["ref"] > 0
    assert values["spk"] == pytest.approx(l_spk.item(), rel=1e-4) and values["spk"] > 0
    assert values["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert options.teacher_coef == 1.0 and options.ref_coef == 0.75 and options.spike_coef == 0.30
    assert worst(mine, gradients(objective)) <= 1e-6


def test_stage2_gradient_does_not_depend_on_the_micro_batch():
    found = []
    for micro in (4, 2, 1):
        run = stage2(small_setup(f"stage2.micro_batch_size={micro}"))
        parts = opd.visit(run, 3)
        values = opd.descend(run, parts) | opd.continuation_statistics(run, parts)
        found.append((gradients(run.objective), values))
    for gradient, values in found[1:]:
        assert worst(found[0][0], gradient) <= 1e-6
        assert values["loss"] == pytest.approx(found[0][1]["loss"], rel=1e-5)
        assert values["adj"] == found[0][1]["adj"]


def test_vanilla_uses_neither_reference_nor_spikes():
    run = stage2(small_setup("stage2.ref_coef=0", "stage2.spike_coef=0"))
    parts = opd.visit(run, 0)
    assert all(part.reference is None and part.reference_spikes is None for part in parts)
    values = opd.descend(run, parts)
    assert values["ref"] == 0 and values["spk"] == 0 and values["loss"] == values["opd"]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_that_is_named_is_trained_with(name):
    """Each entry of the table, as the option chooses it, against the function itself on the same prefixes."""
    run = stage2(small_setup(f"stage2.divergence={name}", "stage2.jsd_beta=0.3", "stage2.spike_coef=0"))
    parts = opd.visit(run, 0)
    values = opd.descend(run, parts)
    sequences = torch.cat([part.sequences for part in parts])
    with torch.no_grad():
        q, p = (model(sequences[:, :-1]).logits[:, -6:] for model in (run.objective.student, run.setup.teacher))
    by_hand = {"forward_kl": forward_kl(q, p), "reverse_kl": reverse_kl(q, p), "jsd": jsd(q, p, 0.3)}
    assert values["opd"] == pytest.approx(by_hand[name].item() / 24, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_reference_agrees_with_the_student_that_it_is(precision):
    """pi_ref = pi_theta0: before the first step the anchor says nothing, in every precision."""
    setup = small_setup(f"train.precision={precision}", "stage1.deploy_updates=0")
    student = spad.initial_student(setup)
    reference = freeze(copy.deepcopy(student))
    run = adaptation_of(setup, student, reference)
    values = opd.descend(run, opd.visit(run, 0))
    assert values["ref"] == 0.0 and values["opd"] > 0
    # Decoding step by step rounds bfloat16 sums in another order than the reference's one pass.
    assert values["spk"] <= (0.0 if precision == "fp32" else 1e-5)


def test_spikes_are_counted_exactly_in_bfloat16():
    recorder = Recorder()
    recorder.spikes = {(0, site): torch.ones(4, 3, 100, 7, dtype=torch.bfloat16) for site in RATE_SITES["all"]}
    assert layer_spikes(recorder, (0,), "all").item() == 9 * 4 * 3 * 100 * 7


# --- whole runs ------------------------------------------------------------------------------------------------------


def run_both(folder, setup, resume=False):
    with RunLog(folder, quiet=True) as log:
        first = spad.run(setup, log, resume=resume)
        return first, opd.run(setup, log, str(folder / "stage1" / "final"), resume=resume)


def test_run_leaves_a_plain_student_and_frozen_models_alone(tmp_path):
    setup = small_setup()
    teacher = fingerprint(setup.teacher)
    first, second = run_both(tmp_path, setup)
    assert fingerprint(setup.teacher) == teacher
    weights = load_file(tmp_path / "final" / "model.safetensors")
    assert not any("alignment" in name for name in weights)
    before = load_file(tmp_path / "stage1" / "final" / "model.safetensors")
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    assert (tmp_path / "final" / "tokenizer.json").is_file()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["stage"], line["update"]) for line in lines] == [
        (s, u) for s in ("stage1", "stage2") for u in (1, 2, 3, 4)
    ]
    last = lines[-1]
    assert {"stage2/opd", "stage2/ref", "stage2/spk", "stage2/adj", "stage2/dist4", "stage2/run", "stage2/rep4",
            "stage2/rate/layer1", "stage2/rate/layer2"} <= last.keys()  # fmt: skip
    assert first["final"]["perplexity"] != first["start"]["perplexity"] and second["updates"] == 4


def test_completions_are_logged_on_request(tmp_path):
    run_both(tmp_path, small_setup("stage2.log_samples=2", "stage1.updates=1", "stage2.updates=1"))
    samples = read_metrics(tmp_path / "metrics.jsonl")[-1]["stage2/samples"]
    assert len(samples) == 2 and all(isinstance(text, str) and text for text in samples)


@pytest.mark.parametrize("deploy", [0, 2])
def test_interrupted_run_resumes_bit_for_bit(tmp_path, monkeypatch, deploy):
    options = (f"stage1.deploy_updates={deploy}",)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _, finished = run_both(whole, small_setup(*options))

    for stage, at in (("stage1", 3), ("stage2", 1)):
        kill_at(monkeypatch, stage, at)
        with pytest.raises(Killed):
            run_both(broken, small_setup(*options), resume=(broken / "stage1").exists())
        monkeypatch.undo()
    _, resumed = run_both(broken, small_setup(*options), resume=True)
    precision = "int8" if deploy else "none"
    for folder in (whole, broken):
        for student in (folder / "stage1" / "final", folder / "final"):
            assert json.loads((student / "config.json").read_text())["deploy_precision"] == precision
    assert resumed["last_rollouts"] == finished["last_rollouts"]
    a, b = (load_file(folder / "final" / "model.safetensors") for folder in (whole, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)
    strip = [[{k: v for k, v in line.items() if k != "time"} for line in read_metrics(folder / "metrics.jsonl")]
             for folder in (whole, broken)]  # fmt: skip
    assert strip[0] == strip[1]


def test_a_changed_teacher_is_refused_on_resume(tmp_path):
    run_both(tmp_path, small_setup())
    setup = small_setup()
    with torch.no_grad():
        setup.teacher.model.decoder.layers[0].fc1.weight[0, 0] += 1
    with pytest.raises(InputError, match="the teacher differ from the run's"):
        run_both(tmp_path, setup, resume=True)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_checkpoint(tmp_path, monkeypatch):
    original = spad.run_teacher

    calls = []

    def poisoned(teacher, ids, **asked):
        output = original(teacher, ids, **asked)
        calls.append(1)
        if len(calls) == 3:
            output.embeddings.fill_(float("nan"))
        return output

    monkeypatch.setattr(spad, "run_teacher", poisoned)
    with pytest.raises(CheckFailed, match="stage1: update 3 gave loss nan"):
        run_both(tmp_path, small_setup())
    (kept,) = (tmp_path / "stage1" / "checkpoints").iterdir()
    assert kept.name == "update-000002" and json.loads((kept / "state.json").read_text())["update"] == 2


def test_a_frozen_teacher_that_moved_spoils_the_run(tmp_path, monkeypatch):
    setup, original = small_setup(), Run.step

    def step(self, *arguments):
        setup.teacher.get_input_embeddings().weight[0, 0] += 1
        return original(self, *arguments)

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(CheckFailed, match="the frozen teacher changed"):
        run_both(tmp_path, setup)
    assert not (tmp_path / "final").exists()


def test_the_teacher_is_hashed_once_whatever_is_saved(tmp_path, monkeypatch):
    hashed, original = [], preparing.fingerprint
    monkeypatch.setattr(preparing, "fingerprint", lambda model: hashed.append(model) or original(model))
    run_both(tmp_path, small_setup("train.save_every=1"))
    assert len(hashed) == 1


def test_a_batch_that_cannot_be_shared_equally_is_refused_before_anything_is_loaded():
    config = small_setup("stage2.batch_size=16", "stage2.micro_batch_size=16").config

    class Seven:
        num_processes = 7

    with pytest.raises(ConfigError, match="16 trajectories .* by 7 processes; start 1, 2, 4, 8, 16"):
        preparing.build(config, Seven())
    for processes in (1, 2, 4, 8, 16):
        check_shares(config, processes)
    check_shares(small_setup("train.stage=1", "stage2.batch_size=16", "stage2.micro_batch_size=16").config, 7)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_shares_of_a_batch_are_the_batch(processes):
    setup, whole = small_setup(), torch.arange(16)

    class One:
        num_processes, device = processes, torch.device("cpu")

    shares = []
    for rank in range(processes):
        One.process_index = rank
        shares += replace(setup, accelerator=One()).micro_batches(whole, 3)
    assert torch.equal(torch.cat(shares), whole) and max(len(share) for share in shares) <= 3


# --- the run and its guard -------------------------------------------------------------------------------------------


def test_a_run_is_an_iterator_that_resumes_where_the_last_checkpoint_lies(tmp_path):
    def updates(resume, stop=99):
        setup = small_setup("train.save_every=2")
        with RunLog(tmp_path, quiet=True) as log:
            run = Run(setup, log, "stage1", spad.make_objective(setup, spad.initial_student(setup)), resume=resume)
            seen = []
            for update in run.updates(5):
                if update == stop:
                    break
                seen.append(update)
                run.log(update, {"loss": float(update)})
        return seen

    assert updates(False, stop=3) == [0, 1, 2]
    assert [path.name for path in (tmp_path / "stage1" / "checkpoints").iterdir()] == ["update-000002"]
    assert updates(True) == [2, 3, 4]
    assert [line["update"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert updates(True) == []


def test_an_update_that_is_not_logged_is_our_mistake(tmp_path):
    setup = small_setup()
    run = Run(setup, RunLog(tmp_path, quiet=True), "stage1", spad.make_objective(setup, spad.initial_student(setup)))
    with pytest.raises(AssertionError, match="ends with run.log"):
        for _ in run.updates(2):
            pass


def test_guard_remembers_its_window_and_says_when_to_end():
    options = small_setup("stage2.collapse_window=2", "stage2.on_collapse=rollback").config.stage2
    notes = []
    guard = CollapseGuard(options, notes.append)
    assert guard.watch(1, {"loss": 1.0}) is False and guard.means() == {}, "no rollouts, nothing to see"
    rows = [dict(adj=0.0, dist4=1.0, run=1.0), dict(adj=0.4, dist4=0.5, run=3.0), dict(adj=0.6, dist4=0.3, run=5.0)]
    assert [guard.watch(n, dict(row)) for n, row in enumerate(rows[:1], start=1)] == [False]
    copied = CollapseGuard(options, notes.append)
    copied.restore(json.loads(json.dumps(guard.state())))
    values = dict(rows[1])
    assert copied.watch(2, values) is True and values["collapsed"] == 1.0  # means 0.2 > 0.1 and 0.25 > 0.05
    assert "collapsed at update 2" in notes[0] and copied.rollback == 0
    assert copied.watch(3, dict(rows[2])) is True and len(notes) == 1
    assert copied.means() == {"adj": 0.5, "dist4": 0.4, "run": 4.0}
    assert copied.checkpoints(save_every=1) == 4


@pytest.mark.parametrize("action", ["log", "stop", "rollback"])
def test_collapse_guard(tmp_path, monkeypatch, action):
    setup = small_setup(f"stage2.on_collapse={action}", "stage2.collapse_window=2", "stage2.updates=6")
    monkeypatch.setattr(
        opd, "continuation_statistics", lambda setup, parts: dict(adj=0.9, dist4=0.2, run=9.0, rep4=0.8)
    )
    monkeypatch.setattr(CollapseDetector, "update", _onset_at(5))
    _, summary = run_both(tmp_path, setup)
    assert summary["onset"] == 5
    if action == "log":
        assert summary["updates"] == 6
    else:
        assert summary["updates"] == 5
    if action == "rollback":
        # onset 5, window 2: the newest checkpoint at or before update 3 is update 2
        assert summary["rolled_back_to"] == 2
        final = load_file(tmp_path / "final" / "model.safetensors")
        healthy = load_file(tmp_path / "stage2" / "checkpoints" / "update-000002" / "objective.safetensors")
        assert all(torch.equal(final[name], healthy[f"student.{name}"]) for name in final)


def _onset_at(step_of_onset):
    def update(self, step, adj, dist4):
        if step >= step_of_onset and self.onset is None:
            self.onset = step
        return self.onset is not None

    return update


def test_chosen_stage1_updates_are_kept_as_students(tmp_path):
    run_both(tmp_path, small_setup("stage1.checkpoint_updates=[1,3]"))
    for update in (1, 3):
        assert (tmp_path / "stage1" / f"update-{update:06d}" / "model.safetensors").is_file()


@pytest.mark.parametrize("gradients", ["fp32", "bf16", "rates"])
def test_what_is_saved_is_what_was_trained(tmp_path, gradients):
    """Projections keep what they made of their weights until these change: a step they do not see must show here."""
    setup = small_setup(f"train.gradients={gradients}", "stage1.deploy_updates=4", "stage1.learning_rate=0.5")
    first, second = run_both(tmp_path, setup)
    assert second["start"]["perplexity"] == first["final"]["perplexity"]
