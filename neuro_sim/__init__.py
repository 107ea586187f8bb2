"""Run exported spiking language models, event by event: counted, checked, on the CPU or on Lava. No torch.

    model = neuro_sim.load("bundle", backend="event")                            # event, lava or dense
    result = neuro_sim.generate(model, "The for statement", max_new_tokens=32)
    result.text, result.tokens, result.activity                                  # energy.report(result) takes it
    for piece in neuro_sim.stream(model, "The for statement"): ...

`api` is the way in, `backends` the table of what can run a bundle, `event` the fast engine, `dense` the oracle it is
tested against, `lava` the Lava processes. Nothing is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuro_sim.api import Generation, Model, Stream, generate, load, stream
    from neuro_sim.backends import BACKENDS

__all__ = ["BACKENDS", "Generation", "Model", "Stream", "generate", "load", "stream"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'neuro_sim' has no attribute {name!r}")
    value = getattr(import_module(f"neuro_sim.{'backends' if name == 'BACKENDS' else 'api'}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
