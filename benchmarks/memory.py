"""Memory of the event engine against the int8 weights of the model, and what a token costs there.

  python benchmarks/memory.py 350m
  python benchmarks/memory.py 1.3b --tokens 2048

Counted is what the process holds beyond an interpreter with the compiled kernels loaded; the peak includes loading.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "tests")]


def main() -> None:
    from calibrated import OPT_SHAPES
    from decode_worker import peak_bytes, resident_bytes
    from random_models import random_model

    from neuro_sim.event.engine import EventDecoder
    from neuro_sim.event.plan import place_weights
    from spikeopd.contracts.bundle import assemble, model_arrays

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(OPT_SHAPES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    EventDecoder(random_model(), threads=1).prefill([1, 2, 3])
    before = resident_bytes()
    shape, model = OPT_SHAPES[args.shape], random_model(OPT_SHAPES[args.shape])
    numbers, arrays = (model.decay, model.embedding.shift, model.head.epsilon), model_arrays(model)
    weights = sum(array.size for array in arrays.values() if array.dtype == "int8")
    del model
    place_weights(shape, "int8", arrays)  # handed over, as load_bundle does it
    model = assemble(shape, "int8", *numbers, arrays)
    del arrays
    decoder = EventDecoder(model, threads=args.threads)
    started = time.process_time()
    prompt = [i % 100 for i in range(args.tokens - 4)]
    for start in range(0, len(prompt), 128):  # as generate() does, so that counts of single tokens do not pile up
        decoder.prefill(prompt[start : start + 128])
    prefill = 1e3 * (time.process_time() - started) / (args.tokens - 4)
    times = []
    for token in range(4):
        started = time.process_time()
        decoder.step(token)
        times.append(1e3 * (time.process_time() - started))
    print(f"{args.shape}: int8 weights {weights / 1e6:.1f} MB, {args.tokens} tokens in the cache")
    resident, peak = resident_bytes() - before, peak_bytes() - before
    print(f"  resident {resident / weights:.3f} x weights, peak {peak / weights:.3f} x")
    print(f"  CPU ms per token: prefill {prefill:.1f}, decode {min(times):.1f}")


if __name__ == "__main__":
    main()
