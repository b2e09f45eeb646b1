# mypy: disable-error-code="no-untyped-def"
"""Prefill: many query positions a sequence, against the packed rows of a layer that hold the new keys already.

Floor: FLOPs of the attended pairs of queries and keys, 2 (d_qk + d_v) each (and 2 qk_rank head_dim a key and KV head
for keys rebuilt in domain `pre`) / the matrix rate. One launch a class of groups, compiled for its widths as sums of
two powers of two (80 = 64 + 16).

In domain `pre` keys are rebuilt once, in memory, before the attention (`rebuild`); where there are few row blocks, or
no memory for it, by each row block for itself, in registers.

Rows of a tile are (position, query head) pairs of the heads that share keys, positions slowest, so that a chunk of few
positions still fills a tile. Rows know the range of keys that they attend to: causal, windows, padding, chunks
against an existing cache and sequences of different lengths are all ranges. Queries are [sequence, position], or of
sequences of any lengths packed behind each other (`tasks`). The longest row blocks are launched first, and those of a
last round that would not fill the GPU in pieces, by a launch of their own. Where there are so few row blocks that most
of a GPU would idle, the keys of each are split as well, by another kernel (`few_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_block import attended_rows
from .tasks import row_block_at

INTEGERS = [
    "batch_size", "units", "blocks", "seq_len", "query_offset", "query_batch", "query_head", "query_position",
    "key_offset", "key_block", "key_row", "value_offset", "value_block", "value_row", "output_offset",
    "output_position", "lse_offset", "lse_head", "table_stride", "mask_query", "rotation_stride", "basis_stride",
    "basis_offset", "constant_offset", "first_task",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    query, key, value, output, lse, first_key, end_key, holes, block_table, mask, cos, sin, basis, constant, tasks,
    query_start_loc, batch_size, units, blocks, seq_len, query_offset, query_batch, query_head, query_position,
    key_offset, key_block, key_row, value_offset, value_block, value_row, output_offset, output_position, lse_offset,
    lse_head, table_stride, mask_query, rotation_stride, basis_stride, basis_offset, constant_offset, first_task, scale,
    softcap,
    QK: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, QK_ROW: tl.constexpr,
    V_ROW: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, KEY_PAGE: tl.constexpr,
    MASK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ROWS of the ROWS * SPLIT of a task, a row block of one unit of one sequence; see `prefill_attention`. Offsets and
    strides in units of ALIGN, of the key and value rows in KEY_ALIGN and VALUE_ALIGN. PACKED: queries of sequences of
    any lengths behind each other, as `query_start_loc` and `tasks` say. PAGE: keys of a page of values, KEY_PAGE of
    keys: 0, as where there are none, of those that were rebuilt.

    A unit is a group, or in domain `pre` one of the HEADS KV heads of a group; PACK query heads share its keys. PRE:
    keys are rebuilt here; else `key` has them, QK columns a unit. KEYS and VALUES are the pieces of a unit (see
    `tile_sizes.static_pieces`), QK_ROW and V_ROW its elements in the rows.
    """
    task = first_task + tl.program_id(0) // SPLIT
    unit = task % units
    sequence, row_block, first_query, count = row_block_at(
        task // units, tasks, query_start_loc, batch_size, blocks, seq_len, PACKED
    )
    group = unit // HEADS
    rows = (row_block * SPLIT + tl.program_id(0) % SPLIT) * ROWS + tl.arange(0, ROWS)
    in_range = rows < count * PACK
    place = first_query + rows // PACK
    first = tl.load(first_key + place, mask=in_range, other=0)
    end = tl.load(end_key + place, mask=in_range, other=0)
    attends = first < end
    tile_begin = tl.min(tl.where(attends, first, 2147483647), 0) // TILE
    tile_end = (tl.max(tl.where(attends, end, 0), 0) + TILE - 1) // TILE

    # Of 64 bits: a large cache, or a long prompt, has more than 2^31 elements.
    key_block = key_block.to(tl.int64) * KEY_ALIGN
    key_row = key_row.to(tl.int64) * KEY_ALIGN
    value_block = value_block.to(tl.int64) * VALUE_ALIGN
    value_row = value_row.to(tl.int64) * VALUE_ALIGN
    head_stride = query_head.to(tl.int64) * ALIGN
    position_stride = query_position.to(tl.int64) * ALIGN
    query_base = query + (first_query if PACKED else sequence) * (query_batch.to(tl.int64) * ALIGN)
    query_base += unit * PACK * head_stride + query_offset.to(tl.int64) * ALIGN
    # Latents are a group's, rebuilt keys a head's.
    key_base = key + (key_offset * KEY_ALIGN + (group if PRE else unit) * QK_ROW)
    value_base = value + (value_offset * VALUE_ALIGN + group * V_ROW)
    key_places = ()
    for p in tl.static_range(len(KEYS)):
        key_places += ((KEYS[p][1], KEYS[p][3], KEYS[p][4], KEYS[p][5]),)
    value_places = ()
    for p in tl.static_range(len(VALUES)):
        value_places += ((VALUES[p][1], VALUES[p][3], VALUES[p][4], VALUES[p][5]),)
    largest, total, weighted = attended_rows(
        query_base, head_stride, position_stride, rows, in_range, place, first, end, tile_begin, tile_end, sequence,
        key_base, value_base, key_places, value_places, key_block, key_row, value_block, value_row, holes, block_table,
        table_stride, mask, mask_query, cos, sin, rotation_stride * ALIGN, basis + basis_offset * ALIGN + group * QK,
        basis_stride * ALIGN, (unit % HEADS) * (2 * HALF), constant + (constant_offset + unit) * (2 * HALF), scale,
        softcap, KEYS, VALUES, PRE, CONSTANT, PACK, HALF, HALF_PADDED, ROWS, TILE, PAGE, KEY_PAGE, MASK, SOFT_CAP,
        ALIGN, KEY_ALIGN, query.dtype.element_ty, PRECISION, COLUMNS,
    )  # fmt: skip

    safe_total = tl.where(total == 0.0, 1.0, total)
    head = unit * PACK + rows % PACK
    natural = (largest + tl.log2(safe_total)) * 0.6931471805599453
    tl.store(lse + (lse_offset + head).to(tl.int64) * lse_head + place, natural, mask=in_range)
    out = output + (place * (output_position.to(tl.int64) * ALIGN) + output_offset * ALIGN + head * V)[:, None]
    for p in tl.static_range(len(VALUES)):
        column = tl.arange(0, VALUES[p][2])[None, :]
        some = in_range[:, None] & (column < VALUES[p][3])
        result = (weighted[p] / safe_total[:, None]).to(output.dtype.element_ty)
        tl.store(out + VALUES[p][1] + column, result, mask=some)
