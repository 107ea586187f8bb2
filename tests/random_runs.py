"""run.json made by the dense oracle over a random model, as docs/formats.md describes it.

python tests/random_runs.py      writes energy/data/example_run.json again, after a change of the format
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from random_models import random_model, random_shape

from neuro_sim.graded import oracle
from spikeopd.contracts import Activity, ModelShape, SpikeTrace
from spikeopd.contracts.run import run_schema

EXAMPLE = Path(__file__).resolve().parents[1] / "energy" / "data" / "example_run.json"


def small_shape(layers: int, steps: int) -> ModelShape:
    return ModelShape(4, layers, 1, 4, 8, 8, steps, 4)


def make_run(
    shape: ModelShape | None = None,
    *,
    prompts: tuple[int, ...] = (5,),
    generated: tuple[int, ...] = (4,),
    seed: int = 0,
    drive: float = 1.0,
    trace: SpikeTrace | None = None,
    texts: list[list[int]] | None = None,
) -> dict:
    """Feed `prompts[s]` random tokens (or `texts[s]`) and decode greedily until `generated[s]` tokens are drawn."""
    model = random_model(shape or random_shape(), seed=seed, drive=drive)
    shape = model.shape
    rng = np.random.default_rng(seed)
    decoder = oracle(model)
    decoder.trace = trace
    phases = {name: Activity.zeros(shape) for name in ("prompt", "generation")}
    per_token = {key: [] for key in ("sequence", "position", "phase", "spikes", "sops", "macs", "bytes")}
    sequences = []
    texts = texts or [[int(t) for t in rng.integers(0, shape.vocab_size, length)] for length in prompts]
    for index, (prompt, new) in enumerate(zip(texts, generated, strict=True)):
        decoder.reset()
        drawn: list[int] = []
        activities: list[tuple[str, Activity]] = []
        for token in prompt:
            logits, activity = decoder.step(token)
            activities.append(("prompt", activity))
        while len(drawn) < new:
            if drawn:
                logits, activity = decoder.step(drawn[-1])
                activities.append(("generation", activity))
            drawn.append(int(np.argmax(logits)))
        context = len(activities)
        for position, (phase, activity) in enumerate(activities):
            activity.sops_unmasked = activity.spikes["q"] * context
            phases[phase].add(activity)
            for key, value in {
                "sequence": index,
                "position": position,
                "phase": phase,
                "spikes": sum(int(a.sum()) for a in activity.spikes.values()),
                "sops": sum(int(a.sum()) for a in activity.sops.values()),
                "macs": activity.macs["embed"] + activity.macs["head"],
                "bytes": sum(activity.bytes.values()),
            }.items():
                per_token[key].append(value)
        sequences.append({"prompt_tokens": prompt, "generated_tokens": drawn, "stopped": "length"})
    return {
        "schema": run_schema(shape),
        "complete": True,
        "backend": "dense",
        "precision": model.precision,
        "bundle": {"name": "random", "sha256": "0" * 64},
        "model": shape.to_dict(),
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": seed, "max_new_tokens": max(generated)},
        "sequences": sequences,
        "phases": {name: activity.to_dict() for name, activity in phases.items()},
        "per_token": per_token,
        "timing": {"load_seconds": 0.0, "prompt_seconds": 0.0, "generation_seconds": 0.0, "threads": 1},
        "environment": {},
    }


def write_run(path: Path, run: dict) -> Path:
    path.write_text(json.dumps(run, separators=(",", ":")) + "\n")
    return path


def example_run() -> dict:
    shape = random_shape(heads=4, head_dim=8, layers=3, ffn=64, vocab=256, positions=64)
    return make_run(shape, prompts=(16,), generated=(17,), seed=7) | {"bundle": {"name": "example", "sha256": "0" * 64}}


if __name__ == "__main__":
    write_run(EXAMPLE, example_run())
