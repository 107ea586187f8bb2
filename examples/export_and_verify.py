"""Lower a trained student to integers, write a bundle, read it back and decode with two backends.

python examples/export_and_verify.py CHECKPOINT      (e.g. demo/run/final)
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from neuro_sim.dense import DenseDecoder
from neuro_sim.event.engine import EventDecoder
from spikeopd.contracts import SpikeTrace, first_difference
from spikeopd.contracts.bundle import load_bundle

with tempfile.TemporaryDirectory() as folder:
    bundle = Path(folder) / "bundle"
    command = [sys.executable, "-m", "export.cli", sys.argv[1], "--to", "nir", "--output", str(bundle)]
    subprocess.run(command, check=True)
    model = load_bundle(bundle)
    traces = [SpikeTrace(), SpikeTrace()]
    decoders = [DenseDecoder(model, trace=traces[0]), EventDecoder(model, trace=traces[1])]
    for token in (2, 40, 77, 300, 12):
        logits = [decoder.step(token)[0] for decoder in decoders]
        assert (logits[0] == logits[1]).all()
    print("first differing spike between oracle and engine:", first_difference(*traces))
