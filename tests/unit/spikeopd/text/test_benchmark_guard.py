"""No benchmark may train a model: refused by path, by resolved path and by the shape of its records."""

from __future__ import annotations

import json

import pytest

from spikeopd.errors import InputError
from spikeopd.text.guard import benchmark_name
from spikeopd.text.sources import open_source

RECORDS = {
    "arc": {"id": "1", "question": "Which?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"},
    "arc_original": {"id": "1", "question": {"stem": "Which?", "choices": []}, "answerKey": "A"},
    "openbook": {"id": "1", "question_stem": "Because", "choices": {"text": ["a"]}, "answerKey": "A"},
    "pi": {"goal": "How?", "sol1": "a", "sol2": "b", "label": 0},
    "wino": {"sentence": "The _ is", "option1": "a", "option2": "b", "answer": "1"},
    "bool": {"question": "is it", "passage": "It is.", "answer": True},
    "super_bool": {"question": "is it", "passage": "It is.", "idx": 0, "label": 1},
    "hella": {"ind": 1, "ctx": "A man", "endings": ["a", "b"], "label": "0"},
    "head": {"name": "x", "qid": 1, "qtext": "What?", "ra": 1, "answers": [{"aid": 1, "atext": "a"}]},
}
REFUSED = (
    r"this is evaluation data \(.+\) and must never train a model; give another text source, and use spikeopd-eval"
)


@pytest.mark.parametrize(
    "path",
    [
        "/d/arc_easy/test.jsonl", "/d/ARC-Challenge/train.jsonl", "/d/ai2_arc/x.jsonl", "/d/winogrande_xl.jsonl",
        "/d/BoolQ/dev.jsonl", "piqa.jsonl", "/d/hellaswag/train.jsonl", "/d/OpenBookQA-V1/x.jsonl",
        "/d/headqa_en/x.jsonl", "head_qa", "ybisk/piqa", "super_glue/boolq", "winogrande1.1/train.jsonl",
        r"C:\data\hellaswag\a.jsonl",
    ],
)  # fmt: skip
def test_benchmark_paths_are_recognised(path):
    assert benchmark_name(path)


@pytest.mark.parametrize(
    "path", ["/d/architecture/arc.txt", "fineweb", "/d/arcade_easyread.txt", "/d/swag.txt", "/d/heading.txt"]
)
def test_other_paths_are_not(path):
    assert benchmark_name(path) is None


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_benchmark_folder_is_refused_before_reading(tmp_path, kind):
    folder = tmp_path / "piqa"
    folder.mkdir()
    (folder / f"a.{kind}").write_text("{}")
    with pytest.raises(InputError, match=REFUSED):
        open_source(f"{kind}:{folder / f'a.{kind}'}")
    with pytest.raises(InputError, match=REFUSED):  # whether or not it exists
        open_source(f"{kind}:/nowhere/boolq/a.{kind}")


def test_a_link_to_a_benchmark_and_a_glob_over_it_are_refused(tmp_path):
    folder = tmp_path / "hellaswag"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "innocent.jsonl").symlink_to(folder / "train.jsonl")
    for name in ("innocent.jsonl", "*/*.jsonl", "."):
        with pytest.raises(InputError, match=REFUSED):
            open_source(f"jsonl:{tmp_path / name}")


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_renamed_benchmark_files_are_refused_by_their_records(tmp_path, record):
    line = json.dumps(record)
    field = next(key for key, value in record.items() if isinstance(value, str))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({field: "harmless"}) + "\n" + line + "\n")
    (tmp_path / "corpus.txt").write_text(f"Some prose first.\n{line}\n")
    (tmp_path / "array.txt").write_text(json.dumps([record], indent=1))
    for name in (
        f"jsonl:{tmp_path / 'corpus.jsonl'}#{field}",
        f"text:{tmp_path / 'corpus.txt'}",
        f"text:{tmp_path / 'array.txt'}",
    ):
        with pytest.raises(InputError, match=REFUSED):
            list(open_source(name).documents("train"))


def test_benchmark_columns_in_parquet_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the train extra brings pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"goal": ["x"], "sol1": ["a"], "sol2": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=REFUSED):
        list(open_source(f"parquet:{tmp_path / 'a.parquet'}#goal").documents("train"))


@pytest.mark.parametrize(
    "name", ["hf:ybisk/piqa", "hf:allenai/ai2_arc/ARC-Easy", "hf:aps/super_glue/boolq", "hf:dvilares/head_qa"]
)
def test_benchmark_datasets_on_the_hub_are_refused(name):
    with pytest.raises(InputError, match=REFUSED):
        open_source(name)
