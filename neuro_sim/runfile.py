"""run.json: what a run produced and counted, for `spikeopd-energy` and for people. Format: docs/formats.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from neuro_sim.decode import PHASES, Result, Sampling
from spikeopd import __version__
from spikeopd.contracts import RUN_SCHEMA, Activity, ModelShape, SpikeModel
from spikeopd.errors import InputError
from spikeopd.files import sha256, write_json

STOPS = ("length", "eos", "context", "interrupted")
SERIES = ("spikes", "sops", "macs", "bytes")
AC_PJ, MAC_PJ = 0.9, 4.6  # 45 nm, Appendix E of the paper


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
        "schema": RUN_SCHEMA,
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
    if trace is not None:
        run["trace"] = trace
        if trace_sha256 is not None:
            run["trace_sha256"] = trace_sha256
    return run


def write_run(path: Path | str, run: dict[str, Any]) -> Path:
    """Check and write; the old file or the new one is seen, never half."""
    validate_run(run, str(path))
    return write_json(path, run)


def read_run(path: Path | str) -> dict[str, Any]:
    """Read and check a run.json."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable run.json ({error})") from error
    validate_run(data, str(path))
    run: dict[str, Any] = data
    return run


def validate_run(data: Any, where: str) -> None:
    """Raise InputError naming the first field of a run that is missing or contradicts another."""

    def need(condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise InputError(f"{where}: field {field!r}: expected {expected}")

    need(isinstance(data, dict), "run", "an object")
    need(data.get("schema") == RUN_SCHEMA, "schema", repr(RUN_SCHEMA))
    need(isinstance(data.get("complete"), bool), "complete", "true or false")
    need(data.get("backend") in ("event", "lava", "dense"), "backend", "event, lava or dense")
    need(data.get("precision") in ("int8", "float32"), "precision", "int8 or float32")
    for name in ("bundle", "model", "sampling", "phases", "per_token", "timing", "environment"):
        need(isinstance(data.get(name), dict), name, "an object")
    try:
        shape = ModelShape(**data["model"])
        phases = {phase: Activity.from_dict(data["phases"][phase]) for phase in PHASES}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: fields 'model' and 'phases': {error!r}") from error
    size = (shape.num_hidden_layers, shape.num_steps)
    for phase, activity in phases.items():
        for site, spikes in activity.spikes.items():
            rows = (1 if site == "embed" else size[0], size[1])
            need(spikes.shape == rows, f"phases.{phase}.spikes.{site}", f"{rows[0]} x {rows[1]} counts")
    sequences = data.get("sequences")
    need(isinstance(sequences, list) and bool(sequences), "sequences", "a list of sequences")
    for index, sequence in enumerate(sequences):
        need(sequence.get("stopped") in STOPS, f"sequences[{index}].stopped", " or ".join(STOPS))
        need(data["complete"] is False or sequence["stopped"] != "interrupted", "complete", "false when interrupted")
    per_token = data["per_token"]
    length = len(per_token.get("phase", ()))
    for name in ("sequence", "position", "phase", *SERIES):
        need(len(per_token.get(name, ())) == length, f"per_token.{name}", f"{length} entries")
    for phase, activity in phases.items():
        rows_of = [i for i, name in enumerate(per_token["phase"]) if name == phase]
        need(activity.tokens == len(rows_of), f"phases.{phase}.tokens", f"{len(rows_of)}, as in per_token")
        totals = {
            "spikes": sum(int(v.sum()) for v in activity.spikes.values()),
            "sops": sum(int(v.sum()) for v in activity.sops.values()),
            "macs": activity.macs["embed"] + activity.macs["head"],
            "bytes": sum(activity.bytes.values()),
        }
        for name, total in totals.items():
            due = sum(per_token[name][i] for i in rows_of)
            need(total == due, f"phases.{phase}.{name}", f"a total of {due}, as in per_token")


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
        "pj_per_token": (AC_PJ * sops + MAC_PJ * macs) / tokens,
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
