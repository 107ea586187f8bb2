"""spikeopd-bench on a small bundle: every combination once, in three forms."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from neuro_sim.bench.cli import main


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_every_combination_is_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (folder, "--prompt-length", "4,6", "--decode", 3, "--context", 2, "--batch", "1,3", "--rounds", 1)
    code, out, err = bench(capsys, *common, "--threads", "1,2", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 2 * (2 + 2) and "decode 3 @ 2, batch 3, 2 thread(s)" in err
    assert {(row["test"], row["batch"], row["threads"]) for row in rows} >= {("prompt 6", 1, 2), ("decode 3 @ 2", 3, 1)}
    assert all(row["tokens_per_second"] > 0 and row["sops_per_token"] > 0 and row["peak_mib"] > 1 for row in rows)
    # Counts are exact, so they do not depend on threads.
    counted = {(row["test"], row["batch"]): row["sops_per_token"] for row in rows if row["threads"] == 1}
    assert all(row["sops_per_token"] == counted[row["test"], row["batch"]] for row in rows)
    code, out, err = bench(capsys, *common, "--format", "csv", "--quiet", "--output", tmp_path / "b.csv")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "b.csv").read_text())))
    assert (code, out, err) == (0, "", "") and len(lines) == 4 and lines[0]["test"] == "prompt 4"
    code, out, _ = bench(capsys, *common, "--quiet")
    assert out.splitlines()[1].split()[:3] == ["test", "threads", "batch"] and len(out.splitlines()) == 6


def test_what_does_not_fit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(capsys, folder, "--prompt-length", 10**6, "--quiet")[0] == 2
    code, _, err = bench(capsys, folder, "--batch", 0, "--quiet")
    assert code == 2 and "must be at least 1" in err
