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
of a GPU would idle, the keys of each are split as well (`slices`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import (
    key_rows,
    load_basis,
    load_piece,
    load_rotation,
    marked_keys,
    numbers_of,
    rebuilt_tile,
    rotate_tile,
    scaled_logits,
)
from .tasks import row_block_at

INTEGERS = [
    "batch_size", "units", "blocks", "seq_len", "query_offset", "query_batch", "query_head", "query_position",
    "key_offset", "key_block", "key_row", "value_offset", "value_block", "value_row", "output_offset",
    "output_position", "lse_offset", "lse_head", "table_stride", "mask_query", "rotation_stride", "basis_stride",
    "basis_offset", "constant_offset", "first_task",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""

SLICE_FIELDS = tl.constexpr(3)
"""Numbers of a slice of a task's keys: the task, its first tile, its end."""


@triton.jit
def _load_queries(base, rows, head_stride, position_stride, valid, WIDTH: tl.constexpr, PACK: tl.constexpr,
                  FIRST: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """[rows, SIZE] of the queries, columns from FIRST on of WIDTH; zeros where there is none."""
    column = FIRST + tl.arange(0, SIZE)
    offset = (rows // PACK).to(tl.int64) * position_stride + (rows % PACK) * head_stride
    return tl.load(base + offset[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    query, key, value, output, lse, first_key, end_key, holes, block_table, mask, cos, sin, basis, constant, tasks,
    query_start_loc, slices, batch_size, units, blocks, seq_len, query_offset, query_batch, query_head, query_position,
    key_offset, key_block, key_row, value_offset, value_block, value_row, output_offset, output_position, lse_offset,
    lse_head, table_stride, mask_query, rotation_stride, basis_stride, basis_offset, constant_offset, first_task, scale,
    softcap,
    QK: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, QK_ROW: tl.constexpr,
    V_ROW: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, KEY_PAGE: tl.constexpr,
    MASK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, SLICED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ROWS of the ROWS * SPLIT of a task, a row block of one unit of one sequence; see `prefill_attention`. Offsets and
    strides in units of ALIGN, of the key and value rows in KEY_ALIGN and VALUE_ALIGN. PACKED: queries of sequences of
    any lengths behind each other, as `query_start_loc` and `tasks` say. PAGE: keys of a page of values, KEY_PAGE of
    keys: 0, as where there are none, of those that were rebuilt.

    SLICED: of the keys of a task only the tiles that `slices` names, into `output` [programs, ROWS, V] and `lse`
    [programs, ROWS] (base 2), both float32, which `slices.join_slices` joins.

    A unit is a group, or in domain `pre` one of the HEADS KV heads of a group; PACK query heads share its keys. PRE:
    keys are rebuilt here; else `key` has them, QK columns a unit. KEYS and VALUES are the pieces of a unit (see
    `shapes.static_pieces`), QK_ROW and V_ROW its elements in the rows.
    """
    if SLICED:
        unit = tl.program_id(0) % units
        slice_of = slices + tl.program_id(0) // units * SLICE_FIELDS
        task = tl.load(slice_of)
    else:
        task = first_task + tl.program_id(0) // SPLIT
        unit = task % units
        task = task // units
    sequence, row_block, first_query, count = row_block_at(
        task, tasks, query_start_loc, batch_size, blocks, seq_len, PACKED
    )
    group = unit // HEADS
    rows = (row_block * SPLIT + tl.program_id(0) % SPLIT) * ROWS + tl.arange(0, ROWS)
    in_range = rows < count * PACK
    place = first_query + rows // PACK
    first = tl.load(first_key + place, mask=in_range, other=0)
    end = tl.load(end_key + place, mask=in_range, other=0)
    attends = first < end
    if SLICED:
        tile_begin = tl.load(slice_of + 1)
        tile_end = tl.load(slice_of + 2)
    else:
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
    DTYPE: tl.constexpr = query.dtype.element_ty
    if PRE:
        width: tl.constexpr = 2 * HALF
        # A pad of the first half would be the second: load each by itself.
        query_0 = _load_queries(query_base, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED)
        query_1 = _load_queries(
            query_base + HALF, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED
        )
        basis_base = basis + basis_offset * ALIGN + group * QK
        basis_row = (unit % HEADS) * width
        constant_base = constant + (constant_offset + unit) * width
        frequency = tl.arange(0, HALF_PADDED)
    else:
        queries = ()
        for p in tl.static_range(len(KEYS)):
            queries += (
                _load_queries(
                    query_base + KEYS[p][1], rows, head_stride, position_stride, in_range, KEYS[p][2], PACK, 0,
                    KEYS[p][5],
                ),
            )  # fmt: skip
    if MASK:
        has_holes = tl.load(holes + place, mask=in_range, other=0) > 0
        mask_rows = mask + place.to(tl.int64) * mask_query
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = ()
    for p in tl.static_range(len(VALUES)):
        weighted += (tl.zeros((ROWS, VALUES[p][5]), tl.float32),)

    for tile in range(tile_begin, tile_end):
        start = tile * TILE
        index = start + tl.arange(0, TILE)
        # Rows behind the last key of the tile's rows may hold anything, pages behind it may not exist.
        valid = (index < tl.max(end, 0)) & (index >= tl.min(tl.where(attends, first, 2147483647), 0))
        block, row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, TILE)
        if KEY_PAGE == PAGE:
            block_of_key, row_of_key = block, row
        else:
            block_of_key, row_of_key = sequence + 0 * index, index
        latents = ()
        if COLUMNS == 0:
            for p in tl.static_range(len(KEYS)):
                piece = load_piece(
                    key_base + KEYS[p][3], block_of_key, row_of_key, key_block, key_row, KEYS[p][4], valid, KEYS[p][0],
                    KEYS[p][5], DTYPE,
                )  # fmt: skip
                latents += (numbers_of(piece, KEYS[p][0], KEYS[p][5], TILE, DTYPE),)
        if PRE:
            stride = basis_stride * ALIGN
            if COLUMNS > 0:
                places = ()
                for p in tl.static_range(len(KEYS)):
                    places += ((KEYS[p][1], KEYS[p][2], KEYS[p][3], KEYS[p][4]),)
                key_0, key_1 = rebuilt_tile(
                    key_base, block_of_key, row_of_key, key_block, key_row, valid, places, basis_base, stride,
                    basis_row, HALF, KEYS, HALF, HALF_PADDED, COLUMNS, TILE, ALIGN, KEY_ALIGN, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                key_0 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                key_1 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                for p in tl.static_range(len(KEYS)):
                    columns = basis_base + KEYS[p][1]
                    basis_0 = load_basis(columns, stride, basis_row, HALF, KEYS[p][2], 0, KEYS[p][5], HALF_PADDED)
                    basis_1 = load_basis(
                        columns, stride, basis_row + HALF, HALF, KEYS[p][2], 0, KEYS[p][5], HALF_PADDED
                    )
                    key_0 = tl.dot(latents[p], basis_0, key_0, input_precision=PRECISION)
                    key_1 = tl.dot(latents[p], basis_1, key_1, input_precision=PRECISION)
            if CONSTANT:
                some = frequency < HALF
                key_0 += tl.load(constant_base + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
                key_1 += tl.load(constant_base + HALF + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
            turn = (start + tl.zeros((), tl.int64)) * (rotation_stride * ALIGN)
            place_in_tile = tl.arange(0, TILE)
            tile_cos, tile_sin = load_rotation(
                cos + turn, sin + turn, place_in_tile, valid, rotation_stride * ALIGN, 0, HALF, HALF_PADDED
            )
            key_0, key_1 = rotate_tile(key_0, key_1, tile_cos, tile_sin)
            scores = tl.dot(query_0, tl.trans(key_0.to(query_0.dtype)), input_precision=PRECISION)
            scores = tl.dot(query_1, tl.trans(key_1.to(query_0.dtype)), scores, input_precision=PRECISION)
        else:
            scores = tl.zeros((ROWS, TILE), tl.float32)
            for p in tl.static_range(len(KEYS)):
                scores = tl.dot(queries[p], tl.trans(latents[p]), scores, input_precision=PRECISION)
        scores = scaled_logits(scores, scale, softcap, SOFT_CAP)
        attended = (index[None, :] >= first[:, None]) & (index[None, :] < end[:, None])
        if MASK:
            attended = attended & marked_keys(mask_rows, start, has_holes, TILE)
        scores = tl.where(attended, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, 1)
        largest = new_largest
        weight = weight.to(DTYPE)
        added = ()
        for p in tl.static_range(len(VALUES)):
            piece = load_piece(
                value_base + VALUES[p][3], block, row, value_block, value_row, VALUES[p][4], valid, VALUES[p][0],
                VALUES[p][5], DTYPE,
            )  # fmt: skip
            values = numbers_of(piece, VALUES[p][0], VALUES[p][5], TILE, DTYPE)
            added += (tl.dot(weight, values, weighted[p] * shrink[:, None], input_precision=PRECISION),)
        weighted = added

    safe_total = tl.where(total == 0.0, 1.0, total)
    base_2_lse = largest + tl.log2(safe_total)
    if SLICED:
        slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(lse + slot, base_2_lse, mask=in_range)
        out = output + (slot * V)[:, None]
    else:
        head = unit * PACK + rows % PACK
        lse_place = lse + (lse_offset + head).to(tl.int64) * lse_head + place
        tl.store(lse_place, base_2_lse * 0.6931471805599453, mask=in_range)
        out = output + (place * (output_position.to(tl.int64) * ALIGN) + output_offset * ALIGN + head * V)[:, None]
    for p in tl.static_range(len(VALUES)):
        column = tl.arange(0, VALUES[p][5])[None, :]
        some = in_range[:, None] & (column < VALUES[p][2])
        result = (weighted[p] / safe_total[:, None]).to(output.dtype.element_ty)
        tl.store(out + VALUES[p][1] + column, result, mask=some)
