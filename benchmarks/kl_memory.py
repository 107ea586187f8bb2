"""Peak memory of the full-vocabulary KL (forward and backward) against its chunk size, at OPT's vocabulary.

python benchmarks/kl_memory.py [--tokens 512] [--width 768] [--vocab 50272]
Each chunk size runs in a process of its own; the figure is the growth of its peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys


def child(tokens: int, width: int, vocab: int, chunk: int) -> None:
    import torch

    from spikeopd.losses import chunked, forward_kl

    torch.set_num_threads(1)
    head, teacher = torch.nn.Linear(width, vocab), torch.nn.Linear(width, vocab)
    head.weight.grad, head.bias.grad = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
    features = torch.randn(tokens, width, requires_grad=True)
    target = torch.randn(tokens, width)

    def part(q, p):
        with torch.no_grad():
            goal = teacher(p)
        return forward_kl(head(q), goal)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunked(part, chunk, features, target).backward()
    print(json.dumps({"chunk": chunk, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="batch x positions (paper: 16 x 32)")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50272)
    parser.add_argument("--chunks", type=int, nargs="*", default=[32, 64, 128, 256, 512])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        child(a.tokens, a.width, a.vocab, a.child)
        return
    table = a.tokens * a.vocab * 4 / 2**20
    print(f"{a.tokens} positions x {a.vocab} tokens; one float32 table of logits takes {table:.0f} MiB")
    print(f"{'chunk':>8}{'peak growth MiB':>18}")
    for chunk in a.chunks:
        command = [sys.executable, __file__, "--child", str(chunk), "--tokens", str(a.tokens), "--width", str(a.width)]
        result = subprocess.run([*command, "--vocab", str(a.vocab)], capture_output=True, text=True, check=True)
        print(f"{chunk:8d}{json.loads(result.stdout)['mib']:18.0f}")


if __name__ == "__main__":
    main()
