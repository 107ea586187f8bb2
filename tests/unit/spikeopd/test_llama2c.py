"""llama2.c's format: a file made here from a random Llama gives that Llama back, with its tokenizer."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, LlamaForCausalLM

from spikeopd.cli import main
from spikeopd.llama2c import tokenizer_content
from spikeopd.models.teacher import load_teacher
from spikeopd.text.tokenizer import load_tokenizer

STORIES = Path(__file__).parents[4] / "shared" / "data" / "teachers" / "stories15M"
PIECES = [" ", "t", "h", "e", "c", "a", " t", "he", " the", "at", "cat", " c"]
SCORES = [-1e9] * 6 + [-1.0, -2.0, -3.0, -0.5, -5.0, -4.0]


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows for rotations of (2i, 2i + 1), as llama2.c has them."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tokenizer_file() -> bytes:
    names = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256))]
    entries = [(name, 0.0) for name in names] + [(p.encode(), s) for p, s in zip(PIECES, SCORES, strict=True)]
    return struct.pack("<i", 9) + b"".join(struct.pack("<fi", s, len(n)) + n for n, s in entries)


def write(model: LlamaForCausalLM, path: Path, tokenizer: bytes) -> None:
    c, state = model.config, model.state_dict()
    tied = c.tie_word_embeddings
    sizes = (c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
             c.vocab_size if tied else -c.vocab_size, c.max_position_embeddings)  # fmt: skip
    parts = [state["model.embed_tokens.weight"]]
    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"):  # fmt: skip
        for layer in range(c.num_hidden_layers):
            weight = state[f"model.layers.{layer}.{name}.weight"]
            heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}.get(name.removeprefix("self_attn.")[0])
            parts.append(interleaved(weight, heads) if name.endswith(("q_proj", "k_proj")) else weight)
    parts += [state["model.norm.weight"], torch.zeros(c.max_position_embeddings, c.hidden_size // heads_of(c))]
    if not tied:
        parts.append(state["lm_head.weight"])
    data = b"".join(np.ascontiguousarray(part.numpy(), "<f4").tobytes() for part in parts)
    path.write_bytes(struct.pack("<7i", *sizes) + data + tokenizer)


def heads_of(config: LlamaConfig) -> int:
    return int(config.num_attention_heads)


def random_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=259 + len(PIECES), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5,
                    tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    ).eval()  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_is_the_model(tmp_path, tied, capsys):
    model = random_llama(tied)
    write(model, tmp_path / "llama2.data", tokenizer_file() if tied else b"")
    extra = []
    if not tied:
        (tmp_path / "tokenizer.bin").write_bytes(tokenizer_file())
        extra = ["--tokenizer", str(tmp_path / "tokenizer.bin")]
    assert main(["llama2c", str(tmp_path / "llama2.data"), "--output", str(tmp_path / "hf"), "--json", *extra]) == 0
    assert json.loads(capsys.readouterr().out)["tied"] is tied
    found = load_teacher(str(tmp_path / "hf"), attentions=False)
    ids = torch.randint(0, 271, (2, 12))
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-6)


def test_the_tokenizer_merges_by_score(tmp_path):
    write(random_llama(True), tmp_path / "model.bin", tokenizer_file())
    assert main(["llama2c", str(tmp_path / "model.bin"), "--output", str(tmp_path / "hf")]) == 0
    tokenizer = load_tokenizer(tmp_path / "hf")
    assert tokenizer.framing == "bos" and tokenizer.bos_token_id == tokenizer.eos_token_id == 1
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("the cat é")]
    # "at" (-0.5), then " c" (-4) before "cat" (-5)
    assert pieces == ["<s>", "▁the", "▁c", "at", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the cat é")) == "the cat é"


def test_other_files_are_refused(tmp_path, capsys):
    def refused(*words: str) -> str:
        assert main(["llama2c", *words, "--output", str(tmp_path / "hf")]) == 2
        assert not (tmp_path / "hf").exists()
        return capsys.readouterr().err

    path = tmp_path / "model.bin"
    assert "no such file; check the path" in refused(str(path))
    path.write_bytes(b"short")
    assert "too short for a header" in refused(str(path))
    path.write_bytes(b"\xff" * 64)
    assert "not a model file of llama2.c" in refused(str(path))
    write(random_llama(True), path, b"")
    assert "give the tokenizer: --tokenizer tokenizer.bin" in refused(str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-2000])
    assert "in the middle of the weights" in refused(str(path))
    path.write_bytes(whole + tokenizer_file()[:-30])
    assert "tokens where the model has 271" in refused(str(path))


@pytest.mark.skipif(not STORIES.is_dir(), reason="no stories15M beside the checkout")
def test_the_tokenizer_of_stories15m():
    """Llama's scores are minus the place of a token: from its vocabulary alone comes the tokenizer that reads alike."""
    whole = Backend.from_file(str(STORIES / "tokenizer.json"))
    names = sorted(whole.get_vocab(), key=whole.get_vocab().get)
    pieces = [(name.replace("▁", " ").encode(), float(259 - number)) for number, name in enumerate(names)]
    made = Backend.from_str(json.dumps(tokenizer_content(pieces)))
    text = "Once upon a time, there was a little girl named Lily. \n\"Hello!\" she said; it's 12 o'clock — schön."
    assert made.encode(text).ids == whole.encode(text).ids and made.decode(made.encode(text).ids) == text
