"""spikeopd-run-lava from the outside, on a bundle whose model comes from memory."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from export.bundle_writer import BundleOptions, write_bundle
from neuro_sim import backends, cli
from neuro_sim.backends import Backend
from neuro_sim.dense import DenseDecoder
from neuro_sim.display import energy, status_line
from spikeopd.contracts import Activity, SpikeModel
from spikeopd.contracts import bundle as bundle_module
from spikeopd.contracts.run import read_run
from spikeopd.errors import BackendMissing
from spikeopd.files import sha256

Hold = Callable[[SpikeModel], None]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_help_is_fast_and_ends_with_examples() -> None:
    code = "import sys, neuro_sim.cli as c; c.build_parser().format_help(); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    help_text = cli.build_parser().format_help()
    assert help_text.rstrip().splitlines()[-1].strip().startswith("spikeopd-run-lava bundle --backend event")


def test_text_goes_to_stdout_and_the_rest_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--backend", "event", "--prompt", "The cat", "--max-new-tokens", 5) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "tok/s" not in out
    assert "SOPs/token" in err and re.search(r" \d[\d.]* [pnµ]J/token", err) and "rate 0." in err
    assert run(folder, "--backend", "event", "--prompt", "The cat", "--max-new-tokens", 5, "--quiet") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("pj", "shown"), [(0.0, "0 pJ"), (999.4, "999.4 pJ"), (1.316e6, "1.316 µJ"), (2.5e9, "2.5 mJ")]
)
def test_energy_is_shown_in_the_largest_unit_that_fits(pj: float, shown: str) -> None:
    assert energy(pj) == shown


def test_what_ends_early_or_after_one_token_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (folder, "--backend", "event", "--prompt-tokens", "1,2", "--ignore-eos", "--max-new-tokens")
    assert run(*common, 1) == 0
    status = capsys.readouterr().err
    assert status.startswith("1 new token  prompt ") and "tok/s" in status and "(prompt" not in status
    assert run(*common, 1000) == 0
    err = capsys.readouterr().err
    assert "prompt 1: " in err and "new tokens filled its context of" in err


@pytest.mark.parametrize("width", [120, 80, 40, 5])
def test_the_status_line_fits_the_terminal(width, monkeypatch):
    numbers = {
        "prompt_tokens_per_second": 12345.0, "tokens_per_second": 1234.5, "generated_tokens": 1024.0,
        "sops_per_token": 123.4e6, "pj_per_token": 123.4e6, "firing_rate": 0.17,
    }  # fmt: skip
    monkeypatch.setattr("neuro_sim.display.summary", lambda result: numbers)
    line = status_line(SimpleNamespace(graded=False), width)
    assert len(line) < max(width, 14) and "1234.5 tok/s" in line
    assert ("prompt" in line) == (width == 120) and ("SOPs" in line) == (width >= 80)


def test_a_checkpoint_is_told_to_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "stage1" / "final"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text("{}")
        assert run(tmp_path, "--prompt-tokens", "1") == 2
        assert "a checkpoint, not a bundle; export it first: spikeopd-export" in capsys.readouterr().err
        (place / "config.json").unlink()


def test_json_and_run_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.json"
    options = [
        "--prompt",
        "One",
        "--prompt",
        "Two",
        "--max-new-tokens",
        4,
        "--json",
        "--output",
        output,
        "--ignore-eos",
    ]
    assert run(folder, "--backend", "event", *options, "--threads", 2) == 0
    printed, written = json.loads(capsys.readouterr().out), read_run(output)
    assert [s["generated_tokens"] for s in printed["sequences"]] == [
        s["generated_tokens"] for s in written["sequences"]
    ]
    assert written["sequences"][0]["prompt_tokens"][0] == 0  # the begin token the manifest names
    assert written["timing"]["threads"] == 2 and written["bundle"]["name"] == "bundle"
    assert run(folder, "--backend", "dense", *options) == 0
    other = read_run(output)
    assert other["phases"] == written["phases"] and other["sequences"] == written["sequences"]


def test_prompts_from_file_stdin_and_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("abc")
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    common = ["--backend", "event", "--max-new-tokens", 2, "--json"]
    assert run(folder, *common) == 0
    assert run(folder, *common, "--prompt-file", tmp_path / "prompt.txt") == 0
    assert run(folder, *common, "--prompt", "abc") == 0
    assert run(folder, *common, "--prompt-tokens", "0,67 68,69") == 0
    sequences = [json.loads(line)["sequences"] for line in capsys.readouterr().out.splitlines()]
    assert sequences[0] == sequences[1] == sequences[2]
    assert sequences[3][0]["prompt_tokens"] == [0, 67, 68, 69]


def test_same_seed_same_text_on_any_threads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for threads, seed in ((1, 1), (2, 1), (1, 2)):
        run(folder, "--backend", "event", "--prompt", "x", "--temperature", 1.0, "--seed", seed, "--threads", threads,
            "--max-new-tokens", 12, "--ignore-eos", "--quiet")  # fmt: skip
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_trace_and_plot(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    assert run(folder, "--backend", "event", "--prompt", "hi", "--max-new-tokens", 3, "--output", output,
               "--trace", "embed,0.a,*.h", "--quiet") == 0  # fmt: skip
    assert read_run(output)["trace"] == "run.trace.npz"
    with np.load(tmp_path / "run.trace.npz") as file:
        assert set(file.files) == {"0/tokens", "0/embed", "0/0.a", "0/0.h", "0/1.h"}
        assert file["0/0.a"].shape == (5, 4, 2, 5) and file["0/1.h"].shape == (5, 4, 16)
    assert (tmp_path / "run.trace.png").stat().st_size > 1000


def test_each_run_has_a_trace_of_its_own(folder: Path, tmp_path: Path) -> None:
    common = ["--backend", "event", "--max-new-tokens", 2, "--trace", "embed", "--quiet"]
    for name in ("one", "two"):
        assert run(folder, *common, "--prompt", name, "--output", tmp_path / f"{name}.json") == 0
    for name in ("one", "two"):
        written = read_run(tmp_path / f"{name}.json")
        assert written["trace"] == f"{name}.trace.npz"
        assert written["trace_sha256"] == sha256(tmp_path / written["trace"])


def test_a_trace_below_the_folder_of_the_run_is_named_and_one_elsewhere_is_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spikeopd.contracts.run import load_run

    output = tmp_path / "out" / "run.json"
    (output.parent / "deep").mkdir(parents=True)
    common = ["--backend", "event", "--prompt", "a", "--max-new-tokens", 2, "--trace", "embed", "--quiet"]
    assert run(folder, *common, "--output", output, "--trace-file", output.parent / "deep" / "t.npz") == 0
    assert read_run(output)["trace"] == "deep/t.npz"
    assert load_run(output).trace == output.parent / "deep" / "t.npz"
    assert run(folder, *common, "--output", output, "--trace-file", tmp_path / "t.npz") == 0
    assert "trace" not in read_run(output) and (tmp_path / "t.npz").is_file()
    assert "is not below the folder" in capsys.readouterr().err


def test_verify_passes_and_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(folder, "--backend", "event", "--prompt", "hi", "--max-new-tokens", 3, "--verify") == 0
    assert "verified: event = dense" in capsys.readouterr().err
    assert run(folder, "--backend", "dense", "--prompt", "hi", "--max-new-tokens", 3, "--verify") == 0
    assert "verified: dense = event" in capsys.readouterr().err

    def wrong_block(self, activity, index, layer, x, residual):
        return original(self, activity, index, layer, x ^ (np.arange(x.shape[1]) == 3), residual)

    original = DenseDecoder._block
    monkeypatch.setattr(DenseDecoder, "_block", wrong_block)
    assert run(folder, "--backend", "event", "--prompt", "hi", "--max-new-tokens", 3, "--verify") == 3
    assert "event and dense differ first at sequence 0, token 0, layer 0, site" in capsys.readouterr().err


def test_interrupt_leaves_a_partial_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(DenseDecoder):
        def step(self, token: int) -> tuple[np.ndarray, Activity]:
            if self.position == 6:
                raise KeyboardInterrupt
            return super().step(token)

    monkeypatch.setattr("neuro_sim.dense.DenseDecoder", Interrupted)
    output = tmp_path / "run.json"
    assert run(folder, "--backend", "dense", "--prompt", "abc", "--output", output, "--ignore-eos") == 130
    partial = read_run(output)
    assert partial["complete"] is False and partial["sequences"][0]["stopped"] == "interrupted"
    assert len(partial["sequences"][0]["generated_tokens"]) == 3
    assert "interrupted after 6 tokens; what was done is in" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_an_interrupted_verification_proves_nothing(
    precision: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: SpikeModel,
    hold: Hold,
) -> None:
    class Interrupted(DenseDecoder):
        def step(self, token: int) -> tuple[np.ndarray, Activity]:
            if self.position == 2:
                raise KeyboardInterrupt
            return super().step(token)

    if precision == "float32":  # a backend that is not the oracle, as Lava would be
        from neuro_sim.lava.precision import float_twin

        decoder = DenseDecoder(float_twin(model))
        monkeypatch.setitem(backends.BACKENDS, "lava", Backend("not Lava", lambda model, running: decoder))
    monkeypatch.setattr("neuro_sim.dense.DenseDecoder", Interrupted)
    output = tmp_path / "run.json"
    backend = "event" if precision == "int8" else "lava"
    options = ["--backend", backend, "--prompt", "abc", "--max-new-tokens", 3, "--verify", "--output", output]
    assert run(folder, *options) == 130
    err = capsys.readouterr().err
    assert "verification interrupted" in err and "verified" not in err and "differ" not in err
    assert read_run(output)["complete"] is True


class Gone(io.StringIO):
    """A stdout whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("form", [[], ["--json"], ["--prompt", "more"]])
def test_a_run_is_written_though_nobody_reads_its_text(
    form: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run.json"
    options = ["--backend", "event", "--prompt", "abc", "--max-new-tokens", 8, "--ignore-eos", "--quiet", *form]
    monkeypatch.setattr(sys, "stdout", Gone())
    assert run(folder, *options, "--output", output) == 0
    assert len(read_run(output)["sequences"][0]["generated_tokens"]) == 8
    assert run(folder, *options) == 141  # nothing else was asked for, so the run ends with its reader


def test_prompts_keep_the_order_of_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text("b")
    prompts = ["--prompt-tokens", "1,2", "--prompt-file", tmp_path / "f", "--prompt", "a", "--prompt-tokens", "3"]
    assert run(folder, "--backend", "event", *prompts, "--max-new-tokens", 1, "--json", "--quiet") == 0
    sequences = json.loads(capsys.readouterr().out)["sequences"]
    numbers = {letter: 1 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "ab"}
    assert [s["prompt_tokens"] for s in sequences] == [[1, 2], [0, numbers["b"]], [0, numbers["a"]], [3]]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_prompts_that_are_no_text(
    errors: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad").write_bytes(b"caf\xe9")
    for options in ([], ["--prompt-file", "-"], ["--prompt-file", tmp_path / "bad"], ["--prompt", "caf\udce9"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(folder, "--backend", "event", *options) == 2
        err = capsys.readouterr().err
        assert "is not UTF-8 text" in err and err.count("\n") == 1


def test_outputs_that_cannot_be_written_are_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(path: object, place: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(bundle_module, "load_bundle", loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    spikes = ["--trace", "embed", "--trace-file"]
    for options, message in (
        (["--output", "/proc/run.json"], "--output /proc/run.json: cannot be written"),
        (["--output", tmp_path], "it is a folder"),
        (["--output", ""], "it is a folder"),
        (["--output", "file.txt/run.json"], "cannot be written"),
        (["--output", "/dev/null"], "it is not a file"),
        ([*spikes, "/proc/x.npz"], "--trace-file /proc/x.npz: cannot be written"),
        ([*spikes, "pic.png"], "must end in .npz"),
        ([*spikes, "same.npz", "--output", "same.npz"], "give another name"),
        ([*spikes, "same.npz", "--output", "sub/../same.png"], "give another name"),
    ):
        assert run(folder, "--prompt", "a", *options) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    output = tmp_path / "run.json"
    common = ["--backend", "event", "--prompt", "a", "--max-new-tokens", 1, "--quiet", "--output", output]
    monkeypatch.setattr("spikeopd.contracts.save_trace", full)
    assert run(folder, *common, "--trace", "embed") == 2
    assert "run.trace.npz: cannot be written (No space left on device)" in capsys.readouterr().err
    assert "trace" not in read_run(output)  # the run is there all the same
    monkeypatch.setattr("spikeopd.contracts.write_run", full)
    assert run(folder, *common) == 2
    assert capsys.readouterr().err.endswith("run.json: cannot be written (No space left on device)\n")


def test_too_many_threads_for_the_machine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    assert run(folder, "--backend", "event", "--prompt", "a", "--threads", 200) == 2
    assert "--threads 200: this machine does not allow so many" in capsys.readouterr().err


def test_json_for_a_terminal_without_unicode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run(folder, "--backend", "event", "--prompt", "é", "--json", "--quiet", "--ignore-eos") == 0
        texts.append(json.loads(stdout.buffer.getvalue())["sequences"])
    assert texts[0] == texts[1]


def test_saturation_is_a_warning(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: SpikeModel,
    hold: Hold,
) -> None:
    from dataclasses import replace

    sites = dict(model.layers[0].sites)
    sites["q"] = replace(sites["q"], shift=15)
    layers = (replace(model.layers[0], sites=sites), *model.layers[1:])
    hold(replace(model, layers=layers))
    output = tmp_path / "run.json"
    assert run(folder, "--backend", "event", "--prompt", "abc", "--max-new-tokens", 2, "--output", output) == 0
    assert "membranes hit the 24-bit limit" in capsys.readouterr().err
    assert read_run(output)["saturations"] > 0


def test_default_backend_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BackendMissing("Lava is not installed; install it with: pip install lava-nc")

    monkeypatch.setattr("neuro_sim.lava.compat.require_lava", missing)
    assert run(folder, "--prompt", "a", "--max-new-tokens", 1) == 0
    assert "backend event: Lava is not installed" in capsys.readouterr().err
    assert run(folder, "--backend", "lava", "--prompt", "a", "--max-new-tokens", 1) == 4
    assert "pip install lava-nc" in capsys.readouterr().err
    monkeypatch.setattr(backends, "LAVA_SMALL", 10)
    assert run(folder, "--prompt", "a", "--max-new-tokens", 1) == 0
    assert "too many for Lava's pace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a", "--top-p", "2"], "top-p must be above 0"),
        (["--prompt", "a", "--threads", "0"], "--threads must be at least 1"),
        (["--prompt", "a", "--threads", "100000"], "at most 256"),
        (["--prompt", "a", "--seed", str(2**63)], "seed must lie between 0 and 2^63 - 1"),
        (["--prompt", "a", "--timeout", "0"], "--timeout must be more than 0"),
        (["--prompt", "a", "--trace", "7.q"], "trace site '7.q' does not exist"),
        (["--prompt", "a", "--trace-file", "x.npz"], "--trace-file needs --trace"),
        (["--prompt", "a" * 60], "prompt 0 has 61 tokens; this model's context holds 48"),
        (["--prompt-file", "/nonexistent"], "--prompt-file /nonexistent"),
        (["--prompt-tokens", "a,b"], "give whole numbers"),
        (["--prompt-tokens", "3,,4"], "--prompt-tokens '3,,4': give whole numbers"),
        (
            ["--prompt-tokens", "3", "--output", "rnus/run.json"],
            "--output rnus/run.json: there is no folder rnus; make it",
        ),
        (["--prompt", "a", "--precision", "float", "--backend", "event"], "runs on Lava only"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *options) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and err[0].startswith("spikeopd-run-lava: ") and message in err[0]


def test_bundle_without_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").unlink()
    assert run(folder, "--prompt", "a") == 2
    assert "no tokenizer in this bundle" in capsys.readouterr().err
    assert run(folder, "--backend", "event", "--prompt-tokens", "1,2", "--max-new-tokens", 3, "--quiet") == 0
    assert len(capsys.readouterr().out.split()) <= 3
    (folder / "tokenizer.json").write_text("{}")
    assert run(folder, "--prompt", "a") == 2
    assert "not a tokenizer" in capsys.readouterr().err


def test_float_bundle_uses_the_oracle(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: SpikeModel, hold: Hold
) -> None:
    from neuro_sim.lava.precision import float_twin

    hold(float_twin(model))
    assert run(folder, "--backend", "event", "--prompt", "a", "--max-new-tokens", 2, "--json") == 0
    out, err = capsys.readouterr()
    assert "backend dense: the event engine is for integers and this bundle is float32" in err
    assert json.loads(out)["precision"] == "float32"
    assert run(folder, "--backend", "event", "--precision", "int8", "--prompt", "a") == 2
    assert "needs an integer bundle" in capsys.readouterr().err
    assert run(folder, "--precision", "float", "--backend", "dense", "--prompt", "a", "--max-new-tokens", 1) == 0
    assert "--precision float is now called float32" in capsys.readouterr().err
    assert run(folder, "--backend", "dense", "--prompt", "a", "--verify") == 2
    out, err = capsys.readouterr()
    assert "nothing to be compared with" in err and out == ""  # said before the run, not after


def test_prompts_from_a_file_one_on_each_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('One\n\n{"prompt": "Two\\nlines"}\n')
    common = (folder, "--backend", "event", "--max-new-tokens", 4, "--json", "--seed", 5)
    assert run(*common, "--prompts", file) == 0
    lines = json.loads(capsys.readouterr().out)["sequences"]
    assert run(*common, "--prompt", "One", "--prompt", "Two\nlines") == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == lines
    for content, words in (
        ("{x\n", "line 1 begins like JSON"),
        ('{"a": 1}\n', 'no text under "prompt"'),
        ("\n", "no line"),
    ):
        file.write_text(content)
        assert run(*common, "--prompts", file) == 2 and words in capsys.readouterr().err


def test_interactive_continues_with_its_history(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (folder, "--backend", "event", "--max-new-tokens", 4, "--temperature", 1, "--ignore-eos")
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\ncd\n/new\nab\n\n/quit\nnever\n"))
    assert run(*common, "--interactive", "--quiet") == 0
    said = capsys.readouterr().out
    assert run(*common, "--prompt", "ab", "--quiet") == 0
    first = capsys.readouterr().out
    assert said.startswith(first) and said.endswith(first)  # what follows /new knows nothing of what was before
    assert run(*common, "--prompt", f"ab\n{first[:-1]}\ncd", "--quiet") == 0
    assert said == first + capsys.readouterr().out + first
    assert run(*common, "--interactive", "--json") == 2 and "drop --json" in capsys.readouterr().err


def test_a_long_talk_forgets_its_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcdefgh\n" * 12))
    assert run(folder, "--backend", "event", "--max-new-tokens", 6, "--ignore-eos", "--interactive", "--quiet") == 0


def test_sampling_comes_from_the_bundle_where_nothing_is_said(
    tmp_path: Path, model: SpikeModel, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def tokens(*more: object, generation: dict[str, object] | None = None) -> list[int]:
        options = BundleOptions(target="lava", tokenizer=tmp_path / "tokenizer.json", generation=generation or {})
        written = write_bundle(model, tmp_path / "bundle", options)
        arguments = (written, "--backend", "event", "--prompt", "ab", "--max-new-tokens", 8, "--json", *more)
        assert run(*arguments, "--ignore-eos") == 0
        return json.loads(capsys.readouterr().out)["sequences"][0]["generated_tokens"]  # type: ignore[no-any-return]

    usual = tokens("--temperature", 0.8, "--top-p", 0.95)
    assert tokens() == usual
    assert tokens(generation={"do_sample": False}) == tokens("--temperature", 0)
    hot = tokens("--temperature", 30, "--top-p", 1, "--top-k", 9)
    own = {"do_sample": True, "temperature": 30, "top_k": 9}
    assert tokens(generation=own) == hot != usual
    assert tokens("--temperature", 0.8, "--top-k", 0, "--top-p", 0.95, generation=own) == usual
    file = tmp_path / "bundle" / "manifest.json"
    file.write_text(file.read_text().replace('"temperature": 30', '"temperature": -1'))
    assert run(tmp_path / "bundle", "--prompt", "ab") == 2
    assert "field 'generation': temperature must be" in capsys.readouterr().err


def test_stop_stats_and_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (folder, "--backend", "event", "--prompt", "ab", "--max-new-tokens", 8, "--temperature", 1, "--ignore-eos")
    assert run(*common, "--quiet") == 0
    text = capsys.readouterr().out[:-1]
    stop = next(letter for letter in text[2:] if letter not in text[:2])
    assert run(*common, "--quiet", "--stop", stop, "--stop", "no such") == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"
    assert run(*common, "--stats") == 0
    err = capsys.readouterr().err
    assert re.search(r"^generation +[\d.]+ s +7 tokens fed", err, re.MULTILINE) and "qkv" in err and "layer 0" in err
    assert run(*common, "--repetition-penalty", 0) == 2 and "above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--version")
    assert re.match(r"spikeopd \d+\.\d+", capsys.readouterr().out)
