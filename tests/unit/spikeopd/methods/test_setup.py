"""Which text a run reads for what: Stage-2 prompts, and prompts that only measure, have a source of their own."""

import numpy as np

from spikeopd.config import load_config
from spikeopd.methods.setup import token_data
from spikeopd.text.tokenizer import load_tokenizer


def test_prompts_come_from_their_own_source(tmp_path):
    for name, text in (("corpus", "alpha beta gamma\n\n"), ("prompts", "one two three\n\n")):
        (tmp_path / f"{name}.txt").write_text(text * 400)
    sources = [
        f"data.{key}=text:{tmp_path / file}.txt" for key, file in (("source", "corpus"), ("prompt_source", "prompts"))
    ]
    config, tokenizer = load_config("tiny", [*sources, f"data.cache_dir={tmp_path / 'cache'}"]), load_tokenizer("tiny")
    found = {part: set(np.asarray(data.tokens).tolist()) for part, data in token_data(config, tokenizer).items()}
    corpus, prompts = (set(tokenizer.encode(word)) for word in (" beta", " two"))
    assert found["train"] >= corpus and found["validation"] >= corpus and not found["train"] & (prompts - corpus)
    assert found["prompts"] >= prompts and found["held_out"] >= prompts and not found["prompts"] & (corpus - prompts)


def test_without_one_they_come_from_the_corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("alpha beta gamma\n\n" * 400)
    overrides = [f"data.source=text:{tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    found = token_data(load_config("tiny", overrides), load_tokenizer("tiny"))
    assert found["held_out"] is None and np.array_equal(found["prompts"].tokens, found["train"].tokens)


def test_the_papers_recipes_take_prompts_from_fineweb():
    for name in ("opt-125m", "opt-350m", "opt-1.3b", "opt-125m-plus"):
        data = load_config(name).data
        assert "fineweb-edu" in data.source and data.prompt_source == "hf:HuggingFaceFW/fineweb/sample-10BT"
