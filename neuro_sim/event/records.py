"""The records that pass between `engine.py` and the compiled kernels: named integers, of which many are addresses."""

from __future__ import annotations

from typing import Any

import numpy as np


def _record(fields: str) -> np.dtype[Any]:
    """A record of int64 fields; a trailing ! marks a float64."""
    return np.dtype([(name.rstrip("!"), "f8" if name.endswith("!") else "i8") for name in fields.split()])


# Sizes ending in _pad are rounded up to whole cache lines (LINE). `row` is the length of one layer's row in tables of
# neurons; `offsets` says where a site starts in it.
PLAN = _record("""
    layers steps hidden hidden_pad ffn ffn_pad heads head_dim head_pad key_words blocks vocab vocab_pad
    head_width head_width_pad factorised two_products current_write residual_readout unit distances inhibiting decay
    row paired embed_shift epsilon!
    offsets weights thresholds biases shifts map_thresholds map_biases inhibition writes write_shifts
    embed_threshold embed_bias
    head_rows table gamma head_sums row_scale bias out_scale out_bias
""")
# offsets         int64 [10]
# weights         int64 [layers, 4]: addresses of int8 [in, out_pad]; Q, K and V are one matrix. paired: of 4-bit
#                 weights, two in a byte, [in, out_pad / 2] (plan.pack_pairs)
# thresholds      int32 [layers, row]            biases       int32 [layers, row]
# shifts          int64 [layers, 10]
# map_thresholds  int32 [layers, heads]          embed_*      int32 [hidden_pad]
# map_biases      int32 [layers, heads, LANES + distances + LANES + WORD], farthest first; distances 0: not read
# inhibition      int32 [layers, hidden] of the neurons of R; not read unless inhibiting
# writes          int32 [layers, 2, hidden_pad]: gains of a spike write, biases of a current write
# write_shifts    int32 [layers, 2, hidden_pad] of a current write
# head_rows       int8 [hidden, head_width_pad]  table        int8 [word_embed_proj_dim, vocab_pad]
# gamma           int32 [hidden]; ones without     unit         what the readout's sums are divided by
# head_sums       float64 [head_width_pad]       row_scale, bias  float64 [vocab_pad]
# out_scale, out_bias  float64 [head_width_pad] if the head has two products

WORK = _record("""
    lanes record list_size spare max_runs scratch_size
    residual embed_masks masks map_words rows factors runs num_runs sums currents wide small queries scratch
    spikes saturations additions active counts head_active narrow barrier
""")
# residual     int32 [lanes, T_s, hidden_pad]     embed_masks uint32 [lanes, row]
# masks        uint32 [layers if record else 1, lanes, row]
# map_words    uint64 [layers if record else 1, lanes, heads, T_s, blocks]
# rows         int32 [lanes, list_size]           factors     int32 [lanes, list_size]
# runs         int64 [lanes, max_runs, 4]         num_runs    int64 [lanes]
# Per thread:
# sums         int16 [threads, 4 * MAX_COLUMNS]   currents    int32 [threads, max(T_s * MAX_COLUMNS, HEAD_COLUMNS)]
# wide         int64 [threads, HEAD_COLUMNS]
# small        int32 [threads, small_size(plan)]  queries     int64 [threads, T_s * key_words]
# scratch      int64 [threads, scratch_size]: of list_rows, and of the head's NORM_FIELDS numbers a lane
# spikes       int64 [threads, lanes, layers + 1, 10, T_s]; row `layers` holds embed at site 0
# saturations  the same                           additions   int64 [threads, lanes, layers, 2, T_s]
# active       int64 [threads, lanes, layers, 6]
# Of the head:
# counts       int64 [lanes, hidden]              head_active int64 [lanes]
# narrow       float64 [lanes, head_width_pad]    barrier     int64 [16]

LANES_GIVEN = _record("count positions keys values logits_row logits")
# positions    int64 [n]                          logits_row  int64 [n]: row of logits, or -1
# keys         int64 [n]: addresses of uint64 [layers, heads, T_s, key_words, blocks * 64]
# values       int64 [n]: addresses of uint64 [layers, heads, T_s, blocks, head_pad]
# logits       float64 [., vocab_pad]
