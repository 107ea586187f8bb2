"""Configuration: recipes, overrides, conversion by declared type, and every error at once."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeopd import config as config_module
from spikeopd import registry
from spikeopd.config import (
    RETIRED,
    SECTIONS,
    Config,
    config_difference,
    config_from_dict,
    config_to_dict,
    explain,
    load_config,
    recipe_names,
    to_yaml,
    with_overrides,
)
from spikeopd.errors import ConfigError
from spikeopd.options import option_table
from spikeopd.registry import DIVERGENCES, METHODS, NEURONS


def problems(recipe="tiny", overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    lines = str(caught.value).splitlines()
    return [line.removeprefix("  - ") for line in lines[1:]] or [lines[0].split(": ", 1)[1]]


def test_recipes_load_and_their_resolved_form_loads_back_equal(tmp_path):
    sizes = [f"opt-{size}{block}" for size in ("1.3b", "125m", "350m") for block in ("", "-plus")]
    assert recipe_names() == [*sizes, "stories", "tiny", "tiny-long", "tiny-paper", "tiny-twin"]
    for name in recipe_names():
        config = load_config(name)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_config(tmp_path / "config.yaml") == config
        assert config_from_dict(config_to_dict(config)) == config
        preset = name.removesuffix("-long").removesuffix("-paper").removesuffix("-plus").removesuffix("-twin")
        assert config.model.preset == {"stories": "tiny"}.get(preset, preset)
        better = name in ("stories", "tiny", "tiny-long", "tiny-twin") or name.endswith("-plus")
        assert config.model.block == ("plus" if better else "paper")


def test_a_block_brings_its_options_and_each_can_be_changed_alone():
    plus = load_config("tiny").model
    assert (plus.residual_write, plus.readout, plus.distances, plus.neurons) == ("current", "residual", 16, "own")
    paper = load_config("opt-125m").model
    assert (paper.residual_write, paper.readout, paper.distances, paper.neurons) == ("spike", "rate", 0, "shared")
    assert load_config("tiny", ["model.readout=rate", "stage1.deploy_updates=0"]).model.readout == "rate"
    changed = with_overrides(load_config("tiny"), ["model.block=paper", "model.distances=4", "stage1.deploy_updates=0"])
    assert (changed.model.residual_write, changed.model.distances) == ("spike", 4)


def test_a_deployable_phase_needs_a_student_that_has_one():
    (line,) = problems("tiny", ["model.readout=rate", "stage1.deploy_updates=5"])
    assert line.startswith("stage1.deploy_updates: needs model.readout=residual")
    (line,) = problems("tiny", ["train.precision=bf16"])
    assert line.startswith("stage1.deploy_updates: the integers are exact in float32 only")


@pytest.mark.parametrize("name", ["opt-125m", "opt-350m", "opt-1.3b"])
def test_paper_recipes_carry_the_papers_values(name):
    config = load_config(name)
    one, two = config.stage1, config.stage2
    assert (one.updates, one.learning_rate, one.warmup_ratio, one.max_grad_norm) == (4000, 5e-4, 0.2, 0.7)
    assert one.micro_batch_size * one.gradient_accumulation_steps == 256
    assert (one.lambda_emb, one.lambda_attn, one.lambda_feat, one.lambda_soft, one.lambda_hard) == (
        0.2,
        0.1,
        0.1,
        0.3,
        0.3,
    )
    assert (one.kd_temperature, one.gamma_attn, one.gamma_feat) == (2.0, 0.5, 0.5)
    assert (two.updates, two.learning_rate, two.batch_size, two.max_grad_norm) == (500, 1.5e-6, 16, None)
    assert (two.prompt_length, two.max_completion_length, two.temperature) == (480, 32, 1.0)
    assert (two.teacher_coef, two.ref_coef, two.spike_coef) == (1.0, 0.75, 0.30)
    assert (two.rate_min, two.rate_max, two.rho, two.spike_layers) == (0.01, 0.58, 1.0, (3, 6, 9, 12))
    assert (two.collapse_window, two.collapse_adj, two.collapse_dist4) == (20, 0.10, 0.05)
    assert config.model.num_steps == 4 and config.model.xi == 2.0
    assert config.teacher.teacher_model_name_or_path == f"facebook/{name}"


def test_defaults_are_the_papers_125m_run():
    recipe, defaults = load_config("opt-125m"), config_from_dict({})
    assert config_difference(defaults, recipe) == [
        "data.max_prompt_tokens: null -> 40000000",
        "stage1.checkpoint_updates: [] -> [1000, 2000, 4000]",
        "train.precision: 'fp32' -> 'bf16'",
        "train.gradient_checkpointing: false -> true",
    ]


def test_sizes_come_from_the_preset_unless_given():
    assert load_config("opt-350m").model.word_embed_proj_dim == 512
    model = load_config("tiny", ["model.hidden_size=64", "model.num_hidden_layers=4"]).model
    assert (model.hidden_size, model.word_embed_proj_dim, model.ffn_dim) == (64, 64, 512)
    assert load_config("opt-125m", ["model.preset=opt-1.3b"]).model.hidden_size == 2048


def test_values_are_converted_by_declared_type():
    config = load_config(
        "tiny",
        [
            "stage1.learning_rate=3e-4", "stage1.updates=1e3", "stage1.max_grad_norm=null", "train.stage=1",
            "train.tensorboard=yes", "stage2.spike_layers=1,2", "data.source=text:a=b.txt", "train.seed= 7",
            "data.cache_dir=", "train.threads=2",
        ],
    )  # fmt: skip
    assert config.stage1.learning_rate == 3e-4
    assert config.stage1.updates == 1000 and isinstance(config.stage1.updates, int)
    assert config.stage1.max_grad_norm is None and config.data.cache_dir is None
    assert config.train.stage == "1" and config.train.tensorboard is True and config.train.seed == 7
    assert config.stage2.spike_layers == (1, 2)
    assert config.data.source == "text:a=b.txt"
    assert load_config("tiny", ["stage2.spike_layers=[]", "stage2.spike_coef=0"]).stage2.spike_layers == ()
    assert load_config("tiny", ["stage2.spike_layers=3"]).stage2.spike_layers == (3,)


def test_a_scientific_number_in_yaml_is_a_number(tmp_path):
    (tmp_path / "a.yaml").write_text("base: tiny\nstage1:\n  learning_rate: 3e-4\n  max_grad_norm: 1\n")
    stage1 = load_config(tmp_path / "a.yaml").stage1
    assert stage1.learning_rate == 3e-4 and type(stage1.max_grad_norm) is float


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage1.updates=many", "stage1.updates: expected a whole number at least 1, got 'many'"),
        ("stage1.updates=1.5", "stage1.updates: expected a whole number at least 1, got 1.5"),
        ("stage1.updates=0", "stage1.updates: expected a whole number at least 1, got 0"),
        ("stage1.updates=true", "stage1.updates: expected a whole number at least 1, got true"),
        ("stage1.updates=null", "stage1.updates: expected a whole number at least 1, got null"),
        ("stage1.learning_rate=0", "stage1.learning_rate: expected a number above 0, got 0"),
        ("stage1.learning_rate=.nan", "stage1.learning_rate: expected a number above 0, got nan"),
        ("stage1.learning_rate=[1]", "stage1.learning_rate: expected a number above 0, got [1]"),
        ("stage1.max_grad_norm=-1", "stage1.max_grad_norm: expected a number above 0, or null, got -1"),
        ("model.alpha=1.5", "model.alpha: expected a number above 0 and at most 1, got 1.5"),
        ("train.tensorboard=1", "train.tensorboard: expected true or false, got 1"),
        ("train.tensorboard=maybe", "train.tensorboard: expected true or false, got 'maybe'"),
        ("train.stage=3", "train.stage: expected one of 1, 2, both, got 3"),
        ("stage2.on_collapse=halt", "stage2.on_collapse: expected one of log, stop, rollback, got 'halt'"),
        ("stage2.method=ppo", f"stage2.method: expected one of {', '.join(METHODS)}, got 'ppo'"),
        ("stage2.divergence=tv", f"stage2.divergence: expected one of {', '.join(DIVERGENCES)}, got 'tv'"),
        ("model.neuron=izh", f"model.neuron: expected one of {', '.join(NEURONS)}, got 'izh'"),
        ("stage2.spike_layers=a", "stage2.spike_layers: expected a list of whole numbers, got 'a'"),
        ("data.source=", "data.source: expected text, got null"),
        ("data.source=[a]", "data.source: expected text, got ['a']"),
        ("stage2.lr=1", "stage2.lr: unknown key (did you mean 'stage2.learning_rate'?)"),
        ("lr=1", "lr: unknown key (did you mean 'stage1.learning_rate' or 'stage2.learning_rate'?)"),
        ("hidden_size=1", "hidden_size: unknown key (did you mean 'model.hidden_size'?)"),
        ("stage1.ref_coef=1", "stage1.ref_coef: unknown key (did you mean 'stage2.ref_coef'?)"),
        ("stage1.updats=1", "stage1.updats: unknown key (did you mean 'stage1.updates'?)"),
        ("train.sead=1", "train.sead: unknown key (did you mean 'train.seed'?)"),
        ("stage2", "override 'stage2': expected section.key=value"),
    ],
)  # fmt: skip
def test_wrong_values_and_keys(override, message):
    assert problems(overrides=[override]) == [message]


NO_STAGE1_WEIGHT = [f"stage1.lambda_{name}=0" for name in ("emb", "attn", "feat", "soft", "hard", "stream")]
NO_STAGE2_WEIGHT = ["stage2.teacher_coef=0", "stage2.ref_coef=0", "stage2.spike_coef=0"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.num_attention_heads=3"],
            "model.hidden_size: 128 is not a multiple of model.num_attention_heads = 3",
        ),
        (
            ["model.attention=inhibiting", "model.neuron=quantised"],
            "model.attention: 'inhibiting' needs spikes, and model.neuron is quantised; set model.attention=sum",
        ),
        (
            ["model.distances=0", "model.distance_start=teacher"],
            "model.distance_start: a student without distances looks nowhere in particular; set model.block=plus, "
            "model.distances, or model.distance_start=near",
        ),
        (
            ["model.alpha=0.9999"],
            "model.alpha: 0.9999 rounds to a membrane without leak (4096 of 4096), which NIR's leaky integrator cannot "
            "hold, so the student could not be exported; give at most 0.9998",
        ),
        (
            ["data.sequence_length=300"],
            "data.sequence_length: 300 exceeds model.max_position_embeddings = 256",
        ),
        (
            ["stage2.prompt_length=240"],
            "stage2.prompt_length: 240 + max_completion_length 32 = 272 exceeds model.max_position_embeddings = 256",
        ),
        (
            ["stage1.updates=9", "stage1.checkpoint_updates=[0, 3, 10]"],
            "stage1.checkpoint_updates: 0 is not between 1 and stage1.updates = 9\n"
            "stage1.checkpoint_updates: 10 is not between 1 and stage1.updates = 9",
        ),
        (
            NO_STAGE1_WEIGHT,
            "stage1.lambda_*: every weight is 0, nothing would be learned; set at least one",
        ),
        (
            NO_STAGE2_WEIGHT,
            "stage2.teacher_coef, ref_coef, spike_coef: all 0, nothing would be learned; set at least one",
        ),
        (
            ["stage2.micro_batch_size=5"],
            "stage2.micro_batch_size: 5 does not divide stage2.batch_size = 16",
        ),
        (
            ["stage2.rate_min=0.6"],
            "stage2.rate_min: 0.6 must lie below stage2.rate_max = 0.58",
        ),
        (
            ["stage2.spike_layers=3,6"],
            "stage2.spike_layers: [6] are not layers of a student with 4 (1 to 4)",
        ),
        (
            ["stage2.spike_layers=2,2"],
            "stage2.spike_layers: [2, 2] names a layer twice",
        ),
        (
            ["stage2.spike_layers=[]"],
            "stage2.spike_layers: empty although stage2.spike_coef > 0; name layers or set spike_coef=0",
        ),
        (
            ["train.stage=2"],
            "stage2.model_name_or_path: train.stage=2 needs a student to start from; give its directory",
        ),
        (
            ["stage2.model_name_or_path=x"],
            "stage2.model_name_or_path: train.stage=both starts Stage 2 from its own Stage 1; use train.stage=2",
        ),
        (
            ["data.source=hf:a/b"],
            "data.max_tokens: hf:a/b is streamed and needs a limit, for example data.max_tokens=100000000",
        ),
    ],
)
def test_contradictions(overrides, message):
    assert problems(overrides=overrides) == message.splitlines()


def test_a_stage_that_does_not_run_is_not_checked():
    load_config("tiny", ["train.stage=1", "stage2.prompt_length=900", "stage2.spike_layers=12"])
    load_config("tiny", ["train.stage=2", "stage2.model_name_or_path=x", "data.sequence_length=900"])


def test_every_error_is_reported_at_once(tmp_path):
    (tmp_path / "bad.yaml").write_text(
        "base: tiny\nstage1:\n  updates: x\n  lr: 1\nstag2:\n  updates: 3\nmodel: 5\nmodel.preset: huge\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "bad.yaml", ["train.seed=-1", "stage2.micro_batch_size=7"])
    first, *rest = str(caught.value).splitlines()
    assert first == f"config {tmp_path}/bad.yaml: 7 problems"
    assert sorted(rest) == [
        "  - model.preset: expected one of tiny, opt-125m, opt-350m, opt-1.3b, got 'huge'",
        "  - model: a section holds keys, got 5",
        "  - stag2: unknown section (did you mean 'stage2'?)",
        "  - stage1.lr: unknown key (did you mean 'stage1.learning_rate'?)",
        "  - stage1.updates: expected a whole number at least 1, got 'x'",
        "  - stage2.micro_batch_size: 7 does not divide stage2.batch_size = 16",
        f"  - train.seed: expected a whole number at least 0 and at most {2**63 - 1}, got -1",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stage1: [1\n", r"recipe .*a.yaml, line 2: not valid YAML \(.*\)"),
        ("- a\n- b\n", r"recipe .*a.yaml: expected sections such as `stage1:` with keys, got list"),
        ("stage1:\n  updates: 1\n  updates: 2\n", r"recipe .*a.yaml, line 3: 'updates' is given twice; keep one"),
        ("base: a.yaml\n", r"its `base` leads back to itself"),
        ("base: nowhere\n", r"recipe 'nowhere' does not exist; give one of opt-1.3b, opt-1.3b-plus, opt-125m"),
        ("stage1: !!python/object/apply:os.system [ls]\n", r"not valid YAML"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, content, message):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")


def test_missing_recipes():
    with pytest.raises(
        ConfigError, match=r"^recipe 'tiney' does not exist \(did you mean 'tiny'\?\); give one of opt-1.3b"
    ):
        load_config("tiney")
    with pytest.raises(
        ConfigError, match=r"^recipe /nowhere/a.yaml: No such file or directory; give a readable YAML file$"
    ):
        load_config("/nowhere/a.yaml")


def test_a_recipe_may_build_on_another(tmp_path):
    (tmp_path / "base.yaml").write_text("base: tiny\nstage1: {updates: 7, kd_temperature: 3}\n")
    (tmp_path / "top.yaml").write_text("base: base.yaml\nstage1: {updates: 8}\n")
    changed = config_difference(load_config("tiny"), load_config(tmp_path / "top.yaml"))
    assert [line.split(" -> ")[1] for line in changed] == ["8", "3"]


def test_the_larger_recipes_say_only_what_differs_from_the_smallest():
    for name, micro in (("opt-350m", 8), ("opt-1.3b", 4)):
        changed = config_difference(load_config("opt-125m"), load_config(name))
        keys = {line.split(":")[0] for line in changed if not line.startswith("model.")}
        assert keys == {"teacher.teacher_model_name_or_path", "data.tokenizer", "stage2.micro_batch_size"}
        assert load_config(name).stage2.micro_batch_size == micro


def test_overrides_may_be_a_mapping_of_values():
    typed = load_config("tiny", ["stage1.updates=7", "stage2.spike_layers=[1,2]", "train.stage=1"])
    assert load_config("tiny", {"stage1.updates": 7, "stage2.spike_layers": (1, 2), "train.stage": 1}) == typed
    assert load_config("tiny", "stage1.updates=7").stage1.updates == 7
    assert problems(overrides={"stage1.updates": "x"}) == [
        "stage1.updates: expected a whole number at least 1, got 'x'"
    ]


def test_retired_options_are_accepted_without_effect_and_with_a_hint(tmp_path, capsys):
    old = tmp_path / "config.yaml"
    old.write_text(to_yaml(load_config("tiny")).replace("train:\n", "train:\n  compile: true\n"))
    assert load_config(old) == load_config("tiny")
    assert capsys.readouterr().err == (
        f"config {old}: train.compile is no longer an option (nothing ever read it) and has no effect; remove it\n"
    )
    assert not RETIRED.keys() & option_table(SECTIONS).keys()


@pytest.mark.parametrize("method", ["gkd", "reverse_kl", "eopd", "sft"])
def test_a_divergence_that_the_method_does_not_read_is_refused(method):
    assert problems(overrides=[f"stage2.method={method}", "stage2.divergence=jsd"]) == [
        f"stage2.divergence: jsd has no part in stage2.method={method}; leave it out"
    ]
    assert load_config("tiny", ["stage2.method=vanilla_opd", "stage2.divergence=jsd"]).stage2.divergence == "jsd"


def test_configs_are_frozen_and_comparable():
    config = load_config()
    with pytest.raises(FrozenInstanceError):
        config.stage1.updates = 3
    assert hash(config) == hash(load_config()) and config != with_overrides(config, ["train.seed=1"])


def test_difference_can_leave_out_what_cannot_change_the_result():
    old = load_config()
    new = with_overrides(
        old, ["train.log_every=9", "stage2.spike_layers=1,2", "stage1.max_grad_norm=null", "train.seed=4"]
    )
    assert config_difference(old, old) == []
    assert config_difference(old, new, harmless=False, ignore=["train.seed"]) == [
        "stage1.max_grad_norm: 0.7 -> null",
        "stage2.spike_layers: [1, 2, 3, 4] -> [1, 2]",
    ]
    assert "train.log_every: 1 -> 9" in config_difference(old, new)


def test_with_overrides_reports_like_load():
    with pytest.raises(ConfigError, match=r"config: train.sede: unknown key \(did you mean 'train.seed'\?\)"):
        with_overrides(load_config(), ["train.sede=4"])
    with pytest.raises(ConfigError, match="expected section.key=value"):
        with_overrides(load_config(), ["train.seed"])


def test_explain_names_default_meaning_limits_and_source():
    assert explain("stage2.ref_coef") == (
        "stage2.ref_coef = 0.75: weight beta_ref of the reverse KL to the frozen reference; "
        "a number at least 0 [paper App. B, Stage 2 table]"
    )
    assert len(explain("stage1").splitlines()) == len(SECTIONS["stage1"].__dataclass_fields__)
    assert len(explain().splitlines()) == len(option_table(SECTIONS))
    with pytest.raises(ConfigError, match=r"stage2.refcoef: unknown key \(did you mean 'stage2.ref_coef'\?\)"):
        explain("stage2.refcoef")


def test_every_option_says_what_it_means():
    for key, option in option_table(SECTIONS).items():
        assert len(option.help) > 5, key
        assert option.expected, key


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(1e-12, 1e3), steps=st.integers(1, 10**12), layers=st.lists(st.integers(1, 4), unique=True, min_size=1),
    name=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(lambda t: t.strip() == t),
)  # fmt: skip
def test_written_configs_load_back_whatever_they_hold(tmp_path_factory, lr, steps, layers, name):
    values = {
        "model": {"preset": "tiny"},
        "data": {"sequence_length": 8, "source": name, "prompt_source": None, "max_tokens": 10},
        "stage1": {"learning_rate": lr, "updates": steps},
        "stage2": {"spike_layers": layers, "prompt_length": 8},
    }
    config = config_from_dict(values)
    path = tmp_path_factory.mktemp("config") / "a.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_sections_and_checks_name_options_that_exist():
    assert list(SECTIONS) == list(Config.__dataclass_fields__)
    named = {key for _, keys in config_module.CHECKS for key in keys.split()}
    assert named and named <= set(option_table(SECTIONS))


def test_an_unfit_value_brings_no_complaint_about_the_default_it_was_to_replace():
    assert problems(overrides=["stage2.batch_size=x", "stage2.micro_batch_size=5"]) == [
        "stage2.batch_size: expected a whole number at least 1, got 'x'"
    ]


def test_no_heavy_import():
    code = (
        "import sys, spikeopd.config as c, spikeopd.runlog, spikeopd.text.sources, spikeopd.text.tokenizer; "
        "c.load_config('tiny'); "
        "sys.exit(bool({'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_added_to_a_table_can_be_chosen_at_once(monkeypatch):
    """Choices are the tables themselves, and a target is looked up each time: a notebook may define it again."""
    monkeypatch.setitem(NEURONS, "mine", f"{__name__}:first")
    module = sys.modules.setdefault(__name__, types.ModuleType(__name__))
    monkeypatch.setattr(module, "first", 1, raising=False)
    changes = {"model.neuron": "mine", "stage1.deploy_updates": 0}
    assert load_config("tiny", changes).model.neuron == "mine" and "mine" in explain("model.neuron")
    with pytest.raises(ConfigError, match="model.neuron is neither lif nor quantised; set stage1.deploy_updates=0"):
        load_config("tiny", {"model.neuron": "mine"})
    assert registry.load(NEURONS["mine"]) == 1
    monkeypatch.setattr(module, "first", 2)
    assert registry.load(NEURONS["mine"]) == 2
    monkeypatch.delitem(NEURONS, "mine")
    with pytest.raises(ConfigError, match="expected one of lif, quantised, got 'mine'"):
        load_config("tiny", {"model.neuron": "mine"})


def test_a_path_is_text():
    config = load_config("tiny", {"train.stage": 2, "stage2.model_name_or_path": Path("runs") / "tiny"})
    assert config.stage2.model_name_or_path == "runs/tiny" and "runs/tiny" in to_yaml(config)


# --- what strangers write --------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    "value",
    ["0x_", "0b_", "2020-99-99", "2020-01-01T99:99:99", "9" * 5000, "1:" * 3000, "[" * 5000, "{" * 5000, "&a [*a]",
     "!!python/object/apply:os.system [id]", "!!binary x", "? [a]", "{[a]: 1}", "\x00", "\x1b[2J", "\ud800",
     "x" * 3_000_000,
     "1e999", "nan", "- - - - 1", "%YAML 9.9", "..."],
)  # fmt: skip
def test_any_override_is_one_short_line(value):
    found = problems(overrides=[f"stage1.updates={value}"])
    assert len(found) == 1 and len(found[0]) < 300 and "stage1.updates: expected a whole number" in found[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "aliases"),
        ("stage1: &a\n  updates: *a\n", "aliases"),
        ("? [a, b]\n: 1\n", "a key is one word"),
        ("{a: 1}: 2\n", "a key is one word"),
        ("[" * 50_000, "nested too deeply"),
        ("a: " * 20_000, "not valid YAML|nested too deeply"),
        ("stage1: {updates: 0x_}\n", "cannot be read"),
        ("stage1: {updates: 2020-99-99}\n", "cannot be read"),
        (f"stage1: {{updates: {'9' * 5000}}}\n", "cannot be read"),
        ("x: !!python/object/apply:os.system [id]\n", "not valid YAML"),
        ("x: 1\n" * 400_000, "too many for a recipe"),
        ("stage1: 3\n", "a section holds keys"),
        ("- 1\n", "expected sections"),
        ("\x00", "not valid YAML"),
        (f"{'k' * 900}: 1\n", "unknown key"),
        ("1: {2: 3}\n", "unknown section"),
        ("null: 1\n", "unknown key"),
    ],
)
def test_any_recipe_is_one_short_line(tmp_path, text, reason):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(tmp_path / "r.yaml")
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)
