"""docs/adding_things.md: each example is taken out of the page, executed, and then chosen by its key or flag."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import energy
import export
import neuro_sim
import spikeopd
from energy.cli import main as energy_main
from energy.costs import COSTS
from neuro_sim.backends import BACKENDS
from neuro_sim.cli import main as run_main
from spikeopd import registry
from spikeopd.cli import main as train_main
from spikeopd.contracts import load_run
from spikeopd.errors import CheckFailed, ConfigError, InputError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_things.md").read_text("utf-8")
TABLES = (registry.NEURONS, registry.DIVERGENCES, registry.METHODS, BACKENDS, COSTS)
TOY = {
    "stage1.updates": 1, "stage2.updates": 1, "stage1.micro_batch_size": 2, "stage2.batch_size": 4,
    "stage2.micro_batch_size": 2, "data.sequence_length": 16, "stage2.prompt_length": 8, "train.threads": 1,
    "stage2.max_completion_length": 4, "model.num_hidden_layers": 1, "stage2.spike_layers": [1],
}  # fmt: skip


def blocks(heading: str, language: str = "python") -> list[str]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def add(monkeypatch):
    """Execute a block as a module of its own; its entries are gone after the test."""
    before = [(table, dict(table)) for table in TABLES]

    def execute(code: str) -> types.ModuleType:
        module = types.ModuleType(f"page_{len(sys.modules)}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, "docs/adding_things.md", "exec"), module.__dict__)  # noqa: S102 - our own page
        return module

    yield execute
    for table, entries in before:
        table.clear()
        table.update(entries)


@pytest.fixture(scope="module")
def stage1(tmp_path_factory):
    """A student after Stage 1, to start Stage 2 from."""
    return spikeopd.train("tiny", tmp_path_factory.mktemp("stage1") / "run", TOY | {"train.stage": 1}, quiet=True)


def adapted(stage1, folder, **options):
    start = {"train.stage": 2, "stage2.model_name_or_path": stage1.student}
    run = spikeopd.train("tiny", folder, TOY | start | {f"stage2.{k}": v for k, v in options.items()}, quiet=True)
    return run, run.metrics()[-1]


def test_a_neuron(add, tmp_path, capsys):
    with pytest.raises(ConfigError, match="expected one of lif"):
        spikeopd.load_config("tiny", {"model.neuron": "hard_reset"})
    module = add(blocks("A neuron")[0])
    # By hand, V = 1, leak 1/2: u = 0.8, 1.2 (fires, emptied), 0.8, 1.2. The subtractive neuron keeps 0.2 of it.
    current, threshold = torch.full((4, 1), 0.8, requires_grad=True), torch.ones(1)
    spikes = module.hard_reset(current, threshold, alpha=0.5)
    assert spikes[:, 0].tolist() == [0, 1, 0, 1]
    spikes.sum().backward()
    assert (current.grad > 0).all()
    assert train_main(["--list", "neurons"]) == 0 and "hard_reset" in capsys.readouterr().out
    run = spikeopd.train(
        "tiny", tmp_path / "run", TOY | {"model.neuron": "hard_reset", "stage1.deploy_updates": 0}, quiet=True
    )
    assert json.loads((run.student / "config.json").read_text())["neuron"] == "hard_reset"
    student, ids = spikeopd.load_student(run.student), torch.tensor([[2, 40, 77, 300]])
    hard = student(ids).logits
    plain = type(student).from_pretrained(run.student, neuron="lif")
    assert not torch.equal(plain(ids).logits, hard)  # it is the chosen neuron that computed
    with pytest.raises(InputError, match="its neuron is 'hard_reset'"):
        export.export(run.student, tmp_path / "bundle")


def test_a_loss(add, stage1, tmp_path):
    module = add(blocks("A loss")[0])
    logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, torch.log(torch.tensor(3.0))]])
    # q = (1/2, 1/2), p = (1/4, 3/4): Jeffreys' divergence sum (p - q) log p/q = 1/4 log 2 + 1/4 log 3/2 = 1/4 log 3.
    assert 2 * module.symmetric_kl(*logits).item() == pytest.approx(0.25 * torch.log(torch.tensor(3.0)).item())
    found = {}
    for name in ("forward_kl", "reverse_kl", "symmetric_kl"):
        _, line = adapted(stage1, tmp_path / name, divergence=name)
        found[name] = line["stage2/opd"]  # of the same rollouts: all begin with the same student
    assert found["symmetric_kl"] == pytest.approx((found["forward_kl"] + found["reverse_kl"]) / 2, rel=1e-5)
    assert found["forward_kl"] != found["reverse_kl"]


def test_a_method(add, stage1, tmp_path, capsys):
    variant, own = blocks("A method")
    add(variant), add(own)
    assert train_main(["--list", "methods"]) == 0 and "best_token" in capsys.readouterr().out
    run, line = adapted(stage1, tmp_path / "variant", method="unanchored", divergence="reverse_kl")
    assert run.summary["stage2"]["method"] == "unanchored" and line["stage2/ref"] == 0 < line["stage2/opd"]
    run, line = adapted(stage1, tmp_path / "own", method="best_token")
    assert run.summary["stage2"]["updates"] == 1 and line["stage2/loss"] > 0 and "stage2/adj" in line
    start, end = (spikeopd.load_student(folder).model.layers[0].fc1.weight for folder in (stage1.student, run.student))
    assert not torch.equal(start, end)
    with pytest.raises(ConfigError, match="has no part in stage2.method=best_token"):
        adapted(stage1, tmp_path / "wrong", method="best_token", divergence="reverse_kl")


def test_a_backend(add, stage1, tmp_path, capsys, monkeypatch):
    bundle = str(tmp_path / "bundle")
    export.export(stage1.student, bundle, evaluation_tokens=0, verification_tokens=4)
    call = [bundle, "--prompt", "The", "--max-new-tokens", "4", "--output", str(tmp_path / "run.json"), "--backend"]
    with pytest.raises(SystemExit, match="2"):
        run_main([*call, "checked"])
    assert "invalid choice: 'checked'" in capsys.readouterr().err
    module = add(blocks("A backend")[0])
    assert run_main([*call, "checked", "--verify"]) == 0
    assert "checked = event" in capsys.readouterr().err and load_run(tmp_path / "run.json").backend == "checked"
    with neuro_sim.load(bundle, "checked") as model, neuro_sim.load(bundle) as engine:
        mine, theirs = (neuro_sim.generate(each, "The", max_new_tokens=4) for each in (model, engine))
        assert mine.tokens == theirs.tokens
        real = module.EventDecoder.step
        monkeypatch.setattr(module.EventDecoder, "step", lambda self, token: (real(self, token)[0] + 1, None))
        with pytest.raises(CheckFailed, match="position 0: the engine is not the oracle"):
            neuro_sim.generate(model, [5], max_new_tokens=1)


def test_a_cost_table(add, tmp_path, capsys):
    run = str(ROOT / "energy" / "data" / "example_run.json")
    activity = load_run(Path(run)).activity()
    operations = sum(int(sops.sum()) for sops in activity.sops.values())
    by_hand = 0.2 * operations + 1.0 * (activity.macs["embed"] + activity.macs["head"])
    file = tmp_path / "my_chip.json"
    file.write_text(blocks("A cost table", "json")[0])
    with pytest.raises(InputError, match="unknown cost table 'my-chip'"):
        energy.report(run, costs="my-chip")
    add(blocks("A cost table")[0])
    for costs in (str(file), "my-chip"):
        assert energy_main(["report", run, "--costs", costs, "--format", "json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["summary"][-1]["energy_pj"] == pytest.approx(by_hand)
        assert energy.report(run, costs=costs).total_pj == pytest.approx(by_hand)
    assert energy_main(["costs"]) == 0 and "my-chip" in capsys.readouterr().out


def test_the_page_names_tables_and_tests_that_exist():
    rows = re.findall(r"^\| [\w ]+ \| `(\w+)` in `([\w/.]+)` \| .* \| `([\w/.]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for table, home, test in rows:
        assert f"{table}: dict[str, " in (ROOT / home).read_text("utf-8") and (ROOT / test).is_file()
