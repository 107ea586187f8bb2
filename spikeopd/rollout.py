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
from spikeopd.models.decoding import Decoder
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
    compiled: bool = True,
) -> Rollout:
    """Sample uniform.shape[1] tokens after each prompt, through the spike K/V cache.

    The visited states are s_t = (prompt, y_<t): the last prompt token and all but the last sampled one.
    compiled: token by token through `models.decoding` where it serves. It changes the time and no bit of the result.
    """
    training = student.training
    student.train(False)
    length = prompts.shape[1] + uniform.shape[1]
    decoder = Decoder.of(student, len(prompts), length) if compiled and uniform.shape[1] > 1 else None
    spikes = torch.zeros(len(layers), device=prompts.device)
    tokens, past, sequence = prompts, None, [prompts]
    for t in range(uniform.shape[1]):
        if decoder is not None and past is not None:
            if t == 1:
                decoder.read_prefix(past)
            logits = decoder.step(tokens)
            spikes += decoder.spikes(layers, RATE_SITES[rate_scope])
        else:
            sites = (EMBED_SITE, *RATE_SITES[rate_scope])
            recorder = Recorder(sites, layers, tokens=slice(-1, None)) if layers else None
            output = student(tokens, past_key_values=past, use_cache=True, logits_to_keep=1, recorder=recorder)
            past, logits = output.past_key_values, output.logits[:, -1]
            if recorder is not None:
                spikes += layer_spikes(recorder, layers, rate_scope)
        tokens = sample(logits, uniform[:, t], temperature)[:, None]
        sequence.append(tokens)
    student.train(training)
    return Rollout(torch.cat(sequence, 1), spikes)
