"""Efficiency columns of Table 2: operations and energy of one context by Appendix E, and those that the paper prints.

The one place of `spikeopd` that asks the package `energy`, which needs nothing but numpy.
"""

from __future__ import annotations

from pathlib import Path

from spikeopd.config import Config
from spikeopd.contracts import Activity, ModelShape


def of_student(folder: Path | str, rate: float, context: int) -> dict[str, float]:
    """Operations [M] and energy [µJ] of a student that fires everywhere at its mean rate."""
    import energy

    whole = energy.estimate(folder, rate, context).data["summary"][-1]
    return {"ops": whole["ops"] / 1e6, "energy": whole["energy_pj"] / 1e6}


def of_teacher(config: Config) -> dict[str, float]:
    """The same of the dense teacher, over a prompt and a rollout of Stage 2."""
    from energy.comparison import teacher_row
    from energy.costs import load_costs
    from energy.flops import keys_of_sequence, load_teacher_shape
    from spikeopd.models.teacher import resolve

    context = config.stage2.prompt_length + config.stage2.max_completion_length
    shape = load_teacher_shape(str(resolve(config.teacher.teacher_model_name_or_path)))
    row = teacher_row("teacher", shape, context, keys_of_sequence(context), load_costs("horowitz45"))
    return {"ops": row["ops"] / 1e6, "energy": row["energy_pj"] / 1e6}


def of_counts(shape: ModelShape, activity: Activity, keys: int) -> dict[str, float]:
    """Energy per token [nJ] of counted events: by Appendix E, and with memory inside under both conventions.

    Of a quantised twin: its zeros skipped, and dense, where every weight is read and multiplied. `fired`: spikes per
    neuron and step; of a twin the share of activations that are not zero.
    """
    from energy.costs import load_costs, load_placement
    from energy.memory import CONVENTIONS, activity_work, student_tally, twin_tally
    from energy.memory import total as billed
    from energy.models import mean_rate, measured_lines, operation, total

    work, placement, each = activity_work(shape, activity, keys), load_placement("cores"), 1e3 * activity.tokens
    tally = twin_tally if shape.graded else student_tally
    found = {
        "appendix_nj": total(measured_lines(activity, load_costs("horowitz45"), synapse=operation(shape))) / each,
        "fired": mean_rate(activity),
    }
    found |= {f"{name}_nj": billed(tally(work, name), placement) / each for name in CONVENTIONS}
    # Of a student: its twin as it is computed, with a zero where the student's neuron never fired in a token.
    found["twin_dense_nj"] = billed(twin_tally(work), placement) / each
    found |= {f"twin_{name}_nj": billed(twin_tally(work, name), placement) / each for name in CONVENTIONS}
    return found


def printed() -> list[dict[str, float | str]]:
    """OPs, rate and energy as the paper's main table prints them, row by row."""
    from energy.paper import PRINTED

    return [
        {"ops": f"{row.ops_g} G", "energy": f"{row.energy_mj} mJ"} | ({} if row.rate is None else {"rate": row.rate})
        for row in PRINTED
    ]
