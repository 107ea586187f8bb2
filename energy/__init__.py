"""Analytical energy of spiking language models: counted events times published prices, beside the paper's formula.

    report = energy.report("run.json")        # or the result of neuro_sim.generate, or run.json's data
    report.total_pj, report.per_token_pj
    report.save("energy.html")                # .txt .json .csv .md .tex .html

`costs` holds the prices, `flops` counts dense work in closed form, `models` turns events into energy, `assembly` makes
a report of them, `comparison` and `paper` set reports side by side, `render` shows. `memory` bills what is read and
written too, `twin` sets a student beside its quantised twin, `audit` asks which conventions give a printed energy.
numpy only; command: `cli`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energy import costs as costs
    from energy.api import Comparison, Report, break_even, compare, compare_twins, estimate, report

__all__ = ["Comparison", "Report", "break_even", "compare", "compare_twins", "costs", "estimate", "report"]


def __getattr__(name: str) -> Any:
    """Nothing is imported before it is used, so that the command answers at once."""
    if name not in __all__:
        raise AttributeError(f"module 'energy' has no attribute {name!r}")
    value = import_module("energy.costs") if name == "costs" else getattr(import_module("energy.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
