"""Sizes and places that the compiled passes and whoever fills their buffers agree on. No numba."""

from __future__ import annotations

from spikeopd.contracts import LOGIT_INPUT_BITS

LINE = 64  # columns handled at once by the row kernels: one cache line of int8 weights; of int4 it holds two of them
NIBBLE_OFFSET = 8  # a 4-bit weight w is stored as w + 8
NIBBLE_ROWS = 16  # so many of them add up in 8 bits
LANES = 16  # neurons handled at once
WORD = 64  # spikes in one packed word
STEP_GROUP = 4  # steps whose accumulators are updated in one pass over a row
SEGMENT_ROWS = 256  # rows whose int8 sum always fits int16: 256 * -128 = -2**15

# Columns of the per-layer tables, in the order of contracts.LAYER_SITES and of plan.WEIGHTS.
Q, K, V, A, R, O, X, F, Y, H = range(10)  # noqa: E741
NUM_SITES = 10
W_QKV, W_O, W_1, W_2 = range(4)
NUM_WEIGHTS = 4
FROM_INPUT, FROM_R, FROM_X, FROM_F, FROM_O, FROM_Y = range(6)  # drivers whose active rows are counted
NUM_DRIVERS = 6

PATTERNS = 1 << STEP_GROUP
AHEAD = 16  # how many places ahead in a list the row kernels prefetch
LIST_PADDING = 32  # entries the prefetching row kernels may read beyond a list
RUN_FIELDS = 4  # first place in the list, rows, step mask, group of steps to widen into afterwards (or -1)
INT16_LIMIT, INT32_LIMIT = 1 << 15, 1 << 31
EXACT_FLOAT = 1 << 53  # integers below are exact in float64
TILE_BYTES = 192 << 10  # weights of one tile, so that they stay in a 512 KiB second-level cache for all lanes
MAX_COLUMNS = 1536  # int16 sums of four steps in 12 KiB: they stay in the first-level cache
FETCHING_LANES = 8  # of a block: their rows of the next tile are prefetched; together they need nearly all
HEAD_COLUMNS = 2048
NORM_FIELDS = 3  # unit, mu and 1 / sqrt(variance + epsilon) of a lane
LOGIT_INPUT_LIMIT = (1 << (LOGIT_INPUT_BITS - 1)) - 1


def small_size(steps: int, head_pad: int) -> int:
    """int32 scratch of `attend`: coincidences, value sums, masks."""
    return steps * (LANES + head_pad) + head_pad


def lists_size(inputs: int) -> int:
    """int64 scratch of `list_rows`: the place of each pattern, then a histogram for every SEGMENT_ROWS inputs."""
    return PATTERNS * (1 + (inputs + SEGMENT_ROWS - 1) // SEGMENT_ROWS)
