"""Options of a training run that contradict each other: small functions, all asked when a configuration is loaded.

Each returns lines that say what does not go together and what to set; `CHECKS` at the foot names the options it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spikeopd.registry import GRADED, METHODS

if TYPE_CHECKING:
    from spikeopd.config import Config


def heads(config: Config) -> list[str]:
    width, heads = config.model.hidden_size or 1, config.model.num_attention_heads or 1
    if width % heads:
        return [f"model.hidden_size: {width} is not a multiple of model.num_attention_heads = {heads}"]
    return []


def alpha(config: Config) -> list[str]:
    if round(4096 * config.model.alpha) < 4096:
        return []
    return [
        f"model.alpha: {config.model.alpha} rounds to a membrane without leak (4096 of 4096), which NIR's leaky "
        "integrator cannot hold, so the student could not be exported; give at most 0.9998"
    ]


def distance_start(config: Config) -> list[str]:
    if config.model.distance_start == "near" or config.model.distances:
        return []
    return [
        "model.distance_start: a student without distances looks nowhere in particular; set model.block=plus, "
        "model.distances, or model.distance_start=near"
    ]


def inhibition(config: Config) -> list[str]:
    neuron = config.model.neuron
    if config.model.attention == "inhibiting" and neuron != "lif":
        return [f"model.attention: 'inhibiting' needs spikes, and model.neuron is {neuron}; set model.attention=sum"]
    return []


def sequence_length(config: Config) -> list[str]:
    length, limit = config.data.sequence_length, config.model.max_position_embeddings or 0
    if config.train.stage != "2" and length > limit:
        return [f"data.sequence_length: {length} exceeds model.max_position_embeddings = {limit}"]
    return []


def rollout_length(config: Config) -> list[str]:
    prompt, completion = config.stage2.prompt_length, config.stage2.max_completion_length
    limit = config.model.max_position_embeddings or 0
    if config.train.stage != "1" and prompt + completion > limit:
        return [
            f"stage2.prompt_length: {prompt} + max_completion_length {completion} = {prompt + completion} "
            f"exceeds model.max_position_embeddings = {limit}"
        ]
    return []


def checkpoint_updates(config: Config) -> list[str]:
    last = config.stage1.updates
    return [
        f"stage1.checkpoint_updates: {update} is not between 1 and stage1.updates = {last}"
        for update in config.stage1.checkpoint_updates
        if config.train.stage != "2" and not 1 <= update <= last
    ]


def deploy(config: Config) -> list[str]:
    model, stage1 = config.model, config.stage1
    if config.train.stage == "2" or not stage1.deploy_updates:
        return []
    found = []
    if model.readout != "residual" or model.word_embed_proj_dim != model.hidden_size:
        found.append(
            "stage1.deploy_updates: needs model.readout=residual and model.word_embed_proj_dim = model.hidden_size; "
            "set stage1.deploy_updates=0"
        )
    if model.neuron not in ("lif", *GRADED):
        found.append("stage1.deploy_updates: model.neuron is neither lif nor quantised; set stage1.deploy_updates=0")
    if model.neuron in GRADED and model.num_steps & (model.num_steps - 1):
        found.append("stage1.deploy_updates: a quantised twin has integers for model.num_steps 1, 2, 4, 8, ... only")
    if config.train.precision != "fp32":
        found.append(
            "stage1.deploy_updates: the integers are exact in float32 only; set train.precision=fp32 or "
            "stage1.deploy_updates=0"
        )
    return found


def stage1_weights(config: Config) -> list[str]:
    stage1 = config.stage1
    if stage1.internals or stage1.lambda_soft or stage1.lambda_hard:
        return []
    return ["stage1.lambda_*: every weight is 0, nothing would be learned; set at least one"]


def stage2_weights(config: Config) -> list[str]:
    stage2 = config.stage2
    if config.train.stage == "1" or any((stage2.teacher_coef, stage2.ref_coef, stage2.spike_coef)):
        return []
    return ["stage2.teacher_coef, ref_coef, spike_coef: all 0, nothing would be learned; set at least one"]


def micro_batch(config: Config) -> list[str]:
    whole, part = config.stage2.batch_size, config.stage2.micro_batch_size
    return [f"stage2.micro_batch_size: {part} does not divide stage2.batch_size = {whole}"] if whole % part else []


def rates(config: Config) -> list[str]:
    low, high = config.stage2.rate_min, config.stage2.rate_max
    return [] if low < high else [f"stage2.rate_min: {low} must lie below stage2.rate_max = {high}"]


def spike_layers(config: Config) -> list[str]:
    chosen, count = config.stage2.spike_layers, config.model.num_hidden_layers or 0
    if config.train.stage == "1":
        return []
    found = []
    if outside := [layer for layer in chosen if not 1 <= layer <= count]:
        found.append(f"stage2.spike_layers: {outside} are not layers of a student with {count} (1 to {count})")
    if len(set(chosen)) != len(chosen):
        found.append(f"stage2.spike_layers: {list(chosen)} names a layer twice")
    if config.stage2.spike_coef > 0 and not chosen:
        found.append("stage2.spike_layers: empty although stage2.spike_coef > 0; name layers or set spike_coef=0")
    return found


def divergence(config: Config) -> list[str]:
    method, chosen = config.stage2.method, config.stage2.divergence
    if chosen == type(config.stage2).divergence or "stage2.divergence" in METHODS[method].reads:
        return []
    return [f"stage2.divergence: {chosen} has no part in stage2.method={method}; leave it out"]


def rate_targets(config: Config) -> list[str]:
    layers, method, found = config.model.num_hidden_layers or 0, config.stage2.method, []
    for stage, section in (("1", config.stage1), ("2", config.stage2)):
        count = len(section.rate_target)
        if config.train.stage in (stage, "both") and count not in (0, 1, layers):
            found.append(
                f"stage{stage}.rate_target: {count} rates for {layers} layers; give one, or one for each layer"
            )
    if config.train.stage != "1" and config.stage2.rate_target and "stage2.rate_target" not in METHODS[method].reads:
        found.append(f"stage2.rate_target: has no part in stage2.method={method}; leave it out")
    return found


def start(config: Config) -> list[str]:
    start = config.stage2.model_name_or_path
    if config.train.stage == "2" and start is None:
        return ["stage2.model_name_or_path: train.stage=2 needs a student to start from; give its directory"]
    if config.train.stage == "both" and start is not None:
        return ["stage2.model_name_or_path: train.stage=both starts Stage 2 from its own Stage 1; use train.stage=2"]
    return []


def streams(config: Config) -> list[str]:
    data = config.data
    return [
        f"data.max_tokens: {source} is streamed and needs a limit, for example data.max_tokens=100000000"
        for source in dict.fromkeys(filter(None, (data.source, data.prompt_source)))
        if source.startswith("hf:") and data.max_tokens is None
    ]


# Each check with the options it reads: when one of them is unfit, the check would only speak of the default.
CHECKS: tuple[tuple[Callable[[Config], list[str]], str], ...] = (
    (alpha, "model.alpha"),
    (heads, "model.preset model.hidden_size model.num_attention_heads"),
    (sequence_length, "model.preset model.max_position_embeddings data.sequence_length train.stage"),
    (
        rollout_length,
        "model.preset model.max_position_embeddings stage2.prompt_length stage2.max_completion_length train.stage",
    ),
    (distance_start, "model.block model.distances model.distance_start"),
    (inhibition, "model.attention model.neuron"),
    (checkpoint_updates, "stage1.checkpoint_updates stage1.updates train.stage"),
    (
        deploy,
        "model.preset model.block model.readout model.neuron model.hidden_size model.word_embed_proj_dim "
        "stage1.deploy_updates train.precision train.stage",
    ),
    (
        stage1_weights,
        "stage1.lambda_emb stage1.lambda_attn stage1.lambda_feat stage1.lambda_soft stage1.lambda_hard "
        "stage1.lambda_stream stage1.lambda_middle",
    ),
    (stage2_weights, "stage2.teacher_coef stage2.ref_coef stage2.spike_coef train.stage"),
    (micro_batch, "stage2.batch_size stage2.micro_batch_size"),
    (rates, "stage2.rate_min stage2.rate_max"),
    (spike_layers, "model.preset model.num_hidden_layers stage2.spike_layers stage2.spike_coef train.stage"),
    (divergence, "stage2.method stage2.divergence"),
    (
        rate_targets,
        "model.preset model.num_hidden_layers stage1.rate_target stage2.rate_target stage2.method train.stage",
    ),
    (start, "stage2.model_name_or_path train.stage"),
    (streams, "data.source data.prompt_source data.max_tokens"),
)
