"""Studies: content keys, sharing, resuming, definitions and the command."""

import fcntl
import json
import math
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_items import write_items
from training_setup import SMALL, Killed, kill_at, small_setup

from spikeopd.config import load_config, with_overrides
from spikeopd.errors import CheckFailed, ConfigError, InputError
from spikeopd.methods import run as running
from spikeopd.methods import spad
from spikeopd.methods.setup import configured_student
from spikeopd.quality import CollapseDetector
from spikeopd.studies import figures, runs, spending, values, worker
from spikeopd.studies import study as studying
from spikeopd.studies.cli import main, seeds
from spikeopd.studies.definitions import STUDIES, Row, every, find, stage1_marks
from spikeopd.studies.pareto import together
from spikeopd.studies.runs import Run, content_key, stage1_run, stage2_run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small configuration with teacher, student and text as files."""
    folder = tmp_path_factory.mktemp("world")
    setup = small_setup()
    setup.teacher.save_pretrained(folder / "teacher")
    student = spad.initial_student(setup)
    for name in ("student", "copy"):
        student.save_pretrained(folder / name)
        setup.tokenizer.save(folder / name)
    (folder / "text.txt").write_text("A study compares methods under matched seeds.\n" * 120)
    overrides = (
        *SMALL, "stage1.updates=4", "stage2.updates=2", f"teacher.teacher_model_name_or_path={folder / 'teacher'}",
        f"data.source=text:{folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "model.init=random",
    )  # fmt: skip
    return folder, overrides, load_config("tiny", overrides)


@pytest.fixture
def here(monkeypatch):
    """Carry runs out in this process, and count them."""
    done = []

    class Inline:
        def __init__(self, gpus=()):
            pass

        def __enter__(self):
            def start(folder, count=1):
                done.append(folder.name)
                worker.main([str(folder)])
                return 0.0

            return start

        def __exit__(self, *_):
            return False

    monkeypatch.setattr(runs, "processes", Inline)
    monkeypatch.setattr(worker, "PROMPTS", 4)
    return done


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_follows_content_not_paths_or_harmless_options(world):
    folder, _, config = world
    one = stage2_run(config, folder / "student")
    assert one.key == stage2_run(config, folder / "copy").key
    assert one.key == stage2_run(config, folder / "student", ["train.save_every=1", "train.keep_checkpoints=1"]).key
    assert one.key == stage2_run(config, folder / "student", ["stage1.learning_rate=0.9"]).key
    others = [
        stage2_run(config, folder / "student", [change]).key
        for change in ("train.seed=1", "stage2.method=vanilla_opd", "stage2.learning_rate=0.5", "stage2.updates=3")
    ]
    evaluation = stage2_run(config, folder / "student", kind="evaluate").key
    teacher = stage2_run(config, folder / "student", ["teacher.teacher_model_name_or_path=tiny"]).key
    assert len({one.key, evaluation, teacher, *others}) == 7
    stage1 = stage1_run(config)
    assert (
        stage1.key == stage1_run(config, ["stage2.learning_rate=0.5"]).key != stage1_run(config, ["train.seed=4"]).key
    )
    spad_run = stage2_run(config, folder / "student", ["stage2.method=continued_spad"])
    changed = stage2_run(config, folder / "student", ["stage2.method=continued_spad", "stage1.lambda_soft=0.9"])
    assert spad_run.key != changed.key, "Continued SpAD reads Stage 1's weights"


def test_another_student_is_another_run(world, tmp_path):
    folder, _, config = world
    weights = bytearray((folder / "student" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(bytes(weights))
    assert stage2_run(config, tmp_path).key != stage2_run(config, folder / "student").key
    shutil.copytree(folder / "student", tmp_path / "other")
    shape = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(shape | {"alpha": 0.5}))
    assert stage2_run(config, tmp_path / "other").key != stage2_run(config, folder / "student").key, "another neuron"
    evaluations = [stage2_run(config, folder / "student", [f"stage2.learning_rate={rate}"], kind="evaluate").key
                   for rate in (0.1, 0.2)]  # fmt: skip
    assert evaluations[0] == evaluations[1], "an evaluation has no learning rate"
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        content_key(stage2_run(config, tmp_path / "nothing"))


# --- carrying out ----------------------------------------------------------------------------------------------------


def ask(world, output, name, *, start=True, seeds=(0,)):
    folder, overrides, config = world
    return studying.Request(
        find(name), config, output, seeds, start=str(folder / "student") if start else None, overrides=overrides
    )


def test_studies_share_finished_runs_and_repeat_none(world, tmp_path, here):
    asked = ask(world, tmp_path, "diagnostics", start=False, seeds=(0, 1))
    first = studying.carry_out(asked, lambda line: None)
    assert len(here) == 6, "Stage 1, the checkpoint, Vanilla and SpikeOPD twice"
    assert [row["label"] for row in first["rows"]] == ["Offline-only", "Vanilla OPD", "SpikeOPD"]
    drifts = [row["values"]["membrane_drift"] for row in first["rows"]]
    assert [drift["n"] for drift in drifts] == [1, 2, 2] and all(math.isfinite(drift["mean"]) for drift in drifts)
    assert drifts[1]["sd"] > 0 and drifts[1]["mean"] != drifts[2]["mean"]
    written = {path.name for path in (tmp_path / "diagnostics").iterdir()}
    assert {"table.txt", "table.csv", "table.tex", "figure.png", "figure.svg", "result.json", "bank.npz"} <= written
    assert "2.67" in (tmp_path / "diagnostics" / "table.txt").read_text()
    bank = (tmp_path / "diagnostics" / "bank.npz").read_bytes()
    again = studying.carry_out(asked, lambda line: None)
    assert len(here) == 6 and (tmp_path / "diagnostics" / "bank.npz").read_bytes() == bank
    assert again["text"] == first["text"]
    ablation = ask(world, tmp_path, "ablation", start=False)
    assert [entry["finished"] for entry in studying.plan(ablation)] == [True, True, False, False, False]


def test_a_killed_run_continues_to_the_same_result(world, tmp_path, here, monkeypatch):
    folder, _, config = world
    run = stage2_run(config, folder / "student", ["stage2.updates=4", "train.eval_every=1"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    (expected,) = runs.execute([("whole", run)], whole, 1, lambda line: None)

    original = running.Run.step
    kill_at(monkeypatch, "stage2", 2)
    with pytest.raises(Killed):
        runs.execute([("broken", run)], broken, 1, lambda line: None)
    assert runs.read_result(run, broken) is None
    monkeypatch.setattr(running.Run, "step", original)
    (found,) = runs.execute([("broken", run)], broken, 1, lambda line: None)
    assert found["evaluation"] == expected["evaluation"] and found["trace"] == expected["trace"]
    assert not (run.folder(broken) / "stage2" / "checkpoints").exists()


def test_a_run_begun_for_one_study_is_continued_for_another(world, tmp_path, here, monkeypatch):
    """Options that do not matter to a run, and places, may differ: the key says that it is the same."""
    folder, _, config = world
    original = running.Run.step
    kill_at(monkeypatch, "stage1", 2)
    first, second = stage1_run(config), stage1_run(with_overrides(config, ["stage2.updates=7", "stage2.batch_size=8"]))
    assert first.key == second.key
    with pytest.raises(Killed):
        runs.execute([("one", first)], tmp_path, 1, lambda line: None)
    (tmp_path / first.key[:20] / "stage1" / ".final.left").mkdir()
    monkeypatch.setattr(running.Run, "step", original)
    (found,) = runs.execute([("two", second)], tmp_path, 1, lambda line: None)
    assert found["updates"] == 4
    assert not (tmp_path / first.key[:20] / "stage1" / ".final.left").exists(), "what a killed process left is removed"


def test_a_bundle_is_no_start_and_the_line_says_how_it_becomes_one(tmp_path, capsys):
    assert (
        main(["controlled", "--start", "stories", "--config", "stories", "--output", str(tmp_path), "--dry-run"]) == 2
    )
    assert "spikeopd.load_student('stories').save_pretrained(DIR)" in capsys.readouterr().err


def test_a_student_of_another_size_is_refused(world):
    folder, _, config = world
    for change in ("model.num_hidden_layers=1", "model.hidden_size=64"):
        other = with_overrides(config, [change, "stage2.spike_layers=[1]", "stage1.deploy_updates=0"])
        name = change.split(".")[1].split("=")[0]
        with pytest.raises(InputError, match=f"has {name} .* the configuration"):
            configured_student(str(folder / "student"), other)


def test_a_pool_behind_a_link_finds_its_students(world, tmp_path, here):
    """A folder's real place counts: `..` behind a link leads elsewhere."""
    folder, _, config = world
    (tmp_path / "deep" / "er" / "pool").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er" / "pool")
    run = stage2_run(config, folder / "student", kind="evaluate")
    runs.execute([("run", run)], tmp_path / "link", 1, lambda line: None)
    for pool in (tmp_path / "link", tmp_path / "deep" / "er" / "pool"):
        found = runs.read_result(run, pool)
        assert found is not None and (Path(found["student"]) / "model.safetensors").is_file()


def test_a_failing_run_is_reported_with_its_last_line(world, tmp_path):
    """A real process: the student it asks for has another vocabulary."""
    _, _, config = world
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps({"kind": "train", "config": {"model": {"preset": "none"}}}))
    with runs.processes() as start, pytest.raises(CheckFailed, match="the run failed .*preset"):
        start(folder)


@pytest.mark.slow
def test_a_study_stopped_from_outside_ends_its_processes_and_goes_on(world, tmp_path):
    folder, overrides, _ = world
    words = [sys.executable, "-m", "spikeopd.studies.cli", "ablation", "--output", str(tmp_path), "--jobs", "2",
             "--start", str(folder / "student"), "--quiet", *overrides, "stage2.updates=400"]  # fmt: skip
    first = subprocess.Popen(words)
    until = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/stage2/checkpoints/*/state.json")):
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.2)
    first.terminate()
    assert first.wait(60) == 143
    for path in tmp_path.glob("runs/*/.lock"):
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left
    words[-1] = "stage2.updates=400"
    assert not list(tmp_path.glob("runs/*/result.json"))
    subprocess.run(words, check=True, capture_output=True)
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 4
    updates = [json.loads(line)["update"] for line in next(tmp_path.glob("runs/*/metrics.jsonl")).open()]
    assert updates == list(range(1, 401))


def test_zero_shot_accuracy_asked_for_later_repeats_no_training(world, tmp_path, here):
    """Two items for each of the eight tasks through the harness; same student, same questions: one evaluation."""
    request = ask(world, tmp_path, "ablation")
    studying.carry_out(request, lambda line: None)
    trained = list(here)
    assert len(trained) == 4
    items = str(write_items(tmp_path / "items"))
    request = replace(request, benchmarks=items, tasks=("piqa", "boolq"))
    whole = studying.carry_out(request, lambda line: None)
    assert len(here) == 4 + 4 and here[:4] == trained, "four evaluations, no training"
    scores = [row["runs"][0]["zeroshot"] for row in whole["rows"]]
    assert all(score["questions"] == {"boolq": 2, "piqa": 2} for score in scores)
    assert [row["values"]["average"]["mean"] for row in whole["rows"]] == [
        (score["tasks"]["piqa"] + score["tasks"]["boolq"]) / 2 for score in scores
    ]
    assert "Avg. %" in whole["text"] and "over piqa, boolq only" in whole["text"]
    studying.carry_out(request, lambda line: None)
    assert len(here) == 8
    (tmp_path / "items" / "piqa" / "validation.jsonl").unlink()
    runs.benchmark_hashes.cache_clear()
    with pytest.raises(InputError, match="lacks 1 of 2 tasks"):
        studying.carry_out(request, lambda line: None)


class CollapsesAt3(CollapseDetector):
    def update(self, update, adj, dist4):
        self.onset = 3 if update >= 3 else None
        return update >= 3


def test_a_collapsed_run_is_scored_by_its_last_student_before_the_onset(world, tmp_path, here, monkeypatch):
    folder, _, config = world
    monkeypatch.setattr(running, "CollapseDetector", CollapsesAt3, raising=True)
    run = stage2_run(config, folder / "student", ["stage2.updates=4", "train.eval_every=1", "train.save_every=1"])
    (found,) = runs.execute([("run", run)], tmp_path / "one", 1, lambda line: None)
    assert found["onset"] == 3 and found["pre_onset"]["update"] == 2
    short = stage2_run(config, folder / "student", ["stage2.updates=2", "train.eval_every=1", "train.save_every=1"])
    (stopped,) = runs.execute([("two", short)], tmp_path / "one", 1, lambda line: None)
    weights = [Path(path) / "model.safetensors" for path in (found["pre_onset_student"], stopped["student"])]
    assert (
        weights[0].read_bytes()
        == weights[1].read_bytes()
        != (Path(found["student"]) / "model.safetensors").read_bytes()
    )
    scored = []
    monkeypatch.setattr(studying, "execute", lambda asked, *_: scored.extend(asked) or [{"average": 50.0}] * len(asked))
    request = replace(ask(world, tmp_path, "stability"), benchmarks="data")
    studying.add_zeroshot(request, [("run", run)], [[found]], lambda line: None)
    assert scored[0][1].student == found["pre_onset_student"] and found["zeroshot"] == {"average": 50.0}
    request = replace(ask(world, tmp_path, "controlled"), benchmarks="data")
    studying.add_zeroshot(request, [("run", run)], [[found]], lambda line: None)
    assert scored[1][1].student == found["student"], "Tab. 3 is about what training ends with"


def test_long_runs_come_first_and_results_stay_in_order(world, tmp_path, monkeypatch):
    folder, _, config = world
    asked = [("short", stage2_run(config, folder / "student")),
             ("evaluation", stage2_run(config, folder / "student", kind="evaluate")),
             ("long", stage2_run(config, folder / "student", ["stage2.updates=3"])),
             ("small", stage2_run(config, folder / "student", ["stage2.method=small_lr_opd"]))]  # fmt: skip
    names = {run.folder(tmp_path).name: label for label, run in asked}
    done = []

    @contextmanager
    def processes(gpus):
        def start(path, count=1):
            done.append(names[path.name])
            (path / "result.json").write_text(json.dumps({"label": names[path.name]}))
            return 0.0

        yield start

    monkeypatch.setattr(runs, "processes", processes)
    results = runs.execute(asked, tmp_path, 1, lambda line: None)
    assert done == ["small", "long", "short", "evaluation"]
    assert [result["label"] for result in results] == ["short", "evaluation", "long", "small"]


def test_a_pool_can_be_moved(world, tmp_path, here):
    folder, _, config = world
    run = stage2_run(config, folder / "student")
    runs.execute([("run", run)], tmp_path / "here", 1, lambda line: None)
    (tmp_path / "here").rename(tmp_path / "there")
    found = runs.read_result(run, tmp_path / "there")
    assert found is not None and (Path(found["student"]) / "model.safetensors").is_file()


def test_runs_side_by_side_have_a_gpu_each(tmp_path, monkeypatch):
    """Real processes that write down what they see; three runs at a time on two devices."""
    assert runs.accelerators({"CUDA_VISIBLE_DEVICES": "3,GPU-5a"}) == ["3", "GPU-5a"]
    assert runs.accelerators({"CUDA_VISIBLE_DEVICES": ""}) == []
    real = subprocess.Popen
    code = """import os, sys, time
time.sleep(0.5)
open(sys.argv[1] + "/seen", "w").write(os.environ["CUDA_VISIBLE_DEVICES"])"""

    def process(words, **rest):
        return real([sys.executable, "-c", code, words[-1]], **rest)

    monkeypatch.setattr(runs.subprocess, "Popen", process)
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    with runs.ThreadPoolExecutor(3) as executor, runs.processes(["3", "GPU-5a"]) as start:
        list(executor.map(start, folders))
    seen = sorted((folder / "seen").read_text() for folder in folders)
    assert seen in (["3", "3", "GPU-5a"], ["3", "GPU-5a", "GPU-5a"])


def test_one_thread_for_every_run():
    assert runs.one_thread({"PATH": "x", "OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "1"


# --- definitions and command -----------------------------------------------------------------------------------------


def test_rows_are_the_papers():
    config = load_config("opt-125m")
    labels = {name: [row.label for row in study.rows(config)] for name, study in STUDIES.items()}
    assert labels["stability"] == ["Vanilla OPD", "Small-LR", "Clipped", "SpikeOPD"]
    assert labels["rollout-length"] == ["K = 8", "K = 16", "K = 32", "K = 64", "K = 128"]
    assert labels["layers"] == ["dL = 1", "dL = 2", "dL = 3", "dL = 4", "dL = 6", "dL = 12", "none"]
    assert every(3, 12) == (3, 6, 9, 12) and every(12, 12) == (12,)
    assert [updates for updates, _ in stage1_marks(config)] == [1000, 2000, 4000]
    assert STUDIES["stability"].seeds == tuple(range(10)) and STUDIES["scale"].seeds == (0, 1, 2)
    spikeopd = STUDIES["stability"].rows(config)[-1]
    assert "stage2.updates=1000" in spikeopd.overrides


def test_rows_of_every_study_are_valid_configurations(world):
    folder, _, _ = world
    for study in STUDIES.values():
        config = load_config("tiny")
        for row in study.rows(config):
            if row.kind != "stage1":
                made = stage2_run(studying.base_of(row, config, ()), folder / "student", row.overrides)
                assert isinstance(made, Run)


def test_rows_the_paper_ran_once_take_more_seeds_only_if_asked(world, tmp_path):
    _, _, config = world
    study = find("rollout-length")
    rows = {row.label: row for row in study.rows(load_config("opt-125m"))}
    for asked, others in ((False, (0,)), (True, (0, 1, 2))):
        request = studying.Request(study, config, tmp_path, (0, 1, 2), asked=asked)
        assert studying.seeds_of(request, rows["K = 32"]) == (0, 1, 2), "the default of Tab. 4 has three seeds"
        assert studying.seeds_of(request, rows["K = 8"]) == others
    assert [row.label for row in find("layers").rows(load_config("opt-125m")) if not row.papers_one_seed] == ["dL = 3"]


def test_table_2_has_teacher_spikegpt_tasks_and_efficiency():
    rows = {row.label: row for row in find("scale").rows(load_config("opt-125m"))}
    assert rows["OPT Teacher 0.125B"].kind == "teacher" and rows["SpikeGPT 0.046B"].kind == "paper"
    assert (
        rows["SpikeOPD 0.35B"].paper["task_piqa"] == 62.2 and rows["SpikeOPD 0.35B"].paper["average"] == "40.0 ± 0.19"
    )
    assert rows["SpikeGPT 0.216B"].paper["ops"] == "18.3 G" and rows["KD 1.3B"].paper["energy"] == "67.3 mJ"
    measured = [values.of_row([{"zeroshot": {"tasks": {"piqa": 50.0}, "average": 50.0}}]), values.of_row([])]
    table = values.make_table(find("scale"), [rows["KD 0.125B"], rows["SpikeGPT 0.046B"]], measured, [])
    head = table.head
    assert [row[head.index("PIQA %")] for row in table.rows] == ["50.0", "-"]
    assert [row[head.index("paper ARC-e %")] for row in table.rows] == ["37.1", "32.3"]


def test_table_2_of_the_better_block_takes_its_recipes():
    for name, recipe in (("opt-125m", "opt-350m"), ("opt-125m-plus", "opt-350m-plus")):
        rows = {row.label: row for row in find("scale").rows(load_config(name))}
        assert rows["SpikeOPD 0.35B"].recipe == rows["KD 0.35B"].recipe == recipe


def test_table_3_has_tasks_where_they_were_measured():
    study, rows = find("controlled"), find("controlled").rows(load_config("opt-125m"))[:2]
    assert rows[1].paper["task_piqa"] == 54.2 and rows[1].paper["run"] == 1.0457
    scored = values.of_row([{"zeroshot": {"tasks": {"piqa": 50.0}, "average": 50.0}}])
    assert "paper ARC-e %" in values.make_table(study, rows, [scored, scored], []).head
    plain = values.of_row([{"evaluation": {"perplexity": 9.0}, "onset": None}])
    head = values.make_table(study, rows, [plain, plain], []).head
    assert "paper Adj. %" in head and not any("PIQA" in column for column in head)


def test_table_4_says_what_an_update_generates():
    rows = find("rollout-length").rows(load_config("tiny", ["stage2.updates=50"]))
    assert rows[0].facts == {"updates": "50", "generated": "128"} and rows[0].paper["generated"] == "8B"


def test_table_1_says_rate_clip_and_steps():
    rows = find("stability").rows(load_config("tiny", ["stage2.updates=50", "stage2.learning_rate=9e-4"]))
    facts = {row.label: tuple(row.facts[key] for key in ("learning_rate", "clip", "updates")) for row in rows}
    assert facts == {"Vanilla OPD": ("0.0009", "-", "50"), "Small-LR": ("0.0003", "-", "100"),
                     "Clipped": ("0.0009", "1", "50"), "SpikeOPD": ("0.0009", "-", "100")}  # fmt: skip
    assert rows[1].paper["learning_rate"] == "η0/3"


def test_a_study_says_what_its_numbers_are_held_against(world, tmp_path, here):
    """The teacher on the same windows, and what R = 0 costs: stated with every table, and a row of Tab. 2."""
    folder, overrides, config = world
    teacher = Row("Teacher", kind="teacher", one_seed=True)
    study = replace(find("scale"), rows=lambda _: [teacher, Row("KD", kind="evaluate", one_seed=True)])
    request = studying.Request(study, config, tmp_path, (0,), start=str(folder / "student"))
    whole = studying.carry_out(request, lambda _: None)
    first, second = (row["values"] for row in whole["rows"])
    student = whole["rows"][1]["runs"][0]["evaluation"]
    assert first["perplexity"]["mean"] == pytest.approx(student["teacher_perplexity"])
    assert second["ops"]["mean"] > 0 and first["energy"]["mean"] > second["energy"]["mean"] > 0
    assert f"{student['attention_off']:.2f} nats a token" in whole["text"]


def test_what_a_student_spends_is_counted_on_its_bundle(world, tmp_path):
    """Exported by the real command, in a folder whose files are nobody's modules."""
    folder, _, config = world
    found = spending.measure(config, folder / "student", tmp_path)
    assert found["tokens"] > 50 and found["event_ms"] > 0 and list(tmp_path.iterdir()) == []
    assert found["appendix_nj"] > 0 and found["spike_nj"] > found["token_nj"] > 0


def test_sparsity_has_both_neurons_at_every_rate_and_rows_can_be_chosen(tmp_path):
    config = load_config("tiny")
    rows = find("sparsity").rows(config)
    assert len(rows) == 14 and rows[0].label == "student, no target" and rows[-1].label == "twin, rate 0.03"
    request = studying.Request(find("sparsity"), config, tmp_path, (0, 1), only=("twin, rate 0.05", "no target"))
    chosen = studying.rows_of(request)
    assert [row.label for row in chosen] == ["student, no target", "twin, no target", "twin, rate 0.05"]
    found = [run for row in chosen for run in studying.runs_of(request, row)]
    assert [run.config.train.seed for run in found] == [0, 1] * 3 and len({run.key for run in found}) == 6
    assert [(r.config.model.neuron, r.config.stage1.rate_target) for r in found[::2]] == [
        ("lif", ()), ("quantised", ()), ("quantised", (0.05,))
    ]  # fmt: skip
    plain = stage1_run(config, ("train.seed=1",))
    assert found[1].key == plain.key  # at its defaults an option that came later is no part of a name
    with pytest.raises(ConfigError, match="--rows izh: no row of sparsity is called so; it has student, no target"):
        studying.rows_of(replace(request, only=("izh",)))


def test_the_pareto_figure_is_drawn_from_what_there_is(tmp_path):
    rows = find("sparsity").rows(load_config("tiny"))[:3]
    keys = ("perplexity", "appendix_nj", "spike_nj", "token_nj", "twin_dense_nj")
    values = [{key: {"mean": 50.0 + place, "sd": None, "n": 1} for key in keys} for place in range(3)]
    drawn = figures.draw(find("sparsity"), rows, values, [[]] * 3, tmp_path)
    assert sorted(path.name for path in drawn) == ["figure.png", "figure.svg"] and drawn[0].stat().st_size > 5000


def test_points_that_lie_together_share_a_label():
    found = together([(0.0, 0.0), (10.0, 5.0), (10.1, 5.1), (10.0, 9.0)], ["a", "b", "c", "d"])
    assert found == [((0.0, 0.0), "a"), ((10.0, 5.0), "b, c"), ((10.0, 9.0), "d")]


def test_seeds():
    assert seeds(["0", "3-5"]) == (0, 3, 4, 5)
    for wrong in (["x"], ["5-3"], ["1", "0-2"], ["-1"]):
        with pytest.raises(ConfigError):
            seeds(wrong)


def test_command_plans_lists_and_refuses(world, tmp_path, capsys):
    folder, overrides, _ = world
    words = ["controlled", "--output", str(tmp_path), "--start", str(folder / "student"), "--dry-run", *overrides]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("to do") == 10 and "Lightning OPD" in shown
    words = ["ablation", "--dry-run", "--output", str(tmp_path), "--start", str(folder / "student")]
    assert main([*words, "--seeds", "0", "1", *overrides]) == 0, "overrides may stand behind the seeds"
    assert capsys.readouterr().out.count("seed 1") == 4
    assert main(["--list"]) == 0 and "rollout-length" in capsys.readouterr().out
    assert main(["nothing"]) == 2 and "does not exist" in capsys.readouterr().err
    assert main(["stability", "--jobs", "0"]) == 2
    for name, reason in (("scale", "different sizes"), ("stage1", "trains Stage 1 itself")):
        assert main([name, "--start", str(folder / "student"), "--output", str(tmp_path), "--dry-run"]) == 2
        assert reason in capsys.readouterr().err
    assert main(["controlled", "--tasks", "piqa"]) == 2 and "--benchmarks DIR" in capsys.readouterr().err
    assert main(["initialization", "--output", str(tmp_path), "--start", str(folder / "student"), "--dry-run"]) == 2
    assert "also needs the student" in capsys.readouterr().err


def test_each_size_may_start_from_a_student_of_its_own(world, tmp_path, capsys):
    folder, overrides, _ = world
    student = str(folder / "student")
    shutil.copytree(student, tmp_path / "deep")
    words = ["scale", "--output", str(tmp_path), "--dry-run", "--json", *overrides]
    one = ["--start", f"1 layer={student}"]
    both = [*one, "--start", f"2 layers={tmp_path / 'deep'}"]
    assert main([*words, *both]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert not any("Stage 1" in str(run) for run in runs), "nothing is trained first"
    request = studying.Request(
        find("scale"), load_config("tiny", overrides), tmp_path, (0,), overrides=overrides,
        start={"1 layer": student, "2 layers": str(tmp_path / "deep")},
    )  # fmt: skip
    found = {row.label: studying.student_of(request, row).name for row in studying.rows_of(request)}
    assert found["KD 1 layer"] == found["SpikeOPD 1 layer"] == "student" and found["SpikeOPD 2 layers"] == "deep"
    assert main([*words, *one]) == 2 and "no student for the row 'KD 2 layers'" in capsys.readouterr().err
    assert main([*words, *one, "--start", student]) == 2 and "SIZE=DIR once for each" in capsys.readouterr().err


def test_help_is_quick_and_ends_with_examples():
    code = "import sys; from spikeopd.studies.cli import main; main(['--help'])"
    check = "\nassert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys\ntry:\n    {code[12:]}\nexcept SystemExit: pass{check}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "spikeopd-study diagnostics --config tiny" in done.stdout
