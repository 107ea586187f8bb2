"""spikeopd-train as typed: errors in one line with exit code 2 and nothing half-written, dry runs, a short real run."""

import json
import shutil
from pathlib import Path

import pytest

from spikeopd.cli import main
from spikeopd.config import load_config, recipe_names

TINY = Path(__file__).parents[2] / "spikeopd" / "assets" / "tiny"
SHORT = ["stage1.updates=2", "stage2.updates=2", "stage1.micro_batch_size=2", "stage2.batch_size=2",
         "stage2.micro_batch_size=2", "data.sequence_length=16", "stage2.prompt_length=8",
         "stage2.max_completion_length=4", "train.threads=1", "--quiet"]  # fmt: skip


def call(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, tmp_path, *words, says):
    output = tmp_path / "out"
    code, out, err = call(capsys, "--output", output, *words, *SHORT)
    assert code == 2 and "Traceback" not in err
    line = err.strip().splitlines()[-1]
    for part in says:
        assert part in line, line
    assert not output.exists(), "nothing half-written"


def test_missing_teacher(capsys, tmp_path):
    refused(capsys, tmp_path, f"teacher.teacher_model_name_or_path={tmp_path}", says=["teacher", "config.json"])


def test_corrupt_weights(capsys, tmp_path):
    broken = tmp_path / "teacher"
    shutil.copytree(TINY, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(capsys, tmp_path, f"teacher.teacher_model_name_or_path={broken}", says=["teacher", "corrupt"])


def test_wrong_vocabulary_names_both_sizes(capsys, tmp_path):
    refused(capsys, tmp_path, "model.vocab_size=1040", says=["1024", "1040", "model.vocab_size=1024"])
    refused(
        capsys,
        tmp_path,
        "model.vocab_size=512",
        says=["1024 vocabulary rows", "the student 512", "add model.vocab_size=1024"],
    )


def test_sequence_longer_than_the_position_table(capsys, tmp_path):
    code, _, err = call(capsys, "--output", tmp_path / "out", "data.sequence_length=300")
    assert code == 2 and "300 exceeds model.max_position_embeddings = 256" in err


def test_missing_and_empty_text(capsys, tmp_path):
    refused(capsys, tmp_path, f"data.source=text:{tmp_path}/none.txt", says=["none.txt"])
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused(capsys, tmp_path, f"data.source=text:{empty}", says=["empty.txt"])


def test_every_config_error_at_once_with_the_nearest_key(capsys, tmp_path):
    code, _, err = call(capsys, "--output", tmp_path / "out", "stage2.refcoef=1", "stage1.updates=many", "foo.bar=1")
    assert code == 2 and "3 problems" in err
    assert "stage2.ref_coef" in err and "stage1.updates" in err and "foo" in err
    assert not (tmp_path / "out").exists()


def test_output_is_needed_and_never_overwritten(capsys, tmp_path):
    code, _, err = call(capsys, "--config", "tiny")
    assert code == 2 and "--output" in err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    code, _, err = call(capsys, "--output", tmp_path / "run")
    assert code == 2 and "--resume" in err
    code, _, err = call(capsys, "--output", tmp_path / "nothing", "--resume")
    assert code == 2 and "no run to resume" in err


def test_a_short_run_its_files_and_a_refused_change(capsys, tmp_path):
    output = tmp_path / "run"
    code, out, err = call(capsys, "--output", output, "--json", *SHORT)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["stage1"]["updates"] == 2 and summary["stage2"]["updates"] == 2
    for name in ("config.yaml", "env.json", "metrics.jsonl", "summary.json", "final/config.json",
                 "final/model.safetensors", "final/tokenizer.json", "stage1/final/model.safetensors"):  # fmt: skip
        assert (output / name).is_file(), name
    words = [word for word in SHORT if word.startswith(("stage", "data", "train"))]
    assert load_config(output / "config.yaml") == load_config("tiny", words)
    code, _, err = call(capsys, "--output", output, "--resume", *SHORT, "stage2.ref_coef=0.5")
    assert code == 2 and "stage2.ref_coef: 0.75 -> 0.5" in err
    code, out, _ = call(capsys, "--output", output, "--resume", "--json", *SHORT)
    assert code == 0 and json.loads(out)["stage2"]["final"] == summary["stage2"]["final"]


def dry_run(capsys, recipe, *overrides):
    code, out, err = call(capsys, "--config", recipe, "--dry-run", "--json", "train.threads=1", *overrides)
    assert code == 0, err
    report = json.loads(out)
    assert report["parameters"] > report["block_parameters"] > 0
    assert set(report["after_one_update"]) == {"stage1", "stage2"}
    assert report["config"]["stage2"]["ref_coef"] == 0.75


# Sisters of recipes that are tried here anyway: other sizes and budgets of the same parts.
SISTERS = {"opt-1.3b", "opt-1.3b-plus", "opt-350m-plus", "tiny-long"}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name in SISTERS)) for name in recipe_names()]
)
def test_every_recipe_dry_runs(capsys, recipe):
    # bfloat16 is slow on a CPU: one recipe shows that it works.
    dry_run(capsys, recipe, *([] if recipe == "opt-125m" else ["train.precision=fp32"]))


def test_a_dry_run_says_what_it_does_and_counts_the_real_model(capsys):
    code, out, err = call(capsys, "--config", "opt-125m", "--dry-run", "--json", "train.precision=fp32", "--stage", "1")
    report = json.loads(out)
    assert code == 0 and 125e6 < report["parameters"] < 126e6 and report["tried_with"]["hidden_size"] == "128 for 768"
    lines = err.splitlines()
    assert len(lines) == 2 and all(line.startswith("dry run: ") and len(line) < 80 for line in lines), err


def test_paper_values_of_the_opt_recipes():
    for name in ("opt-125m", "opt-350m", "opt-1.3b"):
        config = load_config(name)
        one, two = config.stage1, config.stage2
        assert (one.learning_rate, one.warmup_ratio, one.updates, one.max_grad_norm) == (5e-4, 0.2, 4000, 0.7)
        assert (one.micro_batch_size, one.gradient_accumulation_steps, one.kd_temperature) == (16, 16, 2.0)
        assert (two.learning_rate, two.updates, two.batch_size, two.prompt_length) == (1.5e-6, 500, 16, 480)
        assert (two.max_completion_length, two.temperature, two.max_grad_norm) == (32, 1.0, None)
        assert (two.teacher_coef, two.ref_coef, two.spike_coef, two.rho) == (1.0, 0.75, 0.30, 1.0)
        assert (two.rate_min, two.rate_max, two.spike_layers) == (0.01, 0.58, (3, 6, 9, 12))
        assert config.model.num_steps == 4


def test_lists_and_explanations(capsys):
    assert "opt-125m" in call(capsys, "--list", "recipes")[1]
    assert "spikeopd" in call(capsys, "--list", "methods")[1]
    assert "paper" in call(capsys, "--explain", "stage2.ref_coef")[1]


def test_small_teacher_and_tokenizer_can_be_trained(capsys, tmp_path):
    code, out, err = call(capsys, "teacher", "--output", tmp_path / "t", "--updates", "2", "--hidden-size", "16",
                          "--layers", "1", "--threads", "1", "--json")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["validation_perplexity"] > 1
    assert (tmp_path / "t" / "model.safetensors").is_file()


def test_a_summary_is_read_in_words():
    from spikeopd.cli import _readable

    text = _readable({"stage2": {"onset": None, "final": {"teacher_kl": 0.25, "dist4": 1.0}}, "output": "runs/a"})
    assert [line.split("  ")[0] or line.strip() for line in text.splitlines()][0] == "stage2"
    assert "collapse at update      none" in text and "KL to the teacher       0.25" in text and "None" not in text
