"""A recipe for a teacher that no recipe knows, from its configuration and tokenizer: `spikeopd-train --suggest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spikeopd.config import load_config
from spikeopd.errors import InputError
from spikeopd.models.teacher import EMBEDDED, check_fit, load_teacher_config
from spikeopd.options import dump_yaml
from spikeopd.text.tokenizer import Tokenizer, load_tokenizer

LONGEST = 2048  # positions of the student: its table is learned, whatever the teacher could extrapolate to
WINDOW = 512  # tokens per Stage-1 window, as in the paper's recipes
COMPLETION = 32
INNER = ("ffn_dim", "intermediate_size", "n_inner")  # GPT-2 leaves its own null for four times the width


def suggest(teacher: str, tokenizer: str | None = None) -> str:
    """A recipe as YAML text: `load_config` takes it, and it fits the teacher."""
    shape = load_teacher_config(teacher)
    beside = str(Path(teacher).parent) if teacher.endswith(".gguf") else teacher
    tokenizer = tokenizer or ("tiny" if teacher in EMBEDDED else beside)
    words = load_tokenizer(tokenizer)
    values = _values(teacher, shape, words, tokenizer)
    head = (
        f"# A student for {teacher} ({shape.model_type}, {shape.num_hidden_layers} layers of width "
        f"{shape.hidden_size}), written by\n"
        f"#   spikeopd-train --suggest {teacher}\n"
        f"# {_tokens(words)}\n"
        "# Choose data.source: text that the teacher knows. "
        "What is not named here is the paper's (spikeopd/config.py).\n"
    )
    text = head + dump_yaml(values)
    check_fit(_config(values), shape, words.vocab_size)
    return text


def _config(values: dict[str, dict[str, Any]]) -> Any:
    return load_config("opt-125m", {f"{section}.{key}": v for section, e in values.items() for key, v in e.items()})


def _values(teacher: str, shape: Any, words: Tokenizer, tokenizer: str) -> dict[str, dict[str, Any]]:
    def size(*names: str) -> int:
        found = next((getattr(shape, name) for name in names if getattr(shape, name, None)), None)
        if found is None:
            raise InputError(f"teacher {teacher}: its config.json ({shape.model_type}) has no {' or '.join(names)}")
        return int(found)

    width, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    while width % heads:  # heads wider or narrower than width / heads (Qwen3): the next number that divides
        heads -= 1
    positions = min(LONGEST, size("max_position_embeddings"))
    window = min(WINDOW, positions)
    completion = min(COMPLETION, max(1, window // 4))
    inner = next((getattr(shape, name) for name in INNER if getattr(shape, name, None)), 4 * width)
    model = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": int(inner),
        "vocab_size": size("vocab_size"),
        "max_position_embeddings": positions,
        "word_embed_proj_dim": int(getattr(shape, "word_embed_proj_dim", None) or width),
        "block": "plus",
        "init": "teacher" if shape.model_type == "opt" else "random",
    }
    return {
        "model": model,
        "teacher": {"teacher_model_name_or_path": teacher},
        "data": {
            "prompt_source": None,  # data.source
            "tokenizer": tokenizer,
            "framing": words.framing,
            "sequence_length": window,
        },
        "stage2": {
            "prompt_length": window - completion,
            "max_completion_length": completion,
            "spike_layers": sorted({-(-layers * quarter // 4) for quarter in (1, 2, 3, 4)}),
        },
    }


def _tokens(words: Tokenizer) -> str:
    begin, end = words.roles["bos_token"], words.roles["eos_token"]
    if words.bos_token_id == words.eos_token_id:
        return f"Special tokens: {begin} ({words.bos_token_id}) begins, separates and ends documents."
    return (
        f"Special tokens: documents begin with {begin} ({words.bos_token_id}), end with {end} ({words.eos_token_id})."
    )
