"""One decoding step of OPT-125M with a KV cache, written plainly so that torch can export it to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

D, LAYERS, HEADS, FFN, VOCAB, POSITIONS = 768, 12, 12, 3072, 50272, 2050
HEAD_DIM = D // HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, FFN), nn.Linear(FFN, D)

    def forward(self, h: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.before(h)
        q, k, v = (layer(x).view(1, 1, HEADS, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        weights = torch.softmax(torch.matmul(q * HEAD_DIM**-0.5, k.transpose(2, 3)), -1)
        h = h + self.o(torch.matmul(weights, v).transpose(1, 2).reshape(1, 1, D))
        return h + self.down(torch.relu(self.up(self.after(h)))), k, v


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(POSITIONS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, token: Tensor, position: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        h = self.tokens(token) + self.positions(position)
        new: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            h, k, v = block(h, past[2 * index], past[2 * index + 1])
            new += [k, v]
        return (self.head(self.norm(h)), *new)


def cache_names(prefix: str) -> list[str]:
    return [f"{prefix}_{kind}{layer}" for layer in range(LAYERS) for kind in "kv"]


def step_inputs(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    past = {name: rng.normal(size=(1, HEADS, length, HEAD_DIM)).astype(np.float32) for name in cache_names("past")}
    return {"token": np.array([[5]]), "position": np.array([[length + 2]]), **past}


def export_step(path: Path) -> None:
    torch.manual_seed(0)
    example = {name: torch.from_numpy(np.asarray(value)) for name, value in step_inputs(16).items()}
    axes = {name: {2: "past"} for name in cache_names("past")} | {name: {2: "all"} for name in cache_names("new")}
    torch.onnx.export(
        Step().eval(), tuple(example.values()), str(path), input_names=list(example), dynamic_axes=axes,
        output_names=["logits", *cache_names("new")], opset_version=17, dynamo=False,
    )  # fmt: skip
