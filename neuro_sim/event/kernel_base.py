"""What the compiled passes share: how they are compiled, barriers, places in the buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from numba import njit, types

from neuro_sim.event import intrinsics as vector
from neuro_sim.event.constants import NUM_DRIVERS, NUM_SITES
from neuro_sim.event.intrinsics import read_int64, write_int64

# Called by compiled code only: no wrappers for Python. A division by zero cannot happen, so nothing has to raise.
_BARE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
compiled: Callable[[Any], Any] = njit(nogil=True, **_BARE)
entry: Callable[[Any], Any] = njit(types.int64(*[types.int64] * 8), **_BARE)  # compiled where it is defined


if sys.platform == "win32":

    @compiled
    def yield_cpu() -> None:
        pass

else:
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @compiled
    def yield_cpu() -> None:
        _sched_yield()


@compiled
def meet(work: Any, threads: int) -> None:
    """Wait until every thread is here. Spins a little, then gives the core away."""
    if threads == 1:
        return
    arrived, generation = work.barrier, work.barrier + 64
    before = vector.atomic_load(generation)
    if vector.atomic_add(arrived, 1) == threads - 1:
        vector.atomic_store(arrived, 0)
        vector.atomic_add(generation, 1)
        return
    spins = 0
    while vector.atomic_load(generation) == before:
        spins += 1
        if spins > 2000:
            yield_cpu()


@compiled
def smaller(a: int, b: int) -> int:
    return a if a < b else b


@compiled
def layer_masks(plan: Any, work: Any, layer: int, lane: int, site: int) -> Any:
    """Address of a site's masks; without recording all layers share one row."""
    slot = layer if work.record else 0
    return work.masks + 4 * ((slot * work.lanes + lane) * plan.row + read_int64(plan.offsets + 8 * site))


@compiled
def counter(plan: Any, work: Any, table: int, thread: int, lane: int, layer: int, site: int) -> Any:
    """Address of the per-step counters of a site in `work.spikes` or `work.saturations`."""
    return table + 8 * plan.steps * (((thread * work.lanes + lane) * (plan.layers + 1) + layer) * NUM_SITES + site)


@compiled
def count_active(plan: Any, work: Any, thread: int, lane: int, layer: int, driver: int, active: int) -> None:
    address = work.active + 8 * (((thread * work.lanes + lane) * plan.layers + layer) * NUM_DRIVERS + driver)
    write_int64(address, read_int64(address) + active)
