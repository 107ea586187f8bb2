"""Decode an exported model.nir with nir and numpy alone, as its metadata says: no other part of this project is needed.

python examples/nir_reader.py BUNDLE "2 40 77" [NEW_TOKENS]      the prompt as token numbers, the begin token first

Reads the default export (profile `cell`, neuron `exact`, int8 or int4); prints the greedy tokens of every engine here.
"""

import json
import sys
from pathlib import Path

import nir
import numpy as np


class Reader:
    """One sequence: `logits = reader.token(number)` feeds the next token."""

    def __init__(self, path: str) -> None:
        self.graph = nir.read(path)
        self.about, self.host = self.graph.metadata["spikeopd"], self.graph.metadata["host"]
        self.shape, self.position = self.about["shape"], 0
        self.cache: dict[str, list[list[np.ndarray]]] = {}  # spikes of keys and values: node, token, step
        form, integers = [self.about["profile"], self.about["neuron"]], self.about["precision"] in ("int8", "int4")
        if form != ["cell", "exact"] or not integers:
            raise SystemExit(
                "this reader takes the default export: --nir-profile cell --neuron exact --precision int8 (or int4)"
            )

    def token(self, number: int) -> np.ndarray:
        table, row = self.host["embedding"], self.host["embedding"]["table"][number].astype(np.int64)
        row = row @ table["project_in"].astype(np.int64) if "project_in" in table else row
        shift = int(self.about["embedding_shift"])
        scaled = row * int(table["row_scale"][number]) * table["channel_gain"]
        current = ((scaled + ((1 << shift) >> 1)) >> shift) + table["position"][self.position]
        self.last: dict[str, np.ndarray] = {}  # what each node sent last: in this step, or (a loop) in the one before
        self.membrane: dict[str, np.ndarray] = {}  # at rest for every token
        steps = range(self.shape["num_steps"])
        counts = sum(self.step(self.graph, "", current.astype(np.float64), step) for step in steps)
        self.position += 1
        return self.head(counts)

    def step(self, graph: nir.NIRGraph, path: str, given: np.ndarray, step: int) -> np.ndarray:
        """One time step of a graph; names sort in the order of computation. float64 holds every integer exactly."""
        for name in sorted(graph.nodes):
            node, pair = graph.nodes[name], "pair" in graph.nodes[name].metadata
            total = given if isinstance(node, nir.Input) else 0.0
            for source in (source for source, target in graph.edges if target == name):
                value, about = self.last.get(path + source, 0.0), graph.nodes[source].metadata
                if pair and about.get("site", "").endswith((".k", ".v")):  # of every token so far, at this step
                    value = np.stack([spikes[step] for spikes in self.cache[path + source]])
                total = total + (np.sum(value, 0) if "pair" in about and not pair else value)
            if isinstance(node, nir.NIRGraph):
                total = self.step(node, f"{path}{name}/", total, step)
            elif isinstance(node, nir.LI):
                total = self.integrate(path + name, node, total)
            elif isinstance(node, nir.Threshold):
                total = (total > node.threshold).astype(np.float64)
            elif isinstance(node, nir.Scale):
                total = total * node.scale
            elif isinstance(node, nir.Linear | nir.Affine):
                bias = node.bias if isinstance(node, nir.Affine) else 0.0
                if pair and self.shape.get("distances", 0) and isinstance(node, nir.Affine):
                    by_distance = self.graph.metadata["distance_bias"][f"layer{int(graph.metadata['layer']):03d}"]
                    distance = np.arange(self.position, -1, -1).clip(max=by_distance.shape[1] - 1)
                    bias = by_distance[:, distance].T / 1024  # membrane units to counts
                total = total @ node.weight.T + bias
            self.last[path + name] = total
            if isinstance(node, nir.Threshold) and node.metadata.get("site", "").endswith((".k", ".v")):
                spikes = self.cache.setdefault(path + name, [])
                spikes += [[]] if step == 0 else []
                spikes[-1].append(total)
        return total

    def integrate(self, name: str, node: nir.LI, current: np.ndarray) -> np.ndarray:
        """decay(u) + unit * current with the truncating decay and 24 bits; the reset is part of the current."""
        old, unit = self.membrane.get(name, np.int64(0)), np.rint(node.r * self.about["dt"] / node.tau)
        decayed = np.sign(old) * ((np.abs(old) * self.about["decay_numerator"]) >> self.about["decay_bits"])
        new = decayed + np.rint(unit * current).astype(np.int64)
        self.membrane[name] = new.clip(-(2**23), 2**23 - 1)
        return self.membrane[name].astype(np.float64)

    def head(self, n: np.ndarray) -> np.ndarray:
        head, table, size = self.host["head"], self.host["embedding"]["table"].astype(np.int64), n.size
        n = n.astype(np.int64)
        unit = int(self.shape["num_steps"]) * (4096 if self.shape.get("readout") == "residual" else 1)
        mu = int(n.sum()) / (size * unit)
        inv = 1.0 / np.sqrt(max(int((n**2).sum()) / (size * unit * unit) - mu * mu, 0.0) + self.about["epsilon"])
        if "gamma" in head:
            weight = head["gamma"] * table
            return head["row_scale"] * (((weight @ n) / unit - mu * weight.sum(1)) * inv) + head["bias"]
        project = head["project_out"].astype(np.int64) if "project_out" in head else np.eye(size, dtype=np.int64)
        y = head["out_scale"] * (((n @ project) / unit - mu * project.sum(0)) * inv) + head["out_bias"]
        return head["row_scale"] * (table @ np.rint(y).clip(-8191, 8191).astype(np.int64)) + head["bias"]


def text(file: Path, numbers: list[int]) -> str:
    """Tokens of a byte-level tokenizer.json as text: each letter of a token stands for a byte."""
    content = json.loads(file.read_text("utf-8"))
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        return "(not a byte-level tokenizer: decode these numbers with its own library)"
    special = {token["id"] for token in content["added_tokens"]}
    words = {number: word for word, number in content["model"]["vocab"].items() if number not in special}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return bytes(letters[letter] for number in numbers for letter in words.get(number, "")).decode("utf-8", "replace")


def main(bundle: str, prompt: str, count: str = "16") -> None:
    reader, made = Reader(f"{bundle}/model.nir"), []
    logits = [reader.token(int(number)) for number in prompt.split()][-1]
    end = reader.about.get("tokens", {}).get("eos")
    while len(made) < int(count) and (not made or made[-1] != end):
        made.append(int(np.argmax(logits)))
        if len(made) < int(count) and made[-1] != end:
            logits = reader.token(made[-1])
    print(*made)
    if (Path(bundle) / "tokenizer.json").is_file():
        print(text(Path(bundle) / "tokenizer.json", made))


if __name__ == "__main__":
    main(*sys.argv[1:])
