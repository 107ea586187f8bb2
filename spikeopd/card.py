"""The model card of a saved student: README.md with the metadata of the hub, from the run's own numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spikeopd import __version__
from spikeopd.config import Config
from spikeopd.files import write_bytes

FOLDER = "FOLDER"  # where the card says to load from; the repository's name once it is in one
OWN = ("tiny", "tiny-rule")  # teachers that come with the package, whose weights are this project's
CARD = """\
---
{metadata}
---
# {name}

A spiking language model: BiSpikCLM, distilled from `{teacher}` with SpikeOPD {version}. {layers} layers of width
{width}, {steps} steps a token, {vocabulary} tokens of vocabulary, context {context}. Its blocks compute with binary
spikes; embedding and head are dense.

## Load

```python
import spikeopd                                   # pip install spikeopd[train]: makes the Auto classes know the model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

If the folder holds `modeling_bispikclm.py` (`spikeopd-train share FOLDER --remote-code`), transformers alone loads it
when told `trust_remote_code=True`, which runs that file: read it first.

As integers, event by event, without torch: `spikeopd-export FOLDER --output BUNDLE`, `spikeopd-run-lava BUNDLE`.

## Training

| what | value |
| --- | --- |
{rows}

## Numbers

{numbers}

Perplexity and KL are on the validation part of the training's text. Firing rates and energy depend on the text:
`spikeopd-run-lava BUNDLE --stats` counts them, `spikeopd-energy report` prices them.

## Limits

It makes things up, and nothing was done to keep it from repeating what is wrong or harmful in its text. Energy figures
are arithmetic on counted events, not a measurement.
"""


def write_cards(folder: Path, config: Config, summary: Mapping[str, Any]) -> None:
    """A card beside every final student of a run."""
    for place, stages in (("stage1/final", ("stage1",)), ("final", ("stage1", "stage2"))):
        target = folder / place
        if (target / "config.json").is_file():
            told = {stage: summary[stage] for stage in stages if stage in summary}
            write_bytes(target / "README.md", model_card(folder.resolve().name, config, told).encode())


def model_card(name: str, config: Config, summary: Mapping[str, Any]) -> str:
    model, teacher = config.model, _public(config.teacher.teacher_model_name_or_path)
    rows = {"teacher": f"`{teacher}`", "text": f"`{_public(config.data.source)}`", "seed": config.train.seed}
    if "stage1" in summary:
        one = config.stage1
        rows["Stage 1 (SpAD)"] = f"{summary['stage1']['updates']} updates, learning rate {one.learning_rate:g}"
    if "stage2" in summary:
        two = config.stage2
        rows["Stage 2"] = (
            f"`{two.method}`, {summary['stage2']['updates']} updates on its own generations, `{two.divergence}` to the "
            f"teacher, learning rate {two.learning_rate:g}"
        )
    rows["neurons"] = f"`{model.neuron}`, block `{model.block}`, T_s = {model.num_steps}"
    return CARD.format(
        metadata="\n".join(_metadata(teacher)),
        name=name,
        teacher=teacher,
        version=__version__,
        layers=model.num_hidden_layers,
        width=model.hidden_size,
        steps=model.num_steps,
        vocabulary=model.vocab_size,
        context=model.max_position_embeddings,
        rows="\n".join(f"| {what} | {value} |" for what, value in rows.items()),
        numbers=_numbers(summary),
    )


def _public(name: str) -> str:
    """A path by its last part: a card is for everybody, and folders are their owner's business."""
    return re.sub(r"(^|:)(?:~|\.{0,2})/(?:.*/)?", r"\1", name)


def _metadata(teacher: str) -> list[str]:
    own = teacher in OWN
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "language: en"]
    lines += [f"license: {'apache-2.0' if own else 'other'}"]
    if not own:
        lines += ["license_name: of-the-teacher-and-the-text"]  # the makers of the card must say which that is
    if teacher.count("/") == 1 and not Path(teacher).exists():
        lines += [f"base_model: {teacher}"]
    return [
        *lines,
        "tags:",
        *(f"- {tag}" for tag in ("spikeopd", "bispikclm", "spiking-neural-network", "distillation")),
    ]


def _numbers(summary: Mapping[str, Any]) -> str:
    lines = ["| stage | perplexity before | after | KL to the teacher, after |", "| --- | --- | --- | --- |"]
    for stage, values in summary.items():
        start, final = values.get("start", {}), values.get("final", {})
        cells = (start.get("perplexity"), final.get("perplexity"), final.get("teacher_kl"))
        lines.append(f"| {stage} | " + " | ".join("–" if cell is None else f"{cell:.4g}" for cell in cells) + " |")
    return "\n".join(lines)
