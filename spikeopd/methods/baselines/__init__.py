"""Stage 2 by name: SpikeOPD and its controls, all from one checkpoint and one budget, all with one signature.

`METHODS[name](setup, log, student_path, resume=False)` leaves `final/` in the run folder and returns the summary.
docs/studies.md says where a control differs from the publication it is named after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spikeopd.methods import opd
from spikeopd.methods.baselines import (
    clipped_opd,
    continued_spad,
    eopd,
    gkd,
    lightning_opd,
    oprd,
    reverse_kl,
    sft,
    small_lr_opd,
    vanilla_opd,
)

METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "spikeopd": opd.run,
    "vanilla_opd": vanilla_opd.run,
    "small_lr_opd": small_lr_opd.run,
    "clipped_opd": clipped_opd.run,
    "continued_spad": continued_spad.run,
    "sft": sft.run,
    "eopd": eopd.run,
    "lightning_opd": lightning_opd.run,
    "oprd": oprd.run,
    "gkd": gkd.run,
    "reverse_kl": reverse_kl.run,
}
