"""On-policy generation from the spiking student, and the random numbers it uses.

A row's tokens depend on (seed, update, row) alone: not on the micro-batch or the rank it is sampled in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM, Recorder

# Sites of fixed size whose spikes make the firing rate of a layer. The attention map is reported apart.
RATE_SITES = {"all": ("q", "k", "v", "r", "o", "x", "f", "y", "h"), "output": ("h",)}


@dataclass(frozen=True)
class Rollout:
    """sequences [batch, prompt + K]; spikes [layers]: spikes of the layers asked for, summed over the K positions."""

    sequences: Tensor
    spikes: Tensor


def uniforms(seed: int, update: int, rows: int, length: int) -> Tensor:
    """One number in [0, 1) for each row and position, float64 [rows, length]."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed ^ 0x5B1CE, update], dtype=np.uint64)))
    return torch.from_numpy(generator.random((rows, length)))


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
    student.eval()
    spikes = torch.zeros(len(layers), device=prompts.device)
    tokens, past, sequence = prompts, None, [prompts]
    for t in range(uniform.shape[1]):
        recorder = Recorder(RATE_SITES[rate_scope], layers, tokens=slice(-1, None)) if layers else None
        output = student(tokens, past_key_values=past, use_cache=True, logits_to_keep=1, recorder=recorder)
        past = output.past_key_values
        if recorder is not None:
            spikes += layer_spikes(recorder, layers, rate_scope)
        tokens = sample(output.logits[:, -1], uniform[:, t], temperature)[:, None]
        sequence.append(tokens)
    student.train(training)
    return Rollout(torch.cat(sequence, 1), spikes)


def layer_spikes(recorder: Recorder, layers: tuple[int, ...], rate_scope: str) -> Tensor:
    """Sum of spikes of each layer, [layers], in the graph if the recorder's spikes are."""
    # Counted in float32: bfloat16 stops counting at 256.
    return torch.stack(
        [sum(value.sum(dtype=torch.float32) for (at, site), value in recorder.spikes.items()
             if at == layer and site in RATE_SITES[rate_scope])
         for layer in layers]
    )  # fmt: skip


def rate_sites(config: BiSpikCLMConfig, rate_scope: str) -> tuple[str, ...]:
    """Those of RATE_SITES that this student's block has."""
    return tuple(site for site in RATE_SITES[rate_scope] if site in config.layer_sites)


def layer_neurons(config: BiSpikCLMConfig, rate_scope: str) -> int:
    """N_l: neurons of one layer that count for its rate."""
    return sum(config.ffn_dim if site == "f" else config.hidden_size for site in rate_sites(config, rate_scope))
