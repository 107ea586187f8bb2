"""How a student starts: embeddings and final LayerNorm from the teacher, blocks random or from the teacher, then
one calibration pass that brings every projection's current to the scale of its threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import OPTForCausalLM, PreTrainedModel

from spikeopd.config import ModelConfig
from spikeopd.errors import InputError
from spikeopd.losses import layer_map
from spikeopd.models.bispikclm import BiSpikCLMBlock, BiSpikCLMConfig, BiSpikCLMForCausalLM, SpikeLinear


def build_student(model: ModelConfig, **special_tokens: int) -> BiSpikCLMForCausalLM:
    """An untrained student of the configured shape."""
    return BiSpikCLMForCausalLM(
        BiSpikCLMConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_hidden_layers,
            num_attention_heads=model.num_attention_heads,
            ffn_dim=model.ffn_dim,
            max_position_embeddings=model.max_position_embeddings,
            word_embed_proj_dim=model.word_embed_proj_dim,
            num_steps=model.num_steps,
            alpha=model.alpha,
            threshold=model.threshold,
            xi=model.xi,
            grid_bits=model.grid_bits,
            neuron=model.neuron,
            **special_tokens,
        )
    )


@torch.no_grad()
def start_from_teacher(student: BiSpikCLMForCausalLM, teacher: PreTrainedModel, blocks: bool) -> None:
    """Copy token and position embeddings and the final LayerNorm; with `blocks`, the projections too.

    Tables are copied where their shapes agree: a teacher of another width or family gives what fits (at least the
    vocabulary must).
    """
    base = student.model
    table = teacher.get_input_embeddings().weight
    if table.shape == base.embed_tokens.weight.shape:
        base.embed_tokens.weight.copy_(table)
    if not isinstance(teacher, OPTForCausalLM):
        if blocks:
            raise InputError("model.init: `teacher` needs an OPT teacher; use model.init=random")
        return
    decoder = teacher.model.decoder
    positions = decoder.embed_positions.weight
    if positions.shape[1] == base.embed_positions.weight.shape[1]:
        rows = min(len(positions), len(base.embed_positions.weight))
        base.embed_positions.weight[:rows].copy_(positions[:rows])
    if (
        decoder.final_layer_norm is not None
        and decoder.final_layer_norm.weight.shape == base.final_layer_norm.weight.shape
    ):
        base.final_layer_norm.load_state_dict(decoder.final_layer_norm.state_dict())
    for mine, theirs in ((base.project_in, decoder.project_in), (base.project_out, decoder.project_out)):
        if mine is not None and theirs is not None and mine.weight.shape == theirs.weight.shape:
            mine.weight.copy_(theirs.weight)
    if blocks:
        pairs = zip(base.layers, layer_map(len(base.layers), len(decoder.layers)), strict=True)
        for block, index in pairs:
            _copy_block(block, decoder.layers[index])


def _copy_block(block: BiSpikCLMBlock, layer: nn.Module) -> None:
    attention = layer.self_attn
    for name, mine, theirs in (
        ("q_proj", block.q_proj, attention.q_proj),
        ("k_proj", block.k_proj, attention.k_proj),
        ("v_proj", block.v_proj, attention.v_proj),
        ("out_proj", block.out_proj, attention.out_proj),
        ("fc1", block.fc1, layer.fc1),
        ("fc2", block.fc2, layer.fc2),
    ):
        if mine.weight.shape != theirs.weight.shape:
            raise InputError(
                f"model.init: the teacher's {name} is {tuple(theirs.weight.shape)} and the student's "
                f"{tuple(mine.weight.shape)}; use model.init=random"
            )
        mine.weight.copy_(theirs.weight)
        mine.bias.zero_()


@torch.no_grad()
def calibrate(student: BiSpikCLMForCausalLM, input_ids: Tensor, spread: float = 1.0) -> None:
    """Bring each neuron's current to mean 0 and standard deviation spread * V on this text, site after site.

    Silent or saturated sites pass no gradient; after this every site fires at a rate of about 0.2 to 0.3.
    """
    base, config = student.model, student.config
    target = spread * config.threshold
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
    embedded = base.embed(input_ids, positions)
    base.embed_gain.copy_(target / embedded.flatten(0, 1).std(0).clamp(min=1e-6))
    base.embed_bias.copy_(-base.embed_gain * embedded.flatten(0, 1).mean(0))
    hooks = [
        module.register_forward_pre_hook(lambda module, args: _rescale(module, args[0], target))
        for module in student.modules()
        if isinstance(module, SpikeLinear)
    ]
    try:
        base(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _rescale(module: SpikeLinear, x: Tensor, target: float) -> None:
    current = nn.functional.linear(x, module.weight).flatten(0, -2)
    scale = target / current.std(0).clamp(min=1e-6)
    # A neuron that hears almost nothing must not get enormous weights: at most four times the typical scale.
    scale = scale.clamp(max=4 * scale.median().item())
    module.weight.mul_(scale[:, None])
    module.bias.copy_(-scale * current.mean(0))
