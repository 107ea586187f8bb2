"""How good is a model: zero-shot benchmarks, perplexity and rollouts of checkpoints, hub models and exported bundles.

from spikeopd.evaluation.models import open_model
from spikeopd.evaluation.perplexity import perplexity

perplexity(open_model("runs/tiny/final"), "python-docs")["perplexity"]      # a bundle, `tiny` or a hub name too
"""
