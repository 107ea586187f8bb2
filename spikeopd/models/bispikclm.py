r"""BiSpikCLM, the spiking student, as Hugging Face classes. Read top to bottom: block, model, head.

    E_i = Tok[x_i] + Pos[i+2]        h = g_E * E + b_E at every step      X = S_E(h)
    per block:  Q,K,V = S(X W + b)   A, R = spiking attention            O = S_O(R W_O + b)
                h = h + g_O * O      X' = S_X(h)    F = S_1(X' W_1 + b)  Y = S_2(F W_2 + b)
                h = h + g_2 * Y      X = S_H(h)
    logits = LN(mean over steps of X) Tok^T e^s + b

That is the paper's block. Options of the config make the better one (`block: plus` in a recipe):

    residual_write  "current": h = h + R W_O + b, h = h + F W_2 + b; S_O, S_2 and the gains vanish
    readout         "residual": the head reads LN(mean over steps of h); S_H of the last block drives nothing
    distances       D > 0: S_A also gets a learned current per head and distance, bias_a[head, min(i - j, D - 1)]
    attention       "inhibiting": Z = sum_j A_ij (V_j - m), m learned per neuron of S_AV: an attended token that is
                    silent there takes away, as softmax's division would
    neurons         "own": S_E, S_AV, S_X, S_H have a threshold and a bias per neuron: fire at V_n under I + b_n
    scaled_surrogate  u/V - 1 instead of u - V in the surrogate: same spikes
    deploy_precision  "int8" or "int4": every value on the grid of the deployable integers (models/grid.py), which
                    float32 adds exactly: the student computes what its exported file computes, spike for spike and
                    bit for bit

Every neuron starts from rest at every token, so a token's T_s steps depend on other tokens through attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as hf_init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from spikeopd.contracts import EMBED_SITE, LAYER_SITES
from spikeopd.errors import InputError
from spikeopd.models import attention_cpu, grid
from spikeopd.models.attention import (
    Pairs,
    causal_pairs,
    coincidences,
    merge_heads,
    split_heads,
    update_cache,
    weighted_values,
)
from spikeopd.models.configuration import BiSpikCLMConfig as BiSpikCLMConfig
from spikeopd.models.gradients import Gradients
from spikeopd.models.neurons import Neuron, lif_membrane, neuron_of
from spikeopd.models.projection import Neurons, SpikeLinear, place

POSITION_OFFSET = 2  # OPT's position table starts two rows late
BEHIND = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj", "f": "fc1", "y": "fc2"}  # site: projection


@dataclass
class Recorder:
    """What to keep of one forward pass, and after it what was kept. Nothing outlives the object.

    spikes[(layer, site)]    [time, batch, token, feature], in the graph; `a` is [time, batch, head, query, key]
    membranes[(layer, site)] the same without gradient, only for sites in `membranes_of`
    Layer is -1 for `embed`. `sites=None` keeps all sites, `layers=None` all layers; `tokens` only those positions.
    observe: called by each block with its index, the spikes of `h`, the residual stream behind it, `stream`, and behind
    its attention, `middle`, and if `maps` the spikes of `a` averaged over the steps, `map`; what it returns is in
    `observed`. A map that is only summed up need not be kept, and under gradient checkpointing is recomputed with its
    block.
    """

    sites: Iterable[str] | None = None
    layers: Iterable[int] | None = None
    membranes_of: Iterable[str] = ()
    tokens: slice = field(default_factory=lambda: slice(None))
    observe: Callable[[int, Mapping[str, Tensor]], Tensor] | None = None
    maps: bool = False
    observed: list[Tensor] = field(default_factory=list)
    spikes: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    membranes: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def wanted(self, layer: int) -> tuple[frozenset[str], frozenset[str]]:
        """Sites of this layer whose spikes, and whose membranes, are kept."""
        if self.layers is not None and layer not in set(self.layers):
            return frozenset(), frozenset()
        sites = frozenset((EMBED_SITE, *LAYER_SITES) if self.sites is None else self.sites)
        return sites, frozenset(self.membranes_of)

    def keep(self, layer: int, kept: dict[str, Tensor], membranes: dict[str, Tensor]) -> None:
        for target, found in ((self.spikes, kept), (self.membranes, membranes)):
            for site, value in found.items():
                target[layer, site] = self._cut(site, value)

    def _cut(self, site: str, value: Tensor) -> Tensor:
        if self.tokens == slice(None):
            return value
        part = value[..., self.tokens, :]  # the token axis is second to last everywhere; for `a` it is the query
        # Outside the graph a view would keep the whole tensor alive.
        return part if value.requires_grad else part.clone()


class BiSpikCLMBlock(GradientCheckpointingLayer):
    """One block; no LayerNorm, softmax or real multiply inside."""

    threshold: Tensor
    log_threshold_h: nn.Parameter | None
    bias_h: nn.Parameter | None
    gradients: Gradients
    neuron: Neuron

    def __init__(self, config: BiSpikCLMConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.gradients, self.neuron = "fp32", neuron_of(config)
        d, ffn, heads = config.hidden_size, config.ffn_dim, config.num_attention_heads
        own, spike_write = config.neurons == "own", config.residual_write == "spike"
        self.q_proj = SpikeLinear(d, d, config)
        self.k_proj = SpikeLinear(d, d, config)
        self.v_proj = SpikeLinear(d, d, config)
        self.out_proj = SpikeLinear(d, d, config, writes=not spike_write)
        self.fc1 = SpikeLinear(d, ffn, config)
        self.fc2 = SpikeLinear(ffn, d, config, writes=not spike_write)
        if spike_write:
            self.gain_o = nn.Parameter(torch.empty(d))
            self.gain_y = nn.Parameter(torch.empty(d))
        # Logarithms, because a threshold must stay positive whatever the optimizer does.
        self.log_threshold_a = nn.Parameter(torch.empty(heads))
        self.bias_a = nn.Parameter(torch.empty(heads, config.distances)) if config.distances else None
        self.inhibition = nn.Parameter(torch.empty(d)) if config.attention == "inhibiting" else None
        self.log_threshold_r = nn.Parameter(torch.empty(d if own else heads))
        self.bias_r = nn.Parameter(torch.empty(d)) if own else None
        for site in ("x", "h"):
            self.register_parameter(f"log_threshold_{site}", nn.Parameter(torch.empty(d)) if own else None)
            self.register_parameter(f"bias_{site}", nn.Parameter(torch.empty(d)) if own else None)
        self.register_buffer("threshold", torch.tensor([config.threshold]), persistent=False)
        self.calibrate: Callable[[str, Tensor], None] | None = None  # sees each current before its neurons do

    def neurons(self, site: str) -> Neurons:
        """Threshold, bias and unit of a site's neurons. The bias of a projection is added by the projection."""
        config, integer = self.config, self.config.deploy_precision != "none"
        if site in BEHIND:
            return getattr(self, BEHIND[site]).neurons() if integer else Neurons(self.threshold)
        log_threshold, bias = getattr(self, f"log_threshold_{site}"), getattr(self, f"bias_{site}")
        threshold = self.threshold if log_threshold is None else log_threshold.exp()
        if site == "r" and config.neurons == "shared":
            threshold = threshold.repeat_interleave(config.hidden_size // config.num_attention_heads)
        found = place(threshold, bias, grid.COUNT_UNIT if site in ("a", "r") else grid.RESIDUAL_UNIT, integer)
        return found._replace(threshold=found.threshold.view(-1, 1, 1)) if site == "a" else found

    def withheld(self) -> Tensor | None:
        """m: what every spike of S_A takes from each neuron of S_AV, [d]."""
        if self.inhibition is None or self.config.deploy_precision == "none":
            return self.inhibition
        limit = grid.INHIBITION_LIMIT
        return grid.on_unit(self.inhibition, grid.COUNT_UNIT, low=-limit, high=limit)

    def gain(self, site: str) -> Tensor:
        """What a spike of S_O or S_2 adds to the residual stream."""
        gain = self.gain_o if site == "o" else self.gain_y
        return gain if self.config.deploy_precision == "none" else grid.on_unit(gain, grid.RESIDUAL_UNIT)

    def forward(
        self,
        x: Tensor,
        h: Tensor,
        pairs: Pairs | None = None,
        cache: Cache | None = None,
        wanted: tuple[frozenset[str], frozenset[str]] | None = None,
        observe: Callable[[int, Mapping[str, Tensor]], Tensor] | None = None,
        maps: bool = False,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor], Tensor | None]:
        """(X, h) of the next block, spikes and membranes asked for by `wanted`, what `observe` returned.

        pairs: which tokens see each other; None: each sees itself and all before it, and nothing came before these.
        """
        config = self.config
        alpha, xi, heads = config.alpha, config.xi, config.num_attention_heads
        kept: dict[str, Tensor] = {}
        membranes: dict[str, Tensor] = {}

        def fire(site: str, current: Tensor, among: Pairs | None = None) -> Tensor:
            if self.calibrate is not None:
                self.calibrate(site, current)
            threshold, bias, unit = self.neurons(site)
            if bias is not None:
                current = current + (bias if among is None else bias[:, among.distance].movedim(0, -3))
            if among is not None:
                current = current * among.mask
            spikes = self.neuron(current, threshold, alpha, xi, config.scaled_surrogate, unit)
            if among is not None:
                spikes = spikes * among.mask  # masked pairs are silent anyhow; they must not train the threshold either
            if wanted is not None:
                if site in wanted[0]:
                    kept[site] = spikes
                if site in wanted[1]:
                    membranes[site] = lif_membrane(current.detach(), threshold.detach(), alpha, unit)
            return spikes

        def write(h: Tensor, site: str, current: Tensor) -> Tensor:
            return h + (current if config.residual_write == "current" else self.gain(site) * fire(site, current))

        q, k, v = (fire(site, getattr(self, BEHIND[site])(x)) for site in ("q", "k", "v"))
        rates: Tensor | None = None
        if pairs is None and cache is None and self._in_tiles(q, wanted):
            z, rates = self._attend(q, k, v, maps)
        else:
            q, k, v = (split_heads(spikes, heads) for spikes in (q, k, v))
            if cache is not None:
                k, v = update_cache(cache, self.index, k, v, config.num_steps if config.graded else None)
            pairs = pairs or causal_pairs(None, x.shape[1], q.shape[3], k.shape[3], config.distances, x.device, x.dtype)
            a = fire("a", coincidences(q, k), pairs)
            z, rates = merge_heads(weighted_values(a, v)), a.mean(0) if maps else None
            if (m := self.withheld()) is not None:
                z = z - merge_heads(a.sum(-1, keepdim=True) * m.view(heads, 1, -1))
        del q, k, v  # what is not needed again must not outlive its use: spikes are floats here
        middle = write(h, "o", self.out_proj(fire("r", z)))
        h = write(middle, "y", self.fc2(fire("f", self.fc1(fire("x", middle)))))
        last = self.index == config.num_hidden_layers - 1
        if last and self.training and self.log_threshold_h is not None and self.bias_h is not None:
            # This S_H may drive nothing; data parallelism wants every parameter in the graph, if only with zeros.
            h = h + 0.0 * (self.log_threshold_h + self.bias_h)
        x = fire("h", h)
        seen = {"h": x, "stream": h, "middle": middle} | ({} if rates is None else {"map": rates})
        return x, h, kept, membranes, None if observe is None else observe(self.index, seen)

    def _in_tiles(self, x: Tensor, wanted: tuple[frozenset[str], frozenset[str]] | None) -> bool:
        """Whether the compiled attention serves: it makes no map that could be kept or calibrated."""
        asked = self.calibrate is not None or (wanted is not None and "a" in wanted[0] | wanted[1])
        return self.config.neuron == "lif" and not asked and attention_cpu.usable(x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, maps: bool) -> tuple[Tensor, Tensor | None]:
        config = self.config
        threshold, bias, unit = self.neurons("a")
        how = attention_cpu.Synapse(
            config.alpha, config.xi, config.scaled_surrogate, None if unit is None else float(unit),
            self.gradients,
        )  # fmt: skip
        return attention_cpu.attend(q, k, v, threshold.flatten(), bias, how, maps, self.withheld())


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
            for gain in (module.gain_o, module.gain_y) if config.residual_write == "spike" else ():
                signs = torch.randint(0, 2, gain.shape, device=gain.device) * 2 - 1
                hf_init.copy_(gain, signs * config.threshold / 2)
            nn.init.constant_(module.log_threshold_a, math.log(math.sqrt(head_dim) * config.threshold))
            nn.init.constant_(module.log_threshold_r, math.log(2.0))
            if module.inhibition is not None:
                nn.init.zeros_(module.inhibition)
            if module.bias_a is not None:
                hf_init.copy_(module.bias_a, start_distances(*module.bias_a.shape) * math.sqrt(head_dim))
            if config.neurons == "own":
                for site in ("x", "h"):
                    nn.init.constant_(getattr(module, f"log_threshold_{site}"), math.log(config.threshold))
                for site in ("r", "x", "h"):
                    nn.init.zeros_(getattr(module, f"bias_{site}"))
            nn.init.constant_(module.threshold, config.threshold)
        elif isinstance(module, BiSpikCLMModel):
            nn.init.constant_(module.embed_gain, config.threshold / config.initializer_range)
            nn.init.zeros_(module.embed_bias)
            nn.init.zeros_(module.logit_scale)
            if module.log_threshold_embed is not None and module.bias_embed is not None:
                nn.init.constant_(module.log_threshold_embed, math.log(config.threshold))
                nn.init.zeros_(module.bias_embed)
            nn.init.constant_(module.threshold, config.threshold)


class BiSpikCLMModel(BiSpikCLMPreTrainedModel):
    """The student without the output table: tokens to the normalised features that meet it."""

    threshold: Tensor

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
        own = config.neurons == "own"
        self.log_threshold_embed = nn.Parameter(torch.empty(d)) if own else None
        self.bias_embed = nn.Parameter(torch.empty(d)) if own else None
        self.layers = nn.ModuleList(BiSpikCLMBlock(config, index) for index in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(d)
        self.logit_scale = nn.Parameter(torch.empty(()))  # s: logits are scaled by e^s
        self.register_buffer("threshold", torch.tensor([config.threshold]), persistent=False)
        self.gradient_checkpointing = False
        self.gradients: Gradients = "fp32"
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]  # any Module there
        self.embed_tokens = value

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """E [batch, token, d], before gain and bias."""
        tokens = self.embed_tokens(input_ids)
        if self.project_in is not None:
            tokens = self.project_in(tokens)
        return tokens + self.embed_positions(position_ids + POSITION_OFFSET)

    def neurons(self) -> Neurons:
        """The neurons of S_E."""
        log_threshold = self.log_threshold_embed
        threshold = self.threshold if log_threshold is None else log_threshold.exp()
        return place(threshold, self.bias_embed, grid.RESIDUAL_UNIT, self.config.deploy_precision != "none")

    def embedding_current(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """h before the first block, [batch, token, d]: constant over the steps."""
        current = self.embed_gain * self.embed(input_ids, position_ids) + self.embed_bias
        if self.config.deploy_precision == "none":
            return current
        return grid.straight(self.embedding_grid()(input_ids, position_ids + POSITION_OFFSET), current)

    def embedding_grid(self) -> grid.EmbeddingGrid:
        tokens, positions = self.embed_tokens.weight, self.embed_positions.weight
        return grid.EmbeddingGrid(tokens, positions, self.embed_gain, self.embed_bias)

    def read(self, x: Tensor, h: Tensor) -> Tensor:
        """What meets the output table. On the integer grid y / s_y, and the table's side multiplies by e^s."""
        features = self.final_layer_norm((h if self.config.readout == "residual" else x).mean(0))
        if self.config.deploy_precision != "none":
            levels = self.config.num_steps if self.config.graded else 1
            return grid.straight(grid.head_features(h, self.final_layer_norm, levels), features)
        if self.project_out is not None:
            features = self.project_out(features)
        return features * self.logit_scale.exp()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        recorder: Recorder | None = None,
        **kwargs: Any,
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
        start = self.embedding_current(input_ids, position_ids)
        h = start.expand(config.steps, *start.shape)
        threshold, bias, unit = self.neurons()
        current = h if bias is None else h + bias
        neuron = neuron_of(config, self.gradients)
        x = neuron(current, threshold, config.alpha, config.xi, config.scaled_surrogate, unit)
        if recorder is not None:
            sites, membranes_of = recorder.wanted(-1)
            recorder.keep(
                -1,
                {EMBED_SITE: x} if EMBED_SITE in sites else {},
                {EMBED_SITE: lif_membrane(current.detach(), threshold.detach(), config.alpha, unit)}
                if EMBED_SITE in membranes_of
                else {},
            )
        # Blocks that work in tiles need no mask; for the others one is made, not one each.
        plain = attention_mask is None and not past and config.neuron == "lif" and attention_cpu.usable(x)
        pairs = None if plain else causal_pairs(
            attention_mask, batch, length, past + length, config.distances, x.device, x.dtype
        )  # fmt: skip
        for index, layer in enumerate(self.layers):
            wanted = None if recorder is None else recorder.wanted(index)
            observe = None if recorder is None else recorder.observe
            cache = past_key_values if use_cache else None
            maps = recorder is not None and recorder.maps
            x, h, kept, membranes, observed = layer(x, h, pairs, cache, wanted, observe, maps)
            if recorder is not None:
                recorder.keep(index, kept, membranes)
                recorder.observed += [] if observed is None else [observed]
        return BaseModelOutputWithPast(
            last_hidden_state=self.read(x, h),  # type: ignore[arg-type]  # float or, deployed, double
            past_key_values=past_key_values if use_cache else None,
        )


class OutputTable(nn.Linear):
    """The tied, dense head: features to logits. On the integer grid the table is the embedding's int8 one; outside
    training the logits are then the exported file's, bit for bit, in float64.
    """

    def __init__(self, base: BiSpikCLMModel) -> None:
        super().__init__(base.config.word_embed_proj_dim, base.config.vocab_size)
        self.base = (base,)  # not a submodule: only e^s is read
        self.gradients: Gradients = "fp32"

    def forward(self, features: Tensor) -> Tensor:
        (base,) = self.base
        if base.config.deploy_precision == "none":
            return super().forward(features)
        exact = None if self.training else self.grid()(features)
        if exact is not None and not torch.is_grad_enabled():
            return exact
        smooth = nn.functional.linear(*self.affine(features))
        return smooth if exact is None else grid.straight(exact, smooth.double())

    def grid(self) -> grid.HeadGrid:
        return grid.HeadGrid(self.weight, self.base[0].logit_scale, self.bias)

    def affine(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x, W, b) with logits = x W^T + b in training: for a loss that makes them a few rows at a time."""
        (base,) = self.base
        if base.config.deploy_precision == "none":
            return features, self.weight, self.bias
        units = grid.row_units(self.weight)
        table = grid.straight(grid.snapped_rows(self.weight, units), self.weight)
        return features * base.logit_scale.exp(), table, self.bias


class BiSpikCLMForCausalLM(BiSpikCLMPreTrainedModel, GenerationMixin):
    """The student with its tied, dense head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BiSpikCLMConfig) -> None:
        super().__init__(config)
        self.model = BiSpikCLMModel(config)
        self.lm_head = OutputTable(self.model)
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """`logits_to_keep` as everywhere in transformers: logits of the last so many tokens only (0: of all)."""
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache, recorder=recorder
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)


def use_gradients(student: nn.Module, gradients: Gradients) -> None:
    """How the backward pass of a student, or of a block, is computed from now on; no part of what is saved."""
    for module in student.modules():
        if isinstance(module, (BiSpikCLMModel, BiSpikCLMBlock, SpikeLinear, OutputTable)):
            module.gradients = gradients
        if isinstance(module, BiSpikCLMBlock):
            module.neuron = neuron_of(module.config, gradients)


def _positions(input_ids: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Positions count real tokens only, as OPT's do, so that left padding changes nothing."""
    length = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(past, past + length, device=input_ids.device)[None].expand(input_ids.shape[0], -1)
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]


def start_distances(heads: int, distances: int) -> Tensor:
    """Where heads look before training, [head, distance] in units of sqrt(d_h): three of four at one of the last three
    tokens and not at themselves, the fourth anywhere.
    """
    bias = torch.zeros(heads, distances)
    for head in range(heads):
        if 1 + head % 4 < min(4, distances):
            bias[head] = -0.5
            bias[head, 1 + head % 4] = 1.0
    return bias


def register() -> None:
    """Make `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the student. Safe to call twice."""
    AutoConfig.register("bispikclm", BiSpikCLMConfig, exist_ok=True)
    AutoModel.register(BiSpikCLMConfig, BiSpikCLMModel, exist_ok=True)
    AutoModelForCausalLM.register(BiSpikCLMConfig, BiSpikCLMForCausalLM, exist_ok=True)


register()
