r"""The firing rate as a dial: a term beside the paper's losses that draws rates above a target down to it.

    L_rate = c mean_g [ln(r_g / r*_g(u))]_+^2          r*_g(u) = r*_g ^ min(1, (u + 1) / warm-up)

One target is the rate of the whole network: S_E's neurons and those of every layer together, attention maps apart, as
the energy reports have it. A target for each layer is one for the paper's r_l (Eq. app_rate). During the warm-up the
target falls from 1, which nothing exceeds. Rates below the target cost nothing: fewer spikes are never punished.

The term is not linear in the rates, so its gradient is cut at the spikes of the whole batch (as `spike_coefficients`
does): every micro-batch and process goes backward with one and the same slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spikeopd.config import Stage1Config, Stage2Config
from spikeopd.contracts import EMBED_SITE
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder
from spikeopd.quality import RATE_SITES, layer_spikes, rate_slots


def rate_target_loss(rates: Tensor, targets: Tensor) -> Tensor:
    """mean of [ln(r / r*)]_+^2; a group that is silent costs nothing. rates, targets: [groups]."""
    return torch.where(rates > targets, rates / targets, 1.0).log().square().mean()


@dataclass(frozen=True)
class Pull:
    """The term at one update: its value, the rate of the whole network, and its slope in each group's spikes."""

    loss: float
    rate: float
    slope: Tensor

    def __call__(self, spikes: Tensor) -> Tensor:
        """What a part of the batch adds to the loss that goes backward; its value means nothing by itself."""
        return (self.slope * spikes).sum()


@dataclass(frozen=True)
class RateTarget:
    """The dial of one stage. Spikes come as [1 + layers]: S_E's, then each layer's over the sites of `scope`.

    slots: places for a spike of each, over a whole batch.
    """

    targets: tuple[float, ...]
    coefficient: float
    warmup: float
    slots: tuple[int, ...]
    scope: str = "all"

    @staticmethod
    def of(
        options: Stage1Config | Stage2Config, student: BiSpikCLMConfig, positions: int, scope: str = "all"
    ) -> RateTarget | None:
        """The dial that a stage's options ask for, if they do. positions: tokens of a whole batch."""
        if not options.rate_target:
            return None
        layer = rate_slots(student, scope, positions)
        slots = (positions * student.steps * student.hidden_size, *[layer] * student.num_hidden_layers)
        return RateTarget(options.rate_target, options.rate_coef, options.rate_warmup * options.updates, slots, scope)

    @property
    def layers(self) -> tuple[int, ...]:
        """The groups of neurons, as a `Recorder` names them: -1 is the embedding's."""
        return tuple(range(-1, len(self.slots) - 1))

    @property
    def sites(self) -> tuple[str, ...]:
        return (EMBED_SITE, *RATE_SITES[self.scope])

    def at(self, update: int, spikes: Tensor) -> Pull:
        """The term at `update` (from 0), from the spikes of the whole batch [1 + layers]."""
        fallen = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        targets = torch.tensor(self.targets, dtype=torch.float64, device=spikes.device) ** fallen
        slots = torch.tensor(self.slots, dtype=torch.float64, device=spikes.device)
        with torch.enable_grad():
            leaf = spikes.detach().double().requires_grad_(True)
            whole = leaf.sum() / slots.sum()
            rates = whole[None] if len(self.targets) == 1 else leaf[1:] / slots[1:]
            loss = self.coefficient * rate_target_loss(rates, targets)
            (slope,) = torch.autograd.grad(loss, leaf)
        return Pull(loss.item(), whole.item(), slope.float())


@torch.no_grad()
def count_spikes(student: BiSpikCLMForCausalLM, ids: Tensor, dial: RateTarget) -> Tensor:
    """Spikes of a micro-batch [1 + layers], from a forward pass of its own."""
    recorder = Recorder(dial.sites)
    student.model(ids, use_cache=False, recorder=recorder)
    return layer_spikes(recorder, dial.layers, dial.scope)
