"""One contender of benchmarks/decode.py in a process of its own: it builds its model, then measures when told to.

Reads one JSON object per line on stdin, answers with one per line on stdout:
  {"do": "measure", "tokens": n}  ->  {"cpu": seconds, "wall": seconds}   n tokens decoded one by one after the prompt
  {"do": "prefill", "tokens": n}  ->  the same for the last n tokens of the prompt, fed at once; not every peer has it
Started by decode.py; `python decode_worker.py '{"kind": "hf", ...}'` works by hand too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
Measure = Callable[[int], None]  # decode so many tokens after the prompt
VOCAB = 50272


def prompt(length: int) -> list[int]:
    return np.random.default_rng(1).integers(4, VOCAB, length).tolist()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


# --- ours -----------------------------------------------------------------------------------------------------------


def event(options: dict[str, Any]) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """The event engine on a calibrated random model."""
    from calibrated import OPT_SHAPES, calibrated_model, read_bandwidth, refine

    from neuro_sim.event.engine import EventDecoder

    shape, rate, context = OPT_SHAPES[options["shape"]], options["rate"], options["context"]
    model = calibrated_model(shape, rate, context, precision=options["precision"])
    if options.get("refine", True):
        model = refine(model, rate, context)
    decoder = EventDecoder(model, threads=options["threads"])
    del model
    fed = prompt(context - 32) if shape.vocab_size == VOCAB else [t % shape.vocab_size for t in prompt(context - 32)]
    decoder.prefill(fed)
    kept: dict[str, Any] = {}

    def decode(tokens: int) -> None:
        decoder._batch.caches[0].position = len(fed)
        token, total = fed[0], None
        for _ in range(tokens):
            logits, activity = decoder.step(token)
            token = int(np.argmax(logits))
            total = activity if total is None else (total.add(activity) or total)
        kept["activity"] = total

    def prefill(tokens: int) -> None:
        decoder._batch.caches[0].position = len(fed) - tokens
        decoder.prefill(fed[:tokens])

    def batch(tokens: int, size: int) -> None:
        sequences = kept.get(f"batch{size}")
        if sequences is None:
            sequences = kept[f"batch{size}"] = decoder.batch([None] * size)
            for cache in sequences.caches:
                cache.keys[:] = decoder._batch.caches[0].keys
                cache.values[:] = decoder._batch.caches[0].values
                cache.position = len(fed)
        for cache in sequences.caches:
            cache.position = len(fed)
        chosen = [fed[i] for i in range(size)]
        for _ in range(tokens):
            logits, _ = sequences.step(list(range(size)), chosen)
            chosen = np.argmax(logits, 1).tolist()

    def facts() -> dict[str, Any]:
        decode(8)
        activity = kept["activity"]
        rates = {site: float(activity.spikes[site].sum() / activity.cells[site].sum()) for site in activity.spikes}
        return {
            "bytes_per_token": sum(activity.bytes.values()) / activity.tokens,
            "sops_per_token": sum(int(s.sum()) for s in activity.sops.values()) / activity.tokens,
            "active_rows": activity.macs["head_active"] / activity.macs["head"],
            "rates": rates,
        }

    commands = {
        "measure": lambda tokens: timed(lambda: decode(tokens)),
        "prefill": lambda tokens: timed(lambda: prefill(tokens)),
        "batch": lambda tokens, size: timed(lambda: batch(tokens, size)),
        "bandwidth": lambda: {"bytes_per_second": read_bandwidth(options["threads"])},
        "facts": facts,
    }
    return commands, {"prefill": 1}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- dense peers ----------------------------------------------------------------------------------------------------


def opt_config() -> Any:
    from transformers import OPTConfig

    return OPTConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072, vocab_size=VOCAB,
                     max_position_embeddings=2048, word_embed_proj_dim=768)  # fmt: skip


def torch_loop(model: Any, options: dict[str, Any]) -> Measure:
    """`generate` with a KV cache that already holds the prompt."""
    import copy

    import torch

    torch.set_num_threads(options["threads"])
    model.eval()
    ids = torch.tensor([prompt(options["context"] - 32)])
    with torch.inference_mode():
        filled = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    def decode(tokens: int) -> None:
        model.generate(ids, past_key_values=caches.pop(), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                       use_cache=True, attention_mask=torch.ones_like(ids))  # fmt: skip

    caches: list[Any] = []

    def measure(tokens: int) -> None:
        decode(tokens)

    def prefill(tokens: int) -> None:
        with torch.inference_mode():
            model(ids[:, -tokens:], past_key_values=caches.pop(), use_cache=True, logits_to_keep=1)

    def rewind(tokens: int) -> None:
        caches.append(copy.deepcopy(filled))
        caches[-1].crop(1 - tokens)  # `filled` lacks the last token of ids

    measure.prepare = lambda: caches.append(copy.deepcopy(filled))  # type: ignore[attr-defined]
    measure.prefill, measure.rewind = prefill, rewind  # type: ignore[attr-defined]
    return measure


def hf(options: dict[str, Any]) -> Measure:
    import torch
    from transformers import OPTForCausalLM

    torch.manual_seed(0)
    return torch_loop(OPTForCausalLM(opt_config()), options)


def torch_int8(options: dict[str, Any]) -> Measure:
    import torch
    from transformers import OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(opt_config()).eval()
    return torch_loop(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8), options)


def student(options: dict[str, Any]) -> Measure:
    import torch

    from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM

    torch.manual_seed(0)
    config = BiSpikCLMConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072,
                             vocab_size=VOCAB, max_position_embeddings=2048, num_steps=4)  # fmt: skip
    return torch_loop(BiSpikCLMForCausalLM(config), options)


def ctranslate2(options: dict[str, Any]) -> Measure:
    """CTranslate2's own OPT converter; tokens are named t0, t1, ... because the weights are random anyway."""
    import ctranslate2 as ct2
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import OPTForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "opt")
        OPTForCausalLM(opt_config()).save_pretrained(source)
        names = {f"t{i}": i for i in range(VOCAB)}
        words = Tokenizer(models.WordLevel(names, unk_token="t3"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"bos_token": "t2", "eos_token": "t2", "pad_token": "t1", "unk_token": "t3"}
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(source)
        converted = ct2.converters.TransformersConverter(str(source)).convert(
            str(Path(folder, "ct2")), quantization="int8"
        )
        generator = ct2.Generator(converted, device="cpu", intra_threads=options["threads"], compute_type="int8")
    start = [f"t{token}" for token in prompt(options["context"] - 32)]

    def measure(tokens: int) -> dict[str, float]:
        """The first token carries the whole prompt, so the clock starts after it."""
        steps = generator.generate_tokens(start, max_length=tokens + 1, sampling_topk=1, end_token=["t1"])
        next(steps)
        wall, cpu, count = time.perf_counter(), time.process_time(), 0
        for _ in steps:
            count += 1
        scale = tokens / max(1, count)
        return {"cpu": (time.process_time() - cpu) * scale, "wall": (time.perf_counter() - wall) * scale}

    def prefill(tokens: int) -> dict[str, float]:
        """Its cache cannot be cut short, so the whole prompt is fed and its mean taken."""
        clock = timed(lambda: next(generator.generate_tokens(start, max_length=1, sampling_topk=1, end_token=["t1"])))
        return {name: seconds * tokens / len(start) for name, seconds in clock.items()}

    measure.prefill, measure.rewind = prefill, lambda tokens: None  # type: ignore[attr-defined]
    return measure  # type: ignore[return-value]


def onnxruntime(options: dict[str, Any]) -> Measure:
    """A plain OPT-125M decoding step with KV cache, exported by torch, quantised by onnxruntime, run by onnxruntime."""
    import onnxruntime as ort
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from opt_onnx import export_step, step_inputs

    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder, "opt.onnx"), Path(folder, "opt.int8.onnx")
        export_step(plain)
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = options["threads"]
        settings.inter_op_num_threads = 1
        session = ort.InferenceSession(str(small), settings, providers=["CPUExecutionProvider"])
    filled = step_inputs(options["context"] - 32)
    names = [output.name for output in session.get_outputs()]

    def measure(tokens: int) -> None:
        given = dict(filled)
        for _ in range(tokens):
            outputs = dict(zip(names, session.run(None, given), strict=True))
            given["token"] = np.argmax(outputs["logits"], -1).reshape(1, 1)
            given["position"] = given["position"] + 1
            for name in names[1:]:
                given[name.replace("new_", "past_")] = outputs[name]

    return measure


def llama_cpp(options: dict[str, Any], kind: str) -> Measure:
    """llama.cpp through its C interface, without its server or samplers: decode, then the largest logit."""
    from llama_gguf import LlamaContext, write_gguf

    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder, "model.gguf"), kind)
        context = LlamaContext(Path(folder, "model.gguf"), options["threads"])
    fed = prompt(options["context"] - 32)
    context.feed(fed)

    def measure(tokens: int) -> None:
        token = fed[0]
        for _ in range(tokens):
            token = int(context.feed([token]).argmax())

    measure.prepare = lambda: context.keep(len(fed))  # type: ignore[attr-defined]
    measure.rewind = lambda tokens: context.keep(len(fed) - tokens)  # type: ignore[attr-defined]
    measure.prefill = lambda tokens: context.feed(fed[-tokens:]) is None and None  # type: ignore[attr-defined]
    return measure


PEERS: dict[str, Callable[[dict[str, Any]], Measure]] = {
    "hf": hf,
    "torch_int8": torch_int8,
    "student": student,
    "ctranslate2": ctranslate2,
    "onnxruntime": onnxruntime,
    "llama_q8": lambda options: llama_cpp(options, "Q8_0"),
    "llama_q4": lambda options: llama_cpp(options, "Q4_0"),
}


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    kind = options["kind"]
    if kind == "event":
        commands, about = event(options)
    else:
        measure = PEERS[kind](options)

        def command(tokens: int) -> dict[str, float]:
            getattr(measure, "prepare", lambda: None)()
            result: dict[str, float] = {}
            clock = timed(lambda: result.update(measure(tokens) or {}))
            return result or clock

        def feed(tokens: int) -> dict[str, float]:
            measure.rewind(tokens)  # type: ignore[attr-defined]
            result: dict[str, float] = {}
            clock = timed(lambda: result.update(measure.prefill(tokens) or {}))  # type: ignore[attr-defined]
            return result or clock

        commands, about = {"measure": command}, {}
        if hasattr(measure, "prefill"):
            commands["prefill"], about["prefill"] = feed, 1
    print(json.dumps({"ready": kind, **about}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(commands[request.pop("do")](**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
