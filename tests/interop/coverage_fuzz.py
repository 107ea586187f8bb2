"""Parsers under atheris, which mutates towards code not yet reached: `python coverage_fuzz.py [-atheris_runs=N]`.

Runs in an environment of atheris' own that sees the project and what it needs (PYTHONPATH). The first byte chooses the
parser. A refusal is fine; any other exception is what atheris reports as a crash, and ends the process.
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["spikeopd", "neuro_sim", "energy"]):
    from energy.costs import parse_table
    from energy.rates import parse_rates
    from neuro_sim.serve import protocol
    from spikeopd.config import load_config
    from spikeopd.contracts import parse_run
    from spikeopd.contracts.chip import parse_chip
    from spikeopd.contracts.topology import ModelShape, parse_shape
    from spikeopd.errors import SpikeOPDError
    from spikeopd.files import parse_json
    from spikeopd.options import parse_yaml
    from spikeopd.sampling import Sampling
    from spikeopd.text.backend import _check_tokens, is_plain

SHAPE = ModelShape(16, 2, 2, 24, 40, 32, 4, 16)


class Text:
    """As a bundle's text, without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [len(text) % 40]

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)


def tokenizer(raw: object) -> None:
    if isinstance(raw, dict) and isinstance(raw.get("model"), dict):
        with contextlib.suppress(ValueError):  # how `read_backend` hears of it
            _check_tokens(raw)
        is_plain(raw)


OF_JSON = (
    lambda raw: parse_run(raw, "run.json"),
    lambda raw: parse_table("t", raw),
    lambda raw: parse_rates(raw, SHAPE, "rates"),
    lambda raw: parse_shape(raw, "config.json"),
    lambda raw: parse_chip(raw, "run.json", 1),
    lambda raw: protocol.parse(raw, False, "m", Text(), protocol.Limits(), Sampling()),
    lambda raw: protocol.parse(raw, True, "m", Text(), protocol.Limits(), Sampling()),
    tokenizer,
)
OF_TEXT = (lambda text: parse_yaml(text, "recipe"), lambda text: load_config("tiny", [text]))


def one(data: bytes) -> None:
    choice, text = data[0] if data else 0, data[1:].decode("utf-8", "replace")
    choice %= len(OF_JSON) + len(OF_TEXT)
    try:
        if choice < len(OF_TEXT):
            OF_TEXT[choice](text)
            return
        try:
            raw = parse_json(text)
        except ValueError:
            return
        OF_JSON[choice - len(OF_TEXT)](raw)
    except (SpikeOPDError, protocol.BadRequest) as error:
        assert len(str(error)) < 4000 and "\x1b" not in str(error)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
