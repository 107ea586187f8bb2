"""Proof inside the command: read the bundle back and compare it with the model it came from, spike for spike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.reference import TorchReference
from neuro_sim.graded import oracle, unary
from spikeopd.contracts import Array, SpikeModel, SpikeTrace, equal_share, first_difference, is_integer
from spikeopd.contracts.bundle import load_bundle, model_arrays
from spikeopd.errors import CheckFailed
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder

Run = tuple[Array, SpikeTrace]  # logits [token, vocab] and spikes of one prompt


@torch.no_grad()
def run_student(student: BiSpikCLMForCausalLM, prompts: Sequence[Sequence[int]]) -> list[Run]:
    """The student's own forward pass on every prompt."""
    found = []
    for prompt in prompts:
        recorder, trace = Recorder(), SpikeTrace(tokens=list(prompt))
        logits = student(torch.tensor([list(prompt)]), use_cache=False, recorder=recorder).logits[0]
        for (layer, site), spikes in recorder.spikes.items():
            fired = as_steps(spikes[:, 0], student.config)  # [T_s, token, n], of the map [T_s, head, query, key]
            for place in range(len(prompt)):
                pairs = fired[:, :, place, : place + 1].reshape(len(fired), -1) if site == "a" else fired[:, place]
                trace.add(layer, site, pairs)
        found.append((logits.double().numpy(), trace))
    return found


def as_steps(spikes: Tensor, config: BiSpikCLMConfig) -> Array:
    """Recorded spikes as bool [T_s, ...]; a twin's counts as so many of T_s steps, as a trace holds them."""
    if not config.graded:
        return np.asarray(spikes.numpy() > 0)
    counts = (spikes[0] * config.num_steps).round().numpy()
    return unary(counts.reshape(-1), config.num_steps).reshape(-1, *counts.shape)


def verify_bundle(
    model: SpikeModel,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    student: Sequence[Run] | None = None,
    allow_lossy: bool = False,
) -> dict[str, Any]:
    """Torch reference of `model` against the re-read bundle run by the numpy oracle. A difference is `CheckFailed`.

    student: what the student itself computed for each prompt, if it computes in these integers; it must be equal too.
    Returns what was compared, for the report. `allow_lossy` lists a difference instead of failing.
    """
    reread = load_bundle(folder)
    differences = _array_differences(model, reread)
    reference = TorchReference(model)
    decoder = oracle(reread)
    sites = spikes = 0
    shares: list[float] = []
    for number, prompt in enumerate(prompts):
        want_logits, want = reference.run(list(prompt))
        got = SpikeTrace()
        decoder.trace = got
        decoder.reset()
        got_logits = np.stack([decoder.step(int(token))[0] for token in prompt])
        sites = len(want.sites)
        spikes += sum(array.size for arrays in want.sites.values() for array in arrays)
        shares += equal_share(want, got).values()
        runs = [("the model", want_logits, want)]
        if student is not None:
            runs.append(("the student itself", *student[number]))
        for what, logits, trace in runs:
            found = first_difference(trace, got)
            if found is not None:
                differences.append(f"prompt {number}, {found}: the re-read bundle fires otherwise than {what}")
            elif not _logits_equal(logits, got_logits, model.precision):
                token = int(np.abs(logits - got_logits).max(1).argmax())
                differences.append(
                    f"prompt {number}, token {token}: spikes are equal but the logits differ from those of {what}"
                )
    if differences and not allow_lossy:
        raise CheckFailed(f"{differences[0]}; nothing was written (--allow-lossy writes it and lists this)")
    return {
        "prompts": len(prompts),
        "tokens": sum(len(prompt) for prompt in prompts),
        "sites": sites,
        "neuron_steps_compared": spikes,
        "equal_spikes": float(min(shares)) if shares else 1.0,
        "differences": differences,
        **({"student": "spikes, tokens and log-likelihoods equal"} if student and not differences else {}),
    }


def verify_nir(model: SpikeModel, folder: Path, prompt: Sequence[int], manifest: dict[str, Any]) -> dict[str, Any]:
    """Open the file with plain `nir.read` and execute its standard nodes literally, with no help from metadata.

    The cell profile is executed on the first token, where one pair is all the attention there is.
    """
    import nir

    from export.nir.graph import DT
    from export.nir.runner import Runner

    graph = nir.read(folder / "model.nir")
    options = manifest["nir"]
    tokens = [int(token) for token in prompt[: options["context"]]]
    tokens += [tokens[-1]] * (options["context"] - len(tokens))
    currents = np.concatenate([model.embedding.current(token, place) for place, token in enumerate(tokens)])
    steps = model.shape.num_steps
    runner = Runner(graph, DT, subtractive=options["neuron"] == "lif")
    out = runner.run(np.repeat(currents[None], steps, 0))
    want = TorchReference(model).readout(tokens).reshape(out.shape)
    return {
        "executed": "LIF with subtractive reset" if options["neuron"] == "lif" else "standard nodes, no metadata",
        "tokens": len(tokens),
        f"equal_output_{'spikes' if model.shape.readout == 'rate' else 'values'}": float((out == want).mean()),
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


def _logits_equal(a: Array, b: Array, precision: str) -> bool:
    """Exact for integers. A float head adds real numbers, and the order of adding may show in the last bits."""
    return bool(np.array_equal(a, b) if is_integer(precision) else np.allclose(a, b, rtol=1e-9, atol=1e-9))
