"""Time, memory and size of exporting a shape with random weights, as `spikeopd-export` does it.

    python benchmarks/bench_export.py --shape opt-125m --verification-tokens 4

Peak memory is that of the whole process (getrusage); "model memory" is four bytes per parameter of the student.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from export.bundle_writer import BundleOptions, bundle_draft
from export.quantize import lower
from export.report import parameter_count
from export.verify import verify_bundle, verify_nir
from spikeopd.config import BLOCKS
from spikeopd.files import write_json
from spikeopd.models.bispikclm import BiSpikCLMConfig, BiSpikCLMForCausalLM

FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size", "max_position_embeddings",
    "word_embed_proj_dim",
)  # fmt: skip
SHAPES = {
    "tiny": (128, 4, 4, 512, 1024, 256, 128),
    "opt-125m": (768, 12, 12, 3072, 50272, 2048, 768),
    "opt-350m": (1024, 24, 16, 4096, 50272, 2048, 512),
}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="opt-125m")
    parser.add_argument("--to", choices=("nir", "lava"), default="nir")
    parser.add_argument("--block", choices=BLOCKS, default="paper")
    parser.add_argument("--verification-tokens", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    before = peak_mb()
    sizes = dict(zip(FIELDS, SHAPES[args.shape], strict=True))
    student = BiSpikCLMForCausalLM(BiSpikCLMConfig(**sizes, **BLOCKS[args.block])).eval()
    with torch.no_grad():  # trained students have biases
        for block in student.model.layers:
            for module in (block.q_proj, block.k_proj, block.v_proj, block.out_proj, block.fc1, block.fc2):
                module.bias.normal_(std=0.05)
    memory = sum(parameter.numel() for parameter in student.parameters()) * 4 / 2**20
    built = peak_mb()
    start, cpu = time.perf_counter(), time.process_time()
    lowered = lower(student)
    lowered_at = time.perf_counter()
    del student
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bundle"
        with bundle_draft(lowered.model, output, BundleOptions(target=args.to)) as (draft, manifest):
            written_at = time.perf_counter()
            wrote = peak_mb()
            prompt = list(range(10, 10 + args.verification_tokens))
            verify_bundle(lowered.model, draft, [prompt])
            if args.to == "nir":
                verify_nir(lowered.model, draft, prompt, manifest)
            write_json(draft / "report.json", {})
        end, cpu = time.perf_counter(), time.process_time() - cpu
        size = (output / ("model.nir" if args.to == "nir" else "arrays.h5")).stat().st_size
    parameters = parameter_count(lowered.model)
    result = {
        "shape": args.shape,
        "block": args.block,
        "parameters": parameters,
        "file_bytes": size,
        "bytes_per_parameter": round(size / parameters, 4),
        "lower_seconds": round(lowered_at - start, 2),
        "write_seconds": round(written_at - lowered_at, 2),
        "verify_seconds": round(end - written_at, 2),
        "total_seconds": round(end - start, 2),
        "total_cpu_seconds": round(cpu, 2),
        "model_mb": round(memory, 1),
        "import_mb": round(before, 1),
        "student_built_mb": round(built, 1),
        "peak_after_write_mb": round(wrote, 1),
        "peak_mb": round(peak_mb(), 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
