"""Closed forms against the matrix products a real OPT executes, and against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from energy.flops import (
    SPIKEGPT,
    dense_shape,
    keys_of_sequence,
    load_shape,
    load_teacher_shape,
    opt_bytes,
    opt_macs,
    opt_parameters,
    opt_shape,
    parse_teacher,
    published_name,
)
from spikeopd.contracts import ModelShape, parse_shape
from spikeopd.contracts.topology import layer_macs, outer_macs
from spikeopd.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPES = [
    ModelShape(16, 2, 2, 24, 50, 32, 1, 16),
    ModelShape(24, 1, 3, 40, 64, 32, 1, 24),
    ModelShape(32, 3, 4, 64, 70, 48, 1, 16),  # factorised, like OPT-350M
]


def build_opt(shape: ModelShape):
    config = transformers.OPTConfig(
        **{key: value for key, value in shape.to_dict().items() if key != "num_steps"},
        do_layer_norm_before=not shape.factorised,
        attn_implementation="eager",
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.OPTForCausalLM(config).eval()


class MatmulCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the MACs of every matrix product that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left = args[1] if name in ("addmm", "baddbmm") else args[0]
            self.macs += result.numel() * left.shape[-1]
        assert "scaled_dot_product" not in name, "eager attention expected"
        return result


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "three heads", "factorised"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_whole_sequence_executes_the_unmasked_count(shape: ModelShape, tokens: int) -> None:
    model = build_opt(shape)
    with torch.no_grad(), MatmulCounter() as counter:
        model(torch.arange(3, 3 + tokens)[None], use_cache=False)
    assert counter.macs == sum(opt_macs(shape, tokens, tokens * tokens).values())


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "three heads", "factorised"])
def test_cached_decoding_executes_the_masked_count(shape: ModelShape) -> None:
    model, tokens, cache = build_opt(shape), 6, None
    with torch.no_grad(), MatmulCounter() as counter:
        for token in range(tokens):
            cache = model(torch.tensor([[3 + token]]), past_key_values=cache, use_cache=True).past_key_values
    assert counter.macs == sum(opt_macs(shape, tokens, keys_of_sequence(tokens)).values())


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "three heads", "factorised"])
def test_components_by_module_hooks(shape: ModelShape) -> None:
    """Every component on its own: a hook on each Linear multiplies its rows by its weight."""
    model, tokens, found = build_opt(shape), 5, {}
    names = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "out_proj": "output", "fc1": "ffn_in",
             "fc2": "ffn_out", "project_in": "embed", "project_out": "head", "lm_head": "head"}  # fmt: skip

    def hook(component: str):
        def count(module, inputs, output) -> None:
            rows = inputs[0].numel() // inputs[0].shape[-1]
            found[component] = found.get(component, 0) + rows * module.in_features * module.out_features

        return count

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook(names[name.rsplit(".", 1)[-1]]))
    with torch.no_grad():
        model(torch.arange(3, 3 + tokens)[None])
    expected = opt_macs(shape, tokens, 0)
    assert found == {name: macs for name, macs in expected.items() if macs}


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "three heads", "factorised"])
def test_the_student_executes_the_same_products_at_every_step(shape: ModelShape) -> None:
    """BiSpikCLM in torch: T_s times the blocks' FLOPs (its gains are no matrix products), embedding and head once."""
    from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM

    student = dataclasses.replace(shape, num_steps=4)
    model = BiSpikCLMForCausalLM(BiSpikCLMConfig(**student.to_dict())).eval()

    def due(tokens: int, keys: int) -> int:
        blocks = layer_macs(student, tokens, keys)
        inner = student.num_steps * student.num_hidden_layers * (sum(blocks.values()) - blocks["residual"])
        return inner + sum(outer_macs(student, tokens).values())

    with torch.no_grad(), MatmulCounter() as counter:
        model(torch.arange(3, 8)[None], use_cache=False)
    assert counter.macs == due(5, 25)
    cache = None
    with torch.no_grad(), MatmulCounter() as counter:
        for token in range(5):
            cache = model(torch.tensor([[3 + token]]), past_key_values=cache, use_cache=True).past_key_values
    assert counter.macs == due(5, keys_of_sequence(5))


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "three heads", "factorised"])
def test_parameters_match_the_model(shape: ModelShape) -> None:
    assert opt_parameters(shape) == sum(p.numel() for p in build_opt(shape).parameters())


@pytest.mark.parametrize(
    ("name", "parameters"), [("opt-125m", 125_239_296), ("opt-350m", 331_196_416), ("opt-1.3b", 1_315_758_080)]
)
def test_published_shapes(name: str, parameters: int) -> None:
    shape = opt_shape(f"facebook/{name}")
    assert opt_parameters(shape) == parameters
    student = dataclasses.replace(shape, num_steps=4, residual_write="current", readout="residual", distances=64)
    assert published_name(shape) == published_name(student) == name and dense_shape(student) == shape


def test_one_layer_by_hand() -> None:
    """d = 4, f = 6, two tokens that see 1 + 2 keys."""
    shape = ModelShape(4, 1, 2, 6, 10, 8, 4, 4)
    assert layer_macs(shape, 2, 3) == {
        "qkv": 2 * 48, "coincidence": 12, "av": 12, "output": 2 * 16, "residual": 2 * 8, "ffn_in": 48, "ffn_out": 48,
    }  # fmt: skip
    current = dataclasses.replace(shape, residual_write="current")
    assert layer_macs(current, 2, 3) == {name: n for name, n in layer_macs(shape, 2, 3).items() if name != "residual"}
    assert outer_macs(shape, 2) == {"embed": 0, "head": 80}
    assert outer_macs(ModelShape(4, 1, 2, 6, 10, 8, 4, 3), 1) == {"embed": 12, "head": 12 + 30}


def test_keys_in_closed_form() -> None:
    for start in range(4):
        for tokens in range(5):
            assert keys_of_sequence(tokens, start) == sum(i + 1 for i in range(start, start + tokens))


def test_teacher_bytes_by_hand() -> None:
    """d = 4, f = 6, V = 10: 64 + 48 weights in the layer, float16, one token and one key."""
    assert opt_bytes(ModelShape(4, 1, 2, 6, 10, 8, 1, 4), 1, 1) == {
        "weights": 2 * 112, "embed": 2 * 8, "head": 2 * 40, "kv_read": 2 * 8, "kv_write": 2 * 8,
    }  # fmt: skip


def test_spikegpt_shapes_have_their_parameters() -> None:
    """Layers of 13 d^2 and two tables. 216M: 215.2 M. 46M: 46.48 M, and 46,553,088 with every vector of its layers."""
    large, small = SPIKEGPT["spikegpt-216m"], SPIKEGPT["spikegpt-46m"]
    assert large.parameters == 18 * 13 * 768**2 + 2 * 50277 * 768 == 215_244_288
    # Per layer: two LayerNorms (4 d), decay, first and three mixes (5 d), two mixes (2 d); besides, ln0 and ln_out.
    vectors = 12 * (4 + 5 + 2) * 512 + 4 * 512
    assert small.parameters + vectors == 46_553_088


def test_config_files(tmp_path) -> None:
    config = opt_shape("opt-350m").to_dict()
    del config["num_steps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(tmp_path), 4).num_steps == 4
    assert load_shape(str(tmp_path / "config.json"), 1).word_embed_proj_dim == 512
    nested = tmp_path / "bundle"
    nested.mkdir()
    (nested / "manifest.json").write_text(
        json.dumps({"schema": "spikeopd.bundle/1", "shape": config | {"num_steps": 6}})
    )
    assert load_shape(str(nested)).num_steps == 6
    assert load_shape("opt-125m", 4).num_steps == 4


def test_bad_configs_name_the_field(tmp_path) -> None:
    good = opt_shape("opt-125m").to_dict()
    for field in ("hidden_size", "ffn_dim", "vocab_size", "num_hidden_layers", "max_position_embeddings"):
        with pytest.raises(InputError, match=field):
            parse_shape({key: value for key, value in good.items() if key != field}, "here")
        with pytest.raises(InputError, match=field):
            parse_shape(good | {field: 0}, "here")
    with pytest.raises(InputError, match="num_attention_heads"):
        parse_shape(good | {"num_attention_heads": 7}, "here")
    with pytest.raises(InputError, match="neither config.json nor manifest.json"):
        load_shape(str(tmp_path))
    with pytest.raises(InputError, match="unknown teacher 'opt-9t'"):
        load_shape("opt-9t")
    with pytest.raises(InputError, match="--num-steps"):
        load_shape("opt-125m")
    with pytest.raises(InputError, match="'num_steps'"):
        parse_shape({key: value for key, value in good.items() if key != "num_steps"}, "here")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="broken.json"):
        load_shape(str(tmp_path / "broken.json"))


# --- teachers of other families ---------------------------------------------------------------------------------------

_COMMON = dict(vocab_size=70, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
_GROUPED = dict(**_COMMON, intermediate_size=40, num_key_value_heads=2)
FAMILIES = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama with biases": ("LlamaConfig", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 10}),
    "gpt2": ("GPT2Config", {"vocab_size": 70, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "gpt2 wider": ("GPT2Config", {"vocab_size": 70, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 50}),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "intermediate_size": 40}),
    "gpt_neox tied": ("GPTNeoXConfig", {**_COMMON, "intermediate_size": 40, "tie_word_embeddings": True}),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A random model of a family and the shape read from the config.json it saves."""
    kind, values = FAMILIES[request.param]
    config = getattr(transformers, kind)(**values, bos_token_id=0, eos_token_id=2, pad_token_id=None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    config.save_pretrained(tmp_path)
    return model, load_teacher_shape(str(tmp_path / "config.json"))


def _rotation(model, tokens: int) -> int:
    """Some versions make the angles of rotary positions by a matrix product; the closed form leaves them out."""
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    return sum(buffer.numel() for buffer in frequencies) * tokens


def test_another_family_executes_its_closed_form(family) -> None:
    model, shape = family
    with torch.no_grad(), MatmulCounter() as whole:
        model(torch.arange(3, 10)[None], use_cache=False)
    assert whole.macs - sum(opt_macs(shape, 7, 49).values()) in (0, _rotation(model, 7))
    cache = None
    with torch.no_grad(), MatmulCounter() as cached:
        for token in range(6):
            cache = model(torch.tensor([[3 + token]]), past_key_values=cache, use_cache=True).past_key_values
    assert cached.macs - sum(opt_macs(shape, 6, keys_of_sequence(6)).values()) in (0, _rotation(model, 6))


def test_another_family_has_these_parameters_and_moves_these_bytes(family) -> None:
    model, shape = family
    assert opt_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    moved = opt_bytes(shape, 5, 11)
    linear = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    inner = [m.weight.numel() for name, m in model.named_modules() if isinstance(m, linear) and ".0." in name]
    assert moved["weights"] == 5 * 2 * shape.num_hidden_layers * sum(inner)
    layer = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values.layers[0]
    assert moved["kv_read"] == 11 * 2 * shape.num_hidden_layers * (
        layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel()
    )
    assert dense_shape(shape) is shape and shape.to_dict()["family"] == model.config.model_type


def test_llama_by_hand() -> None:
    """d 4, two heads of 2 and one key/value head, f 3, V 5, one layer, two tokens (three keys)."""
    raw = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 1, "intermediate_size": 3, "vocab_size": 5, "max_position_embeddings": 8}  # fmt: skip
    shape = parse_teacher(raw, "config")
    assert opt_macs(shape, 2, 3) == {"qkv": 64, "coincidence": 12, "av": 12, "output": 32, "ffn_in": 48, "ffn_out": 24,
                                     "embed": 0, "head": 40}  # fmt: skip
    assert opt_parameters(shape) == 2 * 20 + (32 + 16 + 24 + 12 + 8) + 4


def test_shapes_it_does_not_know_are_refused_by_name(tmp_path) -> None:
    for family, message in (("mixtral", "no closed form for a 'mixtral'; the teacher may be one of opt, llama"),
                            ("mamba", "no closed form for a 'mamba'")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            parse_teacher({"model_type": family, **_GROUPED}, "config")
    with pytest.raises(InputError, match="field 'num_key_value_heads' must be a whole number from 1, got 1.5"):
        parse_teacher({"model_type": "llama", **_GROUPED, "num_key_value_heads": 1.5}, "config")
    with pytest.raises(InputError, match="field 'ffn_dim' must be a whole number"):
        parse_teacher({"model_type": "llama", **_COMMON}, "config")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **_GROUPED}))
    with pytest.raises(InputError, match="a llama is no shape of a student; give it with --teacher"):
        load_shape(str(path), 4)
    path.write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        load_teacher_shape(str(path))


def test_a_report_is_beside_the_teacher_it_was_given(tmp_path) -> None:
    import energy

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **_GROUPED}))
    student = parse_shape({**_COMMON, "ffn_dim": 40, "num_steps": 4}, "student")
    told = energy.estimate(student, 0.2, 8, teacher=str(path))
    shape = load_teacher_shape(str(path))
    assert told.data["teacher"]["macs"] == opt_macs(shape, 8, keys_of_sequence(8))
    assert told.data["teacher"]["model"]["key_value_size"] == 12
