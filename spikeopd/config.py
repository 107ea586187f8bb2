"""Every option of a training run: its default, meaning and source, written once, here.

`load_config("tiny", ["stage1.updates=50"])` reads a recipe (by name from spikeopd/recipes, or a YAML path), applies
overrides, converts each value to its declared type and reports every problem at once. The defaults are the paper's
controlled 125M run, so a recipe states what differs; `explain("stage2.ref_coef")` says where a value comes from.
The machinery that knows no option is in `options.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from spikeopd import options
from spikeopd.contradictions import CHECKS
from spikeopd.errors import ConfigError, say, short
from spikeopd.files import read_text
from spikeopd.options import opt
from spikeopd.registry import DIVERGENCES, METHODS, NEURONS

Overrides = Sequence[str] | Mapping[str, Any]  # ["stage1.updates=50"] as typed, or {"stage1.updates": 50}

# Named as in OPTConfig.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "ffn_dim",
    "vocab_size",
    "max_position_embeddings",
    "word_embed_proj_dim",
)
# Sizes by preset: facebook/opt-* config.json; a missing word_embed_proj_dim is hidden_size.
MODEL_PRESETS: dict[str, dict[str, int]] = {
    name: dict(zip(SIZES, sizes, strict=False))
    for name, sizes in {
        "tiny": (128, 4, 4, 512, 1024, 256),
        "opt-125m": (768, 12, 12, 3072, 50272, 2048),
        "opt-350m": (1024, 24, 16, 4096, 50272, 2048, 512),
        "opt-1.3b": (2048, 24, 32, 8192, 50272, 2048),
    }.items()
}
# Options of earlier versions: accepted from an old config.yaml, without effect.
RETIRED = {"train.compile": "nothing ever read it"}
# Options of the student's block (spikeopd/models/bispikclm.py) by its name; the paper's, and the better one.
BLOCKS: dict[str, dict[str, Any]] = {
    "paper": {
        "residual_write": "spike",
        "readout": "rate",
        "distances": 0,
        "attention": "sum",
        "neurons": "shared",
        "scaled_surrogate": False,
    },
    "plus": {
        "residual_write": "current",
        "readout": "residual",
        "distances": 16,
        "attention": "sum",
        "neurons": "own",
        "scaled_surrogate": True,
    },
}

STAGE1 = "paper App. F, Stage 1 table"
STAGE1_LOSS = "paper App. F, Eq. app_offline_total"
STAGE2 = "paper App. B, Stage 2 table"
COLLAPSE = "paper, RQ2 and Table opd_multiseed"
ADAM = "PyTorch's default; the paper says Adam and no more"
NOT_STATED = "not stated by the paper"
PRESET = "the preset when null"
BLOCK = "the block when null"
SPARSITY = "docs/energy.md, sparsity as a dial"


@dataclass(frozen=True)
class ModelConfig:
    """The student. Sizes left null are the preset's."""

    preset: str = opt("opt-125m", "shape of the student", "the paper's controlled runs", choices=MODEL_PRESETS)
    hidden_size: int | None = opt(None, "width of the residual stream", PRESET, at_least=1)
    num_hidden_layers: int | None = opt(None, "blocks", PRESET, at_least=1)
    num_attention_heads: int | None = opt(None, "attention heads; divides hidden_size", PRESET, at_least=1)
    ffn_dim: int | None = opt(None, "width of the feed-forward layer", PRESET, at_least=1)
    vocab_size: int | None = opt(None, "rows of the token table (padding rows included)", PRESET, at_least=1)
    max_position_embeddings: int | None = opt(None, "longest sequence", PRESET, at_least=1)
    word_embed_proj_dim: int | None = opt(None, "width of the token table (OPT-350M: 512)", PRESET, at_least=1)
    neuron: str = opt("lif", "neuron at every site", "paper Eq. lif", choices=NEURONS)
    num_steps: int = opt(4, "simulation steps T_s per token", STAGE1, at_least=1)
    alpha: float = opt(0.9, "what is left of the membrane after a step; below 1", NOT_STATED, above=0.0, at_most=1.0)
    threshold: float = opt(0.7, "firing threshold V at the start of training", NOT_STATED, above=0.0)
    xi: float = opt(2.0, "sharpness of the arctangent surrogate", STAGE1, above=0.0)
    grid_bits: int | None = opt(
        14, "weights act in multiples of 2**-grid_bits: exact sums; null is off", at_least=1, at_most=23
    )
    block: str = opt("paper", "the paper's block, or the better one", "docs/decisions.md", choices=BLOCKS)
    residual_write: str | None = opt(
        None,
        "a sublayer adds its spikes times a gain, or its current, to the residual stream",
        BLOCK,
        choices=("spike", "current"),
    )
    readout: str | None = opt(
        None, "the head reads the last spikes' rate, or the mean residual stream", BLOCK, choices=("rate", "residual")
    )
    distances: int | None = opt(None, "distances with a learned current into S_A; 0 is none", BLOCK, at_least=0)
    distance_start: Literal["near", "teacher"] = opt(
        "near",
        "heads begin by looking at the last three tokens, or as far back as the teacher's do",
        "docs/student.md",
    )
    attention: str | None = opt(
        None,
        "S_AV hears the values that attention picks, or these less a learned part: what is silent there inhibits",
        BLOCK,
        choices=("sum", "inhibiting"),
    )
    neurons: str | None = opt(
        None,
        "S_E, S_AV, S_X, S_H share the threshold, or have one and a bias per neuron",
        BLOCK,
        choices=("shared", "own"),
    )
    scaled_surrogate: bool | None = opt(None, "the surrogate sees u/V - 1 instead of u - V", BLOCK)
    init: Literal["random", "teacher"] = opt(
        "random",
        "blocks start random or from the teacher (an OPT or a Llama of the student's sizes); the token table comes "
        "from every teacher of the student's width, positions and final LayerNorm from an OPT, the final norm's gain "
        "from a Llama; the run says what was copied",
    )

    def sizes(self) -> dict[str, int]:
        """The sizes by name; `load_config` has filled in the preset's."""
        return {name: getattr(self, name) for name in SIZES}


@dataclass(frozen=True)
class TeacherConfig:
    """The frozen teacher."""

    teacher_model_name_or_path: str = opt(
        "facebook/opt-125m",
        "`tiny` or `tiny-rule` (shipped), a local directory, a .gguf file or a Hugging Face hub name",
        "paper App. B",
    )
    teacher_precision: Literal["fp32", "bf16"] = opt("fp32", "precision of the teacher's forward pass")


@dataclass(frozen=True)
class DataConfig:
    """Text and tokens. Sources are named as in docs/data.md."""

    source: str = opt("hf:HuggingFaceFW/fineweb-edu/sample-10BT", "Stage-1 text", "paper App. F")
    prompt_source: str | None = opt(
        "hf:HuggingFaceFW/fineweb/sample-10BT", "Stage-2 prompts; null takes data.source", "paper App. B: FineWeb"
    )
    validation_source: str | None = opt(None, "validation text; null takes the validation part of data.source")
    tokenizer: str = opt(
        "facebook/opt-125m", "`tiny` (shipped), a local directory or a hub name; the teacher's", STAGE1
    )
    framing: Literal["auto", "bos", "eos", "both"] = opt(
        "auto",
        "tokens around documents: one separator (bos or eos) or both; auto: as the tokenizer's own settings or "
        "template have it. Prompts begin alike",
    )
    sequence_length: int = opt(
        512, "tokens per Stage-1 window", "not stated by the paper; 480 + 32 of Stage 2", at_least=2
    )
    max_tokens: int | None = opt(
        1_000_000_000,
        "tokens taken from each training source; null takes all, but streamed datasets need a limit",
        "not stated by the paper; 2 GB on disk",
        at_least=1,
    )
    max_prompt_tokens: int | None = opt(
        None, "tokens taken from the source of the prompts; null is max_tokens", at_least=1
    )
    max_validation_tokens: int | None = opt(200_000, "tokens taken for validation; null takes all", at_least=1)
    cache_dir: str | None = opt(None, "token cache; null is $SPIKEOPD_CACHE or ~/.cache/spikeopd", harmless=True)


@dataclass(frozen=True)
class Stage1Config:
    """SpAD, offline distillation from the teacher (paper App. F)."""

    model_name_or_path: str | None = opt(
        None, "student or int8 bundle to go on from; null starts a new student from the teacher"
    )
    updates: int = opt(4000, "optimizer steps", STAGE1, at_least=1)
    learning_rate: float = opt(5e-4, "peak learning rate of Adam", STAGE1, above=0.0)
    warmup_ratio: float = opt(
        0.2, "share of the updates spent warming up; cosine decay follows", STAGE1, at_least=0, at_most=1
    )
    micro_batch_size: int = opt(16, "sequences per forward pass and process", STAGE1, at_least=1)
    gradient_accumulation_steps: int = opt(16, "forward passes per optimizer step", STAGE1, at_least=1)
    max_grad_norm: float | None = opt(0.7, "global gradient-norm clip; null is none", STAGE1, above=0.0)
    kd_temperature: float = opt(2.0, "soft-target temperature T_KD", STAGE1, above=0.0)
    lambda_emb: float = opt(0.2, "weight of embedding alignment (EA)", STAGE1_LOSS, at_least=0.0)
    lambda_attn: float = opt(0.1, "weight of spiking attention alignment (SAA)", STAGE1_LOSS, at_least=0.0)
    lambda_feat: float = opt(0.1, "weight of spiking feature alignment (SFA)", STAGE1_LOSS, at_least=0.0)
    lambda_soft: float = opt(0.3, "weight of soft-target alignment (STA)", STAGE1_LOSS, at_least=0.0)
    lambda_hard: float = opt(0.3, "weight of hard-target alignment (HTA)", STAGE1_LOSS, at_least=0.0)
    lambda_stream: float = opt(
        0.0, "weight of residual stream alignment (RSA); teacher and student of one width", "ours", at_least=0.0
    )
    lambda_middle: float = opt(
        0.0, "weight of the same between attention and feed-forward layer; OPT and Llama", "ours", at_least=0.0
    )
    gamma_attn: float = opt(
        0.5, "SAA: share of the rate target against the continuous one", "paper App. F", at_least=0, at_most=1
    )
    gamma_feat: float = opt(
        0.5, "SFA: share of the rate target against the continuous one", "paper App. F", at_least=0, at_most=1
    )
    rate_target: tuple[float, ...] = opt(
        (),
        "firing rate drawn down to this: one of the whole network, or one for each layer; empty is off",
        SPARSITY,
        above=0.0,
        at_most=1.0,
    )
    rate_coef: float = opt(30.0, "weight of rate_target's term", SPARSITY, at_least=0.0)
    rate_warmup: float = opt(
        0.5, "share of the updates over which rate_target falls from 1 to its value", SPARSITY, at_least=0, at_most=1
    )
    deploy_updates: int = opt(
        0, "last updates that run the deployable integers' forward pass; Stage 2 then stays in it", at_least=0
    )
    checkpoint_updates: tuple[int, ...] = opt(
        (), "also keep the student after these updates", "1k/2k/4k: initialisation study"
    )

    @property
    def internals(self) -> bool:
        """Whether a target compares with the teacher's layers; its logits alone cost less."""
        return any((self.lambda_emb, self.lambda_attn, self.lambda_feat, self.lambda_stream, self.lambda_middle))

    @property
    def maps(self) -> bool:
        """Whether a target compares with the teacher's attention maps, which its fused kernels do not give."""
        return self.lambda_attn > 0


@dataclass(frozen=True)
class Stage2Config:
    """SpikeOPD, on-policy distillation on the student's own continuations (paper Method and App. B)."""

    method: str = opt("spikeopd", "SpikeOPD or a control of the paper", "paper App. B", choices=METHODS)
    model_name_or_path: str | None = opt(None, "student to start from; null takes the result of Stage 1")
    updates: int = opt(500, "optimizer steps", STAGE2, at_least=1)
    learning_rate: float = opt(1.5e-6, "learning rate of Adam, constant", STAGE2, above=0.0)
    batch_size: int = opt(16, "trajectories per update over all processes", STAGE2, at_least=1)
    micro_batch_size: int = opt(16, "trajectories per forward pass; divides batch_size", at_least=1)
    prompt_length: int = opt(480, "tokens of each corpus prompt", STAGE2, at_least=1)
    max_completion_length: int = opt(32, "tokens K rolled out by the active student", STAGE2, at_least=1)
    temperature: float = opt(1.0, "sampling temperature of the rollout, whole distribution", STAGE2, above=0.0)
    divergence: str = opt(
        "forward_kl", "full-vocabulary divergence to the teacher", "paper Eq. opd", choices=DIVERGENCES
    )
    teacher_coef: float = opt(1.0, "weight of the divergence to the teacher", STAGE2, at_least=0.0)
    ref_coef: float = opt(0.75, "weight beta_ref of the reverse KL to the frozen reference", STAGE2, at_least=0.0)
    spike_coef: float = opt(0.30, "weight lambda_spk of the layerwise spike loss", STAGE2, at_least=0.0)
    spike_layers: tuple[int, ...] = opt((3, 6, 9, 12), "layers of the spike loss, counted from 1", STAGE2)
    rate_min: float = opt(0.01, "lowest firing rate without penalty", STAGE2, at_least=0.0, at_most=1.0)
    rate_max: float = opt(0.58, "highest firing rate without penalty", STAGE2, at_least=0.0, at_most=1.0)
    rho: float = opt(1.0, "pull of each rate to the reference's", STAGE2, at_least=0.0)
    rate_scope: Literal["all", "output"] = opt("all", "neurons that count for a layer's rate", "paper Eq. app_rate")
    rate_target: tuple[float, ...] = opt(
        (),
        "firing rate drawn down to this: one of the whole network, or one for each layer; empty is off",
        SPARSITY,
        above=0.0,
        at_most=1.0,
    )
    rate_coef: float = opt(30.0, "weight of rate_target's term", SPARSITY, at_least=0.0)
    rate_warmup: float = opt(
        0.5, "share of the updates over which rate_target falls from 1 to its value", SPARSITY, at_least=0, at_most=1
    )
    max_grad_norm: float | None = opt(
        None, "global gradient-norm clip; null is none", "paper Table opd_multiseed", above=0.0
    )
    on_collapse: Literal["log", "stop", "rollback"] = opt("log", "what the collapse detector does when it fires")
    collapse_window: int = opt(20, "updates the detector averages over", COLLAPSE, at_least=1)
    collapse_adj: float = opt(
        0.10, "mean adjacent repetition above which text has collapsed", COLLAPSE, at_least=0, at_most=1
    )
    collapse_dist4: float = opt(0.05, "mean 1 - Dist-4 above which text has collapsed", COLLAPSE, at_least=0, at_most=1)
    entropy_quantile: float = opt(
        0.80, "eopd: teacher entropy above this quantile takes forward KL", "paper App. B", at_least=0.0, at_most=1.0
    )
    teacher_top_k: int = opt(50, "eopd: teacher tokens that its forward KL sums over", "paper App. B", at_least=1)
    calibration_batches: int = opt(5, "oprd: minibatches that fix its coefficient", "paper App. B", at_least=1)
    jsd_beta: float = opt(
        0.5, "gkd, jsd: weight b of the teacher in m = b p + (1 - b) q", "GKD", above=0.0, at_most=0.999
    )
    buffer_gib: float = opt(4.0, "lightning_opd: largest size of its buffer on disk", NOT_STATED, above=0.0)
    log_samples: int = opt(0, "completions written to the log at each logged update", at_least=0, harmless=True)


@dataclass(frozen=True)
class TrainConfig:
    """How the run is carried out."""

    stage: Literal["1", "2", "both"] = opt("both", "stages to run")
    seed: int = opt(0, "seed of weights, batches and rollouts", at_least=0, at_most=2**63 - 1)
    precision: Literal["fp32", "bf16"] = opt("fp32", "autocast precision of the student")
    gradients: Literal["fp32", "bf16", "rates"] = opt(
        "fp32", "products for the gradients of the blocks, on a CPU (docs/performance.md); spikes stay exact"
    )
    adam_beta1: float = opt(0.9, "first-moment decay of Adam", ADAM, at_least=0.0, at_most=1.0)
    adam_beta2: float = opt(0.999, "second-moment decay of Adam", ADAM, at_least=0.0, at_most=1.0)
    adam_epsilon: float = opt(1e-8, "epsilon of Adam", ADAM, above=0.0)
    gradient_checkpointing: bool = opt(False, "recompute blocks in the backward pass: less memory, more time")
    kl_chunk_tokens: int = opt(256, "tokens per chunk of the full-vocabulary losses; bounds their memory", at_least=1)
    threads: int | None = opt(None, "CPU threads of torch; null leaves its choice", at_least=1)
    log_every: int = opt(1, "updates between lines of metrics.jsonl", at_least=1, harmless=True)
    eval_every: int = opt(0, "updates between validations; 0 validates at the start and the end only", at_least=0)
    save_every: int = opt(100, "updates between checkpoints", at_least=1, harmless=True)
    keep_checkpoints: int = opt(2, "newest checkpoints that are kept", at_least=1, harmless=True)
    tensorboard: bool = opt(False, "also write TensorBoard files", harmless=True)


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    stage1: Stage1Config = field(default_factory=Stage1Config)
    stage2: Stage2Config = field(default_factory=Stage2Config)
    train: TrainConfig = field(default_factory=TrainConfig)


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "teacher": TeacherConfig,
    "data": DataConfig,
    "stage1": Stage1Config,
    "stage2": Stage2Config,
    "train": TrainConfig,
}


MOST_PROBLEMS = 20  # that are listed

# --- loading ---------------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    folder = resources.files("spikeopd") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(recipe: str | Path = "tiny", overrides: Overrides = ()) -> Config:
    """A recipe name or YAML path and overrides, checked as a whole."""
    problems: list[str] = []
    values = options.flatten(_read_recipe(str(recipe), ()), SECTIONS, problems)
    return _build(values | _overrides(overrides, problems), problems, f"config {recipe}")


def with_overrides(config: Config, overrides: Overrides) -> Config:
    """A copy with overrides applied and checked. A new `model.preset` does not undo sizes already set; a new
    `model.block` brings its own options.
    """
    problems: list[str] = []
    values, changes = _flat(config), _overrides(overrides, problems)
    if "model.block" in changes:
        values |= {f"model.{name}": None for name in BLOCKS["paper"]}
    return _build(values | changes, problems, "config")


def config_from_dict(values: Mapping[str, Any], name: str = "config") -> Config:
    """From `{"stage1": {"updates": 3}}`, as YAML or JSON gives it."""
    problems: list[str] = []
    return _build(options.flatten(values, SECTIONS, problems), problems, name)


def to_yaml(config: Config) -> str:
    """The whole configuration as a recipe: `load_config` on it gives an equal one."""
    return options.dump_yaml(config_to_dict(config))


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain lists, numbers and strings, for YAML and JSON."""
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in _flat(config).items():
        section, name = key.split(".")
        nested[section][name] = list(value) if isinstance(value, tuple) else value
    return nested


def config_difference(old: Config, new: Config, *, ignore: Iterable[str] = (), harmless: bool = True) -> list[str]:
    """One line per option that differs. harmless=False leaves out options that cannot change the result."""
    before, after, skipped = _flat(old), _flat(new), set(ignore)
    table = options.option_table(SECTIONS)
    return [
        f"{key}: {options.show(before[key])} -> {options.show(after[key])}"
        for key in before
        if before[key] != after[key] and key not in skipped and (harmless or not table[key].harmless)
    ]


def explain(key: str | None = None) -> str:
    """Type, default, meaning and source of an option, of a section, or (None) of all."""
    return options.explain(key, SECTIONS)


def _overrides(overrides: Overrides, problems: list[str]) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return dict(overrides)
    values = {}
    for override in (overrides,) if isinstance(overrides, str) else overrides:
        key, equals, text = override.partition("=")
        if equals:
            values[key.strip()] = options.parse_scalar(text)
        else:
            problems.append(f"override '{short(override)}': expected section.key=value")
    return values


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{item.name}": getattr(getattr(config, section), item.name)
        for section, kind in SECTIONS.items()
        for item in fields(kind)
    }


def _build(values: Mapping[str, Any], problems: list[str], name: str) -> Config:
    for key in values.keys() & RETIRED.keys():
        say(f"{name}: {key} is no longer an option ({RETIRED[key]}) and has no effect; remove it")
    values = {key: value for key, value in values.items() if key not in RETIRED}
    converted = options.convert_all(values, SECTIONS, problems)
    config = Config(
        **{
            section: kind(
                **{key.split(".")[1]: value for key, value in converted.items() if key.startswith(f"{section}.")}
            )
            for section, kind in SECTIONS.items()
        }
    )
    config = replace(config, model=_fill_sizes(config.model))
    unfit = set(values) - set(converted)
    for check, keys in CHECKS:
        if not unfit & set(keys.split()):
            problems += check(config)
    shown = problems[:MOST_PROBLEMS]
    shown += [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
    if len(problems) == 1:
        raise ConfigError(f"{name}: {problems[0]}")
    if problems:
        raise ConfigError(f"{name}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in shown))
    return config


def _fill_sizes(model: ModelConfig) -> ModelConfig:
    sizes = MODEL_PRESETS.get(model.preset, {})
    missing: dict[str, Any] = {name: size for name, size in sizes.items() if getattr(model, name) is None}
    block = BLOCKS.get(model.block, {})
    missing |= {name: value for name, value in block.items() if getattr(model, name) is None}
    model = replace(model, **missing)
    return model if model.word_embed_proj_dim else replace(model, word_embed_proj_dim=model.hidden_size)


def _read_recipe(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The content of a recipe, laid over its `base:` recipe when it names one."""
    if name in seen:
        raise ConfigError(f"recipe {name}: its `base` leads back to itself ({' -> '.join((*seen, name))})")
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or _is_file(path):
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            text = "not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
            reason = getattr(error, "strerror", None) or text
            raise ConfigError(f"recipe {short(path)}: {reason}; give a readable YAML file") from error
    elif name in recipe_names():
        text = (resources.files("spikeopd") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"recipe '{short(name)}' does not exist{options.nearest(name[:99], recipe_names())}; "
            f"give one of {', '.join(recipe_names())}, or the path of a .yaml file"
        )
    content = options.parse_yaml(text, name)
    base = content.pop("base", None)
    if base is None:
        return content
    beside = path.parent / str(base)
    below = _read_recipe(str(beside) if _is_file(beside) else str(base), (*seen, name))
    for section, entries in content.items():
        both = isinstance(entries, dict) and isinstance(below.get(section), dict)
        below[section] = {**below[section], **entries} if both else entries
    return below


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have: too long, or with a zero in it
        return False
