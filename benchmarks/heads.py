"""How far back heads look: the teacher's attention and the students' spikes of S_A by distance, a panel for each layer.

Of each layer the mean over heads and over the queries of the last three quarters of a window, as shares that sum to 1;
printed is the share beyond 16 tokens. The figure shows what lies beyond each distance.

  python benchmarks/heads.py --teacher runs/stories/teacher --source jsonl:runs/stories/corpus/corpus.jsonl \
    shipped=stories --output docs/results/stories/heads.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from spikeopd.diagnostics.report import pyplot
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import load_teacher, run_teacher
from spikeopd.students import load_student
from spikeopd.text.tokenizer import load_tokenizer
from spikeopd.text.tokens import prepare, sequential_windows

FAR = 16


def shares(maps: Tensor) -> Tensor:
    """[distance] from [head, query, key]: what share of a row's sum lies so far back, a mean over rows and heads."""
    length = maps.shape[-1]
    rows = maps[:, length // 4 :]
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=1e-9)
    distance = torch.arange(length // 4, length)[:, None] - torch.arange(length)
    causal = distance >= 0
    sums = torch.zeros(length).index_add_(0, distance[causal], rows.mean(0)[causal])
    return sums / sums.sum()


def student_maps(student: BiSpikCLMForCausalLM, ids: Tensor) -> list[Tensor]:
    recorder = Recorder(sites=["a"])
    with torch.no_grad():
        student(ids, recorder=recorder, use_cache=False)
    return [recorder.spikes[layer, "a"].mean((0, 1)) for layer in range(student.config.num_hidden_layers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("students", nargs="+", metavar="NAME=STUDENT", help="students or bundles of this teacher")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    named = dict(given.split("=", 1) for given in args.students)
    students = {name: load_student(path).eval() for name, path in named.items()}
    length = min(student.config.max_position_embeddings for student in students.values())
    data = prepare(args.source, load_tokenizer(args.teacher), "validation")
    ids = torch.from_numpy(sequential_windows(data, length)[: args.windows].astype("int64"))
    with torch.no_grad():
        maps = run_teacher(load_teacher(args.teacher), ids, internals=True).attentions
    found = {"teacher": [shares(layer.mean(0)) for layer in maps]}
    found |= {name: [shares(layer) for layer in student_maps(student, ids)] for name, student in students.items()}
    plot = pyplot()
    figure, axes = plot.subplots(
        2, -(-len(maps) // 2), figsize=(9, 4.6), layout="constrained", sharex=True, sharey=True
    )
    for layer, axis in enumerate(axes.flat[: len(maps)]):
        for name, layers in found.items():
            beyond = 1 - layers[layer].cumsum(0)
            axis.plot(range(1, length), beyond[:-1], "k" if name == "teacher" else "", label=name)
        axis.set(xscale="log", title=f"layer {layer + 1}", ylim=(0, 1))
        axis.axvline(FAR, color="0.8", zorder=0)
    axes[0, 0].legend(frameon=False)
    figure.supxlabel("distance in tokens")
    figure.supylabel("share of attention at this distance or further")
    figure.savefig(args.output, dpi=150)
    print(f"share beyond {FAR} tokens, by layer")
    for name, layers in found.items():
        print(f"{name:>12}", "  ".join(f"{float(layer[FAR:].sum()):.2f}" for layer in layers))


if __name__ == "__main__":
    main()
