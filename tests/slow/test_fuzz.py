"""Hypothesis against every parser of plain data: whatever comes, it is read or refused in one line.

SPIKEOPD_EXAMPLES sets the examples of each test (12 tests).
"""

from __future__ import annotations

import json
import os
from importlib import resources

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import random_shape

from energy.costs import parse_table
from energy.rates import parse_rates
from spikeopd.config import SECTIONS, config_from_dict, load_config
from spikeopd.contracts import parse_run
from spikeopd.contracts.topology import parse_shape
from spikeopd.errors import SpikeOPDError, printable, short
from spikeopd.files import parse_json
from spikeopd.options import option_table, parse_yaml, show
from spikeopd.text.backend import is_plain

pytestmark = pytest.mark.slow
EXAMPLES = int(os.environ.get("SPIKEOPD_EXAMPLES", "5000"))
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

text = st.text(st.characters(codec="utf-8") | st.sampled_from("\x00\x1b\x9b\u202e\u2028&*!?:-[]{}'\"#%@`|>\n\t "))
number = st.integers(-(2**80), 2**80) | st.floats() | st.booleans() | st.none()
value = st.recursive(
    number | text, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
)
RUN = json.loads((resources.files("energy") / "data" / "example_run.json").read_text())
TABLE = {"title": "t", "node_nm": 45, "citation": "c", "prices_pj": {"mac": 4.6, "ac": 0.9}}
SHAPE = random_shape()


def refused_or_read(function, *arguments):
    try:
        function(*arguments)
    except SpikeOPDError as error:
        assert len(str(error)) < 4000 and "\x1b" not in str(error)


def changed(data, content):
    """A copy with up to three values replaced, anywhere."""
    copy = json.loads(json.dumps(content))
    for _ in range(data.draw(st.integers(1, 3))):
        place = copy
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = data.draw(st.sampled_from(list(keys)))
            if isinstance(place[key], (dict, list)) and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(value)
            break
    return copy


@many
@given(value)
def test_runs_of_nothing(raw):
    refused_or_read(parse_run, raw, "run.json")


@many
@given(st.data())
def test_runs(data):
    refused_or_read(parse_run, changed(data, RUN), "run.json")


@many
@given(st.data())
def test_cost_tables(data):
    refused_or_read(parse_table, "t", changed(data, TABLE))


@many
@given(value | st.dictionaries(st.sampled_from(SHAPE.layer_components), value))
def test_rates(raw):
    refused_or_read(parse_rates, raw, SHAPE, "rates")


@many
@given(st.data())
def test_shapes(data):
    refused_or_read(parse_shape, changed(data, SHAPE.to_dict()), "config.json")


@many
@given(st.sampled_from(sorted(option_table(SECTIONS))), text)
def test_overrides(key, given_text):
    refused_or_read(load_config, "tiny", [f"{key}={given_text}"])


@many
@given(st.dictionaries(text | st.sampled_from(sorted(SECTIONS)), value, max_size=3))
def test_configurations(raw):
    refused_or_read(config_from_dict, raw)


@many
@given(text)
def test_recipes(given_text):
    refused_or_read(parse_yaml, given_text, "recipe")


@many
@given(text)
def test_json(given_text):
    try:
        parse_json(given_text)
    except ValueError as error:
        assert str(error)


@many
@given(st.dictionaries(st.sampled_from(["type", "vocab", "dropout", "max_input_chars_per_word"]), value), value, value)
def test_tokenizer_parts(model, normalizer, pre_tokenizer):
    is_plain({"model": model, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer})


@many
@given(value)
def test_values_in_messages_are_short(raw):
    assert len(show(raw)) <= 160 and "\n" not in short(raw) and len(short(repr(raw))) <= 160


@many
@given(st.text())
def test_a_terminal_sees_no_control_character(given_text):
    shown = printable(given_text)
    assert not any(ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 for c in shown)
    assert printable(shown) == shown
