"""CPU time per generated token against K (constant if nothing is recomputed), and one Stage-2 update by part.

python benchmarks/rollout.py [--config tiny] [--lengths 8 16 32 64 128] [--deploy int8]
Token by token through the compiled decoder, and through the student's own forward: the same tokens, in turns.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from transformers.utils import logging

from spikeopd.config import load_config
from spikeopd.methods import opd, spad
from spikeopd.methods.adaptation import Adaptation
from spikeopd.methods.setup import build, make_accelerator
from spikeopd.rollout import rollout, uniforms
from spikeopd.runlog import RunLog
from spikeopd.text.tokens import batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deploy", choices=["none", "int8", "int4"], default="int8", help="the student's integers")
    a = parser.parse_args()
    logging.disable_progress_bar()
    config = load_config(a.config, ["train.threads=1"])
    setup = build(config, make_accelerator(config))
    student = spad.initial_student(setup).eval()
    student.config.deploy_precision = a.deploy
    options = config.stage2
    prompts = torch.from_numpy(
        batch(setup.prompts, batch_size=options.batch_size, length=options.prompt_length, seed=0, step=0)
    )
    best = {(k, compiled): 9e9 for k in (1, *a.lengths) for compiled in (True, False)}
    for _ in range(a.rounds):
        for k, compiled in best:
            started = time.process_time()
            rollout(student, prompts, uniforms(0, 0, len(prompts), k), compiled=compiled)
            best[k, compiled] = min(best[k, compiled], time.process_time() - started)
    prefill = best[1, False]
    print(f"rollout of {len(prompts)} prompts of {options.prompt_length} tokens, deploy_precision {a.deploy}")
    print(f"prefill and first token: {prefill * 1e3:.0f} ms")
    print(f"{'K':>6}{'ms per further token':>24}{'by the own forward':>24}")
    for k in a.lengths:
        print(f"{k:6d}" + "".join(f"{(best[k, way] - prefill) / (k - 1) * 1e3:24.2f}" for way in (True, False)))

    policy = opd.DistilledPolicy(student, config.train.kl_chunk_tokens, opd.chosen_divergence(options))
    reference = copy.deepcopy(student).requires_grad_(False).eval()
    run = Adaptation(setup, RunLog("unused", active=False), policy, reference)
    parts = {}

    def timed(name, function, *arguments):
        started = time.process_time()
        result = function(*arguments)
        parts[name] = parts.get(name, 0.0) + time.process_time() - started
        return result

    every = tuple(range(student.config.num_hidden_layers))
    for update in range(a.rounds):
        u = uniforms(0, update, len(prompts), options.max_completion_length)
        sampled = timed("rollout", run.call, policy.rollout, prompts, u, 1.0, every, options.rate_scope)
        visited = timed("teacher and reference", opd.score, setup, reference, sampled)
        values = timed("student forward, losses, backward", opd.descend, run, [visited])
        timed("Adam", run.step, values["loss"], 1e-6)
    total = sum(parts.values())
    print(f"\none Stage-2 update: {total / a.rounds:.2f} CPU s")
    for name, seconds in parts.items():
        print(f"  {name:36}{seconds / total:6.1%}")


if __name__ == "__main__":
    main()
