"""run.json, as its writer and its readers see it: every field checked, every refusal names the field. docs/formats.md.

The energy of a run is only as good as its counts, so the counts are checked against each other and against the
model's shape before anything is multiplied: slots per neuron group, operations per spike, tokens per phase, and the
per-token series against the phase totals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, get_args

import numpy as np

from spikeopd.contracts.activity import MAC_KEYS, Activity, byte_keys, site_rows
from spikeopd.contracts.chip import ChipRun, parse_chip
from spikeopd.contracts.model import Array, Precision
from spikeopd.contracts.topology import (
    SIZES,
    ModelShape,
    connections,
    outer_macs,
    parse_shape,
)
from spikeopd.errors import InputError, short
from spikeopd.files import read_json, write_json

SCHEMA = "spikeopd.run"
VERSIONS = (1, 2, 3)  # 1: the paper's block; 2: any form of `ModelShape`; 3: a quantised twin
PHASES = ("prompt", "generation")
BACKEND = re.compile(r"[a-z][a-z0-9_-]{0,31}")  # a name of neuro_sim.backends.BACKENDS
PRECISIONS = get_args(Precision)
STOPS = ("length", "eos", "stop", "context", "interrupted")
SERIES = ("spikes", "sops", "macs", "bytes")
RUN_LIMIT = 128 << 20  # bytes; a long run has a line of counts for each of its tokens
_LARGEST = 2**62  # sums of a few of these still fit int64


def run_schema(shape: ModelShape) -> str:
    """The lowest version that can say what this model is."""
    return f"{SCHEMA}/{3 if shape.graded else 1 if shape.paper_block else 2}"


@dataclass(frozen=True)
class PerToken:
    """One entry per token that was fed, in the order of feeding."""

    sequence: Array
    position: Array
    phase: tuple[str, ...]
    spikes: Array
    sops: Array
    macs: Array
    bytes: Array

    def mask(self, phase: str | None) -> Array:
        return np.array([phase is None or name == phase for name in self.phase], dtype=bool)


@dataclass(frozen=True)
class Run:
    """A checked run.json."""

    name: str
    path: Path | None
    backend: str
    precision: str
    complete: bool
    shape: ModelShape
    phases: dict[str, Activity]
    per_token: PerToken
    num_sequences: int
    bundle: dict[str, Any]
    trace: Path | None = None
    trace_sha256: str | None = None
    chip: ChipRun | None = None

    def activity(self, phase: str | None = None) -> Activity:
        """Counts of one phase, or of the whole run."""
        if phase is not None:
            return self.phases[phase]
        return Activity.total(self.phases[name] for name in PHASES)

    def keys(self, phase: str | None = None) -> int:
        """Keys seen by the tokens of a phase: the masked size of its attention."""
        return int((self.per_token.position[self.per_token.mask(phase)] + 1).sum())

    def contexts(self) -> dict[int, int]:
        """Tokens fed per sequence."""
        sequences, counts = np.unique(self.per_token.sequence, return_counts=True)
        return {int(s): int(n) for s, n in zip(sequences, counts, strict=True)}

    def keys_unmasked(self, phase: str | None = None) -> int:
        """Keys if every token looked at its whole sequence."""
        contexts = self.contexts()
        return sum(contexts[int(s)] for s in self.per_token.sequence[self.per_token.mask(phase)])


def write_run(path: Path | str, run: dict[str, Any]) -> Path:
    """Check and write; the old file or the new one is seen, never half."""
    parse_run(run, str(path))
    return write_json(path, run)


def load_run(path: Path | str, name: str | None = None) -> Run:
    """Read and check a run.json."""
    path = Path(path)
    return parse_run(_read_json(path), str(path), name or path.stem, path)


def read_run(path: Path | str) -> dict[str, Any]:
    """The same as plain data."""
    raw: dict[str, Any] = _read_json(Path(path))
    parse_run(raw, str(path))
    return raw


def _read_json(path: Path) -> Any:
    try:
        return read_json(path, RUN_LIMIT)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; `spikeopd-energy example` writes one to try") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON: {short(error)}") from error


def parse_run(raw: Any, where: str, name: str = "run", path: Path | None = None) -> Run:
    """Check a run that is already in memory. `where` begins every message."""
    check = _Checker(where)
    data = check.mapping(raw, "run.json")
    schema = check.get(data, "schema")
    if schema not in [f"{SCHEMA}/{version}" for version in VERSIONS]:
        check.fail("schema", f"expected {SCHEMA + '/' + str(VERSIONS[-1])!r}, got {schema!r}")
    complete = check.get(data, "complete")
    if not isinstance(complete, bool):
        check.fail("complete", f"expected true or false, got {complete!r}")
    backend, precision = check.get(data, "backend"), check.get(data, "precision")
    if not isinstance(backend, str) or not BACKEND.fullmatch(backend):
        check.fail("backend", f"expected a backend's name, such as event, got {backend!r}")
    if precision not in PRECISIONS:
        check.fail("precision", f"expected {' or '.join(PRECISIONS)}, got {precision!r}")
    for field in ("bundle", "sampling", "timing", "environment"):
        check.mapping(check.get(data, field), field)
    model = check.mapping(check.get(data, "model"), "model")
    for field in SIZES:
        check.get(model, field, "model")
    shape = parse_shape(model, f"{where}: model")
    if schema == f"{SCHEMA}/1" and not shape.paper_block:
        check.fail("schema", "version 1 has the paper's block alone, and 'model' says another form")
    if shape.graded != (schema == f"{SCHEMA}/3"):
        check.fail("schema", "version 3, and it alone, is of a quantised twin; field 'model.neuron' says otherwise")
    sequences = check.get(data, "sequences")
    if not isinstance(sequences, list) or not sequences:
        check.fail("sequences", "expected a list with at least one sequence")
    phases = check.mapping(check.get(data, "phases"), "phases")
    activities = {
        phase: _activity(check, check.get(phases, phase, "phases"), f"phases.{phase}", shape) for phase in PHASES
    }
    per_token = _per_token(check, check.mapping(check.get(data, "per_token"), "per_token"), shape, len(sequences))
    _check_sequences(check, sequences, per_token, complete, shape)
    for phase in PHASES:
        _check_phase(check, phase, activities[phase], per_token, shape)
    bundle = data.get("bundle")
    trace = data.get("trace")
    if trace is not None and not (isinstance(trace, str) and _lies_below(trace)):
        check.fail("trace", f"expected the name of a file beside run.json or below its folder, got {trace!r}")
    trace_sha256 = data.get("trace_sha256")
    if trace_sha256 is not None and not isinstance(trace_sha256, str):
        check.fail("trace_sha256", f"expected a hash, got {trace_sha256!r}")
    run = Run(
        name=name,
        path=path,
        backend=backend,
        precision=precision,
        complete=complete,
        shape=shape,
        phases=activities,
        per_token=per_token,
        num_sequences=len(sequences),
        bundle=bundle if isinstance(bundle, dict) else {},
        trace=(path.parent / trace) if trace and path is not None else None,
        trace_sha256=trace_sha256,
        chip=parse_chip(data["chip"], where, len(per_token.phase)) if "chip" in data else None,
    )
    _check_unmasked(check, run)
    return run


def _lies_below(name: str) -> bool:
    """A relative name that stays below the folder it is relative to, on any system."""
    forms = PurePosixPath(name), PureWindowsPath(name)
    return "\0" not in name and not any(form.anchor or ".." in form.parts for form in forms)


class _Checker:
    """Refuses with file, field, expectation and value in one line."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, field: str, message: str) -> None:
        raise InputError(f"{self.where}: field {field!r}: {short(message, 300)}")

    def get(self, mapping: dict[str, Any], key: str, prefix: str = "") -> Any:
        field = f"{prefix}.{key}" if prefix else key
        if key not in mapping:
            self.fail(field, "is missing")
        return mapping[key]

    def mapping(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(field, f"expected an object, got {type(value).__name__}")
        result: dict[str, Any] = value
        return result

    def count(self, value: Any, field: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(field, f"expected a whole number, got {value!r}")
        if not 0 <= value < _LARGEST:
            self.fail(field, "must be between 0 and 2^62")
        return int(value)

    def counts(self, value: Any, field: str, shape: tuple[int, ...]) -> Array:
        """A nested list of non-negative whole numbers of exactly this shape."""
        flat: list[int] = []

        def walk(part: Any, depth: int) -> None:
            if depth == len(shape):
                flat.append(self.count(part, field))
                return
            if not isinstance(part, list) or len(part) != shape[depth]:
                got = f"a list of {len(part)}" if isinstance(part, list) else type(part).__name__
                sizes = " x ".join(map(str, shape))
                self.fail(field, f"expected {sizes} whole numbers, got {got} where {shape[depth]} belong")
            for item in part:
                walk(item, depth + 1)

        walk(value, 0)
        return np.array(flat, dtype=np.int64).reshape(shape)

    def equal(self, field: str, left: Array | int, right: Array | int, meaning: str) -> None:
        got, due = np.broadcast_arrays(np.asarray(left), np.asarray(right))
        wrong = np.argwhere(got != due)
        if len(wrong):
            index = tuple(int(i) for i in wrong[0])
            place = f" at {list(index)}" if index else ""
            self.fail(field, f"{got[index]}{place} should be {due[index]} ({meaning})")


def _activity(check: _Checker, raw: Any, prefix: str, shape: ModelShape) -> Activity:
    data = check.mapping(raw, prefix)
    layers, steps = shape.num_hidden_layers, shape.steps

    def table(name: str, rows: dict[str, int]) -> dict[str, Array]:
        inner = check.mapping(check.get(data, name, prefix), f"{prefix}.{name}")
        return {
            key: check.counts(check.get(inner, key, f"{prefix}.{name}"), f"{prefix}.{name}.{key}", (n, steps))
            for key, n in rows.items()
        }

    def scalars(name: str, keys: tuple[str, ...]) -> dict[str, int]:
        inner = check.mapping(check.get(data, name, prefix), f"{prefix}.{name}")
        return {key: check.count(check.get(inner, key, f"{prefix}.{name}"), f"{prefix}.{name}.{key}") for key in keys}

    sites, components = site_rows(shape), dict.fromkeys(shape.layer_components, layers)
    return Activity(
        tokens=check.count(check.get(data, "tokens", prefix), f"{prefix}.tokens"),
        spikes=table("spikes", sites),
        cells=table("cells", sites),
        saturations=table("saturations", sites),
        sops=table("sops", components),
        sops_unmasked=check.counts(
            check.get(data, "sops_unmasked", prefix), f"{prefix}.sops_unmasked", (layers, steps)
        ),
        additions=table("additions", components),
        macs=scalars("macs", MAC_KEYS),
        bytes=scalars("bytes", byte_keys(shape)),
    )


def _per_token(check: _Checker, raw: dict[str, Any], shape: ModelShape, num_sequences: int) -> PerToken:
    phase = check.get(raw, "phase", "per_token")
    if not isinstance(phase, list) or any(name not in PHASES for name in phase):
        check.fail("per_token.phase", f"expected a list of {' or '.join(map(repr, PHASES))}")
    columns = {
        key: check.counts(check.get(raw, key, "per_token"), f"per_token.{key}", (len(phase),))
        for key in ("sequence", "position", *SERIES)
    }
    if (columns["sequence"] >= num_sequences).any():
        check.fail("per_token.sequence", f"names a sequence beyond the {num_sequences} in 'sequences'")
    if (columns["position"] >= shape.max_position_embeddings).any():
        check.fail("per_token.position", f"exceeds model.max_position_embeddings {shape.max_position_embeddings}")
    for sequence in np.unique(columns["sequence"]):
        where = np.flatnonzero(columns["sequence"] == sequence)
        if not np.array_equal(columns["position"][where], np.arange(where.size)):
            check.fail("per_token.position", f"of sequence {sequence} must count 0, 1, 2, ... in order")
        names = [phase[i] for i in where]
        if sorted(names, key=PHASES.index) != names:
            check.fail("per_token.phase", f"of sequence {sequence} goes back from generation to prompt")
    return PerToken(phase=tuple(phase), **columns)


def _check_sequences(
    check: _Checker, sequences: list[Any], per_token: PerToken, complete: bool, shape: ModelShape
) -> None:
    """Tokens fed must be the prompt's and all generated ones but the last; an interrupted run may have fed fewer."""
    for index, item in enumerate(sequences):
        field = f"sequences[{index}]"
        sequence = check.mapping(item, field)
        stopped = check.get(sequence, "stopped", field)
        if stopped not in STOPS:
            check.fail(f"{field}.stopped", f"expected {' or '.join(STOPS)}, got {stopped!r}")
        if complete and stopped == "interrupted":
            check.fail("complete", "must be false when a sequence was interrupted")
        lengths = {}
        for key in ("prompt_tokens", "generated_tokens"):
            tokens = check.get(sequence, key, field)
            if not isinstance(tokens, list):
                check.fail(f"{field}.{key}", "expected a list of token ids")
            ids = check.counts(tokens, f"{field}.{key}", (len(tokens),))
            if (ids >= shape.vocab_size).any():
                check.fail(f"{field}.{key}", f"token {ids.max()} is outside the vocabulary of {shape.vocab_size}")
            lengths[key] = len(tokens)
        # An interrupted run may stop between feeding a token and drawing the next, so its last one may be fed too.
        drawn = lengths["generated_tokens"]
        due = {"prompt": lengths["prompt_tokens"], "generation": max(0, drawn - 1) if complete else drawn}
        for phase in PHASES:
            fed = int(((per_token.sequence == index) & per_token.mask(phase)).sum())
            if fed != due[phase] if complete else fed > due[phase]:
                check.fail(
                    "per_token.phase",
                    f"sequence {index} fed {fed} {phase} tokens, {field} has {due[phase]} to feed",
                )


def _check_phase(check: _Checker, phase: str, activity: Activity, per_token: PerToken, shape: ModelShape) -> None:
    """Counts of one phase against each other, the shape and the per-token series."""
    field = f"phases.{phase}"
    mask = per_token.mask(phase)
    tokens, keys = int(mask.sum()), int((per_token.position[mask] + 1).sum())
    check.equal(f"{field}.tokens", activity.tokens, tokens, "tokens of this phase in per_token")
    for site in site_rows(shape):
        slots = shape.site_slots(site, tokens, keys)
        check.equal(f"{field}.cells.{site}", activity.cells[site], slots, "neuron slots by the model's shape")
        for name in ("spikes", "saturations"):
            table: Array = getattr(activity, name)[site]
            if (table > activity.cells[site]).any():
                check.fail(f"{field}.{name}.{site}", "more than there are neuron slots in 'cells'")
    expected: dict[str, Array] = {}
    for connection in connections(shape):
        if connection.fan_out is None:
            continue
        drivers = [connection.driver_of(layer) for layer in range(shape.num_hidden_layers)]
        events = connection.fan_out * np.stack([activity.spikes[site][max(layer, 0)] for layer, site in drivers])
        expected[connection.component] = expected.get(connection.component, 0) + events
    for name, sops in expected.items():
        check.equal(f"{field}.sops.{name}", activity.sops[name], sops, "spikes of the driver x fan-out")
    q, coincidences = activity.spikes["q"], activity.sops["coincidence"]
    positions = per_token.position[mask]
    low, high = (int(positions.min()) + 1, int(positions.max()) + 1) if tokens else (0, 0)
    if (coincidences < q * low).any() or (coincidences > q * high).any():
        check.fail(f"{field}.sops.coincidence", f"a query spike of this phase meets {low} to {high} keys, not so here")
    for name in shape.layer_components:
        if (activity.additions[name] > activity.sops[name]).any():
            check.fail(f"{field}.additions.{name}", "more additions than synaptic operations in 'sops'")
        if name not in ("coincidence", "av"):
            check.equal(f"{field}.additions.{name}", activity.additions[name], activity.sops[name], "every one adds")
    for name, macs in outer_macs(shape, tokens).items():
        check.equal(f"{field}.macs.{name}", activity.macs[name], macs, "by the model's shape")
    if activity.macs["head_active"] > activity.macs["head"]:
        check.fail(f"{field}.macs.head_active", "exceeds macs.head")
    totals = {
        "spikes": sum(int(table.sum()) for table in activity.spikes.values()),
        "sops": sum(int(table.sum()) for table in activity.sops.values()),
        "macs": activity.macs["embed"] + activity.macs["head"],
        "bytes": sum(activity.bytes.values()),
    }
    for name in SERIES:
        series: Array = getattr(per_token, name)
        check.equal(f"per_token.{name}", int(series[mask].sum()), totals[name], f"total of {field}")


def _check_unmasked(check: _Checker, run: Run) -> None:
    """A square attention gives every query spike its whole sequence as keys."""
    contexts = run.contexts()
    for phase in PHASES:
        activity, field = run.phases[phase], f"phases.{phase}.sops_unmasked"
        here = [contexts[int(s)] for s in np.unique(run.per_token.sequence[run.per_token.mask(phase)])]
        low, high = (min(here), max(here)) if here else (0, 0)
        q = activity.spikes["q"]
        if low == high:
            check.equal(field, activity.sops_unmasked, q * low, "query spikes x tokens fed in the sequence")
        elif (activity.sops_unmasked < q * low).any() or (activity.sops_unmasked > q * high).any():
            check.fail(field, f"a query spike meets {low} to {high} keys, not so here")
        if (activity.sops_unmasked < activity.sops["coincidence"]).any():
            check.fail(field, "below the masked count in sops.coincidence")
