"""Text sources: what they yield, how they are divided, and what they say when they cannot."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from spikeopd.errors import BackendMissing, InputError
from spikeopd.text import python_docs
from spikeopd.text.sources import in_split, open_source


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def documents() -> dict[str, list[str]]:
    source = open_source("python-docs")
    return {split: list(source.documents(split)) for split in ("train", "validation")}


def test_python_docs_is_english_prose_of_useful_size(documents):
    train, validation = documents["train"], documents["validation"]
    size = sum(map(len, train)) + sum(map(len, validation))
    assert 1_500_000 < size < 2_600_000
    assert 0.03 < sum(map(len, validation)) / size < 0.08
    words = "\n".join(train).lower().split()
    assert words.count("the") / len(words) > 0.03


def test_python_docs_parts_share_no_document_and_no_paragraph(documents):
    def paragraphs(documents):
        return {p for d in documents for p in d.split("\n\n") if len(" ".join(p.split())) >= python_docs.MIN_PARAGRAPH}

    assert not paragraphs(documents["train"]) & paragraphs(documents["validation"])
    assert all(document.strip() == document.strip("\n") or document[0] == " " for document in documents["validation"])
    assert not any(line != line.rstrip() for document in documents["validation"] for line in document.splitlines())


def test_python_docs_reads_without_importing():
    """Modules with side effects must never run: `this` prints, `antigravity` opens a browser."""
    for module in ("this", "antigravity", "pydoc_data.topics"):
        sys.modules.pop(module, None)
    library = python_docs.standard_library()
    for name in ("this", "antigravity"):
        python_docs._docstrings(library / f"{name}.py")
    assert python_docs._topics(library / "pydoc_data/topics.py")["assert"]
    assert not {"this", "antigravity", "pydoc_data.topics"} & set(sys.modules)


def test_python_docs_leaves_out_tests_and_installed_packages():
    folders = {part for path in python_docs.modules(python_docs.standard_library()) for part in path.parent.parts}
    assert not folders & {"test", "tests", "idlelib", "site-packages"}


def test_docstrings_are_dedented_in_order_and_deduplicated(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text(
        "topics = {'long': 'A paragraph that several topics of the reference share.\\n\\nAnd one of the long topic.',\n"
        "          'short': 'A paragraph that several topics of the reference share.'}\n"
    )
    (tmp_path / "module.py").write_text(
        '"""The module says something that is long enough to keep."""\n'
        "if True:\n"
        "    class Thing:\n"
        '        """A thing of which a good deal can be said.\n\n'
        "        >>> Thing()\n"
        "        something\n\n"
        "            indented part of the description\n"
        "        =================\n"
        '        """\n'
        "        def method(self):\n"
        '            """Tiny."""\n'
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    found = dict(python_docs.documents(tmp_path))
    assert list(found) == ["topic:long", "module:module"]
    assert found["module:module"] == (
        "The module says something that is long enough to keep.\n\n"
        "A thing of which a good deal can be said.\n\n"
        "    indented part of the description"
    )


def test_python_docs_fingerprint_follows_the_library(tmp_path, monkeypatch):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text("topics = {}\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(python_docs, "standard_library", lambda: tmp_path)
    before = open_source("python-docs").fingerprint()
    assert before == open_source("python-docs").fingerprint()
    (tmp_path / "a.py").write_text("x = 2\n")
    assert open_source("python-docs").fingerprint() != before


def test_python_docs_without_a_complete_library(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match=r"has no pydoc_data/topics.py; install the complete Python standard library"):
        next(open_source("python-docs").documents("train"))


def test_split_is_deterministic_exhaustive_and_about_one_in_twenty():
    keys = [f"document {n}" for n in range(4000)]
    validation = [key for key in keys if in_split(key, "validation")]
    assert all(in_split(key, "train") != in_split(key, "validation") and in_split(key, "all") for key in keys)
    assert 120 < len(validation) < 280
    # Written down once: another Python or machine must divide the same way.
    assert validation[:3] == ["document 6", "document 10", "document 39"]


def test_text_file_is_one_document_whose_end_is_validation(tmp_path):
    content = "".join(f"line {n}\n" for n in range(1000))
    (tmp_path / "a.txt").write_text(content)
    source = open_source(f"text:{tmp_path / 'a.txt'}")
    (train,), (validation,) = source.documents("train"), source.documents("validation")
    assert train + validation == content == next(source.documents("all"))
    assert validation.startswith("line ") and 0.04 < len(validation) / len(content) < 0.06


def test_text_without_line_ends_is_divided_too(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 100)
    source = open_source(f"text:{tmp_path / 'a.txt'}")
    assert len(next(source.documents("validation"))) == 25


def test_folder_glob_and_gzip_give_sorted_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert list(open_source(f"text:{tmp_path}").documents("all")) == ["first", "second", "third"]
    assert list(open_source(f"text:{tmp_path}/[ab].txt").documents("all")) == ["first", "second"]


def test_jsonl_fields_and_split(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {n}", "body": f"body {n}"} for n in range(200)])
    source = open_source(f"jsonl:{path}")
    train, validation = list(source.documents("train")), list(source.documents("validation"))
    assert sorted(train + validation) == sorted(f"document {n}" for n in range(200))
    assert "document 6" in validation
    assert next(open_source(f"jsonl:{path}#body").documents("all")) == "body 0"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the train extra brings pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two", ""], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert list(open_source(f"parquet:{tmp_path / 'a.parquet'}").documents("all")) == ["one", "two"]
    with pytest.raises(
        InputError, match=r"a.parquet: no field 'body' \(there is: text, n\); name it: parquet:.*#FIELD"
    ):
        next(open_source(f"parquet:{tmp_path / 'a.parquet'}#body").documents("all"))
    with pytest.raises(InputError, match=r"row 1: field 'n' holds int, not text"):
        next(open_source(f"parquet:{tmp_path / 'a.parquet'}#n").documents("all"))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match="bad.parquet: not a readable Parquet file"):
        next(open_source(f"parquet:{tmp_path / 'bad.parquet'}").documents("all"))


def test_fingerprint_follows_content_and_field_not_the_path(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": "same", "body": "b"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"text": "same", "body": "b"}])
    assert open_source(f"jsonl:{one}").fingerprint() == open_source(f"jsonl:{two}").fingerprint()
    assert open_source(f"jsonl:{one}#body").fingerprint() != open_source(f"jsonl:{one}").fingerprint()
    assert open_source(f"text:{one}").fingerprint() != open_source(f"jsonl:{one}").fingerprint()
    write_jsonl(two, [{"text": "other", "body": "b"}])
    assert open_source(f"jsonl:{one}").fingerprint() != open_source(f"jsonl:{two}").fingerprint()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikipedia", r"text source 'wikipedia' is not known; use one of python-docs, text:…, jsonl:…"),
        ("text:", r"text source 'text:' is not known"),
        ("text:/no/such/file.txt", r"text:/no/such/file.txt: no such file /no/such/file.txt; check the path"),
        ("text:/no/such/*.txt", r"no file matches /no/such/\*.txt; check the pattern and quote it"),
        ("hf:fineweb", r"expected hf:OWNER/NAME\[/CONFIG\], e.g. hf:HuggingFaceFW/fineweb-edu/sample-10BT"),
    ],
)
def test_names_that_cannot_be_opened(name, message):
    with pytest.raises(InputError, match=message):
        open_source(name)


def test_empty_and_damaged_files(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty.txt is empty; give a file with text in it"):
        open_source(f"text:{tmp_path / 'empty.txt'}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"the folder .*folder holds no .jsonl or .jsonl.gz or .ndjson file"):
        open_source(f"jsonl:{tmp_path / 'folder'}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(InputError, match=r"latin.txt: not UTF-8 text \(invalid continuation byte at byte 3\)"):
        next(open_source(f"text:{tmp_path / 'latin.txt'}").documents("all"))
    (tmp_path / "bad.txt.gz").write_bytes(b"plain")
    with pytest.raises(InputError, match=r"bad.txt.gz: damaged gzip file"):
        next(open_source(f"text:{tmp_path / 'bad.txt.gz'}").documents("all"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "ok"', r"a.jsonl:2: not a JSON object \(.*\); one object per line is expected"),
        ("[1, 2]", r"a.jsonl:2: expected a JSON object, got list"),
        ('{"body": "x"}', r"a.jsonl:2: no field 'text' \(there is: body\); name it: jsonl:.*a.jsonl#FIELD"),
        ('{"text": 3}', r"a.jsonl:2: field 'text' holds int, not text"),
        ("{}", r"a.jsonl:2: no field 'text' \(there is: no field\)"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        list(open_source(f"jsonl:{tmp_path / 'a.jsonl'}").documents("all"))


class FakeHub:
    """Stands for `datasets` and `huggingface_hub`, so that streaming is tested without a network."""

    def __init__(self, rows, failure=None):
        self.rows, self.failure, self.asked = rows, failure, None

    def HfApi(self):  # noqa: N802 - the real name
        return self

    def dataset_info(self, name, revision, timeout):
        if self.failure:
            raise self.failure

    def load_dataset(self, name, config, *, split, streaming, revision):
        self.asked = (name, config, split, streaming, revision)
        return iter(self.rows)


def use_hub(monkeypatch, hub):
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_hub_dataset_streams_the_train_part(monkeypatch):
    hub = FakeHub([{"text": f"document {n}"} for n in range(50)])
    use_hub(monkeypatch, hub)
    source = open_source("hf:HuggingFaceFW/fineweb-edu/sample-10BT@v1")
    assert source.unbounded
    assert list(source.documents("validation")) == ["document 6", "document 10", "document 39"]
    assert hub.asked == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True, "v1")
    assert open_source("hf:a/b").fingerprint() != open_source("hf:a/b@v1").fingerprint()


def test_hub_dataset_errors_are_one_line(monkeypatch):
    use_hub(monkeypatch, FakeHub([], failure=ConnectionError("no route\nto host")))
    with pytest.raises(InputError) as caught:
        next(open_source("hf:a/b").documents("train"))
    assert str(caught.value) == (
        "hf:a/b: cannot be read from the Hugging Face hub (ConnectionError: no route); "
        "check the name and the network, or give local files with text:, jsonl: or parquet:"
    )
    use_hub(monkeypatch, FakeHub([]))
    with pytest.raises(InputError, match="hf:a/b: the dataset is empty; check the configuration name"):
        next(open_source("hf:a/b").documents("train"))
    use_hub(monkeypatch, FakeHub([{"body": "x"}]))
    with pytest.raises(InputError, match=r"hf:a/b row 1: no field 'text' \(there is: body\); name it: hf:a/b#FIELD"):
        next(open_source("hf:a/b").documents("train"))


def test_missing_backends_name_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BackendMissing, match=r"pip install .*\[train\]'"):
        next(open_source("hf:a/b").documents("train"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(BackendMissing, match=r"Parquet needs pyarrow: pip install .*\[train\]'"):
        next(open_source(f"parquet:{tmp_path / 'a.parquet'}").documents("train"))
