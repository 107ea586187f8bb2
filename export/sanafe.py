"""A model as a network for SANA-FE: network.json and network.npz, read back and compared before they appear."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuro_sim.dense import DenseDecoder
from neuro_sim.sanafe.decoder import NetworkDecoder
from neuro_sim.sanafe.description import FILES, read_network, write_network
from neuro_sim.sanafe.interpreter import Interpreter
from neuro_sim.sanafe.network import build_network
from neuro_sim.sanafe.placement import place
from spikeopd.contracts import SpikeModel, SpikeTrace, first_difference
from spikeopd.contracts.bundle import MANIFEST, load_bundle
from spikeopd.errors import CheckFailed, InputError, cannot_write
from spikeopd.files import check_new_directory, new_directory, write_json

CONTEXT, VERIFIED = 32, 4
REPORT_SCHEMA = "spikeopd.sanafe-report/1"


@dataclass(frozen=True)
class ExportedNetwork:
    """A written network. `report` is report.json: sizes, placement, what was compared."""

    path: Path
    report: dict[str, Any]

    def __str__(self) -> str:
        r = self.report
        hops, neurons = r["placement"]["expected_hops"], r["placement"]["neurons"]
        lines = [
            f"network           {self.path}  (sanafe, a cache of {r['context']} tokens)",
            f"neurons           {neurons['site']:,} of the model, {neurons['gate']:,} gates, "
            f"{neurons['relay']:,} relays",
            f"synapses          {r['placement']['synapses']:,}",
            f"steps             {r['steps']} for a token",
            f"placement         {r['placement']['cores']} cores, {r['placement']['chips']} chip(s) of Loihi 1",
            f"expected hops     {hops['in_order']['mean']:.3f} -> {hops['traded']['mean']:.3f} for a message, "
            "cores in order -> seats traded",
            f"verified          {r['verification']['tokens']} tokens, {r['verification']['spikes']:,} spikes: equal",
        ]
        lines += [f"VIOLATED          {violation}" for violation in r["placement"]["violations"]]
        return "\n".join(lines)


def export_network(
    source: SpikeModel | Path | str, output: Path | str, *, context: int | None = None, tokens: int | None = None
) -> ExportedNetwork:
    """Write the network of a bundle, of a student's folder (needs torch), or of a loaded model.

    context  tokens that fit the cache; None: 32, or the model's own limit if that is less
    tokens   how many to compare, spike for spike, executing the files that were written
    Raises `CheckFailed`, and writes nothing, if a single spike differs.
    """
    output = Path(output)
    _check_output(output)
    model = source if isinstance(source, SpikeModel) else _load(Path(source))
    limit = model.shape.max_position_embeddings
    slots = min(CONTEXT, limit) if context is None else context
    network = build_network(model, slots)
    placement = place(network)
    try:
        with new_directory(output) as folder:
            write_network(folder, network, placement)
            checked = _verify(model, folder, min(VERIFIED if tokens is None else tokens, slots))
            report = {
                "schema": REPORT_SCHEMA,
                "context": slots,
                "steps": network.steps,
                "placement": placement.report,
                "verification": checked,
            }
            write_json(folder / "report.json", report)
            _check_output(output)
    except BrokenPipeError:  # the terminal went away, not the disk
        raise
    except OSError as error:
        raise cannot_write(output, "--output", error) from error
    return ExportedNetwork(output, report)


def _load(folder: Path) -> SpikeModel:
    model = _read(folder)
    if model.shape.graded:
        raise InputError(f"{folder}: a quantised twin has no spikes for a simulated chip: its activations are counts")
    return model


def _read(folder: Path) -> SpikeModel:
    if (folder / MANIFEST).is_file():
        return load_bundle(folder)
    from export.quantize import lower
    from spikeopd.students import find_student, load_student

    return lower(load_student(find_student(folder))).model


def _verify(model: SpikeModel, folder: Path, tokens: int) -> dict[str, int]:
    """Execute the written network, step by step, and compare it with the model."""
    written = read_network(folder)
    mine, theirs = SpikeTrace(), SpikeTrace()
    decoder = NetworkDecoder(model, lambda network: Interpreter(written), mine, slots=written.slots)
    oracle = DenseDecoder(model, theirs)
    token = int(np.random.default_rng(0).integers(model.shape.vocab_size))
    for _ in range(tokens):
        logits, _ = decoder.step(token)
        expected, _ = oracle.step(token)
        difference = first_difference(mine, theirs)
        if difference is not None:
            raise CheckFailed(f"the network and the model differ first at {difference}")
        if not np.array_equal(logits, expected):
            raise CheckFailed(f"the network's logits differ from the model's at token {oracle.position - 1}")
        token = int(logits.argmax())
    spikes = sum(int(fired.sum()) for rows in theirs.sites.values() for fired in rows)
    return {"tokens": tokens, "spikes": spikes}


def _check_output(output: Path) -> None:
    """Only an empty folder, or an older network with nothing else in it, may be replaced."""
    if output.is_dir():
        names = {path.name for path in output.iterdir()}
        if names and (not names >= set(FILES) or names - {*FILES, "report.json"}):
            raise InputError(f"--output {output}: exists and is not such a network; choose another name or remove it")
    elif output.exists() or output.is_symlink():
        raise InputError(f"--output {output}: exists and is no folder; choose another name")
    if output.resolve() == Path.cwd():
        raise InputError(f"--output {output}: is the working folder, which cannot be replaced; name a folder in it")
    check_new_directory(output, "--output")
