"""Write the golden spikes: what the oracle decodes from a fixed random model. Run only when the definition changes,
and explain the change in the commit:  python tests/golden/make_golden.py
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from random_models import INHIBITING, PLUS, random_model, random_shape  # noqa: E402

from neuro_sim.dense import DenseDecoder  # noqa: E402
from spikeopd.contracts import SpikeTrace  # noqa: E402

CASES = {
    "plain": {},
    "factorised": {"width": 12},
    "six_steps": {"num_steps": 6, "heads": 3, "head_dim": 5},
    "plus": PLUS,
    "inhibiting": INHIBITING,
    "plus_factorised": {**PLUS, "width": 12},
}
TOKENS = [2, 7, 31, 7, 0, 19, 38, 5, 11, 23]


def decode(name, backend=DenseDecoder):
    """Spikes of every site packed to bits, and the logits of the last token."""
    trace = SpikeTrace()
    decoder = backend(random_model(random_shape(**CASES[name]), seed=11), trace)
    for token in TOKENS:
        logits, _ = decoder.step(token)
    bits = np.concatenate([spikes.ravel() for values in trace.sites.values() for spikes in values])
    return {f"{name}_spikes": np.packbits(bits), f"{name}_logits": logits}


if __name__ == "__main__":
    np.savez_compressed(HERE / "spikes.npz", **{k: v for name in CASES for k, v in decode(name).items()})
