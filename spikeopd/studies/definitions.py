"""The studies of the paper: which runs, which columns, which printed values stand beside. Nothing is carried out here.

A study is a list of rows; a row is a Stage-2 configuration (or a checkpoint that is only evaluated) repeated over
seeds. The paper's values are percentages as printed; values that the paper only draws are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spikeopd.config import Config, load_config, with_overrides
from spikeopd.errors import ConfigError
from spikeopd.evaluation import paper as printed_tables
from spikeopd.evaluation.tasks import BENCHMARKS
from spikeopd.studies import efficiency

Paper = Mapping[str, float | str]


@dataclass(frozen=True)
class Row:
    """overrides: of Stage 2; base: overrides of the study's configuration (another model has another Stage 1).

    start: the Stage-1 student, `final` or `update-NNNNNN`. kind `stage1` is the Stage-1 run itself, `teacher` the
    teacher on the same text, `paper` a row of the paper's that nothing is run for. one_seed: the seed changes nothing;
    papers_one_seed: the paper has one, so more are run only if asked for. facts: cells that are known beforehand.
    """

    label: str
    overrides: tuple[str, ...] = ()
    kind: Literal["train", "evaluate", "stage1", "teacher", "paper"] = "train"
    start: str = "final"
    base: tuple[str, ...] = ()
    recipe: str | None = None
    one_seed: bool = False
    papers_one_seed: bool = False
    paper: Paper = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """key: a value of a result (studies.values); decimals: how it is printed."""

    key: str
    label: str
    decimals: int = 2
    better: Literal["low", "high", ""] = ""


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    rows: Callable[[Config], list[Row]]
    columns: tuple[Column, ...]
    seeds: tuple[int, ...] = (0,)
    figure: Literal["points", "collapse", "diagnostics", "pareto"] = "points"


AVERAGE = Column("average", "Avg. %", 1, "high")
PERPLEXITY = Column("perplexity", "PPL", 2, "low")
SELF_KL = Column("self_kl", "KL self", 3, "low")
TEACHER_KL = Column("teacher_kl", "KL corpus", 3, "low")
ADJ, DIST4 = Column("adj", "Adj. %", 2, "low"), Column("dist4", "Dist.-4 %", 2, "high")
RUN, RATE = Column("run", "Run", 3, "low"), Column("rate", "Rate", 4)
ENERGY = (
    Column("fired", "Rate", 4),
    Column("appendix_nj", "App. E [nJ]", 0, "low"),
    Column("spike_nj", "per spike [nJ]", 0, "low"),
    Column("token_nj", "per token [nJ]", 0, "low"),
    Column("twin_dense_nj", "dense twin [nJ]", 0),
    Column("event_ms", "event CPU [ms]", 3, "low"),
)
TASKS = tuple(Column(f"task_{task.name}", f"{task.label} %", 1, "high") for task in BENCHMARKS.values())
EFFICIENCY = (Column("ops", "OPs [M]", 1, "low"), RATE, Column("energy", "Energy [µJ]", 1, "low"))
QUALITY = (AVERAGE, PERPLEXITY, TEACHER_KL, SELF_KL, ADJ, DIST4)


def method(label: str, name: str, *overrides: str, **rest: Any) -> Row:
    return Row(label, (f"stage2.method={name}", *overrides), **rest)


KD = Row("KD", kind="evaluate", one_seed=True)


def _stability(config: Config) -> list[Row]:
    """Horizons as in the paper: Small-LR and SpikeOPD run twice as long as Vanilla and Clipped."""
    updates, rate, clip = config.stage2.updates, config.stage2.learning_rate, config.stage2.max_grad_norm
    usual = "-" if clip is None else f"{clip:g}"

    def settings(factor: int = 1, slower: int = 1, clip: str = usual) -> dict[str, str]:
        return {"learning_rate": f"{rate / slower:.2g}", "clip": clip, "updates": str(factor * updates)}

    def paper(
        collapsed: str, average: float, adj: float, dist4: float, lr: str, clip: str, steps: int
    ) -> dict[str, Any]:
        values = {"collapsed": collapsed, "average": average, "adj": adj, "dist4": dist4}
        return values | {"learning_rate": lr, "clip": clip, "updates": steps}

    return [
        method("Vanilla OPD", "vanilla_opd", facts=settings(),
               paper=paper("10/10", 34.8, 39.1, 83.7, "η0", "-", 500) | {"onset": 168.5}),
        method("Small-LR", "small_lr_opd", facts=settings(2, slower=3),
               paper=paper("10/10", 34.8, 36.0, 85.5, "η0/3", "-", 1000) | {"onset": 527}),
        method("Clipped", "clipped_opd", facts=settings(clip="1"),
               paper=paper("10/10", 34.5, 31.5, 87.8, "η0", "1.0", 500) | {"onset": 327}),
        method("SpikeOPD", "spikeopd", f"stage2.updates={2 * updates}", facts=settings(2),
               paper=paper("0/10", 35.5, 0.1, 99.2, "η0", "-", 1000)),
    ]  # fmt: skip


def _controlled(config: Config) -> list[Row]:
    printed = {row.method: _table_values(row) for row in printed_tables.CONTROLLED}
    names = {
        "Continued SpAD": "continued_spad",
        "SFT": "sft",
        "Vanilla OPD": "vanilla_opd",
        "EOPD": "eopd",
        "Lightning OPD": "lightning_opd",
        "OPRD": "oprd",
        "SpikeOPD": "spikeopd",
    }
    return [
        Row("KD", kind="evaluate", one_seed=True, paper=printed["KD"]),
        *(method(label, name, paper=printed[label]) for label, name in names.items()),
        method("GKD", "gkd"),
        method("Reverse KL", "reverse_kl"),
    ]


def _ablation(config: Config) -> list[Row]:
    return [
        method("SpikeOPD", "spikeopd", paper={"average": 35.5}),
        method("w/o teacher KL", "spikeopd", "stage2.teacher_coef=0"),
        method("w/o reference KL", "spikeopd", "stage2.ref_coef=0", paper={"average": 31.7}),
        method("w/o spike loss", "spikeopd", "stage2.spike_coef=0"),
    ]


def stage1_marks(config: Config) -> list[tuple[int, str]]:
    """(updates, folder) of the students after a quarter, half and all of Stage 1: the paper's 1k, 2k, 4k."""
    updates = config.stage1.updates
    quarter, half = max(1, updates // 4), max(1, updates // 2)
    return [(quarter, f"update-{quarter:06d}"), (half, f"update-{half:06d}"), (updates, "final")]


def _initialization(config: Config) -> list[Row]:
    rows = []
    for updates, start in stage1_marks(config):
        rows.append(Row(f"{updates} updates, KD", kind="evaluate", start=start, one_seed=True))
        rows.append(method(f"{updates} updates, SpikeOPD", "spikeopd", start=start))
    return rows


def _rollout_length(config: Config) -> list[Row]:
    printed = {8: (34.9, 0.2, 99.0), 16: (35.3, 0.1, 99.3), 32: (35.5, 0.1, 99.2), 64: (35.2, 0.2, 99.1),
               128: (34.8, 0.3, 98.8)}  # fmt: skip
    room = (config.model.max_position_embeddings or 0) - config.stage2.prompt_length
    updates, rows = config.stage2.updates, config.stage2.batch_size
    return [
        method(
            f"K = {k}",
            "spikeopd",
            f"stage2.max_completion_length={k}",
            papers_one_seed=k != 32,
            facts={"updates": str(updates), "generated": str(k * rows)},
            paper={"updates": 500, "generated": f"{k}B"} | dict(zip(("average", "adj", "dist4"), values, strict=True)),
        )
        for k, values in printed.items()
        if k <= room
    ]


def every(interval: int, layers: int) -> tuple[int, ...]:
    """{dL, 2 dL, ...} up to the depth."""
    return tuple(range(interval, layers + 1, interval))


def _layers(config: Config) -> list[Row]:
    printed = {1: (35.0, 0.2, 99.0, 0.176), 2: (35.3, 0.1, 99.3, 0.171), 3: (35.5, 0.1, 99.2, 0.173),
               4: (35.2, 0.1, 99.1, 0.168), 6: (34.9, 0.2, 99.0, 0.164), 12: (34.6, 0.3, 98.8, 0.158)}  # fmt: skip
    depth = config.model.num_hidden_layers or 0
    rows = [
        method(
            f"dL = {interval}",
            "spikeopd",
            f"stage2.spike_layers={list(every(interval, depth))}",
            papers_one_seed=interval != 3,
            paper=dict(zip(("average", "adj", "dist4", "rate"), values, strict=True)),
        )
        for interval, values in printed.items()
        if interval <= depth
    ]
    return [*rows, method("none", "spikeopd", "stage2.spike_coef=0", papers_one_seed=True)]


def _scale(config: Config) -> list[Row]:
    """The paper's three sizes with their teachers, SpikeGPT as it prints it; for the tiny recipe three depths of it,
    since its teacher has one size.
    """
    if config.model.preset == "tiny":
        whole = config.model.num_hidden_layers or 1
        rows = [Row("Teacher", kind="teacher", one_seed=True)]
        for depth in sorted({max(1, whole // 4), max(1, whole // 2), whole}):
            name, base = f"{depth} layer{'s' if depth > 1 else ''}", _depth(depth)
            rows.append(Row(f"KD {name}", kind="evaluate", base=base, one_seed=True))
            rows.append(method(f"SpikeOPD {name}", "spikeopd", base=base))
        return rows
    block = "" if config.model.block == "paper" else f"-{config.model.block}"
    recipes = {scale: f"opt-{size}{block}" for scale, size in (("0.125B", "125m"), ("0.35B", "350m"), ("1.3B", "1.3b"))}
    rows = []
    for printed, spent in zip(printed_tables.MAIN, efficiency.printed(), strict=True):
        label, recipe = f"{printed.method} {printed.scale}", recipes.get(printed.scale)
        paper = _table_values(printed) | spent
        if printed.method == "OPT Teacher":
            rows.append(Row(label, kind="teacher", recipe=recipe, one_seed=True, paper=paper))
        elif printed.method == "KD":
            rows.append(Row(label, kind="evaluate", recipe=recipe, one_seed=True, paper=paper))
        elif printed.method == "SpikeOPD":
            rows.append(method(label, "spikeopd", recipe=recipe, paper=paper))
        else:
            rows.append(Row(label, kind="paper", paper=paper))
    return rows


def _table_values(row: printed_tables.Row) -> dict[str, float | str]:
    """What a printed row says, by the key of the column: tasks, their average, and rollouts where it has them."""
    tasks = {f"task_{name}": value for name, value in zip(printed_tables.COLUMNS, row.accuracies, strict=True)}
    rollouts = {key: value for key in ("adj", "dist4", "run") if (value := getattr(row, key)) is not None}
    spread = "" if row.average_sd is None else f" ± {row.average_sd}"
    return {**tasks, "average": f"{row.average}{spread}" if spread else row.average, **rollouts}


def _depth(layers: int) -> tuple[str, ...]:
    return (f"model.num_hidden_layers={layers}", f"stage2.spike_layers={list(every(1, layers))}")


def _diagnostics(config: Config) -> list[Row]:
    return [
        Row("Offline-only", kind="evaluate", one_seed=True, paper={"hidden_gap": 0.102, "membrane_drift": 3.46}),
        method("Vanilla OPD", "vanilla_opd", paper={"hidden_gap": 0.100, "membrane_drift": 3.30}),
        method("SpikeOPD", "spikeopd", paper={"hidden_gap": 0.095, "membrane_drift": 2.67}),
    ]


def _stage1(config: Config) -> list[Row]:
    """SpAD whole and with each of its five targets left out."""
    parts = {"EA": "emb", "SAA": "attn", "SFA": "feat", "STA": "soft", "HTA": "hard"}
    return [
        Row("SpAD", kind="stage1"),
        *(Row(f"w/o {name}", kind="stage1", base=(f"stage1.lambda_{key}=0",)) for name, key in parts.items()),
    ]


RATES = (0.20, 0.15, 0.10, 0.07, 0.05, 0.03)  # that `sparsity` asks for, beside none


def _sparsity(config: Config) -> list[Row]:
    """Stage 1 of student and twin: without a target, then under each rate, everything else the same."""
    return [
        Row(
            f"{name}, {'no target' if rate is None else f'rate {rate:.2f}'}",
            kind="stage1",
            base=(f"model.neuron={neuron}", f"stage1.rate_target={[] if rate is None else [rate]}"),
        )
        for name, neuron in (("student", "lif"), ("twin", "quantised"))
        for rate in (None, *RATES)
    ]


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study("stability", "Stability controls from one checkpoint (Tab. 1, Fig. 3)", _stability,
              (Column("learning_rate", "LR"), Column("clip", "Clip"), Column("updates", "Step"),
               Column("collapsed", "C/T"), Column("onset", "Onset", 1), AVERAGE,
               Column("pre_onset_perplexity", "PPL pre-onset", 2, "low"), ADJ, DIST4,
               Column("trace_adj", "Adj. train %"), Column("trace_dist4", "Dist.-4 train %")),
              tuple(range(10)), "collapse"),
        Study("controlled", "Post-training methods from one checkpoint (Tab. 3)", _controlled,
              (*TASKS, *QUALITY, RUN)),
        Study("ablation", "Components of SpikeOPD (Fig. 5)", _ablation, QUALITY),
        Study("initialization", "Stage-1 checkpoints of growing age (Fig. 6)", _initialization, QUALITY),
        Study("rollout-length", "Rollout length K (Tab. 4)", _rollout_length,
              (Column("updates", "Upd."), Column("generated", "Gen./upd."), *QUALITY), (0, 1, 2)),
        Study("layers", "Layers of the spike loss (Tab. 5)", _layers, (*QUALITY, RATE), (0, 1, 2)),
        Study("scale", "Model sizes (Tab. 2)", _scale, (*TASKS, *QUALITY, *EFFICIENCY), (0, 1, 2)),
        Study("diagnostics", "Paired-prefix diagnostics (Figs. 1-2)", _diagnostics,
              (Column("mean_kappa_self", "KL self", 3, "low"), Column("mean_kappa_corp", "KL corpus", 3, "low"),
               Column("last_prefix_gap", "gap at K", 3, "low"), Column("spike_drift_display", "D_spk x1e4", 2, "low"),
               Column("hidden_gap", "G_H", 4, "low"), Column("membrane_drift", "D_U", 4, "low")),
              (0,), "diagnostics"),
        Study("stage1", "SpAD and its five targets (App. F)", _stage1,
              (AVERAGE, PERPLEXITY, TEACHER_KL)),
        Study("sparsity", "Sparsity as a dial: what a firing rate costs and saves (docs/energy.md)", _sparsity,
              (PERPLEXITY, TEACHER_KL, *ENERGY), (0, 1, 2), "pareto"),
    )
}  # fmt: skip


def base_of(row: Row, config: Config, given: tuple[str, ...]) -> Config:
    """The configuration a row starts from: the study's own, another recipe, or with other model sizes."""
    if row.recipe is not None:
        config = load_config(row.recipe, given)
    return with_overrides(config, row.base) if row.base else config


def find(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"study '{name}' does not exist; give one of {', '.join(STUDIES)}")
    return STUDIES[name]
