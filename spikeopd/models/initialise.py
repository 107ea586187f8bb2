"""How a student starts: from its teacher, or at random, and calibrated to its thresholds.

Embeddings and final LayerNorm always come from the teacher; one calibration pass then brings every projection's
current to the scale of its threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, OPTForCausalLM, PreTrainedModel

from spikeopd.config import BLOCKS, ModelConfig
from spikeopd.errors import InputError
from spikeopd.losses import head_map, layer_map
from spikeopd.models.attention import key_distance
from spikeopd.models.bispikclm import (
    BiSpikCLMBlock,
    BiSpikCLMConfig,
    BiSpikCLMForCausalLM,
    start_distances,
)
from spikeopd.models.neurons import neuron_of
from spikeopd.models.projection import SpikeLinear
from spikeopd.models.teacher import eager_attention, run_teacher

RATES = {"a": 0.1, "r": 0.15}  # firing rates that calibration gives to S_A and, where heads share V, to S_AV
MASS = 4.0  # spikes of S_A a query and step at the start, where heads begin by looking where the teacher's look
WRITE = 0.5  # deviation of a sublayer's current write, in units of the residual stream's at the start


def build_student(model: ModelConfig, **special_tokens: int | None) -> BiSpikCLMForCausalLM:
    """An untrained student of the configured shape."""
    same = ("num_steps", "alpha", "threshold", "xi", "grid_bits", "neuron", *BLOCKS["paper"])
    options: dict[str, Any] = model.sizes() | {name: getattr(model, name) for name in same} | special_tokens
    return BiSpikCLMForCausalLM(BiSpikCLMConfig(**options))


@torch.no_grad()
def start_from_teacher(student: BiSpikCLMForCausalLM, teacher: PreTrainedModel, blocks: bool) -> dict[str, str]:
    """Copy the token table; from an OPT positions and final LayerNorm, from a Llama the gain of its final norm, and no
    positions; with `blocks` the projections of either.

    Tables are copied where their shapes agree: a teacher of another width or family gives what fits (at least the
    vocabulary must). Returns for each part "copied", or why it starts anew.
    """
    base = student.model
    done: dict[str, str] = {}

    def copy(part: str, mine: Tensor | None, theirs: Any) -> None:
        if mine is None:
            return
        if theirs is None:
            done[part] = "not copied: this teacher has none that fits"
        elif mine.shape[1:] != theirs.shape[1:] or (part != "positions" and len(mine) != len(theirs)):
            done[part] = f"not copied: {list(theirs.shape)} in the teacher, {list(mine.shape)} in the student"
        else:
            rows = min(len(mine), len(theirs))
            mine[:rows].copy_(theirs[:rows])
            done[part] = "copied"

    table: Any = teacher.get_input_embeddings().weight
    copy("token table", base.embed_tokens.weight, table)
    output: Any = teacher.get_output_embeddings()
    shared = output is not None and output.weight.data_ptr() == table.data_ptr()
    done["output head"] = "the token table" + ("" if shared else "; the teacher's own is not copied")
    decoder: Any = teacher.model.decoder if isinstance(teacher, OPTForCausalLM) else None
    copy("positions", base.embed_positions.weight, decoder and decoder.embed_positions.weight)
    llama: Any = teacher.model if isinstance(teacher, LlamaForCausalLM) else None
    if llama:
        # Random ones are as large as the tokens of a table with a deviation of 0.02: noise that must be unlearned.
        base.embed_positions.weight.zero_()
        done["positions"] = "zero: this teacher rotates queries and keys instead"
    norm: Any = decoder.final_layer_norm if decoder else llama.norm if llama else None
    copy("final LayerNorm", base.final_layer_norm.weight, norm and norm.weight)
    if done["final LayerNorm"] == "copied" and decoder:
        base.final_layer_norm.bias.copy_(norm.bias)
    for name in ("project_in", "project_out"):
        mine, theirs = getattr(base, name), getattr(decoder, name, None)
        copy(name, mine and mine.weight, theirs and theirs.weight)
    source = decoder or llama
    if blocks and source is None:
        raise InputError("model.init: `teacher` needs an OPT or a Llama; use model.init=random")
    if blocks:
        pairs = zip(base.layers, layer_map(len(base.layers), len(source.layers)), strict=True)
        for block, index in pairs:
            (_copy_block if decoder else _copy_llama_block)(block, source.layers[index])
    done["blocks"] = "copied" if blocks else "random"
    return done


def _copy_block(block: BiSpikCLMBlock, layer: Any) -> None:
    attention = layer.self_attn
    for name, theirs in (
        ("q_proj", attention.q_proj),
        ("k_proj", attention.k_proj),
        ("v_proj", attention.v_proj),
        ("out_proj", attention.out_proj),
        ("fc1", layer.fc1),
        ("fc2", layer.fc2),
    ):
        _copy_projection(name, getattr(block, name), theirs.weight)
    _follow_gains(block)


def _copy_llama_block(block: BiSpikCLMBlock, layer: Any) -> None:
    """Projections with the gains of the norms before them. The student has no rotations and no product of currents.

    A neuron of its feed-forward layer hears gate + up and drives what silu(gate) up drives. With twice the teacher's
    neurons each has a partner that hears gate - up and drives the opposite, and the pair follows the product's sign:
    f(g + u) - f(g - u) rises with u wherever the gate is open, and is 0 at u = 0.
    """
    attention, mlp = layer.self_attn, layer.mlp
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    paired = block.config.ffn_dim == 2 * len(gate)
    before, behind = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    pairs = {
        "q_proj": attention.q_proj.weight * before,
        "k_proj": attention.k_proj.weight * before,
        "v_proj": attention.v_proj.weight * before,
        "out_proj": attention.o_proj.weight,
        "fc1": (torch.cat([gate + up, gate - up]) if paired else gate + up) * behind,
        "fc2": torch.cat([down, -down], dim=1) if paired else down,
    }
    for name, theirs in pairs.items():
        _copy_projection(name, getattr(block, name), theirs)
    _follow_gains(block)


def _copy_projection(name: str, mine: SpikeLinear, theirs: Tensor) -> None:
    if mine.weight.shape != theirs.shape:
        raise InputError(
            f"model.init: the teacher's {name} is {tuple(theirs.shape)} and the student's "
            f"{tuple(mine.weight.shape)}; use model.init=random"
        )
    mine.weight.copy_(theirs)
    mine.bias.zero_()


def _follow_gains(block: BiSpikCLMBlock) -> None:
    # A spike of S_O or S_2 adds its signed gain: where that is negative, the row must ask for the opposite.
    if block.config.residual_write == "spike":
        block.out_proj.weight.mul_(block.gain_o.sign()[:, None])
        block.fc2.weight.mul_(block.gain_y.sign()[:, None])


@torch.no_grad()
def attention_by_distance(teacher: PreTrainedModel, input_ids: Tensor, student: BiSpikCLMConfig) -> list[Tensor]:
    """For each block of the student [head, distance]: how much the teacher's head in its place attends to a token that
    lies so far back, on this text.

    The last distance stands for all beyond it. Queries of the first quarter are left out: they have few tokens to see.
    """
    length, distances = input_ids.shape[1], student.distances
    with eager_attention(teacher):
        maps = run_teacher(teacher, input_ids, internals=True, maps=True).attentions
    rows = slice(length // 4, None)
    distance = key_distance(None, length, length, distances, input_ids.device)[rows]
    causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[rows]
    heads = head_map(student.num_attention_heads, maps[0].shape[1])
    return [
        _by_distance(maps[layer].mean(0)[heads][:, rows], distance, causal, distances)
        for layer in layer_map(student.num_hidden_layers, len(maps))
    ]


def _by_distance(values: Tensor, distance: Tensor, causal: Tensor, distances: int) -> Tensor:
    """Mean of values [head, query, key] over the pairs of each distance, [head, distance]; 0 where there is none."""
    where = distance[causal]
    sums = values.new_zeros(len(values), distances).index_add_(1, where, values[:, causal])
    return sums / torch.bincount(where, minlength=distances).clamp(min=1)


@torch.no_grad()
def calibrate(
    student: BiSpikCLMForCausalLM, input_ids: Tensor, spread: float = 1.0, attention: Sequence[Tensor] = ()
) -> None:
    """Bring every neuron site to a working point on this text, site after site: silent or saturated neurons pass no
    gradient.

    Projections: current of mean 0 and standard deviation spread * V per neuron, a firing rate of 0.2 to 0.3; neurons
    of their own the same, through V and b. S_A, and S_AV where a head shares V: V for a rate of RATES. Current writes:
    WRITE of the stream's deviation. Shared S_X and S_H see what h is: it starts at mean 0 and deviation spread * V, and
    a gain of V / 2 with a sign at random adds a twentieth to its variance per write.

    attention: of each block [head, distance], where the teacher's heads look; S_A's distance bias is chosen so that
    the student's fire in that proportion, MASS times a query and step. Without it `start_distances`.
    """
    base, config = student.model, student.config
    target = spread * config.threshold
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
    embedded = base.embed(input_ids, positions).flatten(0, 1)
    if config.neurons == "own":
        # One gain for all channels keeps the teacher's directions, which the head reads; S_E has its own scales.
        base.embed_gain.fill_(target / embedded.std(0).square().mean().sqrt())
        base.embed_bias.zero_()
        _own(base.log_threshold_embed, base.bias_embed, base.embed_gain * embedded, spread)
    else:
        base.embed_gain.copy_(target / embedded.std(0).clamp(min=1e-6))
        base.embed_bias.copy_(-base.embed_gain * embedded.mean(0))
    current_write = config.residual_write == "current"
    hooks = []
    for block in base.layers:
        for name, module in block.named_modules():
            if isinstance(module, SpikeLinear):
                written = current_write and name in ("out_proj", "fc2")
                hooks.append(
                    module.register_forward_pre_hook(
                        partial(_rescale_write if written else _rescale, target=WRITE * target if written else target)
                    )
                )
        profile = attention[block.index] if attention else None
        block.calibrate = partial(_calibrate_site, block, spread=spread, profile=profile)
    try:
        base(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for block in base.layers:
            block.calibrate = None


@torch.no_grad()
def widen(student: BiSpikCLMForCausalLM, earlier: BiSpikCLMForCausalLM, input_ids: Tensor) -> None:
    """Give an untrained student all that a trained one of fewer feed-forward neurons or distances has: the same
    function.

    Further distances begin with what all of them shared. The neurons that `earlier` lacks keep the projections they
    started with, calibrated on its stream, and write nothing until an update teaches them to.
    """
    mine = student.state_dict()
    for name, theirs in earlier.state_dict().items():
        if name.endswith("fc2.weight"):
            mine[name].zero_()
        if name.endswith("bias_a"):
            mine[name].copy_(theirs[:, -1:].expand_as(mine[name]))
        mine[name][tuple(map(slice, theirs.shape))].copy_(theirs)
    student.config.deploy_precision = earlier.config.deploy_precision
    if student.config.ffn_dim == earlier.config.ffn_dim:
        return
    rescale = partial(_rescale, target=student.config.threshold, first=earlier.config.ffn_dim)
    hooks = [block.fc1.register_forward_pre_hook(rescale) for block in student.model.layers]
    try:
        student.model(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def temper(student: BiSpikCLMForCausalLM, input_ids: Tensor) -> None:
    """Scale the logits of an untrained student by the power of two, at most 1, of least cross-entropy on this text.

    A Llama's token table makes an untrained head certain and wrong: stories15M's gave a perplexity of 10^8.
    """
    base = student.model
    features = base(input_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = input_ids[:, 1:].flatten()
    rows = slice(None, None, max(1, len(labels) // 512))
    logits = nn.functional.linear(features[rows], student.lm_head.weight)
    scales = [0.5**power for power in range(12)]
    losses = [float(nn.functional.cross_entropy(logits * scale, labels[rows])) for scale in scales]
    base.logit_scale.add_(math.log(scales[losses.index(min(losses))]))


def _calibrate_site(
    block: BiSpikCLMBlock, site: str, current: Tensor, spread: float, profile: Tensor | None = None
) -> None:
    config = block.config
    if site == "v" and block.inhibition is not None:  # what an attended token gives on average is taken away again
        block.inhibition.copy_(block.neuron(current, block.threshold, config.alpha).mean((0, 1, 2)))
    if site == "a":
        queries, keys = current.shape[-2:]
        causal = torch.ones(queries, keys, dtype=torch.bool, device=current.device).tril()
        pairs = current[..., causal].movedim(2, 0).flatten(2)  # [head, time, ...]
        block.log_threshold_a.copy_(torch.stack([_threshold_for(x, RATES["a"], config) for x in pairs]).log())
        if block.bias_a is not None and profile is None:
            block.bias_a.copy_(start_distances(*block.bias_a.shape) * block.log_threshold_a.exp()[:, None])
        elif block.bias_a is not None and profile is not None:
            block.bias_a.copy_(_biases_for(current, (MASS * profile).clamp(max=0.9), block))
    elif site in ("r", "x", "h") and config.neurons == "own":
        _own(getattr(block, f"log_threshold_{site}"), getattr(block, f"bias_{site}"), current, spread)
    elif site == "r":
        heads = current.unflatten(-1, (config.num_attention_heads, -1)).movedim(-2, 0)
        block.log_threshold_r.copy_(torch.stack([_threshold_for(x, RATES["r"], config) for x in heads]).log())


def _own(log_threshold: Tensor, bias: Tensor, current: Tensor, spread: float) -> None:
    """V = sigma / spread and b = - mu: the neuron of threshold V_0 under the current (I - mu) spread V_0 / sigma."""
    flat = current.flatten(0, -2)
    deviation = flat.std(0)
    log_threshold.copy_((deviation.clamp(min=0.1 * deviation.median().item() + 1e-6) / spread).log())
    bias.copy_(-flat.mean(0))


def _threshold_for(current: Tensor, rate: float, config: BiSpikCLMConfig, rounds: int = 20) -> Tensor:
    """V at which neurons under this current [time, ...] fire at `rate` on average, by bisection."""
    neuron = neuron_of(config)
    low, high = current.new_tensor(1e-3), current.max() * current.shape[0] + 1
    for _ in range(rounds):
        middle = (low * high).sqrt()
        if neuron(current, middle, config.alpha).mean() > rate:
            low = middle
        else:
            high = middle
    return high


def _biases_for(current: Tensor, rates: Tensor, block: BiSpikCLMBlock, rounds: int = 14) -> Tensor:
    """Currents [head, distance] with which pairs under this one [time, batch, head, query, key] fire at `rates`
    [head, distance] on average, by bisection.
    """
    config, (queries, keys) = block.config, current.shape[-2:]
    threshold, distances = block.log_threshold_a.exp(), rates.shape[1]
    distance = key_distance(None, queries, keys, distances, current.device)
    causal = torch.ones(queries, keys, dtype=torch.bool, device=current.device).tril()
    low, high = (threshold[:, None].expand_as(rates) * far for far in (-6.0, 3.0))
    for _ in range(rounds):
        middle = (low + high) / 2
        spikes = block.neuron(current + middle[:, distance], threshold.view(-1, 1, 1), config.alpha).mean((0, 1))
        more = _by_distance(spikes, distance, causal, distances) < rates
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return (low + high) / 2


def _rescale(module: SpikeLinear, arguments: tuple[Tensor], target: float, first: int = 0) -> None:
    """The current of each neuron, from the `first` one on, to mean 0 and standard deviation `target`."""
    weight, bias = module.weight[first:], module.bias[first:]
    current = nn.functional.linear(arguments[0], weight).flatten(0, -2)
    scale = target / current.std(0).clamp(min=1e-6)
    # A neuron that hears almost nothing must not get enormous weights: at most four times the typical scale.
    scale = scale.clamp(max=4 * scale.median().item())
    weight.mul_(scale[:, None])
    bias.copy_(-scale * current.mean(0))


def _rescale_write(module: SpikeLinear, arguments: tuple[Tensor], target: float) -> None:
    """The whole write to mean 0 per channel and root mean square deviation `target`; its directions stay."""
    current = nn.functional.linear(arguments[0].mean(0), module.weight).flatten(0, -2)
    scale = target / current.var(0).mean().sqrt().clamp(min=1e-6)
    module.weight.mul_(scale)
    module.bias.copy_(-scale * current.mean(0))
