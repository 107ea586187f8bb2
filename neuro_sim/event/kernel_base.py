"""What the compiled passes share: constants, barriers, places in the buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from numba import njit, types
from numpy.typing import NDArray

from neuro_sim.event import intrinsics as vector
from neuro_sim.event.intrinsics import STEP_GROUP, read_int64, write_int64
from spikeopd.contracts import LOGIT_INPUT_BITS

Array = NDArray[Any]
# Called by compiled code only: without wrappers for Python the first start is a sixth shorter.
_BARE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compiled: Callable[[Any], Any] = njit(nogil=True, **_BARE)

# Columns of the per-layer tables, in the order of contracts.LAYER_SITES and of plan.WEIGHTS.
Q, K, V, A, R, O, X, F, Y, H = range(10)  # noqa: E741
NUM_SITES = 10
W_QKV, W_O, W_1, W_2 = range(4)
NUM_WEIGHTS = 4
FROM_INPUT, FROM_R, FROM_X, FROM_F, FROM_O, FROM_Y = range(6)  # drivers whose active rows are counted
NUM_DRIVERS = 6

PATTERNS = 1 << STEP_GROUP
LIST_PADDING = 16  # entries the prefetching row kernels may read beyond a list
RUN_FIELDS = 4  # first place in the list, rows, step mask, group of steps to widen into afterwards (or -1)
INT16_LIMIT, INT32_LIMIT = 1 << 15, 1 << 31
EXACT_FLOAT = 1 << 53  # integers below are exact in float64
TILE_BYTES = 192 << 10  # weights of one tile, so that they stay in a 512 KiB second-level cache for all lanes
MAX_COLUMNS = 1536  # int16 sums of four steps in 12 KiB: they stay in the first-level cache
HEAD_COLUMNS = 2048
LOGIT_INPUT_LIMIT = (1 << (LOGIT_INPUT_BITS - 1)) - 1


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
