"""What a recipe needs on a machine, calculated before anything is loaded: memory per GPU, communication, tokens/s.

Counts of parameters and of what a block keeps for its backward pass follow the code (tests hold them against it).
Speed is products over what the machine is said to reach, so it is an estimate; memory is not, up to the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from spikeopd.config import Config, Overrides, load_config, with_overrides
from spikeopd.errors import ConfigError

GIB = 2**30
RESERVED = 1.5  # GiB: the CUDA context and what the allocator cannot use


@dataclass(frozen=True)
class Machine:
    """gpus: processes in all; memory: GiB each; tflops: of one, dense, in the run's precision; share: of them that is
    reached; link: GB/s between two of them; shard: FSDP2 instead of DDP.
    """

    gpus: int = 8
    memory: float = 24.0
    tflops: float = 70.0
    share: float = 0.3
    link: float = 12.0
    shard: bool = False

    @staticmethod
    def read(text: str) -> Machine:
        """From `gpus=8,memory=24,tflops=70,share=0.3,link=12,shard=1`; what is left out is as above."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Machine)}
        found: dict[str, Any] = {}
        for word in filter(None, text.split(",")):
            name, _, value = word.partition("=")
            try:
                found[name] = bool(int(value)) if name == "shard" else kinds[name](value)
            except (KeyError, ValueError):
                raise ConfigError(f"--plan: {word!r} is none of {', '.join(f'{n}=NUMBER' for n in kinds)}") from None
            if name != "shard" and not found[name] > 0:
                raise ConfigError(f"--plan: {name} must be above 0")
        return Machine(**found)


def plan(recipe: str | Path | Config, machine: str | Machine = "", overrides: Overrides = ()) -> dict[str, Any]:
    """Memory per GPU, communication and speed of each stage of a recipe, whether it fits, and what to change if not.

    The teacher is taken to have the student's sizes, as every recipe of the paper has.
    """
    config = with_overrides(recipe, overrides) if isinstance(recipe, Config) else load_config(recipe, overrides)
    place = machine if isinstance(machine, Machine) else Machine.read(machine)
    found = _calculated(config, place)
    return found if found["fits"] else found | {"change": changes(config, place)}


def _calculated(config: Config, place: Machine) -> dict[str, Any]:
    stages = {}
    if config.train.stage != "2":
        stages["stage1"] = _stage(config, place, 1)
    if config.train.stage != "1":
        stages["stage2"] = _stage(config, place, 2)
    fits = all(stage["fits"] for stage in stages.values())
    return {"machine": vars(place), "parameters": parameters(config), **stages, "fits": fits}


def needed(config: Config) -> int:
    """Bytes that one process takes at most, on a machine of its own."""
    stages = _calculated(config, Machine(gpus=1))
    return int(GIB * max(stages[name]["memory_gib"] for name in ("stage1", "stage2") if name in stages))


def changes(config: Config, place: Machine) -> str:
    """The overrides under which the recipe fits, those first that change no result; or that there are none."""
    taken: list[str] = []
    config = with_overrides(config, {"train.gradient_checkpointing": True})
    taken.append("train.gradient_checkpointing=true")
    while not _calculated(config, place)["fits"]:
        steps, rows = config.stage1.gradient_accumulation_steps, config.stage1.micro_batch_size
        if config.teacher.teacher_precision == "fp32":
            step = ["teacher.teacher_precision=bf16"]
        elif place.gpus > 1 and not place.shard and 16 * parameters(config) > place.memory * GIB / 3:
            place, step = replace(place, shard=True), []
        elif config.train.precision == "fp32":
            step = ["train.precision=bf16"]
        elif rows % 2 == 0:
            step = [f"stage1.micro_batch_size={rows // 2}", f"stage1.gradient_accumulation_steps={2 * steps}"]
        elif config.stage2.micro_batch_size % 2 == 0:
            step = [f"stage2.micro_batch_size={config.stage2.micro_batch_size // 2}"]
        elif place.gpus > 1 and not place.shard:
            place, step = replace(place, shard=True), []
        else:
            return "nothing makes it fit this memory; take more or larger GPUs"
        config = with_overrides(config, step)
        taken = [old for old in taken if old.partition("=")[0] not in {new.partition("=")[0] for new in step}] + step
    return " ".join([*taken, *(["under FSDP2 (shard=1)"] if place.shard else [])])


def parameters(config: Config) -> int:
    """Of the student; embedding and head are one table."""
    model, s = config.model, config.model.sizes()
    d, width, own = s["hidden_size"], s["word_embed_proj_dim"], model.neurons == "own"
    block = block_weights(config) + 4 * d + s["ffn_dim"] + d  # biases of q, k, v, o, f, y
    block += 2 * d if model.residual_write == "spike" else 0
    block += s["num_attention_heads"] * (1 + (model.distances or 0))
    block += d if model.attention == "inhibiting" else 0
    block += 6 * d if own else s["num_attention_heads"]  # thresholds and biases of r, x, h
    outside = s["vocab_size"] * (width + 1) + (s["max_position_embeddings"] + 2) * d  # tables, bias of the head
    outside += 2 * d + 2 * d + 1 + (2 * d if own else 0)  # gain and bias of the embedding, LayerNorm, e^s, S_E
    outside += 2 * width * d if width != d else 0
    return s["num_hidden_layers"] * block + outside


def block_weights(config: Config) -> int:
    """Weights of one block's six projections."""
    s = config.model.sizes()
    return 4 * s["hidden_size"] ** 2 + 2 * s["hidden_size"] * s["ffn_dim"]


def block_bytes(config: Config, length: int) -> int:
    """What one block keeps of one token for its backward pass, all steps: membranes of every site, spikes that meet a
    weight or other spikes, and the attention map.
    """
    model, s = config.model, config.model.sizes()
    d, ffn, heads, steps = s["hidden_size"], s["ffn_dim"], s["num_attention_heads"], model.num_steps
    narrow = 2 if config.train.precision == "bf16" else 4
    wide = 4  # the residual stream stays in float32, and so do the membranes of the neurons that read it
    neurons = narrow * (8 * d + 2 * ffn) + (wide + narrow) * 2 * d  # q, k, v, r, f; then x and h
    if model.residual_write == "spike":
        neurons += narrow * 4 * d  # o and y
    # A bias of its own lifts a current to float32, and the membranes with it.
    neurons += (wide - narrow) * d if model.neurons == "own" else 0
    maps = narrow + (wide if model.distances else narrow)
    return steps * (neurons + maps * heads * length)


def _stage(config: Config, place: Machine, stage: int) -> dict[str, Any]:
    s, model, train = config.model.sizes(), config.model, config.train
    d, layers, vocab, heads = s["hidden_size"], s["num_hidden_layers"], s["vocab_size"], s["num_attention_heads"]
    steps, chunk, count = model.num_steps, train.kl_chunk_tokens, parameters(config)
    if stage == 1:
        length, rows = config.data.sequence_length, config.stage1.micro_batch_size
        passes = config.stage1.gradient_accumulation_steps
    else:
        length = config.stage2.prompt_length + config.stage2.max_completion_length
        mine = -(-config.stage2.batch_size // place.gpus)
        rows = min(config.stage2.micro_batch_size, mine)
        passes = -(-mine // rows)
    tokens, parts = rows * length, place.gpus if place.shard else 1
    theirs = 2 if config.teacher.teacher_precision == "bf16" else 4
    kept, streams = block_bytes(config, length), steps * d * 8  # X and h: what a checkpointed block starts from
    observed = (4 * heads * length + 12 * d) if stage == 1 else 0  # slopes of SAA and SFA, one a token and block
    recompute = train.gradient_checkpointing
    activations = tokens * (layers * streams + kept + observed if recompute else layers * (kept + observed))
    memory = {
        "weights, gradients, Adam": 16 * count // parts,
        "weights as they act": 4 * layers * block_weights(config) // (layers if parts > 1 else 1),
        "teacher": theirs * count,
        "reference": 4 * count if stage == 2 else 0,
        "teacher's maps and states": tokens * layers * theirs * (heads * length + d) if stage == 1 else 0,
        "activations": activations,
        "chunk of logits, head's gradient": 20 * chunk * vocab + 4 * vocab * s["word_embed_proj_dim"],
    }
    total = sum(memory.values()) / GIB + RESERVED
    fits = total <= place.memory
    products = 2 * steps * block_weights(config) * layers + 4 * steps * d * length * layers // 2  # causal half
    head, teacher = 2 * vocab * d, 2 * (count + d * length * layers)
    scored = tokens if stage == 1 else rows * config.stage2.max_completion_length
    flops = tokens * (products * (4 if recompute else 3) + teacher) + scored * head * 3
    if stage == 2:
        flops += tokens * products * 2  # the rollout with its cache, the reference
    seconds = passes * flops / (place.tflops * 1e12 * place.share)
    exchanged = 4 * count * 2 * (place.gpus - 1) / place.gpus
    if place.shard:  # gathered for the forward and the backward pass of each part, scattered with its gradients
        exchanged *= (2 * passes + 1) / 2
    waiting = exchanged / (place.link * 1e9)
    updates = config.stage1.updates if stage == 1 else config.stage2.updates
    return {
        "fits": fits,
        "memory_gib": round(total, 2),
        "parts_gib": {name: round(size / GIB, 2) for name, size in memory.items() if size},
        "micro_batch": f"{rows} x {length}, {passes} for each update",
        "sequences_per_update": rows * passes * place.gpus,
        "exchanged_gb_per_update": round(exchanged / 1e9, 2),
        "seconds_per_update": round(seconds + waiting, 2),
        "tokens_per_second": round(tokens * passes * place.gpus / (seconds + waiting)),
        "hours": round(updates * (seconds + waiting) / 3600, 2),
    }
