"""Lower a trained student to integers, write a bundle, and decode it with the oracle and the event engine.

python examples/export_and_verify.py CHECKPOINT      (e.g. demo/run/final)
"""

import sys
import tempfile
from pathlib import Path

import export
import neuro_sim

with tempfile.TemporaryDirectory() as folder:
    bundle = export.export(sys.argv[1], Path(folder) / "bundle", to="nir")
    print(bundle)
    texts = {}
    for backend in ("event", "dense"):
        model = neuro_sim.load(bundle.path, backend=backend)
        texts[backend] = neuro_sim.generate(model, "The for statement", max_new_tokens=16).text
    assert bundle.verified and texts["event"] == texts["dense"]
    print("both backends continue:", texts["event"])
