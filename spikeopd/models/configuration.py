"""The configuration of a BiSpikCLM student, as transformers keeps it in config.json."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from spikeopd.contracts import LAYER_SITES
from spikeopd.errors import InputError, short
from spikeopd.registry import GRADED, NEURONS


class BiSpikCLMConfig(PreTrainedConfig):
    """Fields named as OPTConfig's, plus `num_steps` (T_s), `alpha`, `threshold` (V), `xi`, `grid_bits`, `neuron` and
    the options of the block (top of bispikclm.py), whose defaults are the paper's.

    grid_bits: block weights and biases act in multiples of 2**-grid_bits. A sum of such weights over binary spikes is
    exact in float32, hence the same in any order: decoding token by token, padding or splitting a batch cannot flip a
    spike. None switches the grid off.
    """

    model_type = "bispikclm"
    neuron = "lif"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50272,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        ffn_dim: int = 3072,
        max_position_embeddings: int = 2048,
        word_embed_proj_dim: int | None = None,
        num_steps: int = 4,
        alpha: float = 0.9,
        threshold: float = 0.7,
        xi: float = 2.0,
        grid_bits: int | None = 14,
        neuron: str = "lif",
        residual_write: str = "spike",
        readout: str = "rate",
        distances: int = 0,
        attention: str = "sum",
        neurons: str = "shared",
        scaled_surrogate: bool = False,
        deploy_precision: str = "none",
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int | None = 1,
        bos_token_id: int | None = 2,
        eos_token_id: int | None = 2,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.ffn_dim = ffn_dim
        self.max_position_embeddings = max_position_embeddings
        self.word_embed_proj_dim = word_embed_proj_dim if word_embed_proj_dim is not None else hidden_size
        self.num_steps = num_steps
        self.alpha = alpha
        self.threshold = threshold
        self.xi = xi
        self.grid_bits = grid_bits
        if neuron not in NEURONS:
            raise InputError(f"model: neuron {neuron!r} does not exist; give one of {', '.join(NEURONS)}")
        if neuron != self.neuron:  # config.json names what is unusual
            self.neuron = neuron
        self.residual_write = residual_write
        self.readout = readout
        self.distances = distances
        self.attention = attention
        self.neurons = neurons
        self.scaled_surrogate = scaled_surrogate
        self.deploy_precision = deploy_precision
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        if hidden_size % num_attention_heads:
            raise InputError(
                f"model: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
            )
        if num_steps < 1:
            raise InputError(f"model: num_steps is {short(num_steps)}; a neuron needs at least one step")
        for name, allowed in (
            ("residual_write", ("spike", "current")),
            ("readout", ("rate", "residual")),
            ("attention", ("sum", "inhibiting")),
            ("neurons", ("shared", "own")),
            ("deploy_precision", ("none", "int8", "int4")),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"model: {name} is {short(repr(getattr(self, name)))}; give {' or '.join(allowed)}")
        if attention == "inhibiting" and self.graded:
            raise InputError("model: attention 'inhibiting' needs neurons that spike; a quantised twin takes 'sum'")
        if deploy_precision != "none" and self.graded and num_steps & (num_steps - 1):
            raise InputError(
                f"model: deploy_precision of a quantised twin needs num_steps 1, 2, 4, ..., not {num_steps}"
            )
        if deploy_precision != "none" and (readout != "residual" or self.word_embed_proj_dim != hidden_size):
            raise InputError(
                "model: deploy_precision needs readout 'residual' and a token table as wide as the residual stream"
            )
        super().__init__(
            pad_token_id=pad_token_id,  # type: ignore[call-arg]  # a dataclass that takes more than it says
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @property
    def graded(self) -> bool:
        """The quantised twin: one step, whose values are counts of up to T_s (models/quantised.py)."""
        return self.neuron in GRADED

    @property
    def steps(self) -> int:
        """Steps that a token takes: T_s, or one of a twin."""
        return 1 if self.graded else self.num_steps

    @property
    def layer_sites(self) -> tuple[str, ...]:
        """The neuron sites of one layer, in the order in which they fire."""
        return tuple(s for s in LAYER_SITES if self.residual_write == "spike" or s not in ("o", "y"))
