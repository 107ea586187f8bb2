"""On-policy generation from the spiking student, and its random numbers as tensors.

A row's tokens depend on (seed, update, row) alone: not on the micro-batch or the rank it is sampled in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spikeopd import sampling
from spikeopd.contracts import EMBED_SITE
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.quality import RATE_SITES, layer_spikes


@dataclass(frozen=True)
class Rollout:
    """sequences [batch, prompt + K]; spikes [layers]: spikes of the layers asked for, summed over the K positions
    (layer -1: the embedding's).
    """

    sequences: Tensor
    spikes: Tensor


def uniforms(seed: int, update: int, rows: int, length: int) -> Tensor:
    """One number in [0, 1) for each row and position, float64 [rows, length]."""
    return torch.from_numpy(sampling.uniforms(seed, update, rows, length))


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling over the full vocabulary. logits [batch, vocab], uniform [batch] -> ids [batch]."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    target = uniform[:, None].to(logits.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def rollout(
    student: BiSpikCLMForCausalLM,
    prompts: Tensor,
    uniform: Tensor,
    temperature: float = 1.0,
    layers: tuple[int, ...] = (),
    rate_scope: str = "all",
) -> Rollout:
    """Sample uniform.shape[1] tokens after each prompt, through the spike K/V cache.

    The visited states are s_t = (prompt, y_<t): the last prompt token and all but the last sampled one.
    """
    training = student.training
    student.train(False)
    spikes = torch.zeros(len(layers), device=prompts.device)
    tokens, past, sequence = prompts, None, [prompts]
    for t in range(uniform.shape[1]):
        recorder = Recorder((EMBED_SITE, *RATE_SITES[rate_scope]), layers, tokens=slice(-1, None)) if layers else None
        output = student(tokens, past_key_values=past, use_cache=True, logits_to_keep=1, recorder=recorder)
        past = output.past_key_values
        if recorder is not None:
            spikes += layer_spikes(recorder, layers, rate_scope)
        tokens = sample(output.logits[:, -1], uniform[:, t], temperature)[:, None]
        sequence.append(tokens)
    student.train(training)
    return Rollout(torch.cat(sequence, 1), spikes)
