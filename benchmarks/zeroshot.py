"""Log-likelihood requests of the shape of HellaSwag: our adapter against the harness's HFLM, same model and items.

    python benchmarks/zeroshot.py                         # OPT-125M's shape, random weights
    python benchmarks/zeroshot.py --size tiny --items 32  # a student of the tiny recipe's size

Each item is a context of 40 to 100 tokens and four endings of 10 to 40 tokens, cut from python-docs. The two take turns
within one process, and the medians are compared; the log-likelihoods are compared too, every time. Processor time
is reported beside wall-clock time, because only the former means something on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from typing import Any

import numpy as np

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 512},
    "125m": {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
    },
}  # fmt: skip


def hellaswag_like(tokenizer: Any, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` questions as (context, ending) pairs, four to each."""
    from spikeopd.text.tokens import prepare

    data = prepare("python-docs", tokenizer, "validation")
    generator = np.random.default_rng(seed)

    def cut(low: int, high: int) -> str:
        length = int(generator.integers(low, high + 1))
        start = int(generator.integers(0, len(data) - length))
        return " ".join(tokenizer.decode(data.tokens[start : start + length]).split())

    pairs = []
    for _ in range(count):
        context = cut(40, 100)
        pairs += [(context, " " + cut(10, 40)) for _ in range(4)]
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--model", choices=("student", "opt"), default="student")
    parser.add_argument("--items", type=int, default=8, help="questions (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--hflm-batch", type=int, default=8, help="batch size of HFLM (default: 8)")
    parser.add_argument("--batch-size", type=int, help="ours (default: auto)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    from spikeopd.evaluation.adapter import HarnessLM
    from spikeopd.evaluation.scoring import Limits
    from spikeopd.evaluation.torch_model import TorchScorer
    from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM
    from spikeopd.models.teacher import resolve
    from spikeopd.text.tokenizer import load_tokenizer

    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = {**SIZES[arguments.size], "max_position_embeddings": 256}
    if arguments.model == "student":
        model: Any = BiSpikCLMForCausalLM(BiSpikCLMConfig(**shape)).eval()
    else:
        model = OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=shape["hidden_size"])).eval()
    tokenizer = load_tokenizer("tiny")
    ours = HarnessLM(TorchScorer(model), tokenizer, Limits(sequences=arguments.batch_size))
    theirs = HFLM(
        pretrained=model,
        tokenizer=AutoTokenizer.from_pretrained(resolve("tiny")),
        batch_size=arguments.hflm_batch,
    )
    requests = [
        Instance("loglikelihood", {}, pair, index)
        for index, pair in enumerate(hellaswag_like(tokenizer, arguments.items))
    ]
    seconds: dict[str, list[float]] = {"ours": [], "hflm": []}
    processor: dict[str, list[float]] = {"ours": [], "hflm": []}
    difference = 0.0
    ours.loglikelihood(requests[:8])  # compile the neuron loops
    for _ in range(arguments.rounds):
        answers = {}
        for name, lm in (("ours", ours), ("hflm", theirs)):
            began, busy = time.perf_counter(), time.process_time()
            answers[name] = lm.loglikelihood(requests, disable_tqdm=True)
            seconds[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - busy)
        pairs = zip(answers["ours"], answers["hflm"], strict=True)
        difference = max(difference, *(abs(one[0] - two[0]) for one, two in pairs))
    report: dict[str, Any] = {
        "model": f"{arguments.model} {arguments.size}",
        "requests": len(requests),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "largest_difference": difference,
    }
    for name, clock in (("wall", seconds), ("processor", processor)):
        ratios = [hflm / our for our, hflm in zip(clock["ours"], clock["hflm"], strict=True)]
        report[name] = {
            "ours_seconds": round(statistics.median(clock["ours"]), 3),
            "hflm_seconds": round(statistics.median(clock["hflm"]), 3),
            "speedup_median": round(statistics.median(ratios), 2),
            "speedup_smallest": round(min(ratios), 2),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
