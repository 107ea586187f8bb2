"""spikeopd-eval as a command: results, summary.json, errors and exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from evaluation_items import write_items

from spikeopd.evaluation.arguments import COMMANDS, PAPER_ROWS, build_parser
from spikeopd.evaluation.cli import RUN, main
from spikeopd.evaluation.models import open_model

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPIKEOPD_CACHE", str(tmp_path_factory.getbasetemp() / "token-cache"))
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(variable, "1")  # the command sets them; this puts them back afterwards


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text("The kettle is on the table. A module defines names.\n" * 20)
    return f"text:{path}"


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_zeroshot_over_seeds_in_json(checkpoint, tmp_path, capsys, no_network):
    pytest.importorskip("lm_eval")
    data = write_items(tmp_path / "data")
    for seed in (0, 1):
        (tmp_path / f"run-{seed}").mkdir()
        (tmp_path / f"run-{seed}" / "final").symlink_to(checkpoint)
    code, out, err = run(
        capsys, "zeroshot", tmp_path / "run-{seed}", "--seeds", "0-1", "--benchmarks", data,
        "--tasks", "piqa,hellaswag", "--json", "--output", tmp_path / "out", "--batch-size", "4",
    )  # fmt: skip
    assert code == 0
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["schema_version"] == 1 and summary["definitions"]["version"] == 1
    assert [entry["seed"] for entry in summary["runs"]] == [0, 1]
    assert summary["average"]["sd"] == 0.0  # the same model twice
    first = summary["runs"][0]
    assert first["kind"] == "student" and len(first["weights_sha256"]) == 64
    assert summary["average"]["mean"] == pytest.approx(
        (first["tasks"]["piqa"]["acc"] + first["tasks"]["hellaswag"]["acc"]) / 2
    )
    assert first["harness"]["tasks"]["piqa"] == 1.0
    assert summary["environment"]["versions"]["spikeopd"]
    assert [row["method"] for row in summary["paper"]["rows"]] == ["OPT Teacher", "KD", "SpikeOPD"]
    assert "it/s" not in err  # the harness's own bars stay away


def test_zeroshot_table(checkpoint, tmp_path, capsys, no_network):
    pytest.importorskip("lm_eval")
    data = write_items(tmp_path / "data")
    code, out, err = run(capsys, "zeroshot", checkpoint, "--benchmarks", data, "--tasks", "boolq", "--limit", "1",
                         "--output", tmp_path / "out", "--quiet")  # fmt: skip
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["BQ", "Avg."]
    assert any(line.split() == ["paper:", "SpikeOPD", "0.125B", "48.5", "48.5"] for line in lines)
    assert "only the first 1 questions" in out and "none of the paper's sizes" in out


def test_a_bundle_is_scored_by_the_event_engine(checkpoint, student, tmp_path, capsys, no_network):
    """Deployment accuracy: the same questions as the student, answered by the exported integers."""
    pytest.importorskip("lm_eval")
    from export.bundle_writer import BundleOptions, write_bundle
    from export.quantize import lower

    options = BundleOptions(tokenizer=checkpoint / "tokenizer.json", tokens={"bos": 2, "eos": 2, "pad": 1})
    write_bundle(lower(student, "int8").model, tmp_path / "bundle", options)
    data = write_items(tmp_path / "data")
    code, out, _ = run(capsys, "zeroshot", tmp_path / "bundle", "--benchmarks", data, "--tasks", "piqa,winogrande",
                       "--json", "--output", tmp_path / "out")  # fmt: skip
    assert code == 0
    (result,) = json.loads(out)["runs"]
    assert result["kind"] == "bundle" and result["engine"] == "event" and "model.nir" in result["files"]
    assert result["tasks"]["piqa"]["questions"] == 2
    code, _, err = run(capsys, "zeroshot", tmp_path / "bundle", "--benchmarks", data, "--device", "cuda")
    assert code == 2 and "a bundle runs on the CPU" in err


def test_zeroshot_errors(checkpoint, tmp_path, capsys):
    data = write_items(tmp_path / "data", {"piqa": [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}]})
    for words, expected in (
        (("--benchmarks", data), "lacks 7 of 8 tasks"),
        (("--benchmarks", data, "--tasks", "mmlu"), "no benchmark 'mmlu'"),
        (("--benchmarks", data, "--tasks", "piqa", "--seeds", "1"), "write {seed}"),
        (("--benchmarks", data, "--tasks", "piqa", "--limit", "0"), "--limit 0"),
        (("--benchmarks", data, "--tasks", "piqa", "--batch-size", "none"), "--batch-size none"),
    ):
        code, out, err = run(capsys, "zeroshot", checkpoint, *words)
        assert code == 2 and out == "" and expected in err and err.count("\n") == 1


@pytest.mark.parametrize("name,expected", [("/nowhere/at/all", "no such folder"), ("nothing", "no such folder")])
def test_a_model_that_is_not_there(name, expected, capsys):
    code, out, err = run(capsys, "perplexity", name)
    assert code == 2 and expected in err and err.count("\n") == 1


def test_a_folder_that_is_no_model(tmp_path, capsys):
    code, _, err = run(capsys, "rollouts", tmp_path)
    assert code == 2 and "neither config.json (a checkpoint) nor manifest.json (a bundle)" in err


@pytest.mark.parametrize("place", ["final", "stage1/final"])
def test_a_run_folder_stands_for_its_student(place, checkpoint, text, tmp_path, capsys):
    (tmp_path / "run" / place).parent.mkdir(parents=True)
    (tmp_path / "run" / place).symlink_to(checkpoint)
    code, out, err = run(capsys, "perplexity", tmp_path / "run", "--source", text, "--split", "all", "--max-tokens",
                         "20", "--json", "--quiet", "--output", tmp_path / "out")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["folder"] == str(tmp_path / "run" / place)


def test_the_named_tokenizer_file_is_used_and_no_other(checkpoint, tmp_path, capsys):
    from spikeopd.text.tokenizer import load_tokenizer

    load_tokenizer("tiny").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(content))
    tokenizer = open_model(str(checkpoint), tokenizer=str(tmp_path / "lower.json")).tokenizer
    assert tokenizer.decode(tokenizer.encode("A Kettle")) == "a kettle"
    (tmp_path / "notes.txt").write_text("no tokenizer")
    code, _, err = run(capsys, "perplexity", checkpoint, "--tokenizer", tmp_path / "notes.txt", "--output",
                       tmp_path / "out", "--quiet")  # fmt: skip
    assert code == 2 and "notes.txt: not a tokenizer file" in err and err.count("\n") == 1


def test_a_tokenizer_too_large_for_the_model(tmp_path, student, capsys):
    from small_students import small_student

    from spikeopd.text.tokenizer import load_tokenizer

    small_student().save_pretrained(tmp_path)
    load_tokenizer("tiny").save(tmp_path)
    code, _, err = run(capsys, "perplexity", tmp_path)
    assert code == 2 and "60 vocabulary rows, but the tokenizer" in err


def test_perplexity_equals_one_plain_pass(checkpoint, student, text, tmp_path, capsys):
    """A text that fits one window: the loss of the model itself."""
    code, out, _ = run(capsys, "perplexity", checkpoint, "--source", text, "--split", "all", "--max-tokens", "100",
                       "--json", "--output", tmp_path)  # fmt: skip
    assert code == 0
    summary = json.loads(out)
    tokenizer = open_model(str(checkpoint)).tokenizer
    whole = "The kettle is on the table. A module defines names.\n" * 20
    tokens = [2, *tokenizer.encode(whole, add_special_tokens=False)][:100]
    with torch.no_grad():
        logits = student(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    nats = -logits[range(99), tokens[1:]].sum().item()
    assert summary["tokens"] == 99 and summary["windows"] == 1
    assert summary["nats"] == pytest.approx(nats, rel=1e-6)
    assert summary["perplexity"] == pytest.approx(math.exp(nats / 99), rel=1e-6)
    length = len(tokenizer.decode(tokens[1:]).encode())
    assert whole.startswith(tokenizer.decode(tokens[1:])) and summary["bytes"] == length
    assert summary["bits_per_byte"] == pytest.approx(nats / math.log(2) / length, rel=1e-6)


def test_perplexity_slides_over_a_longer_text(checkpoint, text, tmp_path, capsys):
    words = ("perplexity", checkpoint, "--source", text, "--split", "all", "--output", tmp_path, "--quiet")
    code, out, err = run(capsys, *words, "--window", "32", "--stride", "32")
    assert code == 0 and err == "" and "perplexity per byte" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bytes"] == 52 * 20 and summary["window"] == 32
    assert summary["windows"] == math.ceil(summary["tokens"] / 32)
    code, _, err = run(capsys, *words, "--window", "500")
    assert code == 2 and "model's 128 positions" in err
    code, _, err = run(capsys, *words, "--stride", "0")
    assert code == 2 and "--stride 0" in err


def test_rollouts_do_not_depend_on_the_batch(checkpoint, text, tmp_path, capsys):
    results = []
    for size in ("1", "3"):
        code, out, _ = run(
            capsys, "rollouts", checkpoint, "--source", text, "--split", "all", "--num-prompts", "4",
            "--prompt-length", "20", "--max-new-tokens", "8", "--seed", "5", "--samples", "4", "--batch-size", size,
            "--json", "--output", tmp_path,
        )  # fmt: skip
        assert code == 0
        results.append(json.loads(out))
    assert results[0]["samples"] == results[1]["samples"]
    from spikeopd.quality import rollout_statistics

    made = np.array([sample["tokens"] for sample in results[0]["samples"]])
    assert made.shape == (4, 8)
    for name, value in rollout_statistics(made).items():
        assert results[0][name] == pytest.approx(value)
    assert results[0]["paper"]["rows"][-1]["run"] == 1.0477


def test_rollouts_table_and_limits(checkpoint, text, tmp_path, capsys):
    words = ("rollouts", checkpoint, "--source", text, "--split", "all", "--output", tmp_path, "--num-prompts", "2")
    code, out, _ = run(
        capsys, *words, "--prompt-length", "16", "--max-new-tokens", "4", "--temperature", "0", "--samples", "1"
    )
    assert code == 0 and "Dist.-4 %" in out and "paper: Vanilla OPD 0.125B" in out and "1. …" in out
    code, _, err = run(capsys, *words, "--max-new-tokens", "128")
    assert code == 2 and "must hold a prompt too" in err
    code, _, err = run(capsys, *words, "--prompt-length", "120")
    assert code == 2 and "to leave room for 32" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--temperature", "nan"), "--temperature nan"),
        (("--temperature", "inf"), "--temperature inf"),
        (("--temperature", "-1"), "--temperature -1.0"),
        (("--samples", "-1"), "--samples -1"),
        (("--seed", "99999999999999999999999"), "--seed must lie between 0 and 2^63 - 1"),
        (("--seed", str(2**63)), "--seed must lie between 0 and 2^63 - 1"),
        (("--seed", "-1"), "--seed must lie between 0 and 2^63 - 1"),
    ],
)
def test_rollout_settings_out_of_range(words, expected, checkpoint, text, tmp_path, capsys):
    code, out, err = run(capsys, "rollouts", checkpoint, "--source", text, "--split", "all", "--output", tmp_path,
                         "--num-prompts", "2", "--prompt-length", "16", "--max-new-tokens", "4", *words)  # fmt: skip
    assert code == 2 and out == "" and expected in err and err.count("\n") == 1


def test_the_largest_seed_can_be_used(checkpoint, text, tmp_path, capsys):
    code, _, _ = run(capsys, "rollouts", checkpoint, "--source", text, "--split", "all", "--output", tmp_path,
                     "--num-prompts", 1, "--prompt-length", 16, "--max-new-tokens", 2, "--seed", 2**63 - 1)  # fmt: skip
    assert code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, capsys, monkeypatch):
    def loaded(*arguments, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("spikeopd.evaluation.models.open_model", loaded)
    monkeypatch.setattr("spikeopd.models.teacher.load_teacher", loaded)
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep", "/proc/x"):
        code, out, err = run(capsys, command, "tiny", "--output", folder)
        assert code == 2 and out == "" and f"--output {folder}" in err and "cannot be written" in err
        assert err.count("\n") == 1


def test_help_is_fast_and_ends_with_examples(capsys):
    """Nothing heavy is imported for --help; every subcommand shows two commands that its own parser accepts."""
    code = "import sys; from spikeopd.evaluation.cli import main; main([]); " \
           "sys.exit(bool({'numpy', 'torch', 'lm_eval', 'numba'} & set(sys.modules)))"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    import shlex

    for command in COMMANDS.values():
        assert len(command.examples) == 2
        for example in command.examples:
            build_parser().parse_args(shlex.split(example))


def test_every_command_has_a_function():
    assert list(RUN) == list(COMMANDS)


def test_every_choice_of_paper_rows_has_rows():
    from spikeopd.evaluation import paper

    shown = {choice: paper.rows(choice, {}) for choice in PAPER_ROWS}
    assert [choice for choice, rows in shown.items() if not rows] == ["none"]
    assert {row.scale for choice in PAPER_ROWS for row in shown[choice]} <= {"0.125B", "0.35B", "1.3B"}


def test_old_spellings_are_accepted_with_a_hint(checkpoint, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    data = write_items(tmp_path / "data")
    words = ("zeroshot", checkpoint, "--tasks", "piqa", "--limit", "1", "--quiet", "--json", "--output", tmp_path)
    new = run(capsys, *words, "--benchmarks", data, "--precision", "bf16")
    old = run(capsys, *words, "--data-dir", data, "--dtype", "bfloat16")
    assert (new[0], old[0], new[2]) == (0, 0, "")
    assert old[2].splitlines() == [
        "spikeopd-eval: --data-dir is now --benchmarks; the old name goes in the next release",
        "spikeopd-eval: --dtype is now --precision; the old name goes in the next release",
    ]
    found = [json.loads(out) for _, out, _ in (new, old)]
    assert found[0]["runs"] == found[1]["runs"] and found[0]["runs"][0]["dtype"] == "bfloat16"
    with pytest.raises(SystemExit):
        main(["rollouts", "tiny", "--precision", "int4"])
    assert "invalid choice: 'int4' (choose from fp32, bf16, fp16)" in capsys.readouterr().err
    assert "--dtype" not in build_parser().format_help()


def test_lengths_and_counts_have_the_names_of_the_other_commands(capsys):
    new = build_parser().parse_args(["rollouts", "tiny", "--num-prompts", "3", "--max-new-tokens", "5"])
    assert capsys.readouterr().err == ""
    old = build_parser().parse_args(["rollouts", "tiny", "--prompts", "3", "--length", "5"])
    assert vars(old) == vars(new) and capsys.readouterr().err.count(" is now ") == 2
