r"""BiSpikCLM, the spiking student, as Hugging Face classes. Read top to bottom: config, projection, block, model, head.

    E_i = Tok[x_i] + Pos[i+2]        h = g_E * E + b_E at every step      X = S_E(h)
    per block:  Q,K,V = S(X W + b)   A, R = spiking attention            O = S_O(R W_O + b)
                h = h + g_O * O      X' = S_X(h)    F = S_1(X' W_1 + b)  Y = S_2(F W_2 + b)
                h = h + g_2 * Y      X = S_H(h)
    logits = LN(mean over steps of X) Tok^T e^s + b

Every neuron starts from rest at every token, so a token's T_s steps depend on other tokens through attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as hf_init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from spikeopd.contracts import EMBED_SITE, LAYER_SITES
from spikeopd.errors import InputError
from spikeopd.models.attention import causal_mask, merge_heads, spiking_attention, split_heads, update_cache
from spikeopd.models.neurons import lif_membrane
from spikeopd.registry import NEURONS, load

POSITION_OFFSET = 2  # OPT's position table starts two rows late


class BiSpikCLMConfig(PreTrainedConfig):
    """Fields named as OPTConfig's, plus `num_steps` (T_s), `alpha`, `threshold` (V), `xi`, `grid_bits`, `neuron`.

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
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int | None = 1,
        bos_token_id: int | None = 2,
        eos_token_id: int | None = 2,
        tie_word_embeddings: bool = True,
        **kwargs,
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
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        if hidden_size % num_attention_heads:
            raise InputError(
                f"model: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
            )
        if num_steps < 1:
            raise InputError(f"model: num_steps is {num_steps}; a neuron needs at least one step")
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


@dataclass
class Recorder:
    """What to keep of one forward pass, and after it what was kept. Nothing outlives the object.

    spikes[(layer, site)]    [time, batch, token, feature], in the graph; `a` is [time, batch, head, query, key]
    membranes[(layer, site)] the same without gradient, only for sites in `membranes_of`
    Layer is -1 for `embed`. `sites=None` keeps all sites, `layers=None` all layers; `tokens` only those positions.
    """

    sites: Iterable[str] | None = None
    layers: Iterable[int] | None = None
    membranes_of: Iterable[str] = ()
    tokens: slice = field(default_factory=lambda: slice(None))
    spikes: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    membranes: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def wanted(self, layer: int) -> tuple[frozenset[str], frozenset[str]]:
        """Sites of this layer whose spikes, and whose membranes, are kept."""
        if self.layers is not None and layer not in set(self.layers):
            return frozenset(), frozenset()
        sites = frozenset((EMBED_SITE, *LAYER_SITES) if self.sites is None else self.sites)
        return sites, frozenset(self.membranes_of)

    def keep(self, layer: int, kept: dict[str, Tensor], membranes: dict[str, Tensor]) -> None:
        for target, values in ((self.spikes, kept), (self.membranes, membranes)):
            for site, value in values.items():
                target[layer, site] = self._cut(site, value)

    def _cut(self, site: str, value: Tensor) -> Tensor:
        if self.tokens == slice(None):
            return value
        part = value[..., self.tokens, :]  # the token axis is second to last everywhere; for `a` it is the query
        # Outside the graph a view would keep the whole tensor alive.
        return part if value.requires_grad else part.clone()


class _Snap(torch.autograd.Function):
    """Round to the grid; the gradient passes as if nothing had happened."""

    @staticmethod
    def forward(ctx, weight: Tensor, bits: int) -> Tensor:  # type: ignore[override]
        return torch.round(weight * 2.0**bits) * 2.0**-bits

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad, None


class SpikeLinear(nn.Linear):
    """A projection of spikes: current = X W^T + b, with W and b on the config's grid."""

    def __init__(self, fan_in: int, fan_out: int, grid_bits: int | None) -> None:
        super().__init__(fan_in, fan_out)
        self.grid_bits = grid_bits
        self.keep_snapped = True
        self._snapped: tuple[tuple[object, ...], Tensor, Tensor] | None = None

    def on_grid(self) -> tuple[Tensor, Tensor]:
        """Weight and bias as they act. Without gradient they are kept until a parameter changes."""
        if self.grid_bits is None:
            return self.weight, self.bias
        if torch.is_grad_enabled() and self.weight.requires_grad:
            self._snapped = None
            return _Snap.apply(self.weight, self.grid_bits), _Snap.apply(self.bias, self.grid_bits)
        key = (self.weight.data_ptr(), self.weight._version, self.bias._version, self.weight.dtype)
        if self._snapped is None or self._snapped[0] != key:
            with torch.no_grad():
                pair = _Snap.apply(self.weight, self.grid_bits), _Snap.apply(self.bias, self.grid_bits)
            if not self.keep_snapped:
                return pair
            self._snapped = (key, *pair)
        return self._snapped[1:]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.on_grid()
        return nn.functional.linear(x, weight, bias)


class BiSpikCLMBlock(GradientCheckpointingLayer):
    """One block; no LayerNorm, softmax or real multiply inside."""

    def __init__(self, config: BiSpikCLMConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        d, ffn, heads, bits = config.hidden_size, config.ffn_dim, config.num_attention_heads, config.grid_bits
        self.q_proj = SpikeLinear(d, d, bits)
        self.k_proj = SpikeLinear(d, d, bits)
        self.v_proj = SpikeLinear(d, d, bits)
        self.out_proj = SpikeLinear(d, d, bits)
        self.fc1 = SpikeLinear(d, ffn, bits)
        self.fc2 = SpikeLinear(ffn, d, bits)
        self.gain_o = nn.Parameter(torch.empty(d))
        self.gain_y = nn.Parameter(torch.empty(d))
        # Logarithms, because a threshold must stay positive whatever the optimizer does.
        self.log_threshold_a = nn.Parameter(torch.empty(heads))
        self.log_threshold_r = nn.Parameter(torch.empty(heads))
        self.register_buffer("threshold", torch.tensor([config.threshold]), persistent=False)

    def forward(
        self,
        x: Tensor,
        h: Tensor,
        mask: Tensor,
        cache: Cache | None = None,
        wanted: tuple[frozenset[str], frozenset[str]] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(X, h) of the next block, then the spikes and membranes asked for by `wanted`."""
        config = self.config
        alpha, xi, heads, neuron = config.alpha, config.xi, config.num_attention_heads, load(NEURONS[config.neuron])
        kept: dict[str, Tensor] = {}
        membranes: dict[str, Tensor] = {}
        threshold_a, threshold_r = self.log_threshold_a.exp(), self.log_threshold_r.exp()

        def note(site: str, spikes: Tensor, current: Tensor, threshold: Tensor) -> Tensor:
            if wanted is not None:
                if site in wanted[0]:
                    kept[site] = spikes
                if site in wanted[1]:
                    membranes[site] = lif_membrane(current.detach(), threshold.detach(), alpha)
            return spikes

        def fire(site: str, current: Tensor) -> Tensor:
            return note(site, neuron(current, self.threshold, alpha, xi), current, self.threshold)

        q = split_heads(fire("q", self.q_proj(x)), heads)
        k = split_heads(fire("k", self.k_proj(x)), heads)
        v = split_heads(fire("v", self.v_proj(x)), heads)
        if cache is not None:
            k, v = update_cache(cache, self.index, k, v)
        a, r, counts, z = spiking_attention(q, k, v, mask, threshold_a, threshold_r, alpha, xi, neuron)
        note("a", a, counts, threshold_a.view(-1, 1, 1))
        r = merge_heads(r)
        note("r", r, merge_heads(z), threshold_r.repeat_interleave(config.hidden_size // heads))
        o = fire("o", self.out_proj(r))
        h = h + self.gain_o * o
        f = fire("f", self.fc1(fire("x", h)))
        y = fire("y", self.fc2(f))
        h = h + self.gain_y * y
        return fire("h", h), h, kept, membranes


class BiSpikCLMPreTrainedModel(PreTrainedModel):
    config_class = BiSpikCLMConfig
    config: BiSpikCLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BiSpikCLMBlock"]

    def _init_weights(self, module: nn.Module) -> None:
        """Random start: currents of about one threshold at a firing rate of 0.2. `calibrate` refines it from data."""
        config = self.config
        if isinstance(module, SpikeLinear):
            nn.init.normal_(module.weight, std=config.threshold / math.sqrt(0.2 * module.in_features))
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, BiSpikCLMBlock):
            head_dim = config.hidden_size // config.num_attention_heads
            # Signs at random: all-positive gains would lift the residual stream, and the firing rate, with depth.
            for gain in (module.gain_o, module.gain_y):
                signs = torch.randint(0, 2, gain.shape, device=gain.device) * 2 - 1
                hf_init.copy_(gain, signs * config.threshold / 2)
            nn.init.constant_(module.log_threshold_a, math.log(math.sqrt(head_dim) * config.threshold))
            nn.init.constant_(module.log_threshold_r, math.log(2.0))
            nn.init.constant_(module.threshold, config.threshold)
        elif isinstance(module, BiSpikCLMModel):
            nn.init.constant_(module.embed_gain, config.threshold / config.initializer_range)
            nn.init.zeros_(module.embed_bias)
            nn.init.zeros_(module.logit_scale)
            nn.init.constant_(module.threshold, config.threshold)


class BiSpikCLMModel(BiSpikCLMPreTrainedModel):
    """The student without the output table: tokens to the normalised features that meet it."""

    def __init__(self, config: BiSpikCLMConfig) -> None:
        super().__init__(config)
        d, width = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.embed_positions = nn.Embedding(config.max_position_embeddings + POSITION_OFFSET, d)
        factorised = width != d
        self.project_in = nn.Linear(width, d, bias=False) if factorised else None
        self.project_out = nn.Linear(d, width, bias=False) if factorised else None
        self.embed_gain = nn.Parameter(torch.empty(d))
        self.embed_bias = nn.Parameter(torch.empty(d))
        self.layers = nn.ModuleList(BiSpikCLMBlock(config, index) for index in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(d)
        self.logit_scale = nn.Parameter(torch.empty(()))  # s: logits are scaled by e^s
        self.register_buffer("threshold", torch.tensor([config.threshold]), persistent=False)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """E [batch, token, d], before gain and bias."""
        tokens = self.embed_tokens(input_ids)
        if self.project_in is not None:
            tokens = self.project_in(tokens)
        return tokens + self.embed_positions(position_ids + POSITION_OFFSET)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        recorder: Recorder | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        config = self.config
        batch, length = input_ids.shape
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = _positions(input_ids, attention_mask, past)
        if past + length > config.max_position_embeddings:
            raise InputError(
                f"sequence of {past + length} tokens is longer than the position table of "
                f"{config.max_position_embeddings}; shorten the prompt or generate fewer tokens"
            )
        embedded = self.embed(input_ids, position_ids)
        h = (self.embed_gain * embedded + self.embed_bias).expand(config.num_steps, *embedded.shape)
        x = load(NEURONS[config.neuron])(h, self.threshold, config.alpha, config.xi)
        if recorder is not None:
            sites, membranes_of = recorder.wanted(-1)
            recorder.keep(
                -1,
                {EMBED_SITE: x} if EMBED_SITE in sites else {},
                {EMBED_SITE: lif_membrane(h.detach(), self.threshold, config.alpha)}
                if EMBED_SITE in membranes_of
                else {},
            )
        mask = causal_mask(attention_mask, batch, length, past + length, x.device, x.dtype)
        for index, layer in enumerate(self.layers):
            wanted = None if recorder is None else recorder.wanted(index)
            x, h, kept, membranes = layer(x, h, mask, past_key_values if use_cache else None, wanted)
            if recorder is not None:
                recorder.keep(index, kept, membranes)
        features = self.final_layer_norm(x.mean(0))
        if self.project_out is not None:
            features = self.project_out(features)
        return BaseModelOutputWithPast(
            last_hidden_state=features * self.logit_scale.exp(),
            past_key_values=past_key_values if use_cache else None,
        )


class BiSpikCLMForCausalLM(BiSpikCLMPreTrainedModel, GenerationMixin):
    """The student with its tied, dense head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BiSpikCLMConfig) -> None:
        super().__init__(config)
        self.model = BiSpikCLMModel(config)
        self.lm_head = nn.Linear(config.word_embed_proj_dim, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        recorder: Recorder | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """`logits_to_keep` as everywhere in transformers: logits of the last so many tokens only (0: of all)."""
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache, recorder=recorder
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)


def _positions(input_ids: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Positions count real tokens only, as OPT's do, so that left padding changes nothing."""
    length = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past, past + length, device=input_ids.device)[None].expand(input_ids.shape[0], -1)
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]


def register() -> None:
    """Make `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the student. Safe to call twice."""
    AutoConfig.register("bispikclm", BiSpikCLMConfig, exist_ok=True)
    AutoModel.register(BiSpikCLMConfig, BiSpikCLMModel, exist_ok=True)
    AutoModelForCausalLM.register(BiSpikCLMConfig, BiSpikCLMForCausalLM, exist_ok=True)


register()
