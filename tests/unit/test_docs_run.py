"""Every command and every piece of Python in README's and docs' blocks is run, or says on the page why not.

They run in the order of their page, in a folder with what the pages speak of, made small: the words of `SMALL` are
appended. The quick ones run always, whole pages in the slow suite. Commands in running text are parsed (test_docs.py).
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.doc_blocks import INSTALLING, MODULES, PAGES, ROOT, Step, steps
from tests.evaluation_items import write_items

TOY = (
    "stage1.updates=2 stage1.deploy_updates=1 stage2.updates=1 data.sequence_length=16 stage2.prompt_length=8 "
    "stage2.max_completion_length=4 model.num_hidden_layers=1 stage2.spike_layers=[1] train.threads=1"
)
SMALL = {
    ("spikeopd-train", "--config"): TOY,
    ("spikeopd-train", "tokenizer"): "--vocab-size 300 --source text:PATH",
    ("spikeopd-train", "teacher"): "--updates 1",
    ("spikeopd-export",): "--evaluation-tokens 64 --verification-tokens 8",
    ("spikeopd-export", "map"): "",
    ("spikeopd-run-lava",): "--max-new-tokens 4",
    ("spikeopd-bench",): "--rounds 1 --decode 2 --context 8 --batch 1 --prompt-length 8",
    (
        "spikeopd-eval",
        "rollouts",
    ): "--num-prompts 2 --prompt-length 16 --max-new-tokens 4",
    ("spikeopd-eval", "perplexity"): "--max-tokens 300 --split all",
    ("spikeopd-eval", "zeroshot"): "--tasks piqa --limit 1",
    ("spikeopd-eval", "diagnose"): "--num-prompts 2 --prompt-length 8 --max-new-tokens 4",
}
# Pages whose Python is run by a test of its own, or is the same as on one of those.
ELSEWHERE = {
    "api.md": "test_api_docs.py",
    "adding_things.md": "test_adding_things.py",
    "README.md": "test_api_docs.py: the same calls on a toy run",
    "quickstart.md": "the same",
    "serve.md": "test_serve.py: the same calls of OpenAI's client",
    "lava.md": "tests/lava: its interpreter is slow to start and to leave",
}
QUICK = (
    "spikeopd-energy",
    "spikeopd-run-lava stories",
    "spikeopd-study --list",
    "spikeopd-train --config opt-125m --plan",
)


def identity(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def small(words: list[str]) -> list[str]:
    """The words of a command, and what makes it small."""
    if "--plan" in words or "--list" in words:
        return words
    found = SMALL.get(tuple(words[:2]), SMALL.get((words[0],), ""))
    if words[0] == "spikeopd-export" and "sanafe" in words:
        found = "--context 4"
    return [*words, *found.split()]


def run(words: list[str]) -> None:
    if words[0] == "spikeopd-serve":
        serve(words)
        return
    stdin, sys.stdin = sys.stdin, io.StringIO("The list\n")
    try:
        code = import_module(MODULES[words[0]]).main(small(words)[1:])
    finally:
        sys.stdin = stdin
    assert code == 0, " ".join(words)


def serve(words: list[str]) -> None:
    code = f"import sys; from {MODULES[words[0]]} import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words[1:], "--port", "0"], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert child.stderr is not None
    said = ""
    while "http://" not in said:
        line = child.stderr.readline()
        assert line, said
        said += line
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) in (0, 130), said


def try_page(page: Path, chosen: list[Step]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    if any(step.text for step in chosen):
        exec("import energy, export, neuro_sim, spikeopd", names)  # as the pages do once, at their top
    for step in chosen:
        if step.text:
            exec(compile(step.text, identity(page), "exec"), names)  # noqa: S102 - our own page
        else:
            run(step.words)


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for step in steps(page):
        known = step.text or step.words[0] in (*MODULES, *INSTALLING)
        assert step.reason or known, f"{page.name}: {' '.join(step.words)}: mark it, or teach this test to run it"


def test_the_quick_commands_of_all_pages_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_module("energy.cli").main(["example"]) == 0
    tried = 0
    for page in PAGES:
        for step in steps(page):
            line = " ".join(step.words)
            later = {"student.json", "twin.json", "run.json", "demo/run.json"} & set(step.words)  # made by slower ones
            if not step.reason and line.startswith(QUICK) and not later:
                run(step.words)
                tried += 1
    assert tried >= 12 and "pJ" in capsys.readouterr().out


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """What the pages speak of: runs, bundles, texts, by the names that they use, placeholders included."""
    folder = tmp_path_factory.mktemp("world")
    text = "The list is a function of the class. It returns the following values.\n"
    (folder / "PATH").write_text(text * 80)
    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": f"{n}: {text * 8}"}) + "\n" for n in range(99)))
    (folder / "prompts.jsonl").write_text('{"prompt": "The list"}\n{"prompt": "The class"}\n')
    write_items(folder / "DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for recipe, place in (("tiny", "runs/tiny"), ("tiny-twin", "runs/twin")):
            run(["spikeopd-train", "--config", recipe, "--output", place, "--quiet"])
        run(["spikeopd-export", "runs/tiny", "--output", "bundle"])
        run(["spikeopd-export", "runs/twin", "--output", "twin"])
        run(["spikeopd-run-lava", "bundle", "--prompt", "The list", "--output", "student.json"])
        run(["spikeopd-run-lava", "twin", "--prompt", "The list", "--output", "twin.json"])
    shutil.copytree(ROOT / "spikeopd" / "assets" / "tiny", folder / "DIR-OR-NAME")
    (folder / "MODEL").symlink_to("runs/tiny")
    (folder / "BUNDLE").symlink_to("bundle")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=identity)
def test_a_page_runs_from_top_to_bottom(page: Path, world: Path, tmp_path, monkeypatch) -> None:
    here = tmp_path / "here"
    shutil.copytree(world, here, symlinks=True)
    for made in {word for step in steps(page) for word in following(step.words, "--output")}:
        if (here / made).is_dir() and (here / made / "config.yaml").exists():
            shutil.rmtree(here / made)  # the page makes it itself
    monkeypatch.chdir(here)
    chosen = [step for step in steps(page) if not step.reason and (step.text or step.words[0] in MODULES)]
    try_page(page, [step for step in chosen if not step.text or page.name not in ELSEWHERE])


def following(words: list[str], option: str) -> list[str]:
    return [after for before, after in zip(words, words[1:], strict=False) if before == option]
