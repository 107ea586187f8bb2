"""Lower a trained student to integers, write a bundle, decode with two backends and compare every spike.

python examples/export_and_verify.py RUN BUNDLE      (e.g. runs/tiny bundle)
"""

import sys

import export
import neuro_sim
from spikeopd.contracts import first_difference

bundle = export.export(sys.argv[1], sys.argv[2], to="nir")
print(bundle)
results = []
for backend in ("dense", "event"):
    with neuro_sim.load(bundle.path, backend) as model:
        results.append(neuro_sim.generate(model, "The following functions are", max_new_tokens=16, trace="all"))
oracle, engine = results
print("tokens equal:", oracle.tokens == engine.tokens)
print("counts equal:", oracle.activity.to_dict() == engine.activity.to_dict())
print("first differing spike:", first_difference(oracle.traces[0], engine.traces[0]))
print(f"energy of it: python examples/energy_report.py {engine.save(bundle.path.with_suffix('.run.json'))}")
