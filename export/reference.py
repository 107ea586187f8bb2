"""The deployable model in torch, whole sequences at once: a second, independent writing of its definition.

Written against `spikeopd.contracts`, not against `neuro_sim.dense`: there one token at a time in numpy, here every
token of a sequence in one pass, so that agreement of the two means something.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spikeopd.contracts import (
    DECAY_BITS,
    EMBED_SITE,
    MEMBRANE_MAX,
    MEMBRANE_MIN,
    Array,
    Layer,
    SpikeModel,
    SpikeTrace,
    head_logits,
)
from spikeopd.errors import InputError


class TorchReference:
    """`logits, trace = TorchReference(model).run(tokens)`."""

    def __init__(self, model: SpikeModel) -> None:
        self.model = model
        self.integer = model.integer
        ones = torch.ones(1, model.shape.hidden_size, dtype=torch.float64)
        self._sums = self._accumulate(ones)[0].numpy()

    @torch.no_grad()
    def run(self, tokens: Sequence[int], *, trace: bool = True, logits: bool = True) -> tuple[Array, SpikeTrace]:
        """Logits [token, vocab] (float64) and the spikes of all sites. Empty arrays where not asked for."""
        record = SpikeTrace(tokens=list(tokens)) if trace else None
        read = self._forward(tokens, record)
        # Step by step: in float precision the order of adding is part of the definition.
        out = self._head(sum(read[1:], read[0])) if logits else np.zeros((0, self.model.shape.vocab_size))
        return out, record if record is not None else SpikeTrace()

    @torch.no_grad()
    def readout(self, tokens: Sequence[int]) -> Array:
        """What the head sums over the steps, [T_s, token, d]: the last spikes (0 or 1) or the residual stream."""
        return self._forward(tokens, None).numpy()

    def _forward(self, tokens: Sequence[int], record: SpikeTrace | None) -> Tensor:
        shape = self.model.shape
        if not tokens or min(tokens) < 0 or max(tokens) >= shape.vocab_size:
            raise InputError(f"tokens must be 0 to {shape.vocab_size - 1} and at least one")
        if len(tokens) > shape.max_position_embeddings:
            raise InputError(f"{len(tokens)} tokens do not fit the context of {shape.max_position_embeddings}")
        h = self._embed(torch.tensor(list(tokens)))
        h = (h * shape.num_steps)[None] if shape.graded else h.expand(shape.num_steps, -1, -1)
        x = self._fire(-1, EMBED_SITE, h, record)
        for index, layer in enumerate(self.model.layers):
            x, h = self._block(index, layer, x, h, record)
        return x.long() if shape.readout == "rate" else h

    def _embed(self, tokens: Tensor) -> Tensor:
        """[token, d] in residual units."""
        e = self.model.embedding
        rows = torch.from_numpy(e.table)[tokens]
        gain, position = torch.from_numpy(e.channel_gain), torch.from_numpy(e.position[: len(tokens)])
        if not self.integer:
            return (rows if e.project_in is None else rows @ torch.from_numpy(e.project_in)) * gain + position
        wide = rows.long()
        if e.project_in is not None:
            wide = wide @ torch.from_numpy(e.project_in).long()
        scaled = wide * torch.from_numpy(e.row_scale)[tokens, None].long() * gain.long()
        return torch.div(scaled + (2**e.shift // 2), 2**e.shift, rounding_mode="floor") + position.long()

    def _block(
        self, index: int, layer: Layer, x: Tensor, h: Tensor, record: SpikeTrace | None
    ) -> tuple[Tensor, Tensor]:
        heads = self.model.shape.num_attention_heads

        def project(site: str, spikes: Tensor, weight: Array) -> Tensor:
            return self._fire(index, site, self._sum(spikes, weight), record)

        def split(spikes: Tensor) -> Tensor:
            """[time, token, d] -> [time, head, token, d_h]"""
            return spikes.view(*spikes.shape[:-1], heads, -1).transpose(1, 2)

        q, k, v = project("q", x, layer.w_q), project("k", x, layer.w_k), project("v", x, layer.w_v)
        causal = torch.ones(x.shape[1], x.shape[1]).tril()
        # Counts of coincidences are small integers: exact in float32.
        counts = (split(q).float() @ split(k).float().transpose(-1, -2)) * causal
        a = self._fire(index, "a", counts, record).float() * causal
        z = (a @ split(v).float()).transpose(1, 2).flatten(-2)
        if layer.inhibition is None:
            r = self._fire(index, "r", z, record)
        else:
            # The same sum as one product: values less than whole, in membrane units.
            unit = 1 << layer.sites["r"].shift
            values = split(v).double() * unit + _tensor(layer.inhibition).double().view(heads, 1, -1)
            z = (a.double() @ values).transpose(1, 2).flatten(-2)
            r = self._fire(index, "r", z if self.integer else z.float(), record, shift=0)
        if self.model.shape.residual_write == "spike":
            h = h + project("o", r, layer.w_o) * _tensor(layer.gain_o)
        else:
            h = h + self._current(r, layer.w_o, layer.shift_o, layer.bias_o)
        f = project("f", self._fire(index, "x", h, record), layer.w_1)
        if self.model.shape.residual_write == "spike":
            h = h + project("y", f, layer.w_2) * _tensor(layer.gain_y)
        else:
            h = h + self._current(f, layer.w_2, layer.shift_y, layer.bias_y)
        return self._fire(index, "h", h, record), h

    def _current(self, spikes: Tensor, weight: Array, shift: Array | None, bias: Array | None) -> Tensor:
        """What a sublayer writes without neurons of its own: its sums in residual units, plus a bias."""
        sums = self._sum(spikes, weight)
        if self.integer:
            # A product with the power of two, where the oracle shifts.
            sums = sums.long() * (2 ** _tensor(shift).long())
        return sums + _tensor(bias) * (self.model.shape.num_steps if self.model.shape.graded else 1)

    def _sum(self, spikes: Tensor, weight: Array) -> Tensor:
        """Sum of the weights whose input spiked. Integer sums below 2**24 are exact in float32, in any order."""
        rows = torch.from_numpy(weight)
        largest = 128 * (self.model.shape.num_steps if self.model.shape.graded else 1)
        if not self.integer or largest * weight.shape[0] < 1 << 24:
            return spikes.float() @ rows.float()
        return spikes.long() @ rows.long()

    def _fire(
        self, layer: int, name: str, current: Tensor, record: SpikeTrace | None, shift: int | None = None
    ) -> Tensor:
        """bool spikes of all steps; current [time, token, n], or [time, head, query, key] for the attention map."""
        site = self.model.site(layer, name)
        threshold, bias = torch.from_numpy(site.threshold), torch.from_numpy(site.bias)
        if name == "a":
            threshold = threshold[:, None, None]
            bias = self._pair_bias(bias, current.shape[-1])
        if self.model.shape.graded:
            return self._graded(layer, name, current, threshold, bias, record)
        fire = self._integer_steps if self.integer else self._float_steps
        spikes = fire(current, threshold, bias, site.shift if shift is None else shift)
        self._record(layer, name, spikes, record)
        return spikes

    def _record(self, layer: int, name: str, spikes: Tensor, record: SpikeTrace | None) -> None:
        """spikes [T_s, token, n], or [T_s, head, query, key]."""
        if record is not None:
            for token in range(spikes.shape[-2] if name == "a" else spikes.shape[1]):
                if name == "a":
                    record.add(layer, name, spikes[:, :, token, : token + 1].flatten(1).numpy())
                else:
                    record.add(layer, name, spikes[:, token].numpy())

    def _graded(
        self, layer: int, name: str, current: Tensor, threshold: Tensor, bias: Tensor, record: SpikeTrace | None
    ) -> Tensor:
        """Counts of a twin's neurons, [1, ...]: the levels that the mean current reaches, one comparison each."""
        levels, shift = self.model.shape.num_steps, self.model.site(layer, name).shift
        parts = levels**2 if name in ("a", "r") else levels
        value = current.long() * 2**shift + parts * bias.long()
        # Level k is reached at (k - 1/2) / T_s of the threshold.
        reached = [2 * levels * value >= (2 * k - 1) * parts * threshold.long() for k in range(1, levels + 1)]
        self._record(layer, name, torch.cat(reached), record)
        return torch.stack(reached).sum(0)

    def _pair_bias(self, bias: Tensor, tokens: int) -> Tensor:
        """Biases of the attention map [head, query, key]: one per head, or one per head and distance i - j."""
        if not self.model.shape.distances:
            return bias[:, None, None]
        place = torch.arange(tokens)
        distance = (place[:, None] - place).clamp(0, self.model.shape.distances - 1)  # pairs with j > i are masked
        return bias[:, distance]

    def _integer_steps(self, current: Tensor, threshold: Tensor, bias: Tensor, shift: int) -> Tensor:
        drive = (current.long() << shift) + bias.long()
        threshold = threshold.long()
        v = torch.zeros_like(drive[0])
        spikes = torch.zeros(drive.shape, dtype=torch.bool)
        previous = spikes[0]
        for step in range(len(drive)):
            # Truncating the magnitude is rounding towards zero.
            decayed = torch.div(v * int(self.model.decay), 1 << DECAY_BITS, rounding_mode="trunc")
            v = (decayed + drive[step] - threshold * previous).clamp(MEMBRANE_MIN, MEMBRANE_MAX)
            previous = v >= threshold
            spikes[step] = previous
        return spikes

    def _float_steps(self, current: Tensor, threshold: Tensor, bias: Tensor, shift: int) -> Tensor:
        v = torch.zeros_like(current[0])
        spikes = torch.zeros(current.shape, dtype=torch.bool)
        previous = spikes[0]
        for step in range(len(current)):
            v = self.model.decay * v + (current[step] + bias) - threshold * previous
            previous = v >= threshold
            spikes[step] = previous
        return spikes

    def _head(self, counts: Tensor) -> Array:
        pairs = zip(counts.numpy(), self._accumulate(counts.double()).numpy(), strict=True)
        return np.stack([head_logits(self.model, n, acc, self._sums) for n, acc in pairs])

    def _accumulate(self, counts: Tensor) -> Tensor:
        """[token, d] -> acc_v or acc_k of `contracts.Head`. Integers below 2**53 are exact in float64."""
        head = self.model.head
        if head.project_out is not None:
            return counts @ torch.from_numpy(head.project_out).double()
        if head.gamma is None:
            return counts
        weighted = counts * torch.from_numpy(head.gamma).double()
        # In slices: the table in float64 would be eight times the exported one.
        table = torch.from_numpy(self.model.embedding.table)
        return torch.cat([weighted @ part.double().T for part in torch.split(table, 4096)], -1)


def _tensor(array: Array | None) -> Tensor:
    assert array is not None  # the form of the block says which arrays there are
    return torch.from_numpy(array)
