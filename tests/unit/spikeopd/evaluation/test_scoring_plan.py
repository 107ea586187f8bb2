"""Planning: which items share a beginning, how batches are packed, what is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd.errors import CheckFailed, ConfigError, InputError
from spikeopd.evaluation.perplexity import windows
from spikeopd.evaluation.scoring import Group, Item, Limits, Scored, batches, make_item, plan, score

token = st.integers(0, 2)
item = st.builds(
    lambda context, continuation: make_item(context, continuation, 40),
    st.lists(token, min_size=1, max_size=30),
    st.lists(token, min_size=1, max_size=12),
)


class Counting:
    """A scorer whose log-probability of a target is minus its number; it counts what it is fed."""

    max_length, vocab_size = 40, 100

    def __init__(self, shares: bool = True) -> None:
        self.shares, self.fed = shares, 0

    def run(self, groups):
        for group in groups:
            self.fed += group.shared + sum(len(item.inputs) - group.shared for item in group.items)
        return [[Scored(-np.array(item.targets, float), False) for item in group.items] for group in groups]


def question(context: int, *endings: tuple[int, ...], start: int = 0) -> list[Item]:
    return [make_item(range(start, start + context), ending, 40) for ending in endings]


def test_choices_of_a_question_share_their_context():
    first = question(20, (1, 2, 3), (4, 5), (6,))
    second = question(15, (1, 2), (3, 4, 5), start=50)
    groups = plan([first[0], second[1], first[2], second[0], first[1]])
    assert sorted((group.shared, len(group.items)) for group in groups) == [(15, 2), (20, 3)]


def test_a_context_is_fed_once():
    scorer = Counting()
    score(scorer, question(20, (1, 2, 3), (4, 5, 6), (7, 8, 9)))
    assert scorer.fed == 20 + 3 * 2
    alone = Counting(shares=False)
    score(alone, question(20, (1, 2, 3), (4, 5, 6), (7, 8, 9)))
    assert alone.fed == 3 * 22


def test_endings_that_begin_alike_do_not_lengthen_what_is_shared():
    # Both begin with 7: its own output is needed for each, so sharing ends with the context.
    (group,) = plan(question(20, (7, 8), (7, 9)))
    assert group.shared == 20


def test_contexts_that_differ_at_the_end_share_the_rest():
    """WinoGrande: the option is the end of the context and the continuation is the same."""
    common = tuple(range(20))
    (group,) = plan([make_item((*common, 90), (1, 2, 3), 40), make_item((*common, 91), (1, 2, 3), 40)])
    assert group.shared == 20


def test_items_without_a_worthwhile_beginning_stay_alone():
    groups = plan([make_item((2, number), (5,), 40) for number in range(10, 16)])
    assert all(group.shared == 0 and len(group.items) == 1 for group in groups)


@settings(deadline=None, max_examples=60)
@given(st.lists(item, max_size=25))
def test_a_plan_holds_every_item_once_and_shares_only_what_is_the_same(items):
    unique = list(dict.fromkeys(items))
    groups = plan(unique)
    assert sorted((i.inputs, i.targets) for g in groups for i in g.items) == sorted(
        (i.inputs, i.targets) for i in unique
    )
    for group in groups:
        assert len({entry.inputs[: group.shared] for entry in group.items}) == 1
        assert all(group.shared <= entry.context for entry in group.items)
    fed = sum(g.shared + sum(len(i.inputs) - g.shared for i in g.items) for g in groups)
    assert fed <= sum(len(i.inputs) for i in unique)


@settings(deadline=None, max_examples=40)
@given(st.lists(item, min_size=1, max_size=25), st.integers(1, 6), st.booleans())
def test_results_come_back_in_order_with_duplicates(items, size, share):
    told = []
    results = score(Counting(share), items, Limits(sequences=size), told.append)
    assert [result.total for result in results] == [-float(sum(i.targets)) for i in items]
    assert sum(told) == len(items)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_gives_no_numbers_stops_the_evaluation(value):
    class Broken(Counting):
        def run(self, groups):
            return [[Scored(np.full(len(item.targets), value), False) for item in group.items] for group in groups]

    with pytest.raises(CheckFailed, match="log-likelihoods are not finite; its weights are damaged or overflow"):
        score(Broken(), question(5, (1, 2)))


def test_batches_keep_the_limits_and_put_long_items_first():
    groups = [Group(tuple(question(length, (1, 2), (3, 4), start=length)), length) for length in (10, 30, 20, 12)]
    packed = list(batches(groups, Limits(sequences=4), Counting()))
    assert [[group.shared for group in batch] for batch in packed] == [[30, 20], [12, 10]]
    by_tokens = list(batches(groups, Limits(tokens=90), Counting()))
    assert [[group.shared for group in batch] for batch in by_tokens] == [[30], [20, 12], [10]]
    by_logits = list(batches(groups, Limits(logits=2 * 2 * 2 * 100), Counting()))
    assert [len(batch) for batch in by_logits] == [2, 2]


def test_padding_never_outgrows_the_position_table():
    """A long context with short endings beside a short context with long ones: 38 + 20 positions, of 40."""
    long = Group(tuple(question(38, (1, 2), (3, 4))), 38)
    short = Group(tuple(question(12, tuple(range(20)), tuple(range(20, 40)), start=50)), 12)
    assert [len(batch) for batch in batches([long, short], Limits(), Counting())] == [1, 1]
    assert [len(batch) for batch in batches([long, short], Limits(sequences=8), Counting())] == [1, 1]


def test_a_long_context_loses_its_beginning():
    """As the harness does it: max_length + 1 tokens are kept, the last of which is only a target."""
    cut = make_item(range(100), (7, 8, 9), 10)
    assert cut == Item((92, 93, 94, 95, 96, 97, 98, 99, 7, 8), (7, 8, 9))
    with pytest.raises(InputError, match="continuation of 11 tokens does not fit the model's 10 positions"):
        make_item([1], range(11), 10)
    with pytest.raises(InputError, match="at least one token"):
        make_item([], [1], 10)


def test_windows_by_hand():
    assert windows([0, 1, 2, 3, 4, 5, 6], window=4, stride=2) == [
        Item((0, 1, 2, 3), (1, 2, 3, 4)),
        Item((2, 3, 4, 5), (5, 6)),
    ]


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_windows_score_every_token_but_the_first_once(count, window, data):
    stride = data.draw(st.integers(1, window))
    items = windows(list(range(count)), window, stride)
    assert [t for entry in items for t in entry.targets] == list(range(1, count))
    for entry in items:
        assert len(entry.inputs) <= window
        assert entry.inputs[len(entry.inputs) - len(entry.targets)] == entry.targets[0] - 1
        # context before the first target: all there is, or at least window - stride tokens and the one itself
        assert entry.context >= min(entry.targets[0], window - stride + 1)


def test_windows_refuse_what_would_skip_tokens():
    with pytest.raises(ConfigError, match="--stride 5 must lie between 1 and the window of 4"):
        windows([1, 2, 3], 4, 5)
    with pytest.raises(InputError, match="nothing to predict"):
        windows([1], 4, 2)
