"""run.json: what a run produced and counted, for `spikeopd-energy` and for people. Format: docs/formats.md."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from neuro_sim.decode import PHASES, Result, Sampling
from spikeopd import __version__
from spikeopd.contracts import APPENDIX_E_PJ, Activity, SpikeModel
from spikeopd.contracts.run import run_schema
from spikeopd.files import sha256


def bundle_identity(folder: Path | str) -> dict[str, str]:
    """Name of a bundle and the hash of its manifest, which holds the hashes of everything else."""
    folder = Path(folder)
    return {"name": folder.resolve().name, "sha256": sha256(folder / "manifest.json")}


def build_run(
    result: Result,
    model: SpikeModel,
    *,
    backend: str,
    bundle: Mapping[str, str],
    sampling: Sampling,
    load_seconds: float,
    threads: int,
    trace: str | None = None,
    trace_sha256: str | None = None,
) -> dict[str, Any]:
    """The run as plain data. Valid for an interrupted run too."""
    run: dict[str, Any] = {
        "schema": run_schema(model.shape),
        "complete": result.complete,
        "backend": backend,
        "precision": model.precision,
        "bundle": dict(bundle),
        "model": model.shape.to_dict(),
        "sampling": asdict(sampling),
        "sequences": [
            {
                "prompt_tokens": [int(token) for token in sequence.prompt_tokens],
                "generated_tokens": [int(token) for token in sequence.generated_tokens],
                "stopped": sequence.stopped,
            }
            for sequence in result.sequences
        ],
        "phases": {phase: result.phases[phase].to_dict() for phase in PHASES},
        "per_token": {name: list(values) for name, values in result.per_token.items()},
        "saturations": saturations(result.activity),
        "timing": {
            "load_seconds": load_seconds,
            "prompt_seconds": result.seconds["prompt"],
            "generation_seconds": result.seconds["generation"],
            "threads": threads,
        },
        "environment": environment(),
    }
    if result.chip is not None:
        run["chip"] = result.chip
    if trace is not None:
        run["trace"] = trace
        if trace_sha256 is not None:
            run["trace_sha256"] = trace_sha256
    return run


def saturations(activity: Activity) -> int:
    """Membranes that hit the 24-bit limit."""
    return sum(int(counts.sum()) for counts in activity.saturations.values())


def summary(result: Result) -> dict[str, float]:
    """The few numbers people ask for, over everything that was fed: speed, events, energy by Appendix E, rate."""
    activity = result.activity
    tokens = max(1, activity.tokens)
    sops = sum(int(counts.sum()) for counts in activity.sops.values())
    macs = activity.macs["embed"] + activity.macs["head"]
    fed = {phase: result.phases[phase].tokens for phase in PHASES}
    spikes = sum(int(v.sum()) for k, v in activity.spikes.items() if k != "a")
    cells = sum(int(v.sum()) for k, v in activity.cells.items() if k != "a")
    return {
        "prompt_tokens": fed["prompt"],
        "generated_tokens": sum(len(sequence.generated_tokens) for sequence in result.sequences),
        "prompt_tokens_per_second": _ratio(fed["prompt"], result.seconds["prompt"]),
        "tokens_per_second": _ratio(fed["generation"], result.seconds["generation"]),
        "sops_per_token": sops / tokens,
        "macs_per_token": macs / tokens,
        "pj_per_token": (APPENDIX_E_PJ["mac" if result.graded else "ac"] * sops + APPENDIX_E_PJ["mac"] * macs) / tokens,
        "firing_rate": _ratio(spikes, cells),
        "map_rate": _ratio(int(activity.spikes["a"].sum()), int(activity.cells["a"].sum())),
        "saturations": saturations(activity),
    }


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


def environment() -> dict[str, str]:
    """Versions and machine, for whoever compares runs."""
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "absent"
    return {
        "spikeopd": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
