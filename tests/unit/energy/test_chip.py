"""A run on a simulated chip in reports: both bills, what explains their difference, hops, refusals."""

from __future__ import annotations

import copy
import json

import pytest
from priced_chip import PRICES, PricedInterpreter
from random_models import PLUS, random_model, random_shape

import energy
from energy.cli import main
from neuro_sim.decode import Sampling, generate
from neuro_sim.runfile import build_run
from neuro_sim.sanafe.decoder import NetworkDecoder
from spikeopd.contracts import load_run, write_run
from spikeopd.errors import CheckFailed, InputError


@pytest.fixture(scope="module", params=["paper", "plus"])
def run(request):
    form = {} if request.param == "paper" else PLUS
    model = random_model(random_shape(heads=2, head_dim=32, layers=2, ffn=96, **form), seed=3, drive=1.5)
    decoder = NetworkDecoder(model, lambda network: PricedInterpreter(network, spread=False))
    sampling = Sampling(max_new_tokens=3)
    result = generate(decoder, [[1, 2], [3]], sampling)
    identity = {"name": "random", "sha256": "0"}
    options = {"backend": "sanafe", "bundle": identity, "sampling": sampling, "load_seconds": 0.0, "threads": 1}
    return build_run(result, model, **options)


def test_a_report_shows_both_bills_and_explains_their_difference(run):
    report = energy.report(run, costs="loihi")
    chip = report.data["chip"]
    bill = {row["part"]: row for row in chip["bill"]}
    tokens = report.tokens
    assert tokens == 7 and chip["tokens"] == 7
    sops = sum(row["sops"] for row in report.data["summary"][:2])
    assert bill["synaptic events"]["counted"] * tokens == pytest.approx(sops)
    extra = sum(row["energy_pj"] for row in chip["extras"])
    assert bill["all"]["counted_pj"] + extra == pytest.approx(bill["all"]["simulated_pj"])
    assert chip["energy_per_token_pj"] == pytest.approx(sum(run["chip"]["per_token"]["energy_pj"]) / tokens)
    assert chip["energy_error_pj"] == pytest.approx(0.12 * chip["energy_per_token_pj"])
    assert chip["seconds_error"] == pytest.approx(0.25 * chip["seconds_per_token"])
    reasons = {row["what"] for row in chip["extras"]}
    assert {"gates, in every step", "relays, in every step", "reset of a neuron by a synapse to itself"} <= reasons
    assert f"simulated): {chip['energy_per_token_pj'] / 1e6:.3g}"[:14] in str(report)
    for title in ("What explains the difference", "Two price lists of the same chip", "Busiest links of the mesh"):
        assert title in str(report)


def test_measured_hops_take_the_place_of_given_ones(run):
    chip = run["chip"]
    assert chip["totals"]["site_hops_ew"] + chip["totals"]["site_hops_ns"] > 0
    spikes = chip["spikes"]["site"]
    due = [chip["totals"][f"site_hops_{way}"] / spikes for way in ("ew", "ns")]
    measured = energy.report(run, costs="loihi")
    assert list(measured.data["hops_per_spike"].values()) == pytest.approx(due)
    none = energy.report(run, costs="loihi", hops=(0, 0))
    assert measured.total_pj - none.total_pj == pytest.approx(spikes * (3.0 * due[0] + 4.0 * due[1]))
    assert energy.report({k: v for k, v in run.items() if k != "chip"}).data["chip"] is None


def test_compare_has_columns_for_it(run, tmp_path, capsys):
    write_run(tmp_path / "chip.json", run)
    plain = {name: value for name, value in run.items() if name != "chip"}
    write_run(tmp_path / "plain.json", plain)
    assert load_run(tmp_path / "chip.json").chip.prices_pj == PRICES
    rows = energy.compare({"a": run, "b": plain}).rows
    assert rows[0]["chip_us_per_token"] > 0 and "chip_us_per_token" not in rows[1]
    assert main(["compare", str(tmp_path / "chip.json"), str(tmp_path / "plain.json")]) == 0
    assert "SANA-FE per token" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "plain.json")]) == 0
    assert "SANA-FE per token" not in capsys.readouterr().out
    for form in ("html", "md", "csv", "tex", "json"):
        assert main(["report", str(tmp_path / "chip.json"), "--output", str(tmp_path / f"r.{form}"), "--quiet"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["chip"]["tokens"] == 7
    assert "Busiest links" in (tmp_path / "r.html").read_text()


def test_a_record_that_does_not_add_up_is_refused(run):
    for change, error, message in (
        (lambda chip: chip.update(schema="other"), InputError, "field 'chip.schema'"),
        (lambda chip: chip.update(tokens=3), InputError, r"field 'chip.tokens': 3 should be 7"),
        (lambda chip: chip["totals"].pop("updated"), InputError, "field 'chip.totals.updated': expected a number"),
        (lambda chip: chip["roles"].update(reset=0), InputError, r"field 'chip.roles': \d+ should be \d+"),
        (lambda chip: chip["prices_pj"].update(spike=-1), InputError, "field 'chip.prices_pj.spike'"),
        (lambda chip: chip["totals"].update(soma_pj=1.0), CheckFailed, "events times prices give"),
        (lambda chip: chip["totals"].update(soma_gate_pj=1.0), CheckFailed, "the count plus its extras give"),
        (lambda chip: _move(chip["roles"]), CheckFailed, r"\d+ synaptic events of the model on interpreter"),
    ):
        broken = copy.deepcopy(run)
        change(broken["chip"])
        with pytest.raises(error, match=message):
            energy.report(broken)


def _move(roles):
    roles["relay"], roles["coincidence"] = roles["relay"] + 1, roles["coincidence"] - 1
