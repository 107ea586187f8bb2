"""Proof inside the command: read the bundle back and compare it with the model it came from, spike for spike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export.reference import TorchReference
from neuro_sim.dense import DenseDecoder
from spikeopd.contracts import SpikeModel, SpikeTrace, equal_share, first_difference
from spikeopd.contracts.bundle import load_bundle, model_arrays
from spikeopd.errors import CheckFailed


def verify_bundle(
    model: SpikeModel, folder: Path, prompts: Sequence[Sequence[int]], *, allow_lossy: bool = False
) -> dict[str, Any]:
    """Torch reference of `model` against the re-read bundle run by the numpy oracle. A difference is `CheckFailed`.

    Returns what was compared, for the report. `allow_lossy` lists a difference instead of failing.
    """
    reread = load_bundle(folder)
    differences = _array_differences(model, reread)
    reference = TorchReference(model)
    oracle = DenseDecoder(reread)
    sites = spikes = 0
    shares: list[float] = []
    for number, prompt in enumerate(prompts):
        want_logits, want = reference.run(list(prompt))
        got = SpikeTrace()
        oracle.trace = got
        oracle.reset()
        got_logits = np.stack([oracle.step(int(token))[0] for token in prompt])
        sites = len(want.sites)
        spikes += sum(array.size for arrays in want.sites.values() for array in arrays)
        shares += equal_share(want, got).values()
        found = first_difference(want, got)
        if found is not None:
            differences.append(f"prompt {number}, {found}: the re-read bundle fires otherwise than the model")
        elif not _logits_equal(want_logits, got_logits, model.precision):
            token = int(np.abs(want_logits - got_logits).max(1).argmax())
            differences.append(f"prompt {number}, token {token}: spikes are equal but the logits differ")
    if differences and not allow_lossy:
        raise CheckFailed(f"{differences[0]}; nothing was written (--allow-lossy writes it and lists this)")
    return {
        "prompts": len(prompts),
        "tokens": sum(len(prompt) for prompt in prompts),
        "sites": sites,
        "neuron_steps_compared": spikes,
        "equal_spikes": float(min(shares)) if shares else 1.0,
        "differences": differences,
    }


def verify_nir(model: SpikeModel, folder: Path, prompt: Sequence[int], manifest: dict[str, Any]) -> dict[str, Any]:
    """Open the file with plain `nir.read` and execute its standard nodes literally, with no help from metadata.

    The cell profile is executed on the first token, where one pair is all the attention there is.
    """
    import nir

    from export.nir_graph import DT
    from export.nir_runner import Runner

    graph = nir.read(folder / "model.nir")
    options = manifest["nir"]
    tokens = [int(token) for token in prompt[: options["context"]]]
    tokens += [tokens[-1]] * (options["context"] - len(tokens))
    currents = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(tokens)])
    steps = model.shape.num_steps
    runner = Runner(graph, DT, subtractive=options["neuron"] == "lif")
    out = runner.run(np.repeat(currents[None], steps, 0)) > 0
    _, trace = TorchReference(model).run(tokens, logits=False)
    want = np.concatenate(trace.sites[model.shape.num_hidden_layers - 1, "h"], 1)
    return {
        "executed": "LIF with subtractive reset" if options["neuron"] == "lif" else "standard nodes, no metadata",
        "tokens": len(tokens),
        "equal_output_spikes": float((out == want).mean()),
        "nodes": _count_nodes(graph),
    }


def _count_nodes(graph: Any) -> int:
    return sum(1 + (_count_nodes(node) if hasattr(node, "nodes") else 0) for node in graph.nodes.values())


def _array_differences(model: SpikeModel, reread: SpikeModel) -> list[str]:
    read = model_arrays(reread)
    return [
        f"array {name} changed on the way through the file"
        for name, values in model_arrays(model).items()
        if not np.array_equal(values, read[name])
    ]


def _logits_equal(a: Any, b: Any, precision: str) -> bool:
    """Exact for integers. A float head adds real numbers, and the order of adding may show in the last bits."""
    return bool(np.array_equal(a, b) if precision == "int8" else np.allclose(a, b, rtol=1e-9, atol=1e-9))
