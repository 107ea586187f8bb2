"""Peak memory and CPU time of the full-vocabulary KL (forward and backward) by chunk size, at OPT's vocabulary.

python benchmarks/kl_memory.py [--tokens 512] [--width 768] [--vocab 50272]
Each way and chunk size runs in a process of its own; memory is the growth of its peak. Ways: `fused` (linear_sums, what
training uses), `recomputed` (chunks under activation checkpointing), `whole` (plain autograd, no chunks).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def child(tokens: int, width: int, vocab: int, chunk: int, way: str) -> None:
    import torch

    from spikeopd.losses import chunked, forward_kl, linear_sums

    torch.set_num_threads(1)
    head, teacher = torch.nn.Linear(width, vocab), torch.nn.Linear(width, vocab)
    head.weight.grad, head.bias.grad = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
    features = torch.randn(tokens, width, requires_grad=True)
    target = torch.randn(tokens, width)

    def from_logits(logits, p):
        with torch.no_grad():
            goal = teacher(p)
        return forward_kl(logits, goal)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    if way == "fused":
        affine = (features, head.weight, head.bias)
        linear_sums(lambda q, p: from_logits(q, p)[None], (1.0,), chunk, affine, target)[0].backward()
    elif way == "recomputed":
        chunked(lambda q, p: from_logits(head(q), p), chunk, features, target).backward()
    else:
        from_logits(head(features), target).backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"mib": grown, "seconds": time.process_time() - began}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="batch x positions (paper: 16 x 32)")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50272)
    parser.add_argument("--chunks", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--ways", nargs="*", default=["fused", "recomputed", "whole"])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        child(a.tokens, a.width, a.vocab, a.child, a.ways[0])
        return
    table = a.tokens * a.vocab * 4 / 2**20
    print(f"{a.tokens} positions x {a.vocab} tokens; one float32 table of logits takes {table:.0f} MiB")
    print(f"{'way':12}{'chunk':>8}{'peak growth MiB':>18}{'CPU s':>8}")
    for way in a.ways:
        for chunk in a.chunks if way != "whole" else [a.tokens]:
            command = [sys.executable, __file__, "--child", str(chunk), "--tokens", str(a.tokens)]
            command += ["--width", str(a.width), "--vocab", str(a.vocab), "--ways", way]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(result.stdout)
            print(f"{way:12}{chunk:8d}{found['mib']:18.0f}{found['seconds']:8.2f}", flush=True)


if __name__ == "__main__":
    main()
