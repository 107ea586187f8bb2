"""The head as a compiled pass: what the readout counted to logits, bit for bit as contracts.head_logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from neuro_sim.event import intrinsics as vector
from neuro_sim.event import row_intrinsics as by_row
from neuro_sim.event.constants import (
    EXACT_FLOAT,
    FETCHING_LANES,
    HEAD_COLUMNS,
    INT16_LIMIT,
    INT32_LIMIT,
    LINE,
    LIST_PADDING,
    LOGIT_INPUT_LIMIT,
    MAX_COLUMNS,
    NORM_FIELDS,
    TILE_BYTES,
    H,
)
from neuro_sim.event.intrinsics import (
    read_float,
    read_int32,
    read_int64,
    read_uint32,
    write_float,
    write_int32,
    write_int64,
)
from neuro_sim.event.kernel_base import compiled, layer_masks, meet, smaller


@compiled
def read_out(plan: Any, work: Any, lanes: int, thread: int, threads: int) -> None:
    """What the head reads: sums of the residual stream, or spike counts of the last layer and the rows they select."""
    for lane in range(thread, lanes, threads):
        counts = work.counts + 8 * plan.hidden * lane
        if plan.residual_readout:
            stream = work.residual + 4 * plan.hidden_pad * plan.steps * lane
            for i in range(plan.hidden):
                total = 0
                for step in range(plan.steps):
                    total += read_int32(stream + 4 * (plan.hidden_pad * step + i))
                write_int64(counts + 8 * i, total)
            continue
        masks, filled = layer_masks(plan, work, plan.layers - 1, lane, H), 0
        rows, factors = work.rows + 4 * work.list_size * lane, work.factors + 4 * work.list_size * lane
        for i in range(plan.hidden):
            spikes = vector.count_bits(read_uint32(masks + 4 * i))
            write_int64(counts + 8 * i, spikes)
            if spikes > 0:
                write_int32(rows + 4 * filled, i)
                write_int32(factors + 4 * filled, spikes * read_int32(plan.gamma + 4 * i))
                filled += 1
        for i in range(LIST_PADDING):
            write_int32(rows + 4 * (filled + i), 0)
        write_int64(work.head_active + 8 * lane, filled)


@compiled
def scaled_rows(
    weights: int, stride: int, columns: int, rows: int, factors: int, count: int, sums: int, wide: int, ahead: int
) -> None:
    """wide [columns] = factors @ rows, exactly: 32-bit sums, moved to 64 bits before they could overflow.

    What is prefetched lies further on in the list, or so many bytes further on in the same rows.
    """
    later, skip = weights + ahead, 0 if ahead else 16  # the next four of the list
    vector.clear(wide, 8 * columns)
    vector.clear(sums, 4 * columns)
    largest = 0
    for i in range(count):
        largest = max(largest, abs(read_int32(factors + 4 * i)))
    safe = INT32_LIMIT // (128 * max(largest, 1)) - 1  # rows whose products cannot overflow
    i, used = 0, 0
    while largest < INT16_LIMIT and i + 4 <= count:
        if used + 4 > safe:
            by_row.move_pairs(sums, wide, columns)
            used = 0
        row = rows + 4 * i
        by_row.pair_rows_4(weights, stride, row, factors + 4 * i, columns, sums, later, row + skip)
        i, used = i + 4, used + 4
    by_row.move_pairs(sums, wide, columns)
    used = 0
    while i < count:
        if used + 4 > safe:
            by_row.move_sums(sums, wide, columns)
            used = 0
        row = rows + 4 * i
        if i + 4 <= count:
            by_row.scale_rows_4(weights, stride, row, factors + 4 * i, columns, sums, later, row + skip)
            i, used = i + 4, used + 4
        else:
            by_row.scale_rows_1(weights, stride, row, factors + 4 * i, columns, sums, later, row + skip)
            i, used = i + 1, used + 1
    by_row.move_sums(sums, wide, columns)


@compiled
def summed_rows(plan: Any, counts: int, column: int, columns: int, wide: int) -> None:
    """wide [columns] = sums of the residual stream, through project_out if the head is factorised."""
    if not plan.factorised:
        for i in range(columns):
            write_int64(wide + 8 * i, read_int64(counts + 8 * (column + i)) if column + i < plan.hidden else 0)
        return
    vector.clear(wide, 8 * columns)
    for i in range(plan.hidden):
        row = plan.head_rows + plan.head_width_pad * i + column
        by_row.add_scaled(row, read_int64(counts + 8 * i), columns, wide)


@compiled
def divide(number: int, by: int) -> float:
    """number / by, rounded once, as Python divides integers. by: below 2**53."""
    if number < EXACT_FLOAT:
        return number / by
    quotient, rest, halvings = number // by, number % by, 0
    while quotient < 2 * EXACT_FLOAT:  # two more bits than a float64 keeps
        rest *= 2
        quotient = 2 * quotient + (rest >= by)
        rest -= by if rest >= by else 0
        halvings += 1
    return float(quotient | (rest != 0)) * 0.5**halvings


@compiled
def normalise(plan: Any, counts: int, norm: int) -> None:
    """Unit, mu and 1/sqrt(var + epsilon): contracts.normalise_counts, operation by operation."""
    total, squares = 0, 0
    for i in range(plan.hidden):
        count = read_int64(counts + 8 * i)
        total += count
        squares += count * count
    mu = total / (plan.hidden * plan.unit)
    variance = divide(squares, plan.hidden * plan.unit * plan.unit) - mu * mu
    write_float(norm, float(plan.unit))
    write_float(norm + 8, mu)
    write_float(norm + 16, 1.0 / math.sqrt(max(variance, 0.0) + plan.epsilon))


@compiled
def run_head(plan: Any, work: Any, given: Any, thread: int, threads: int) -> None:
    """contracts.head_logits for the lanes that want logits.

    A plain head on spike counts is one product with the table. Otherwise there are two: what the readout counted to
    14-bit integers y, and y times the table.
    """
    lanes = given.count
    wide = work.wide + 8 * HEAD_COLUMNS * thread
    sums = work.currents + 4 * max(plan.steps * MAX_COLUMNS, HEAD_COLUMNS) * thread
    norms = work.scratch + 8 * work.scratch_size * thread
    # Several lanes share the rows through the cache, so their tiles are narrower.
    tile = HEAD_COLUMNS if lanes == 1 else max(LINE, smaller(HEAD_COLUMNS, TILE_BYTES // plan.hidden // LINE * LINE))
    lines = plan.head_width_pad // LINE
    start, stop = lines * thread // threads * LINE, lines * (thread + 1) // threads * LINE
    for lane in range(lanes):
        normalise(plan, work.counts + 8 * plan.hidden * lane, norms + 8 * NORM_FIELDS * lane)
    for column in range(start, stop, tile):
        columns = smaller(tile, stop - column)
        for lane in range(lanes):
            row = read_int64(given.logits_row + 8 * lane)
            if row < 0:
                continue
            counts, norm = work.counts + 8 * plan.hidden * lane, norms + 8 * NORM_FIELDS * lane
            if plan.residual_readout:
                summed_rows(plan, counts, column, columns, wide)
            else:
                scaled_rows(
                    plan.head_rows + column, plan.head_width_pad, columns, work.rows + 4 * work.list_size * lane,
                    work.factors + 4 * work.list_size * lane, read_int64(work.head_active + 8 * lane), sums, wide,
                    columns if lanes > 1 and lane < FETCHING_LANES else 0,
                )  # fmt: skip
            by_row.centre(wide, plan.head_sums + 8 * column, norm, columns, wide)
            if plan.two_products:
                out = work.narrow + 8 * (plan.head_width_pad * lane + column)
                by_row.affine(wide, plan.out_scale + 8 * column, plan.out_bias + 8 * column, columns, out)
            else:
                out = given.logits + 8 * (plan.vocab_pad * row + column)
                by_row.affine(wide, plan.row_scale + 8 * column, plan.bias + 8 * column, columns, out)
    if not plan.two_products:
        return
    meet(work, threads)
    for lane in range(thread, lanes, threads):
        for k in range(plan.head_width):
            y = np.rint(read_float(work.narrow + 8 * (plan.head_width_pad * lane + k)))
            y = min(max(y, float(-LOGIT_INPUT_LIMIT)), float(LOGIT_INPUT_LIMIT))
            write_int32(work.rows + 4 * (work.list_size * lane + k), k)
            write_int32(work.factors + 4 * (work.list_size * lane + k), int(y))
        for k in range(plan.head_width, plan.head_width + LIST_PADDING):
            write_int32(work.rows + 4 * (work.list_size * lane + k), 0)
    meet(work, threads)
    lines = plan.vocab_pad // LINE
    start, stop = lines * thread // threads * LINE, lines * (thread + 1) // threads * LINE
    for column in range(start, stop, tile):
        columns = smaller(tile, stop - column)
        for lane in range(lanes):
            row = read_int64(given.logits_row + 8 * lane)
            if row < 0:
                continue
            scaled_rows(
                plan.table + column, plan.vocab_pad, columns, work.rows + 4 * work.list_size * lane,
                work.factors + 4 * work.list_size * lane, plan.head_width, sums, wide,
                columns if lanes > 1 and lane < FETCHING_LANES else 0,
            )  # fmt: skip
            by_row.to_float(wide, columns)
            out = given.logits + 8 * (plan.vocab_pad * row + column)
            by_row.affine(wide, plan.row_scale + 8 * column, plan.bias + 8 * column, columns, out)
