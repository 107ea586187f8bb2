"""Text to tokens: sources of documents, tokenizers, and cached token streams that windows are cut from. No torch.

sources.open_source   tokenizer.load_tokenizer   tokens.prepare, tokens.batch, tokens.sequential_windows
"""
