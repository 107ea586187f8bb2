"""The plan of a run: its counts are those of the code, and what it proposes fits."""

import pytest
import torch

from spikeopd.config import load_config, recipe_names, with_overrides
from spikeopd.errors import ConfigError
from spikeopd.models import lif_cpu, products
from spikeopd.models.initialise import build_student
from spikeopd.planning import GIB, Machine, block_bytes, parameters, plan

SMALL = {"model.hidden_size": 48, "model.ffn_dim": 80, "model.num_hidden_layers": 2, "model.num_attention_heads": 3,
         "model.word_embed_proj_dim": 48, "stage2.spike_layers": [1, 2], "stage1.deploy_updates": 0}  # fmt: skip


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if name.startswith(("opt", "tiny"))])
def test_parameters_are_those_of_the_student(recipe):
    config = load_config(recipe)
    with torch.device("meta"):
        student = build_student(config.model)
    assert parameters(config) == sum(p.numel() for p in student.parameters())


@pytest.mark.parametrize("recipe", ["tiny", "tiny-paper"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(monkeypatch, recipe, precision):
    """Bytes of every tensor that one more block saves for the backward pass, but for its weights."""
    monkeypatch.setattr(products, "fast", lambda: False)  # as on a GPU
    monkeypatch.setattr(lif_cpu, "ENABLED", False)
    rows, length = 3, 40
    config = load_config(recipe, SMALL | {"train.precision": precision})

    def saved(layers):
        torch.manual_seed(0)
        student = build_student(with_overrides(config, {"model.num_hidden_layers": layers}).model).train()
        owned = {p.untyped_storage().data_ptr() for p in student.parameters()}
        seen = {}

        def keep(x):
            if x.numel() >= rows * length * 4 and x.untyped_storage().data_ptr() not in owned:
                seen[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
            return x

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast:
            student.model(torch.randint(4, 1024, (rows, length)), use_cache=False)
        return sum(size for _, size in seen.values())

    weights = 4 * (4 * 48 * 48 + 2 * 48 * 80) * (1 if precision == "fp32" else 1.5)  # as they act
    found = saved(3) - saved(2) - weights
    assert found == pytest.approx(rows * length * block_bytes(config, length), rel=0.12)


@pytest.mark.parametrize("recipe", ["opt-125m", "opt-350m-plus", "opt-1.3b"])
def test_what_the_plan_proposes_fits(recipe):
    found = plan(recipe, "gpus=8,memory=24", ["train.gradient_checkpointing=false"])
    assert not found["fits"]
    words = found["change"].split(" under ")[0].split()
    shard = "shard=1" in found["change"]
    after = plan(recipe, Machine(shard=shard), words)
    assert after["fits"] and after["stage1"]["sequences_per_update"] == found["stage1"]["sequences_per_update"] == 2048
    for stage in ("stage1", "stage2"):
        assert after[stage]["memory_gib"] == pytest.approx(sum(after[stage]["parts_gib"].values()) + 1.5, abs=0.05)


def test_more_of_everything_costs_more():
    base = plan("opt-125m")["stage1"]
    for change in ("model.num_steps=8", "data.sequence_length=1024", "model.num_hidden_layers=24"):
        more = plan("opt-125m", "", [change])["stage1"]
        assert more["memory_gib"] > base["memory_gib"] and more["tokens_per_second"] < base["tokens_per_second"]
    assert plan("opt-125m", "gpus=8,shard=1")["stage1"]["memory_gib"] < base["memory_gib"]
    assert plan("opt-1.3b", "gpus=1,memory=2")["change"].startswith("nothing makes it fit")
    assert base["memory_gib"] * GIB > 16 * 125e6


def test_a_machine_is_read_or_refused_in_one_line():
    assert Machine.read("gpus=2,memory=80,shard=1") == Machine(gpus=2, memory=80.0, shard=True)
    for wrong in ("gpus", "gpu=2", "memory=much", "gpus=0"):
        with pytest.raises(ConfigError, match="--plan"):
            Machine.read(wrong)
