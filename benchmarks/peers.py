"""The same work by this project and by plain code or a library: CPU seconds, memory kept for the backward pass. In turns.

python benchmarks/peers.py block [--rows 2 --length 128 --width 768]   one block, against the same block of SpikingJelly modules
python benchmarks/peers.py kl [--rows 256 --width 768 --vocab 50272]   full-vocabulary KL through the output table; TRL if installed
python benchmarks/peers.py stage2 [--rows 4 --length 480]              one update, K = 32, against a plain one: no cache, no int8,
                                                                       no compiled kernels, all logits at once
"""  # noqa: E501

from __future__ import annotations

import argparse
import copy
import tempfile
import time

import torch
import torch.nn.functional as F
from neuron import saved_bytes
from torch import nn

from spikeopd import losses
from spikeopd.config import load_config
from spikeopd.methods import opd, spad
from spikeopd.methods.adaptation import Adaptation
from spikeopd.methods.setup import make_accelerator
from spikeopd.models import lif_cpu, products
from spikeopd.models.attention import causal_mask, merge_heads, split_heads
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, use_gradients
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.rollout import sample, uniforms
from spikeopd.runlog import RunLog
from spikeopd.training import random_setup


def in_turns(ways, rounds):
    """Best CPU seconds of each way; the first is what the others are compared with."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, work in ways.items():
            started = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - started)
    return best


def show(best, **columns):
    first = next(iter(best.values()))
    print(f"{'way':36}{'CPU s':>10}{'of ours':>9}" + "".join(f"{name:>14}" for name in columns))
    for name, seconds in best.items():
        cells = "".join(f"{values[name]:14.1f}" for values in columns.values())
        print(f"{name:36}{seconds:10.3f}{seconds / first:9.2f}{cells}")


class JellyBlock(nn.Module):
    """The paper's block of SpikingJelly's multi-step modules and torch's products."""

    def __init__(self, width, ffn, heads):
        super().__init__()
        from spikingjelly.activation_based import layer, neuron, surrogate

        def fire(threshold=0.7):
            return neuron.LIFNode(
                2.0, v_threshold=threshold, v_reset=None, surrogate_function=surrogate.ATan(), step_mode="m"
            )

        sizes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width),
                 "f": (width, ffn), "y": (ffn, width)}  # fmt: skip
        self.heads = heads
        self.dense = nn.ModuleDict({name: layer.Linear(*size, step_mode="m") for name, size in sizes.items()})
        thresholds = {"a": 0.7 * (width // heads) ** 0.5, "r": 2.0, "x": 0.7, "h": 0.7}
        self.fire = nn.ModuleDict({name: fire(thresholds.get(name, 0.7)) for name in (*sizes, *thresholds)})
        self.gain = nn.ParameterDict({name: nn.Parameter(torch.full((width,), 0.35)) for name in "oy"})

    def forward(self, x, h, mask):
        q, k, v = (split_heads(self.fire[name](self.dense[name](x)), self.heads) for name in "qkv")
        a = self.fire["a"](q @ k.transpose(-1, -2) * mask) * mask
        r = self.fire["r"](merge_heads(a @ v))
        h = h + self.gain["o"] * self.fire["o"](self.dense["o"](r))
        f = self.fire["f"](self.dense["f"](self.fire["x"](h)))
        h = h + self.gain["y"] * self.fire["y"](self.dense["y"](f))
        return self.fire["h"](h), h


def block(arguments):
    from spikingjelly.activation_based import functional

    rows, length, width = arguments.rows or 2, arguments.length or 128, arguments.width
    config = BiSpikCLMConfig(hidden_size=width, ffn_dim=4 * width, num_attention_heads=width // 64, num_hidden_layers=2,
                             vocab_size=64)  # fmt: skip
    torch.manual_seed(0)
    ours = BiSpikCLMForCausalLM(config).train().model.layers[0]
    theirs = JellyBlock(width, 4 * width, width // 64)
    x = (torch.rand(4, rows, length, width) < 0.2).float()
    h = torch.randn(4, rows, length, width).requires_grad_()
    mask = causal_mask(None, rows, length, length, x.device, x.dtype)

    def by_jelly(source, _=None):
        functional.reset_net(theirs)
        return theirs(x, source, mask)

    def by_us(source, _=None):
        return ours(x, source)

    def both_ways(forward):
        spikes, after = forward(h)[:2]
        (spikes.sum() + after.sum()).backward()

    coarse = copy.deepcopy(ours)
    use_gradients(coarse, "bf16")
    ways = {
        "ours": by_us,
        "ours, train.gradients=bf16": lambda source, _=None: coarse(x, source),
        "SpikingJelly modules": by_jelly,
    }
    best = in_turns({name: lambda way=way: both_ways(way) for name, way in ways.items()}, arguments.rounds)
    show(best, kept_mib={name: saved_bytes(way, h, None) / 2**20 for name, way in ways.items()})


def kl(arguments):
    rows, width, vocab = arguments.rows or 256, arguments.width, arguments.vocab
    torch.manual_seed(0)
    teacher, bias = torch.randn(rows, vocab), torch.zeros(vocab, requires_grad=True)
    features, table = torch.randn(rows, width, requires_grad=True), (torch.randn(vocab, width) / 28).requires_grad_()

    def chunked(*_):
        return losses.linear_sums(
            lambda q, p: losses.forward_kl(q, p)[None], (1.0,), 128, (features, table, bias), teacher
        )[0]

    def plain(*_):
        p, q = teacher.log_softmax(-1), F.linear(features, table, bias).log_softmax(-1)
        return F.kl_div(q, p, reduction="sum", log_target=True)

    ways = {"ours (linear_sums)": chunked, "plain autograd": plain}
    try:
        from trl.experimental.gkd import GKDTrainer

        def by_trl(*_):
            logits = F.linear(features, table, bias)
            return GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], beta=0.0, reduction="sum")

        ways["TRL generalized_jsd_loss"] = by_trl
    except ImportError as error:
        print(f"TRL: not measured ({error})")
    values = {name: way().item() for name, way in ways.items()}
    best = in_turns({name: lambda way=way: way().backward() for name, way in ways.items()}, arguments.rounds)
    show(best, loss=values)  # memory: benchmarks/kl_memory.py


def stage2(arguments):
    rows, prompt = arguments.rows or 4, arguments.length or 480
    changes = [f"stage2.{key}={value}" for key, value in
               {"batch_size": rows, "micro_batch_size": rows, "prompt_length": prompt}.items()]  # fmt: skip
    config = load_config(
        "tiny", ["train.threads=1", "model.init=random", "model.max_position_embeddings=512", *changes]
    )
    setup = random_setup(config, make_accelerator(config))
    options = setup.config.stage2
    start = spad.initial_student(setup)
    prompts = torch.randint(4, start.config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
    u = uniforms(0, 0, rows, options.max_completion_length)
    every = tuple(range(start.config.num_hidden_layers))
    head = output_table(setup.teacher)
    found = {}

    def fresh():
        student = copy.deepcopy(start)
        return student, copy.deepcopy(student).requires_grad_(False).eval()

    def ours():
        student, reference = pair
        sampled = run.call(policy.rollout, prompts, u, 1.0, every, options.rate_scope)
        visited = opd.score(setup, reference, sampled)
        found["ours"] = opd.descend(run, [visited])["loss"], sampled.sequences
        run.step(0.0, 0.0)

    def plain():
        enabled, fast = lif_cpu.ENABLED, products.fast
        lif_cpu.ENABLED, products.fast = False, lambda: False
        student, reference = plain_pair
        sequences = prompts
        with torch.no_grad():
            for t in range(u.shape[1]):
                logits = student.eval()(sequences, use_cache=False, logits_to_keep=1).logits[:, -1]
                sequences = torch.cat((sequences, sample(logits, u[:, t], 1.0)[:, None]), 1)
            k = u.shape[1]
            teacher = head(run_teacher(setup.teacher, sequences[:, :-1], internals=False).features[:, -k:])
            anchor = reference(sequences[:, :-1], use_cache=False).logits[:, -k:]
        logits = student.train()(sequences[:, :-1], use_cache=False).logits[:, -k:]
        loss = options.teacher_coef * losses.forward_kl(logits.flatten(0, 1), teacher.flatten(0, 1))
        loss = (loss + options.ref_coef * losses.reverse_kl(logits.flatten(0, 1), anchor.flatten(0, 1))) / (rows * k)
        loss.backward()
        found["plain"] = loss.item(), sequences
        lif_cpu.ENABLED, products.fast = enabled, fast

    pair, plain_pair = fresh(), fresh()
    policy = opd.DistilledPolicy(pair[0], config.train.kl_chunk_tokens, opd.chosen_divergence(options))
    with tempfile.TemporaryDirectory() as folder, RunLog(folder, quiet=True) as log:
        run = Adaptation(setup, log, policy, pair[1])
        ours()  # loads the kernels
        best = in_turns({"ours": ours, "plain": plain}, arguments.rounds)
    assert torch.equal(found["ours"][1], found["plain"][1]), "the same tokens"
    show(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["block", "kl", "stage2"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50272)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"block": block, "kl": kl, "stage2": stage2}[arguments.what](arguments)


if __name__ == "__main__":
    main()
