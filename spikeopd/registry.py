"""What a configuration chooses by name: neurons, divergences, methods of Stage 2. Imports nothing that is heavy.

Adding one is a function, a line here and a test: options, `--list`, error messages and property tests read these
tables. A target is written `module:function` and imported by `load` when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """What `module:function` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


# (current [time, ...], threshold, alpha, xi) -> spikes [time, ...]
NEURONS: dict[str, str] = {
    "lif": "spikeopd.models.neurons:lif",
    "quantised": "spikeopd.models.quantised:quantised",
}
# Neurons that take one step and give a share k / T_s, k = 0 .. T_s, instead of T_s spikes; they also take `levels`.
GRADED = frozenset({"quantised"})


@dataclass(frozen=True)
class Divergence:
    """(student logits, teacher logits, **options) -> sum over positions; options: argument -> option of Stage 2."""

    target: str
    options: dict[str, str] = field(default_factory=dict)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence("spikeopd.losses:forward_kl"),
    "reverse_kl": Divergence("spikeopd.losses:reverse_kl"),
    "jsd": Divergence("spikeopd.losses:jsd", {"beta": "jsd_beta"}),
}


@dataclass(frozen=True)
class Method:
    """A method of Stage 2, `target(setup, log, student_path, resume=False)`: it leaves `final/` in the run folder and
    returns the summary.

    reads: options that not every method reads, and sections other than `stage2` (`stage1`)
    internals: needs the teacher's attention maps and hidden states
    update_factor: updates it takes for each of stage2.updates
    """

    target: str
    about: str
    reads: tuple[str, ...] = ()
    internals: bool = False
    update_factor: int = 1


_CONTROLS = "spikeopd.methods.baselines"
_RATE = "stage2.rate_target"
_DIVERGENCE = ("stage2.divergence", "stage2.jsd_beta", _RATE)
METHODS: dict[str, Method] = {
    "spikeopd": Method("spikeopd.methods.opd:run", "on-policy distillation with reference and spike loss", _DIVERGENCE),
    "vanilla_opd": Method(f"{_CONTROLS}.teacher_only:vanilla", "the teacher's divergence alone", _DIVERGENCE),
    "small_lr_opd": Method(
        f"{_CONTROLS}.teacher_only:small_lr",
        "vanilla, a third of the rate, twice the updates",
        _DIVERGENCE,
        update_factor=2,
    ),
    "clipped_opd": Method(f"{_CONTROLS}.teacher_only:clipped", "vanilla, gradient norm clipped to 1", _DIVERGENCE),
    "continued_spad": Method(f"{_CONTROLS}.continued_spad:run", "Stage 1 goes on", ("stage1",), internals=True),
    "sft": Method(f"{_CONTROLS}.sft:run", "next tokens of the corpus"),
    "eopd": Method(
        f"{_CONTROLS}.eopd:run",
        "the teacher's entropy chooses the divergence",
        ("stage2.entropy_quantile", "stage2.teacher_top_k", _RATE),
    ),
    "lightning_opd": Method(
        f"{_CONTROLS}.lightning_opd:run",
        "a fixed buffer of the checkpoint's rollouts",
        ("stage2.divergence", "stage2.jsd_beta", "stage2.buffer_gib"),
    ),
    "oprd": Method(f"{_CONTROLS}.oprd:run", "hidden states", ("stage2.calibration_batches",), internals=True),
    "gkd": Method(f"{_CONTROLS}.teacher_only:gkd", "generalised Jensen-Shannon divergence", ("stage2.jsd_beta", _RATE)),
    "reverse_kl": Method(f"{_CONTROLS}.teacher_only:reverse_kl", "reverse KL to the teacher", (_RATE,)),
}
