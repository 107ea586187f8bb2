"""Teachers beyond OPT: what they give, what of them is transferred, and the recipe suggested for them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from teacher_families import CONFIGS, HEADS, LAYERS, POSITIONS, VOCABULARY, random_teacher, save_teacher
from transformers import LlamaConfig, LlamaForCausalLM

import neuro_sim
import spikeopd
from export import export
from spikeopd.cli import main
from spikeopd.config import load_config
from spikeopd.errors import InputError
from spikeopd.models.initialise import build_student, calibrate, start_from_teacher, temper
from spikeopd.models.teacher import check_fit, load_teacher_config, output_table, run_teacher
from spikeopd.text.tokenizer import load_tokenizer

FAMILIES = sorted(CONFIGS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_what_stage_1_aligns_with(family):
    teacher = random_teacher(family)
    ids = torch.randint(4, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    output, whole = run_teacher(teacher, ids, internals=True), teacher(ids, output_hidden_states=True)
    assert [h.shape for h in (output.embeddings, *output.hidden)] == [(2, 9, 16)] * (LAYERS + 1)
    for mine, theirs in zip((output.embeddings, *output.hidden), whole.hidden_states, strict=True):
        assert torch.equal(mine, theirs)
    assert [a.shape for a in output.attentions] == [(2, HEADS, 9, 9)] * LAYERS
    for found in output.attentions:
        assert torch.allclose(found.sum(-1), torch.ones(2, HEADS, 9), atol=1e-6) and not found.triu(1).any()
    assert torch.equal(output_table(teacher)(output.features), whole.logits)
    assert torch.equal(run_teacher(teacher, ids, internals=False).features, output.features)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_the_stream_inside_a_layer_is_what_entered_it_and_what_attention_added(family):
    teacher = random_teacher(family)
    ids = torch.randint(4, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    written = []
    for layer in teacher.get_decoder().layers:
        layer.self_attn.register_forward_hook(lambda _, __, out: written.append(out[0]))
    output = run_teacher(teacher, ids, internals=True, middle=True)
    before = (output.embeddings, *output.hidden)[:LAYERS]
    assert len(output.middle) == LAYERS
    for middle, stream, attended in zip(output.middle, before, written, strict=True):
        assert torch.allclose(middle, stream + attended, atol=1e-6)
    assert not run_teacher(teacher, ids, internals=True).middle


def test_where_a_layer_has_no_inside_that_is_said():
    config = load_config("tiny", ["stage1.lambda_middle=1", "model.init=random", "stage1.lambda_stream=0"])
    for family, name in (("gpt2", "gpt2"), ("opt", "one with norms behind them")):
        teacher = deepcopy(random_teacher(family).config)
        teacher.hidden_size, teacher.vocab_size, teacher.do_layer_norm_before = 128, 1024, False
        with pytest.raises(InputError, match=rf"(?s)the teacher is {name}.*stage1.lambda_middle=0"):
            check_fit(config, teacher, 1024)
    with pytest.raises(
        InputError, match="set stage1.lambda_middle=0"
    ):  # Stage 2's Continued SpAD asks for it as it runs
        run_teacher(random_teacher("gpt2"), torch.zeros(1, 4, dtype=torch.long), internals=True, middle=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_transferred_is_said(family):
    teacher = random_teacher(family)
    student = build_student(load_config("tiny", {"model.hidden_size": 16, "model.word_embed_proj_dim": 16}).model)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    said = start_from_teacher(student, teacher, blocks=False)
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert said["token table"] == "copied" and "model.embed_tokens.weight" in changed
    assert torch.equal(student.model.embed_tokens.weight, teacher.get_input_embeddings().weight)
    assert (said["positions"] == "copied") == (family == "opt")
    zero = not student.model.embed_positions.weight.any()
    assert said["positions"].startswith("zero") == zero == family.startswith("llama")
    assert ("model.embed_positions.weight" in changed) == (family == "opt" or zero)
    assert said["blocks"] == "random" and not any("layers" in name for name in changed)
    tied = family in ("opt", "llama-tied", "gpt2")
    assert said["output head"] == "the token table" + ("" if tied else "; the teacher's own is not copied")


def test_another_width_is_said_too():
    student = build_student(load_config("tiny").model)
    said = start_from_teacher(student, random_teacher("opt"), blocks=False)
    assert said["token table"] == "not copied: [1024, 16] in the teacher, [1024, 128] in the student"
    with pytest.raises(InputError, match="needs an OPT or a Llama; use model.init=random"):
        start_from_teacher(student, random_teacher("gpt2"), blocks=True)


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        tie_word_embeddings=True,
    ))  # fmt: skip
    for name, weight in llama.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return llama


def test_blocks_of_a_llama_are_taken_over():
    llama, student = small_llama(), build_student(load_config("tiny").model)
    said = start_from_teacher(student, llama, blocks=True)
    assert said["blocks"] == said["final LayerNorm"] == "copied"
    assert torch.equal(student.model.final_layer_norm.weight, llama.model.norm.weight)
    for mine, theirs in zip(student.model.layers, llama.model.layers, strict=True):
        before, behind = theirs.input_layernorm.weight, theirs.post_attention_layernorm.weight
        x = torch.randn(5, 128)
        assert torch.allclose(x @ mine.v_proj.weight.T, theirs.self_attn.v_proj(x * before), atol=1e-5)
        both = theirs.mlp.gate_proj(x * behind) + theirs.mlp.up_proj(x * behind)
        assert torch.allclose(x @ mine.fc1.weight.T, both, atol=1e-5)
        assert torch.equal(mine.fc2.weight, theirs.mlp.down_proj.weight) and not mine.fc2.bias.any()
    config = load_config("tiny", ["model.ffn_dim=256"])
    with pytest.raises(InputError, match="those of this teacher fit hidden_size 128 and ffn_dim 512 or 1024"):
        check_fit(config, llama.config, 1024)


def test_a_gated_neuron_becomes_a_pair_that_follows_the_sign_of_the_product():
    llama, student = small_llama(), build_student(load_config("tiny", ["model.ffn_dim=1024"]).model)
    check_fit(load_config("tiny", ["model.ffn_dim=1024"]), llama.config, 1024)
    start_from_teacher(student, llama, blocks=True)
    x = torch.randn(200, 128)
    for mine, theirs in zip(student.model.layers, llama.model.layers, strict=True):
        y = x * theirs.post_attention_layernorm.weight
        gate, up = theirs.mlp.gate_proj(y), theirs.mlp.up_proj(y)
        heard = x @ mine.fc1.weight.T
        assert torch.allclose(heard, torch.cat([gate + up, gate - up], dim=1), atol=1e-5)
        # What the pair writes, as rates would: along the teacher's write where one neuron alone is hardly.
        wanted = (torch.nn.functional.silu(gate) * up) @ theirs.mlp.down_proj.weight.T
        paired = heard.relu() @ mine.fc2.weight.T
        alone = (gate + up).relu() @ theirs.mlp.down_proj.weight.T
        cosine = torch.nn.functional.cosine_similarity
        assert cosine(wanted, paired).mean() > cosine(wanted, alone - alone.mean(0)).mean() + 0.1


def test_a_head_that_is_certain_and_wrong_is_tempered():
    llama, student = small_llama(), build_student(load_config("tiny").model)
    llama.get_input_embeddings().weight.data.mul_(100)
    start_from_teacher(student, llama, blocks=False)
    ids = torch.randint(0, 1024, (4, 16))

    def loss() -> float:
        with torch.no_grad():
            logits = student(ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()

    calibrate(student, ids)
    before = loss()
    temper(student, ids)
    assert before > 20 > 8 > loss() and student.model.logit_scale.item() < 0


def test_every_problem_at_once_with_the_overrides_that_mend_it(tmp_path):
    folder = save_teacher("llama", tmp_path / "teacher")
    overrides = [f"teacher.teacher_model_name_or_path={folder}", "model.vocab_size=900"]
    config = load_config("tiny", overrides)
    with pytest.raises(InputError) as caught:
        check_fit(config, load_teacher_config(str(folder)), 1030)
    message = str(caught.value)
    assert message.count("\n  - ") == 6, message
    mends = message.rpartition("add: ")[2].split()
    assert {mend.partition("=")[0] for mend in mends} == {
        "data.tokenizer", "model.vocab_size", "data.sequence_length", "stage2.prompt_length", "model.init",
        "stage1.lambda_stream",
    }  # fmt: skip
    mended = load_config("tiny", [*overrides, *mends])
    check_fit(mended, load_teacher_config(str(folder)), load_tokenizer(mended.data.tokenizer).vocab_size)


def test_blocks_of_another_size_are_refused_before_the_weights_are_read(tmp_path):
    folder = save_teacher("opt", tmp_path / "teacher")
    config = load_config("tiny", [f"teacher.teacher_model_name_or_path={folder}", "train.stage=1",
                                  "data.sequence_length=16", "stage1.lambda_stream=0"])  # fmt: skip
    with pytest.raises(InputError, match=r"teacher fit hidden_size 16 and ffn_dim 24; add model.init=random"):
        check_fit(config, load_teacher_config(str(folder)), 1024)


def test_a_path_that_is_not_there_is_no_hub_name(tmp_path):
    for name in ("/nope", "./nope", "a/b/c"):
        with pytest.raises(InputError, match="teacher: no such directory"):
            load_teacher_config(name)


def test_a_model_without_attention_is_refused_by_name():
    from transformers import MambaConfig, MambaForCausalLM

    teacher = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(InputError, match="a mamba gives no attention map for every layer"):
        run_teacher(teacher, torch.tensor([[1, 2, 3]]), internals=True)


FRAMINGS = {"opt": ("eos", 2, 2), "llama": ("bos", 0, 0), "qwen3": ("eos", 2, 2), "gpt2": ("eos", 2, 2),
            "gpt_neox": ("eos", 2, 2)}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FRAMINGS))
def test_a_recipe_for_a_teacher_never_seen(family, tmp_path, capsys):
    folder = save_teacher(family, tmp_path / "teacher")
    assert main(["--suggest", str(folder), "--output", str(tmp_path / "recipe.yaml")]) == 0
    assert "recipe.yaml" in capsys.readouterr().out
    config = load_config(tmp_path / "recipe.yaml", ["data.source=python-docs"])
    model, framing = config.model, FRAMINGS[family][0]
    assert (model.vocab_size, model.hidden_size, model.num_hidden_layers) == (VOCABULARY, 16, LAYERS)
    assert model.ffn_dim == (64 if family == "gpt2" else 24) and model.hidden_size % model.num_attention_heads == 0
    assert (config.data.framing, config.data.sequence_length, model.max_position_embeddings) == (
        framing, POSITIONS, POSITIONS,
    )  # fmt: skip
    assert model.init == ("teacher" if family == "opt" else "random")
    assert main(["--suggest", str(folder), "train.seed=1"]) == 2
    assert "give train.seed=1 when you train with it" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_from_a_strangers_teacher_to_text(family, tmp_path, capsys):
    """suggest, train, export, decode: every part begins with the token that began the teacher's documents."""
    folder, (_, begin, end) = save_teacher(family, tmp_path / "teacher"), FRAMINGS[family]
    text = tmp_path / "text.txt"
    text.write_text("Once there was a list of items, and a function returned it.\n" * 200)
    (tmp_path / "recipe.yaml").write_text(spikeopd.suggest(str(folder)))
    run = spikeopd.train(tmp_path / "recipe.yaml", tmp_path / "run", [
        f"data.source=text:{text}", f"data.cache_dir={tmp_path / 'cache'}", "data.max_tokens=null", "train.stage=1",
        "stage1.updates=1", "stage1.micro_batch_size=2", "stage1.gradient_accumulation_steps=1", "train.threads=1",
    ])  # fmt: skip
    assert run.summary["stage1"]["from_teacher"]["family"] == family
    assert run.summary["stage1"]["from_teacher"]["positions"].startswith(("not copied", "zero"))
    assert "separates documents" in capsys.readouterr().err
    student = spikeopd.load_student(run.student)
    assert (student.config.bos_token_id, student.config.eos_token_id) == (begin, end)
    bundle = export(run.student, tmp_path / "bundle", source=f"text:{text}", evaluation_tokens=0,
                    verification_tokens=2)  # fmt: skip
    assert bundle.verified
    model = neuro_sim.load(tmp_path / "bundle")
    made = neuro_sim.generate(model, "Once", max_new_tokens=2)
    assert made.sequences[0].prompt_tokens[0] == begin and model.bundle.text.eos == end
    assert load_tokenizer(run.student).encode("Once") == made.sequences[0].prompt_tokens
