"""The eight benchmarks through the harness from local files, without any network."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from evaluation_items import ITEMS, SHARED, SPLITS, write_items

from spikeopd.errors import ConfigError, InputError
from spikeopd.evaluation import paper
from spikeopd.evaluation.models import Model, open_model
from spikeopd.evaluation.scoring import Scored
from spikeopd.evaluation.tasks import BENCHMARKS, choose, data_files
from spikeopd.evaluation.zeroshot import aggregate, evaluate, flips, models_of, report, table
from spikeopd.text.sources import open_source
from spikeopd.text.tokenizer import load_tokenizer

pytest.importorskip("lm_eval")


class ByLength:
    """Log-likelihood of a continuation: `sign` times its number of tokens."""

    max_length, vocab_size, shares = 512, 1024, True

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def run(self, groups):
        return [[Scored(np.full(len(i.targets), self.sign, float), False) for i in g.items] for g in groups]


def by_length(sign: int) -> Model:
    return Model("by length", ByLength(sign), load_tokenizer("tiny"), {})


def accuracies(model: Model, data_dir, **options) -> dict[str, float]:
    return {
        name: task["acc"] for name, task in evaluate(model, choose(None), data_dir=data_dir, **options)["tasks"].items()
    }


def test_all_eight_are_scored_as_the_harness_defines_them(tmp_path, no_network):
    """The right choice of each first question is the shortest, of each second one the longest. WinoGrande compares
    contexts before the same continuation, so lengths tie and the first option wins; BoolQ's choices are no and yes."""
    folder = write_items(tmp_path / "data")
    first = accuracies(by_length(-1), folder, limit=1)
    assert first == {**dict.fromkeys(BENCHMARKS, 1.0), "boolq": 0.0}
    both = evaluate(by_length(+1), choose(None), data_dir=folder)
    assert {name: task["acc"] for name, task in both["tasks"].items()} == dict.fromkeys(BENCHMARKS, 0.5)
    assert all(task["questions"] == 2 for task in both["tasks"].values())
    assert {name for name, task in both["tasks"].items() if "acc_norm" in task} == set(BENCHMARKS) - {
        "winogrande",
        "boolq",
    }
    assert set(both["harness"]["tasks"]) == set(BENCHMARKS) and both["harness"]["lm_eval"] >= "0.4.13"
    assert "</s>" in both["bos"]


def test_compressed_files_are_read_and_nothing_else_is_written(tmp_path, no_network):
    folder = write_items(tmp_path / "data", {"piqa": ITEMS["piqa"]})
    plain = folder / "piqa" / "validation.jsonl"
    (folder / "piqa" / "validation.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    result = evaluate(by_length(-1), choose(["piqa"]), data_dir=folder)
    assert result["tasks"]["piqa"]["acc"] == 0.5
    assert [path.name for path in folder.rglob("*")] == ["piqa", "validation.jsonl.gz"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real benchmark files are not at hand")
def test_slices_of_the_real_files(tmp_path, no_network):
    """A reference computed here from the records themselves: the shortest choice in tokens, first among equals."""
    names = [name for name in BENCHMARKS if (SHARED / name).is_dir()]
    records = {}
    for name in names:
        with open(SHARED / name / f"{SPLITS.get(name, 'validation')}.jsonl", encoding="utf-8") as file:
            records[name] = [json.loads(line) for line in itertools.islice(file, 8)]
    folder = write_items(tmp_path / "data", records)
    result = evaluate(by_length(-1), choose(names), data_dir=folder)
    tokenizer = load_tokenizer("tiny")
    for name in names:
        right = 0
        for record in records[name]:
            prompt, choices, gold = expected_prompt(name, record)
            context = len(tokenizer.encode(prompt))
            lengths = [len(tokenizer.encode(f"{prompt} {choice}")) - context for choice in choices]
            right += lengths.index(min(lengths)) == gold
        assert result["tasks"][name]["acc"] == right / 8


def expected_prompt(name, record):
    """Prompt, choices and the right one, as the harness's task files have them."""
    if name == "piqa":
        return f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], record["label"]
    if name == "headqa_en":
        answers = [answer["atext"] for answer in record["answers"]]
        return f"Question: {record['qtext']}\nAnswer:", answers, record["ra"] - 1
    gold = record["choices"]["label"].index(record["answerKey"].strip())
    if name == "openbookqa":
        return record["question_stem"], record["choices"]["text"], gold
    return f"Question: {record['question']}\nAnswer:", record["choices"]["text"], gold


def test_a_real_model_gives_the_same_scores_in_any_batch(checkpoint, tmp_path, no_network):
    from spikeopd.evaluation.scoring import Limits

    folder = write_items(tmp_path / "data")
    model = open_model(str(checkpoint))
    assert model.about["kind"] == "student"
    tasks = choose(["hellaswag", "winogrande"])
    results = [
        evaluate(model, tasks, data_dir=folder, limits=limits)["tasks"] for limits in (None, Limits(sequences=1))
    ]
    assert results[0] == results[1]


def test_answers_that_flip_by_hand():
    ours = [(0, True), (1, False), (2, True), (3, False), (0, False)]
    theirs = [(0, True), (2, True), (1, False), (1, False), (0, False)]
    assert flips(ours, theirs) == {"questions": 5, "flips": 3, "right_to_wrong": 1, "wrong_to_right": 1}


def test_a_model_against_another(tmp_path, no_network):
    """The shortest choice against the longest: every answer flips but WinoGrande's, where lengths tie."""
    folder = write_items(tmp_path / "data")

    def load(name: str) -> Model:
        return replace(by_length(-1 if name == "short" else +1), about={"shape": {}})

    told = report("short", [(None, "short")], load, choose(["piqa", "winogrande"]), data_dir=folder, beside="none",
                  against="long")  # fmt: skip
    (run,) = told.summary["runs"]
    assert run["against"]["tasks"]["piqa"] == {
        "questions": 2, "flips": 2, "right_to_wrong": 1, "wrong_to_right": 1,
    }  # fmt: skip
    assert run["against"]["tasks"]["winogrande"]["flips"] == 0 and "answers" not in run
    assert "short against long: 2 of 4 answers flip (50.0 %), 1 from right to wrong, 1 from wrong to right" in told.text
    plain = report("short", [(None, "short")], load, choose(["piqa"]), data_dir=folder, beside="none")
    assert "against" not in plain.summary["runs"][0] and "flip" not in plain.text


def test_missing_files_are_all_named_with_their_origin(tmp_path):
    folder = write_items(tmp_path / "data")
    shutil.rmtree(folder / "boolq")
    shutil.rmtree(folder / "arc_challenge")
    with pytest.raises(InputError) as caught:
        data_files(folder, choose(None))
    message = str(caught.value)
    assert "lacks 2 of 8 tasks" in message and "\n" not in message
    for part in ("boolq/validation.jsonl", "arc_challenge/test.jsonl.gz", "aps/super_glue boolq",
                 "https://huggingface.co/datasets/allenai/ai2_arc", "--tasks arc_easy,winogrande,piqa"):  # fmt: skip
        assert part in message
    with pytest.raises(InputError, match="no such folder"):
        data_files(tmp_path / "nowhere", choose(None))


def test_unsuitable_records_are_refused_with_the_line(tmp_path):
    folder = write_items(tmp_path / "data", {"boolq": [{"question": "q", "passage": "p", "answer": True}]})
    with pytest.raises(
        InputError, match=r"validation\.jsonl:1: no field 'label'; boolq needs question, passage, label"
    ):
        data_files(folder, choose(["boolq"]))
    (folder / "boolq" / "validation.jsonl").write_text("not json\n")
    with pytest.raises(InputError, match=r"validation\.jsonl:1: not a JSON object"):
        data_files(folder, choose(["boolq"]))


def test_a_damaged_line_further_down_is_an_error_of_the_file(tmp_path, no_network):
    folder = write_items(tmp_path / "data", {"piqa": ITEMS["piqa"]})
    with open(folder / "piqa" / "validation.jsonl", "a") as file:
        file.write('{"goal": "cut\n')
    with pytest.raises(InputError, match=r"validation\.jsonl: not all are readable JSON lines"):
        evaluate(by_length(-1), choose(["piqa"]), data_dir=folder)


def test_unknown_tasks_and_seeds_without_a_place_for_them():
    with pytest.raises(ConfigError, match="no benchmark 'mmlu'; there is arc_easy"):
        choose(["piqa,mmlu"])
    assert [b.name for b in choose(["piqa", "arc_easy"])] == ["arc_easy", "piqa"]  # the paper's order
    assert models_of("runs/a-{seed}", [3, 5]) == [(3, "runs/a-3"), (5, "runs/a-5")]
    with pytest.raises(ConfigError, match=r"write \{seed\} where their paths differ"):
        models_of("runs/a", [0, 1])
    with pytest.raises(ConfigError, match=r"\{seed\} needs --seeds"):
        models_of("runs/{seed}", None)


def test_three_seeds_by_hand():
    runs = [{"tasks": {"piqa": {"acc": a, "acc_norm": n}, "boolq": {"acc": b}}}
            for a, n, b in ((0.5, 0.6, 0.1), (0.6, 0.7, 0.2), (0.7, 0.8, 0.3))]  # fmt: skip
    summary = aggregate(runs, "acc")
    assert summary["tasks"]["piqa"] == {"mean": pytest.approx(0.6), "sd": pytest.approx(0.1)}
    assert summary["average"] == {"mean": pytest.approx(0.4), "sd": pytest.approx(0.1)}
    assert aggregate(runs, "acc_norm")["average"]["mean"] == pytest.approx(0.45)  # BoolQ has acc only
    assert aggregate(runs[:1], "acc")["average"]["sd"] is None
    text = table("ours", summary, paper.rows("0.125B", {}))
    assert "60.0±10.00" in text and "40.0±10.00" in text
    assert "paper: SpikeOPD 0.125B" in text and "51.9" in text  # the mean of 55.3 and 48.5


def test_the_papers_rows_are_consistent_with_themselves():
    for row in (*paper.MAIN, *paper.CONTROLLED):
        assert sum(row.accuracies) / 8 == pytest.approx(row.average, abs=0.0501)
    assert len(paper.MAIN) == 11 and len(paper.CONTROLLED) == 8
    assert paper.scale_of({"hidden_size": 768, "num_hidden_layers": 12}) == "0.125B"
    methods = [row.method for row in paper.rows("auto", {"hidden_size": 2048, "num_hidden_layers": 24})]
    assert methods == ["OPT Teacher", "KD", "SpikeOPD"]
    assert paper.rows("none", {}) == () and paper.rows("controlled", {}) == paper.CONTROLLED


@pytest.mark.parametrize("name", ITEMS)
def test_no_benchmark_can_train_a_model(name, tmp_path):
    """Neither where evaluation looks for it, nor under another name."""
    path = write_items(tmp_path / "data") / name / f"{SPLITS.get(name, 'validation')}.jsonl"
    with pytest.raises(InputError, match="must never train a model"):
        open_source(f"jsonl:{path}")
    hidden = tmp_path / "corpus.jsonl"
    hidden.write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="must never train a model"):
        list(open_source(f"jsonl:{hidden}#{next(iter(ITEMS[name][0]))}").documents("all"))
