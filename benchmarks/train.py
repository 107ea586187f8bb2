"""One update of each stage by part: CPU seconds, share of products, peak memory, tokens/s. Random weights and tokens.

python benchmarks/train.py [--shape tiny|small|slice] [--stage 1 2] [--rows 8] [--length 128] [--threads 1] [section.key=value]
shapes: tiny (the recipe), small (6 x 288, FFN 768, vocabulary 6,000), slice (two blocks of OPT-125M's, vocabulary 50,272)
Best of --rounds for each part; --rounds 0 for the first update alone, where memory is the question. With CUDA, wall seconds and the device's peak instead.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time

import torch

from spikeopd.config import load_config
from spikeopd.methods import opd, spad
from spikeopd.methods.adaptation import Adaptation
from spikeopd.methods.alignment import TeacherShape, branch_sizes, branch_weights
from spikeopd.methods.run import Run
from spikeopd.methods.setup import make_accelerator
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.runlog import RunLog
from spikeopd.text.tokens import batch
from spikeopd.training import random_setup

SHAPES = {
    "tiny": {},
    "small": {"model.hidden_size": 288, "model.word_embed_proj_dim": 288, "model.ffn_dim": 768,
              "model.num_hidden_layers": 6, "model.num_attention_heads": 6, "model.vocab_size": 6000},
    "slice": {"model.hidden_size": 768, "model.word_embed_proj_dim": 768, "model.ffn_dim": 3072,
              "model.num_hidden_layers": 2, "model.num_attention_heads": 12, "model.vocab_size": 50272,
              "model.max_position_embeddings": 2048, "stage2.spike_layers": [1, 2]},
}  # fmt: skip
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_", "aten::_int_mm", "aten::baddbmm")


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_mib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def stage1(setup, log):
    options, length = setup.config.stage1, setup.config.data.sequence_length
    objective = spad.make_objective(setup, spad.initial_student(setup))
    run = Run(setup, log, "stage1", objective)
    run.parallel.train()
    shape, head = TeacherShape.of(setup.teacher.config), output_table(setup.teacher)
    sizes = branch_sizes(objective.student.config, shape, options.micro_batch_size, length)
    scale = (branch_weights(options) / sizes).tolist()
    ids = torch.from_numpy(batch(setup.train, batch_size=options.micro_batch_size, length=length, seed=0, step=0))
    ids = ids.to(setup.device)

    def update(mark):
        target = run_teacher(setup.teacher, ids, internals=True)
        mark("teacher")
        loss, _ = run.call(objective.sums, ids, target, head, scale)
        mark("forward")
        run.backward(loss)
        mark("backward")
        run.step(0.0, 1e-4)
        mark("optimizer")

    return update, ids.numel()


def stage2(setup, log):
    options = setup.config.stage2
    student = spad.initial_student(setup)
    folder = tempfile.mkdtemp()
    student.save_pretrained(folder)
    active, reference = opd.load_pair(setup, folder)
    policy = opd.DistilledPolicy(active, setup.config.train.kl_chunk_tokens, opd.chosen_divergence(options))
    run = Adaptation(setup, log, policy, reference)
    run.parallel.train()

    def update(mark):
        parts = opd.visit(run, 0)
        mark("rollout and scores")
        opd.descend(run, parts)
        mark("forward and backward")
        run.step(0.0, 1e-6)
        mark("optimizer")

    return update, options.batch_size * (options.prompt_length + options.max_completion_length)


def measure(update, rounds):
    best: dict[str, float] = {}

    def once():
        last = [clock()]
        spent: dict[str, float] = {}

        def mark(name):
            now = clock()
            spent[name] = now - last[0]
            last[0] = now

        update(mark)
        for name, seconds in spent.items():
            best[name] = min(best.get(name, seconds), seconds)

    once()
    if rounds:
        best.clear()
    for _ in range(rounds):
        once()
    return best


def product_share(update):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        update(lambda name: None)
    rows = found.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    return sum(row.self_cpu_time_total for row in rows if row.key in PRODUCTS) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--stage", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", action="store_true", help="also the share of products (one update under a profiler)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(arguments.threads)
    changes = [f"{key}={value}" for key, value in SHAPES[arguments.shape].items()]
    changes += [f"stage1.micro_batch_size={arguments.rows}", f"data.sequence_length={arguments.length}"]
    config = load_config("tiny", [*changes, "model.init=random", "stage1.deploy_updates=0", *arguments.overrides])
    setup = random_setup(config, make_accelerator(config))
    for stage in arguments.stage:
        with tempfile.TemporaryDirectory() as folder, RunLog(folder, quiet=True) as log:
            update, tokens = (stage1 if stage == 1 else stage2)(setup, log)
            before = peak_mib()
            best = measure(update, arguments.rounds)
            total = sum(best.values())
            found = {
                "shape": arguments.shape,
                "stage": stage,
                "threads": arguments.threads,
                "seconds": {name: round(value, 4) for name, value in best.items()},
                "tokens_per_second": round(tokens / total, 1),
                "peak_mib": round(peak_mib()),
                "grown_mib": round(peak_mib() - before),
            }
            if arguments.share:
                found["products"] = round(product_share(update), 3)
        print(json.dumps(found) if arguments.json else "\n".join(f"{key:20}{value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
