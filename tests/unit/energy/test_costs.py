"""The cost tables: the figures that were verified, and what is refused."""

from __future__ import annotations

import json

import pytest

from energy.costs import COSTS, EVENTS, MEMORY, load_costs, load_memory, parse_table
from spikeopd.contracts import APPENDIX_E_PJ
from spikeopd.errors import InputError

GOOD = {"title": "t", "node_nm": 7, "citation": "c", "prices_pj": {"mac": 1, "ac": 0.5}}


def test_the_papers_constants_are_the_default() -> None:
    table = load_costs("horowitz45")
    assert table.prices_pj == APPENDIX_E_PJ == {"mac": 4.6, "ac": 0.9} and table.node_nm == 45
    assert next(iter(COSTS)) == "horowitz45" and load_costs(table) is table


def test_loihi_figures() -> None:
    """Davies et al. 2018, Table 2."""
    prices = load_costs("loihi").prices_pj
    assert {k: v for k, v in prices.items() if k != "mac"} == {
        "ac": 23.6, "neuron_active": 81.0, "neuron_inactive": 52.0, "spike": 1.7, "hop_ew": 3.0, "hop_ns": 4.0,
    }  # fmt: skip


def test_memory_is_a_64_bit_access_over_eight_bytes() -> None:
    """Horowitz 2014: 10, 20, 100 pJ and 1.3 to 2.6 nJ per 64 bits."""
    expected = {"sram-8kb": 10, "sram-32kb": 20, "sram-1mb": 100, "dram": 1300, "dram-high": 2600}
    assert {name: 8 * level.pj_per_byte for name, level in MEMORY.items()} == expected


@pytest.mark.parametrize("name", COSTS)
def test_every_table_says_where_it_comes_from(name: str) -> None:
    table = COSTS[name]
    assert table.node_nm > 0 and len(table.citation) > 20 and len(table.verified) > 20 and len(table.basis) > 5
    assert "doi:" in table.citation or "arXiv:" in table.citation
    assert set(table.missing) | set(table.prices_pj) == set(EVENTS)
    # A host price inside a chip's table must say that it is one.
    if name not in ("horowitz45", "horowitz45-int8"):
        assert "host" in table.price_notes["mac"]


def test_a_table_of_the_user(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    table = load_costs(str(path))
    assert table.name == "mine" and table.price("ac") == 0.5 and table.price("spike") == 0
    assert "not verified" in table.verified


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices_pj": {"mac": 1}}, "prices_pj.ac"),
        ({"prices_pj": {"mac": 1, "ac": -1}}, "prices_pj.ac"),
        ({"prices_pj": {"mac": 1, "ac": float("nan")}}, "prices_pj.ac"),
        ({"prices_pj": {"mac": 1, "ac": "free"}}, "prices_pj.ac"),
        ({"prices_pj": {"mac": 1, "ac": 1, "coffee": 1}}, "'coffee'"),
        ({"prices_pj": {"mac": 1, "ac": 1, "neuron_active": 1}}, "neuron_inactive"),
        ({"prices_pj": {"mac": 1, "ac": 1, "neuron_active": 1, "neuron_inactive": 2}}, "neuron_active"),
        ({"prices_pj": []}, "prices_pj"),
        ({"prices_pj": {"mac": 1, "ac": 10**400}}, "prices_pj.ac"),
        ({"node_nm": "abc"}, "'node_nm' must be a number above 0"),
        ({"node_nm": 0}, "'node_nm' must be"),
        ({"node_nm": True}, "'node_nm' must be"),
        ({"node_nm": float("inf")}, "'node_nm' must be"),
        ({"price_notes": ["a"]}, "'price_notes' must map"),
        ({"price_notes": None}, "'price_notes' must map"),
    ],
)
def test_bad_tables_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_table("mine", GOOD | change)


@pytest.mark.parametrize("field", ["title", "node_nm", "citation", "prices_pj"])
def test_missing_fields_of_a_table(field: str) -> None:
    with pytest.raises(InputError, match=field):
        parse_table("mine", {key: value for key, value in GOOD.items() if key != field})


def test_unknown_names(tmp_path) -> None:
    with pytest.raises(InputError, match="choose one of horowitz45"):
        load_costs("horrorwitz")
    with pytest.raises(InputError, match="sram-8kb"):
        load_memory("tape")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="bad.json"):
        load_costs(str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match="object"):
        parse_table("mine", [])
