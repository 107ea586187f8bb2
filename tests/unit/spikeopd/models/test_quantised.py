"""The twin's neuron by hand, its gradient, its cache, and that twin and student differ in the neuron alone."""

from fractions import Fraction
from math import floor

import pytest
import torch
from small_students import PLUS, small_student, tokens
from training_setup import small_config, small_setup

from spikeopd.errors import ConfigError, InputError
from spikeopd.methods import spad
from spikeopd.methods.alignment import BRANCHES, TeacherShape, branch_sizes, branch_weights
from spikeopd.models.attention import coincidences, weighted_values
from spikeopd.models.bispikclm import Recorder
from spikeopd.models.quantised import counts, pack_counts, quantised, unpack_counts
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.text.tokens import batch


def test_counts_by_hand():
    """T_s = 4 and V = 1: level k begins at (k - 1/2) / 4, inclusive."""
    current = torch.tensor([-3.0, 0.0, 0.124, 0.125, 0.374, 0.375, 0.624, 0.625, 0.875, 1.0, 9.0])
    by_hand = torch.tensor([0.0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 4])
    assert counts(current, torch.tensor(1.0), 4).equal(by_hand)
    assert quantised(current[None], torch.tensor([1.0]), levels=4).equal(by_hand[None] / 4)
    assert quantised(2 * current[None], torch.tensor([2.0]), levels=4).equal(by_hand[None] / 4)


def test_exact_counts_are_those_of_whole_numbers():
    """On multiples of a unit, at every edge and for any number of levels."""
    current = torch.arange(-40, 400).float()
    for levels, threshold in ((1, 7), (3, 101), (4, 64), (5, 93)):
        exact = counts(current, torch.tensor(float(threshold)), levels, exact=True)
        due = [min(max(floor(Fraction(levels * int(i), threshold) + Fraction(1, 2)), 0), levels) for i in current]
        assert exact.tolist() == due


def test_gradients_pass_straight_through_but_not_where_it_clips():
    current = torch.tensor([[-0.5, 0.3, 0.5, 1.7]], requires_grad=True)
    threshold = torch.tensor([0.8, 0.8, 0.8, 0.8], requires_grad=True)
    quantised(current, threshold, levels=4).sum().backward()
    assert torch.allclose(current.grad, torch.tensor([[0.0, 1.25, 1.25, 0.0]]))
    assert torch.allclose(threshold.grad, torch.tensor([0.0, -0.3 / 0.64, -0.5 / 0.64, 0.0]))


def test_coincidences_of_counts_are_products_of_counts():
    """Q = (2, 0, 3) / 4, K = (1, 4, 2) / 4: (2 + 0 + 6) / 16. A map of 3 / 4, V = (1, 0, 4) / 4: 3 (1, 0, 4) / 16."""
    q, k, v = (torch.tensor(x).view(1, 1, 1, 1, 3) / 4 for x in ((2.0, 0, 3), (1.0, 4, 2), (1.0, 0, 4)))
    assert coincidences(q, k).item() == 8 / 16
    assert weighted_values(torch.full((1, 1, 1, 1, 1), 0.75), v).flatten().tolist() == [3 / 16, 0.0, 12 / 16]


def test_the_cache_holds_counts():
    x = torch.randint(0, 5, (1, 2, 3, 4, 8)) / 4
    assert pack_counts(x, 4).dtype == torch.uint8 and unpack_counts(pack_counts(x, 4), 4, x.dtype).equal(x)


@pytest.mark.parametrize("form", [{}, PLUS], ids=["paper", "plus"])
def test_a_twin_decodes_token_by_token_what_it_computes_at_once(form):
    twin = small_student(neuron="quantised", **form)
    ids = torch.tensor([tokens(9)])
    recorder = Recorder()
    with torch.no_grad():
        whole = twin(ids, use_cache=False, recorder=recorder).logits
        past, parts = None, []
        for place in range(ids.shape[1]):
            output = twin(ids[:, place : place + 1], past_key_values=past, use_cache=True)
            past = output.past_key_values
            parts.append(output.logits)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)  # a level that flipped would show at once
    seen = torch.cat([value.flatten() for value in recorder.spikes.values()])
    assert all(value.shape[0] == 1 for value in recorder.spikes.values())
    assert set((4 * seen).unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize("block", ["paper", "plus"])
def test_twin_and_student_differ_in_the_neuron_alone(block):
    """One configuration: the same parameters, data, targets, weights and sizes of the losses."""
    common = ("stage1.deploy_updates=0", f"model.block={block}")
    setups = [small_setup(*common, f"model.neuron={neuron}") for neuron in ("lif", "quantised")]
    students = [spad.initial_student(setup) for setup in setups]
    shapes = [{name: tuple(p.shape) for name, p in student.named_parameters()} for student in students]
    assert shapes[0] == shapes[1] and [s.config.neuron for s in students] == ["lif", "quantised"]
    different = {k: v for k, v in students[0].config.to_dict().items() if students[1].config.to_dict().get(k) != v}
    assert not different  # config.json names the neuron only where it is unusual
    config = setups[0].config
    ids = [batch(s.train, batch_size=4, length=16, seed=s.config.train.seed, step=7) for s in setups]
    assert (ids[0] == ids[1]).all() and setups[0].identity == setups[1].identity
    teacher = TeacherShape.of(setups[0].teacher.config)
    assert branch_sizes(students[0].config, teacher, 4, 16).equal(branch_sizes(students[1].config, teacher, 4, 16))
    assert branch_weights(config.stage1).equal(branch_weights(setups[1].config.stage1))
    target = run_teacher(setups[0].teacher, torch.from_numpy(ids[0]), internals=True, middle=True)
    for setup, student in zip(setups, students, strict=True):
        objective = spad.make_objective(setup, student)
        loss, sums = objective.sums(
            torch.from_numpy(ids[0]), target, output_table(setup.teacher), [1.0] * len(BRANCHES)
        )
        loss.backward()
        assert torch.isfinite(sums).all() and sums[-2:].gt(0).all()
        trained = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert {"model.layers.0.q_proj.weight", "model.layers.1.fc2.weight", "model.embed_gain"} <= trained


def test_the_recipe_is_tiny_with_another_neuron():
    from spikeopd.config import config_difference, load_config

    assert config_difference(load_config("tiny"), load_config("tiny-twin")) == ["model.neuron: 'lif' -> 'quantised'"]


def test_integers_of_a_twin_need_a_power_of_two():
    with pytest.raises(InputError, match="needs num_steps 1, 2, 4, ..., not 3"):
        small_student(neuron="quantised", num_steps=3, deploy_precision="int8", **PLUS)
    with pytest.raises(ConfigError, match="stage1.deploy_updates: a quantised twin has integers for model.num_steps"):
        small_config("model.neuron=quantised", "model.num_steps=3", "stage1.deploy_updates=2")
