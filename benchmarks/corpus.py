"""Sampling a corpus against plain `generate` of transformers: the same teacher, batch and length, in turns, one thread.

CPU time per token of the best round; tokens behind a document's end are not counted for either.

  python benchmarks/corpus.py TEACHER --batch 128 --length 128 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from spikeopd.corpus import CorpusOptions, sample_batch
from spikeopd.models.teacher import load_teacher
from spikeopd.students import no_bars
from spikeopd.text.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    no_bars()
    tokenizer = load_tokenizer(args.teacher)
    model = load_teacher(args.teacher, attentions=False)

    narrow = load_teacher(args.teacher, attentions=False, dtype=torch.bfloat16)

    def ours(seed: int, teacher: Any = model) -> int:
        options = CorpusOptions(seed=seed)
        return sum(x["tokens"] for x in sample_batch(teacher, tokenizer, 0, args.batch, args.length, options))

    def in_bf16(seed: int) -> int:
        return ours(seed, narrow)

    def plain(seed: int) -> int:
        torch.manual_seed(seed)
        start = torch.full((args.batch, 1), tokenizer.bos_token_id)
        made = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_length=args.length, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
        )  # fmt: skip
        ends = (made[:, 1:] == tokenizer.eos_token_id).int()
        return int(torch.where(ends.any(1), ends.argmax(1) + 1, made.shape[1]).sum())

    ways = {"ours": ours, "ours, bf16": in_bf16, "generate": plain}
    best = dict.fromkeys(ways, float("inf"))
    for seed in range(args.rounds):
        for name, run in ways.items():
            began = time.process_time()
            tokens = run(seed)
            best[name] = min(best[name], (time.process_time() - began) / tokens)
    print(json.dumps({
        "teacher": args.teacher, "batch": args.batch, "length": args.length, "vocabulary": tokenizer.vocab_size,
        "ms_per_token": {name: round(1e3 * value, 3) for name, value in best.items()},
        "times_as_fast": {name: round(best["generate"] / value, 2) for name, value in best.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
