"""Small trained-like students for tests of the exporter. Needs torch."""

from __future__ import annotations

import torch

from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM


def small_student(
    *,
    seed: int = 0,
    dyadic: bool = False,
    width: int | None = None,
    layers: int = 2,
    vocab: int = 60,
    bias: bool = True,
    alpha: float | None = None,
    **options: object,
) -> BiSpikCLMForCausalLM:
    """A student whose parameters are all in use. dyadic: alpha, threshold and all weights are short binary fractions,
    so that every sum is exact in float32 whatever its order. options: more fields of the config."""
    torch.manual_seed(seed)
    config = BiSpikCLMConfig(
        vocab_size=vocab,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=24,
        word_embed_proj_dim=width,
        alpha=alpha if alpha is not None else 0.875 if dyadic else 0.9,
        threshold=0.75 if dyadic else 0.7,
        grid_bits=6 if dyadic else 14,
        **options,
    )
    model = BiSpikCLMForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.5)
            if dyadic and "norm" not in name:
                parameter.copy_((parameter * 64).round() / 64)
            if dyadic and "log_threshold" in name:
                parameter.copy_(torch.log(torch.exp(parameter).mul(64).round().div(64)))
            if not bias and name.startswith("model.layers") and name.endswith("bias"):
                parameter.zero_()
    return model


def tokens(count: int, vocab: int = 60, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


# Every option of the block away from the paper's.
PLUS = {"residual_write": "current", "readout": "residual", "distances": 3, "neurons": "own", "scaled_surrogate": True}
INHIBITING = PLUS | {"attention": "inhibiting"}
