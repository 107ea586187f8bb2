"""The compiled passes of the event engine: one call decodes a block of tokens, on any number of threads.

A *lane* is one token of the block: the next token of one of several sequences (batched decoding), or one of several
successive tokens of one sequence (prefill). The block goes through the network layer by layer, so a weight row that
several lanes need is fetched from memory once. All threads run `decode_block` on disjoint columns or heads and meet
at barriers; everything is an exact integer, so the result does not depend on their number.

Spikes of a neuron are a uint32 mask with one bit per step, which is also what the row kernels want: rows are visited
grouped by mask, each row once, and their sum is added to every step in which those inputs spiked.

The kernels see the model, the buffers and the lanes as records of integers (`records.py`), in which
arrays are addresses: that keeps a call cheap and compilation short. `engine.py` fills them and keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

from neuro_sim.event import intrinsics as vector
from neuro_sim.event import row_intrinsics as by_row
from neuro_sim.event.constants import (
    FETCHING_LANES,
    FROM_F,
    FROM_INPUT,
    FROM_O,
    FROM_R,
    FROM_X,
    HEAD_COLUMNS,
    LANES,
    LINE,
    LIST_PADDING,
    MAX_COLUMNS,
    NUM_SITES,
    NUM_WEIGHTS,
    PATTERNS,
    RUN_FIELDS,
    SEGMENT_ROWS,
    STEP_GROUP,
    TILE_BYTES,
    W_1,
    W_2,
    W_O,
    W_QKV,
    WORD,
    A,
    F,
    H,
    K,
    O,
    Q,
    R,
    V,
    X,
    Y,
    small_size,
)
from neuro_sim.event.intrinsics import read_int32, read_int64, read_uint32, write_int32, write_int64
from neuro_sim.event.kernel_base import compiled, count_active, counter, entry, layer_masks, meet, smaller
from neuro_sim.event.kernel_head import read_out, run_head, scaled_rows
from neuro_sim.event.records import LANES_GIVEN, PLAN, WORK

# --- projections ----------------------------------------------------------------------------------------------------


@compiled
def list_rows(masks: int, inputs: int, steps: int, rows: int, spare: int, runs: int, scratch: int) -> tuple[int, int]:
    """Group the inputs that spiked by their step pattern: fills rows and runs, returns (runs, active inputs).

    Steps are taken four at a time. A segment of inputs ends before any step could have more than SEGMENT_ROWS spikes
    in it, so int16 sums cannot overflow; the last run of a segment says that they are to be widened then.
    Silent inputs are passed over a word of spikes at a time. Those that are silent in this group of steps alone are
    listed too, from place `spare` on, where nobody looks: that needs no branch.
    """
    num_runs, filled = 0, 0
    chunks = (inputs + SEGMENT_ROWS - 1) // SEGMENT_ROWS
    place, histogram = scratch, scratch + 8 * PATTERNS  # int64 [PATTERNS], [chunks, PATTERNS]
    for group in range((steps + STEP_GROUP - 1) // STEP_GROUP):
        shift = STEP_GROUP * group
        for chunk in range(chunks):
            counts = histogram + 8 * PATTERNS * chunk
            vector.clear(counts, 8 * PATTERNS)
            for start in range(chunk * SEGMENT_ROWS, smaller(inputs, (chunk + 1) * SEGMENT_ROWS), WORD):
                word = vector.active_word(masks + 4 * start)
                while word != 0:
                    i, word = start + vector.lowest_bit(word), word & (word - 1)
                    raise_by(counts + 8 * ((read_uint32(masks + 4 * i) >> shift) & (PATTERNS - 1)), 1)
        first = 0
        while first < chunks:
            last, counts = first + 1, histogram + 8 * PATTERNS * first
            while last < chunks and fits(counts, histogram + 8 * PATTERNS * last):
                for pattern in range(PATTERNS):
                    raise_by(counts + 8 * pattern, read_int64(histogram + 8 * (PATTERNS * last + pattern)))
                last += 1
            before = num_runs
            for pattern in range(1, PATTERNS):
                write_int64(place + 8 * pattern, filled)
                length = read_int64(counts + 8 * pattern)
                if length > 0:
                    run = runs + 8 * RUN_FIELDS * num_runs
                    write_int64(run, filled)
                    write_int64(run + 8, length)
                    write_int64(run + 16, pattern)
                    write_int64(run + 24, -1)
                    num_runs += 1
                    filled += length
            if num_runs > before:
                write_int64(runs + 8 * RUN_FIELDS * num_runs - 8, group)
                write_int64(place, spare)
                for start in range(first * SEGMENT_ROWS, smaller(inputs, last * SEGMENT_ROWS), WORD):
                    word = vector.active_word(masks + 4 * start)
                    while word != 0:
                        i, word = start + vector.lowest_bit(word), word & (word - 1)
                        at = place + 8 * ((read_uint32(masks + 4 * i) >> shift) & (PATTERNS - 1))
                        write_int32(rows + 4 * read_int64(at), i)
                        raise_by(at, 1)
            first = last
    active = filled
    if steps > STEP_GROUP:  # an input may be listed once in every group
        active = 0
        for start in range(0, inputs, WORD):
            active += vector.count_bits(vector.active_word(masks + 4 * start))
    for i in range(LIST_PADDING):
        write_int32(rows + 4 * (filled + i), 0)
    return num_runs, active


@compiled
def raise_by(address: int, amount: int) -> None:
    write_int64(address, read_int64(address) + amount)


@compiled
def fits(first: int, more: int) -> bool:
    """Whether two chunks together still have at most SEGMENT_ROWS spikes in every step, by their histograms."""
    for step in range(STEP_GROUP):
        count = 0
        for pattern in range(PATTERNS):
            if (pattern >> step) & 1:
                count += read_int64(first + 8 * pattern) + read_int64(more + 8 * pattern)
        if count > SEGMENT_ROWS:
            return False
    return True


@compiled
def make_lists(plan: Any, work: Any, lanes: int, layer: int, driver: int, thread: int, threads: int) -> None:
    """Row lists of every lane for the projection that `driver` (FROM_*) drives."""
    for lane in range(thread, lanes, threads):
        inputs = plan.hidden
        if driver == FROM_INPUT:
            if layer == 0:
                masks = work.embed_masks + 4 * lane * plan.row
            else:
                masks = layer_masks(plan, work, layer - 1, lane, H)
        elif driver == FROM_R:
            masks = layer_masks(plan, work, layer, lane, R)
        elif driver == FROM_X:
            masks = layer_masks(plan, work, layer, lane, X)
        else:
            masks = layer_masks(plan, work, layer, lane, F)
            inputs = plan.ffn
        rows, runs = work.rows + 4 * work.list_size * lane, work.runs + 8 * RUN_FIELDS * work.max_runs * lane
        scratch = work.scratch + 8 * work.scratch_size * thread
        num_runs, active = list_rows(masks, inputs, plan.steps, rows, work.spare, runs, scratch)
        write_int64(work.num_runs + 8 * lane, num_runs)
        count_active(plan, work, thread, lane, layer, driver, active)


@compiled
def add_pairs(weights: int, stride: int, columns: int, row: int, last: int, pattern: int, sums: int) -> None:
    """Rows of 4-bit weights, listed from `row` to `last`, for the steps of one pattern."""
    while row + 32 <= last:
        by_row.add_pairs_8(weights, stride, row, columns, pattern, sums)
        row += 32
    if row + 16 <= last:
        by_row.add_pairs_4(weights, stride, row, columns, pattern, sums)
        row += 16
    if row + 8 <= last:
        by_row.add_pairs_2(weights, stride, row, columns, pattern, sums)
        row += 8
    if row < last:
        by_row.add_pairs_1(weights, stride, row, columns, pattern, sums)


@compiled
def add_rows(weights: int, stride: int, columns: int, row: int, last: int, pattern: int, sums: int) -> None:
    """Rows of 8-bit weights, listed from `row` to `last`, for the steps of one pattern."""
    while row + 16 <= last:
        by_row.add_rows_4(weights, stride, row, columns, pattern, sums)
        row += 16
    if row + 8 <= last:
        by_row.add_rows_2(weights, stride, row, columns, pattern, sums)
        row += 8
    if row < last:
        by_row.add_rows_1(weights, stride, row, columns, pattern, sums)


@compiled
def accumulate(
    weights: int, stride: int, columns: int, steps: int, rows: int, runs: int, num_runs: int, cached: bool, ahead: int,
    paired: int, sums: int, currents: int,
) -> None:  # fmt: skip
    """currents [steps, columns] = for every step the sum of the rows that spiked in it.

    From memory whole rows are read and the sums kept in the first-level cache; of weights that are in the cache already
    it is the other way round: a line of columns at a time, its sums in registers.
    """
    vector.clear(currents, 4 * steps * columns)
    if cached:
        if num_runs > 0 and paired:
            by_row.collect_pairs(weights, stride, rows, runs, num_runs, columns, steps, currents, ahead)
        elif num_runs > 0:
            by_row.collect_rows(weights, stride, rows, runs, num_runs, columns, steps, currents, ahead)
        return
    vector.clear(sums, 2 * STEP_GROUP * columns)
    for index in range(num_runs):
        run = runs + 8 * RUN_FIELDS * index
        row, pattern, group = rows + 4 * read_int64(run), read_int64(run + 16), read_int64(run + 24)
        last = row + 4 * read_int64(run + 8)
        if paired:
            add_pairs(weights, stride, columns, row, last, pattern, sums)
        else:
            add_rows(weights, stride, columns, row, last, pattern, sums)
        if group >= 0:
            first = STEP_GROUP * group
            by_row.widen_sums(sums, currents + 4 * first * columns, columns, smaller(STEP_GROUP, steps - first))


@compiled
def fire_tile(
    plan: Any, work: Any, lane: int, layer: int, site: int, column: int, columns: int, currents: int, stride: int,
    thread: int,
) -> Any:  # fmt: skip
    """Neurons [column, column + columns) of a site: from currents to masks and counts. How many spiked at all."""
    at = 4 * (plan.row * layer + read_int64(plan.offsets + 8 * site) + column)
    return vector.fire(
        currents, stride, plan.thresholds + at, plan.biases + at,
        read_int64(plan.shifts + 8 * (NUM_SITES * layer + site)), plan.decay, columns, plan.steps,
        layer_masks(plan, work, layer, lane, site) + 4 * column,
        counter(plan, work, work.spikes, thread, lane, layer, site),
        counter(plan, work, work.saturations, thread, lane, layer, site),
    )  # fmt: skip


@compiled
def fire_part(
    plan: Any, work: Any, lane: int, layer: int, site: int, half: int, column: int, columns: int, currents: int,
    stride: int, thread: int,
) -> None:  # fmt: skip
    """Neurons of one site; for O (half 0) and Y (half 1) also the residual stream and the neurons that read it."""
    if columns <= 0:  # padding only
        return
    if half < 0:
        fire_tile(plan, work, lane, layer, site, column, columns, currents, stride, thread)
        return
    pad = plan.hidden_pad
    residual = work.residual + 4 * (pad * plan.steps * lane + column)
    at = 4 * (pad * (2 * layer + half) + column)
    if plan.current_write:
        vector.add_currents(
            residual, 4 * pad, currents, stride, plan.write_shifts + at, plan.writes + at, columns, plan.steps
        )
    else:
        active = fire_tile(plan, work, lane, layer, site, column, columns, currents, stride, thread)
        count_active(plan, work, thread, lane, layer, FROM_O + half, active)
        masks = layer_masks(plan, work, layer, lane, site) + 4 * column
        vector.add_gains(residual, 4 * pad, masks, plan.writes + at, columns, plan.steps)
    fire_tile(plan, work, lane, layer, X if half == 0 else H, column, columns, residual, 4 * pad, thread)


@compiled
def project(plan: Any, work: Any, lanes: int, layer: int, driver: int, thread: int, threads: int) -> None:
    """One projection and all that follows it neuron by neuron: spikes, and behind W_o and W_2 the residual stream."""
    inputs, outputs, pad = plan.hidden, plan.hidden, plan.hidden_pad
    weight, site, parts, half = W_QKV, Q, 3, -1  # Q, K and V: three matrices side by side
    if driver == FROM_R:
        weight, site, parts, half = W_O, O, 1, 0
    elif driver == FROM_X:
        weight, site, parts, outputs, pad = W_1, F, 1, plan.ffn, plan.ffn_pad
    elif driver == FROM_F:
        weight, site, parts, half, inputs = W_2, Y, 1, 1, plan.ffn
    paired = plan.paired  # two weights in a byte: a line holds twice as many columns
    line = LINE << paired
    lines = parts * pad // line
    start, stop = lines * thread // threads * line, lines * (thread + 1) // threads * line
    # One lane: long rows. Several lanes: so many columns that all their rows stay in the cache from lane to lane.
    tile = MAX_COLUMNS
    if lanes > 1:
        tile = smaller(tile, max(line, (TILE_BYTES << paired) // inputs // line * line))
    sums = work.sums + 2 * STEP_GROUP * MAX_COLUMNS * thread
    currents = work.currents + 4 * max(plan.steps * MAX_COLUMNS, HEAD_COLUMNS) * thread
    weights = read_int64(plan.weights + 8 * (NUM_WEIGHTS * layer + weight))
    stride = parts * pad >> paired
    while start < stop:
        columns = smaller(tile, stop - start)
        for lane in range(lanes):
            ahead = columns >> paired if lane < FETCHING_LANES else 0  # the same rows of the next tile
            accumulate(
                weights + (start >> paired), stride, columns, plan.steps,
                work.rows + 4 * work.list_size * lane, work.runs + 8 * RUN_FIELDS * work.max_runs * lane,
                read_int64(work.num_runs + 8 * lane), lanes > 1, ahead,
                paired, sums, currents,
            )  # fmt: skip
            done = 0
            while done < columns:
                part, column = (start + done) // pad, (start + done) % pad
                taken = smaller(columns - done, pad - column)
                real = smaller(taken, outputs - column)
                fire_part(
                    plan, work, lane, layer, site + part, half, column, real, currents + 4 * done, 4 * columns, thread
                )
                done += taken
        start += columns


# --- attention ------------------------------------------------------------------------------------------------------


@compiled
def word_mask(bits: int) -> int:
    """A word with the lowest `bits` bits set, at most all 64."""
    return -1 if bits >= WORD else (1 << bits) - 1


@compiled
def store_key_value(plan: Any, work: Any, given: Any, lane: int, layer: int, head: int) -> None:
    """Append the K and V spikes of one head to the packed cache."""
    position = read_int64(given.positions + 8 * lane)
    keys, values = read_int64(given.keys + 8 * lane), read_int64(given.values + 8 * lane)
    key_masks = layer_masks(plan, work, layer, lane, K) + 4 * head * plan.head_dim
    value_masks = layer_masks(plan, work, layer, lane, V) + 4 * head * plan.head_dim
    for step in range(plan.steps):
        index = (layer * plan.heads + head) * plan.steps + step
        for w in range(plan.key_words):
            word = vector.pack_word(key_masks + 4 * WORD * w, step) & word_mask(plan.head_dim - WORD * w)
            write_int64(keys + 8 * ((index * plan.key_words + w) * plan.blocks * WORD + position), word)
        row = values + 8 * (index * plan.blocks + position // WORD) * plan.head_pad
        vector.put_bits(row, value_masks, step, position, plan.head_pad)


scratch_of_attend = compiled(small_size)


@compiled
def attend(plan: Any, work: Any, given: Any, lane: int, layer: int, head: int, thread: int, threads: int) -> None:
    """Q against all keys up to the lane's position, the attention neurons, and the sum of the chosen values."""
    steps, words, pad = plan.steps, plan.key_words, plan.head_pad
    context = read_int64(given.positions + 8 * lane) + 1
    blocks = (context + WORD - 1) // WORD
    index = (layer * plan.heads + head) * steps
    keys, values = read_int64(given.keys + 8 * lane), read_int64(given.values + 8 * lane)
    capacity = 8 * WORD * plan.blocks  # bytes of one word of all keys
    value_bytes = 8 * plan.blocks * pad
    if lane + 1 < given.count:  # whose keys are read next
        following = read_int64(given.keys + 8 * (lane + 1)) + index * words * capacity
    else:
        following = read_int64(given.keys) + (index + threads * steps) * words * capacity
    threshold = read_int32(plan.map_thresholds + 4 * (layer * plan.heads + head))
    shift = read_int64(plan.shifts + 8 * (NUM_SITES * layer + A))
    value_shift = read_int64(plan.shifts + 8 * (NUM_SITES * layer + R))
    queries = work.queries + 8 * steps * words * thread
    found = work.small + 4 * scratch_of_attend(steps, pad) * thread
    sums = found + 4 * steps * LANES
    query_masks = layer_masks(plan, work, layer, lane, Q) + 4 * head * plan.head_dim
    slot = layer if work.record else 0
    chosen = work.map_words + 8 * ((slot * work.lanes + lane) * plan.heads + head) * steps * plan.blocks
    spikes = counter(plan, work, work.spikes, thread, lane, layer, A)
    saturations = counter(plan, work, work.saturations, thread, lane, layer, A)
    additions = work.additions + 8 * ((thread * work.lanes + lane) * plan.layers + layer) * 2 * steps
    for step in range(steps):
        for w in range(words):
            word = vector.pack_word(query_masks + 4 * WORD * w, step) & word_mask(plan.head_dim - WORD * w)
            write_int64(queries + 8 * (step * words + w), word)
    vector.clear(found, 4 * steps * LANES)
    for step in range(steps):  # spikes of the heads before this one, until the sums of values take the place
        write_int32(sums + 4 * step * pad, read_int64(spikes + 8 * step))
    if plan.distances:
        biases = plan.map_biases + 4 * (2 * LANES + WORD + plan.distances) * (layer * plan.heads + head)
        vector.attend_biased(
            keys + index * words * capacity, words * capacity, capacity, words, queries, steps, threshold, shift,
            plan.decay, context, chosen, 8 * plan.blocks, found, spikes, saturations,
            values + index * value_bytes, value_bytes, biases, plan.distances,
        )  # fmt: skip
    else:
        vector.attend_keys(
            keys + index * words * capacity, words * capacity, capacity, words, queries, steps, threshold, shift,
            plan.decay, context, chosen, 8 * plan.blocks, found, spikes, saturations,
            values + index * value_bytes, value_bytes, 0, 0,
        )  # fmt: skip
    for step in range(steps):
        step_sums = sums + 4 * step * pad
        step_values = values + (index + step) * value_bytes
        seen = read_int64(spikes + 8 * step) - read_int32(step_sums)
        ahead = following + step * words * capacity
        vector.sum_values(step_values, 8 * pad, blocks, chosen + 8 * step * plan.blocks, step_sums, ahead)
        coincidences, taken = 0, 0
        for i in range(LANES):
            coincidences += read_int32(found + 4 * (step * LANES + i))
        for i in range(plan.head_dim):
            taken += read_int32(step_sums + 4 * i)
        if plan.inhibiting:
            taken_from = plan.inhibition + 4 * (layer * plan.hidden + head * plan.head_dim)
            for i in range(plan.head_dim):
                counted = read_int32(step_sums + 4 * i) << value_shift
                write_int32(step_sums + 4 * i, counted + read_int32(taken_from + 4 * i) * seen)
        write_int64(additions + 8 * step, read_int64(additions + 8 * step) + coincidences)
        write_int64(additions + 8 * (steps + step), read_int64(additions + 8 * (steps + step)) + taken)
    # The neighbouring head may belong to another thread, so the masks of R go to scratch and are copied.
    result = sums + 4 * steps * pad
    at = 4 * (plan.row * layer + read_int64(plan.offsets + 8 * R) + head * plan.head_dim)
    vector.fire(
        sums, 4 * pad, plan.thresholds + at, plan.biases + at, 0 if plan.inhibiting else value_shift,
        plan.decay, plan.head_dim, steps, result, counter(plan, work, work.spikes, thread, lane, layer, R),
        counter(plan, work, work.saturations, thread, lane, layer, R),
    )  # fmt: skip
    masks = layer_masks(plan, work, layer, lane, R) + 4 * head * plan.head_dim
    for i in range(plan.head_dim):
        write_int32(masks + 4 * i, read_uint32(result + 4 * i))


# --- the whole block ------------------------------------------------------------------------------------------------


@compiled
def run_block(plan: Any, work: Any, given: Any, thread: int, threads: int) -> None:
    """Feed one block of tokens. `work.residual` holds each lane's embedding current at every step."""
    lanes, pad = given.count, plan.hidden_pad
    for lane in range(thread, lanes, threads):
        vector.fire(
            work.residual + 4 * pad * plan.steps * lane, 4 * pad, plan.embed_threshold, plan.embed_bias,
            plan.embed_shift, plan.decay, plan.hidden, plan.steps, work.embed_masks + 4 * plan.row * lane,
            counter(plan, work, work.spikes, thread, lane, plan.layers, 0),
            counter(plan, work, work.saturations, thread, lane, plan.layers, 0),
        )  # fmt: skip
    meet(work, threads)
    for layer in range(plan.layers):
        for driver in range(FROM_F + 1):  # FROM_INPUT, FROM_R, FROM_X, FROM_F
            make_lists(plan, work, lanes, layer, driver, thread, threads)
            meet(work, threads)
            project(plan, work, lanes, layer, driver, thread, threads)
            meet(work, threads)
            if driver == FROM_INPUT:
                # A thread keeps its heads for storing and attending, so it needs no barrier between the two.
                for head in range(thread, plan.heads, threads):
                    for lane in range(lanes):
                        store_key_value(plan, work, given, lane, layer, head)
                    for lane in range(lanes):
                        attend(plan, work, given, lane, layer, head, thread, threads)
                meet(work, threads)
    read_out(plan, work, lanes, thread, threads)
    meet(work, threads)
    run_head(plan, work, given, thread, threads)


as_plan, as_work, as_given = (vector.record_at(kind) for kind in (PLAN, WORK, LANES_GIVEN))


@entry
def enter(job: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """The one way in (native.py). job 0: a block of plan, work, given, thread, threads; 1: the arguments of scaled_rows
    with rows as long as there are columns, prefetching in the order of the list."""
    if job == 0:
        run_block(as_plan(a), as_work(b), as_given(c), d, e)
    else:
        scaled_rows(a, b, b, c, d, e, f, g, 0)
    return 0
