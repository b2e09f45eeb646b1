# mypy: disable-error-code="no-untyped-def"
"""Decoding: one query position a sequence, against the packed rows of a layer.

Floor: bytes of the compressed keys and values that are attended / memory bandwidth. All query rows of a group are one
tile, so its latents are read once. In domain `pre` the keys of each KV head are rebuilt from them by a matrix product
and rotated in registers, from latents that stay there or, with COLUMNS, from so many columns at a time, which come out
of the L1 or L2 cache again for every head. Queries are rotated back to the start of the tile, so that keys only turn by
their place in it, by a table of `TILE` rows that stays in the L1 cache; that is right for a stepped table too, one with
a row only for each STEP of positions: where tiles begin and STEP are powers of two, and so either divides the other.
With NODES only the FAST planes of a key are rebuilt so; what the others contribute comes from the latents themselves
(`absorbed`). With STEP no key is rebuilt (`stepped`).

A program works through tiles of keys of one unit (a part of a layer, see `layer_table`, and a sequence) after another;
which ones is the schedule's matter:

- `stream`: a fixed number of programs with slices of equal bytes over all parts, sequences and tiles; a slice may
  begin and end inside a unit, and `combine` joins the results by their log-sum-exp.
- `lpt`: whole units, the longest first, each to the program with the least work (FDC section 5.3).
- `none`: one program a unit.

Logits are held transposed, [keys, query rows]: keys are the long side, and rebuilt ones go into the next product
without leaving registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..table_fields import (
    BASIS_COLUMN,
    BASIS_ROW,
    BODY,
    FIELDS,
    FIRST_HEAD,
    QK_16,
    QK_OFFSET,
    QK_RANK,
    QUERY_OFFSET,
    V_16,
    V_OFFSET,
    WORK,
    WORK_BEFORE,
)
from ..tiles import (
    key_rows,
    load_basis,
    load_rotation,
    numbers_of,
    piece_places,
    rebuilt_tile,
    rotate_back,
    rotate_tile,
    scaled_logits,
)
from .absorbed import absorb_queries, slow_scores
from .combine import tiles_before, unit_on_the_line
from .softmax import attended_keys, load_pieces, store_result, weighed
from .stepped import stepped_segment


@triton.jit
def _rebuilt_keys(
    latents, places, basis_base, basis_stride, rows, count, KEYS: tl.constexpr, HALF: tl.constexpr,
    FREQUENCIES: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both halves of a head's keys [keys, FREQUENCIES] from latents that are in registers, by `count` of its rows."""
    key_0 = tl.zeros((TILE, FREQUENCIES), tl.float32)
    key_1 = tl.zeros((TILE, FREQUENCIES), tl.float32)
    for p in tl.static_range(len(KEYS)):
        columns = basis_base + places[p][0]
        width = places[p][1]
        basis_0 = load_basis(columns, basis_stride, rows, count, width, 0, KEYS[p][2], FREQUENCIES)
        basis_1 = load_basis(columns, basis_stride, rows + HALF, count, width, 0, KEYS[p][2], FREQUENCIES)
        key_0 = tl.dot(latents[p], basis_0, key_0, input_precision=PRECISION)
        key_1 = tl.dot(latents[p], basis_1, key_1, input_precision=PRECISION)
    return key_0, key_1


@triton.jit
def _head_scores(
    scores, key_0, key_1, head, first, start, head_base, constant_base, cos, sin, rotation_len, rotation_stride,
    DTYPE: tl.constexpr, CONSTANT: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr,
    FREQUENCIES: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores [keys, query rows] plus what one KV head contributes at FREQUENCIES of its rotary frequencies."""
    if CONSTANT:
        frequency = first + tl.arange(0, FREQUENCIES)
        constants = constant_base + head * (2 * HALF) + frequency
        key_0 += tl.load(constants, mask=frequency < HALF, other=0.0).to(tl.float32)[None, :]
        key_1 += tl.load(constants + HALF, mask=frequency < HALF, other=0.0).to(tl.float32)[None, :]
    place = tl.arange(0, TILE)
    tile_cos, tile_sin = load_rotation(cos, sin, place, place < rotation_len, rotation_stride, first, HALF, FREQUENCIES)
    key_0, key_1 = rotate_tile(key_0, key_1, tile_cos, tile_sin)

    query_row = tl.arange(0, TILE_ROWS)[:, None]
    column = first + tl.arange(0, FREQUENCIES)[None, :]
    # Rows of other heads are zeros: each row gets the logits of its own head.
    own = (query_row // HEADS_PER_KV == head) & (query_row < ROWS) & (column < HALF)
    query_0 = tl.load(head_base + column, mask=own, other=0.0).to(tl.float32)
    query_1 = tl.load(head_base + HALF + column, mask=own, other=0.0).to(tl.float32)
    row_of_start = start + tl.zeros((1,), tl.int64)
    start_cos, start_sin = load_rotation(
        cos, sin, row_of_start, row_of_start < rotation_len, rotation_stride, first, HALF, FREQUENCIES
    )
    query_0, query_1 = rotate_back(query_0, query_1, start_cos, start_sin)
    query_0 = tl.trans(query_0.to(DTYPE))
    query_1 = tl.trans(query_1.to(DTYPE))
    scores = tl.dot(key_0.to(DTYPE), query_0, scores, input_precision=PRECISION)
    return tl.dot(key_1.to(DTYPE), query_1, scores, input_precision=PRECISION)


@triton.jit
def _segment(
    query, key, value, partial, partial_lse, output, lse, row, slot, first_tile, last_tile, first, end, holes, sequence,
    block_table, mask, cos, sin, basis, constant, absorbed, absorbed_constant, query_stride, head_stride, key_block,
    key_row, value_block, value_row, table_stride, mask_stride, rotation_len, rotation_stride, basis_stride,
    output_stride, lse_stride, steps, scale, softcap,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr, FREQUENCIES: tl.constexpr,
    ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    MASK: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    PARTIAL_WIDTH: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, COLUMNS: tl.constexpr,
    FAST: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ABSORBED_COLUMNS: tl.constexpr,
    PLANES: tl.constexpr, NODE_ROWS: tl.constexpr, BASIS_STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles first_tile ... last_tile - 1 of one unit, `row` being its part's row of the table."""
    DTYPE: tl.constexpr = query.dtype.element_ty
    key_base = key + tl.multiple_of(tl.load(row + QK_OFFSET), ROW_ALIGN)
    value_base = value + tl.multiple_of(tl.load(row + V_OFFSET), ROW_ALIGN)
    key_places = piece_places(row + QK_16, KEYS, DTYPE, ALIGN, ROW_ALIGN)
    value_places = piece_places(row + V_16, VALUES, DTYPE, ALIGN, ROW_ALIGN)
    query_row = tl.arange(0, TILE_ROWS)
    query_base = query + sequence.to(tl.int64) * query_stride
    if PRE:
        first_head = tl.load(row + FIRST_HEAD)
        head_base = query_base + (first_head + query_row[:, None]) * head_stride
        basis_base = basis + tl.multiple_of(tl.load(row + BASIS_COLUMN), ALIGN)
        basis_row = tl.load(row + BASIS_ROW)
        constant_base = constant + first_head // HEADS_PER_KV * (2 * HALF)
    else:
        query_base += tl.multiple_of(tl.load(row + QUERY_OFFSET), ALIGN)
        row_base = query_base + query_row[:, None] * tl.multiple_of(tl.load(row + QK_RANK), ALIGN)
        queries = ()
        for p in tl.static_range(len(KEYS)):
            column = tl.arange(0, KEYS[p][2])[None, :]
            some = (query_row[:, None] < ROWS) & (column < key_places[p][1])
            queries += (tl.trans(tl.load(row_base + key_places[p][0] + column, mask=some, other=0.0)),)
    largest = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    weighted = ()
    for p in tl.static_range(len(VALUES)):
        weighted += (tl.zeros((TILE_ROWS, VALUES[p][2]), tl.float32),)

    if AHEAD:
        ahead = load_pieces(
            key_base, first_tile, last_tile, first, end, sequence, block_table, table_stride, key_block, key_row,
            key_places, KEYS, PAGE, TILE, DTYPE,
        )  # fmt: skip
    for tile in range(first_tile, last_tile):
        start = tile * TILE
        if len(NODES) > 0:  # noqa: SIM102 - known to the compiler, the other is not
            # Queries of the planes that are not rebuilt, once a block.
            if (tile == first_tile) | (tile % (BLOCK // TILE) == 0):
                absorb_queries(
                    absorbed, absorbed_constant, steps // (FAST // FREQUENCIES), query_base + first_head * head_stride,
                    head_stride, start // BLOCK * BLOCK, cos, sin, rotation_len, rotation_stride, basis_base,
                    basis_stride, basis_row, tl.multiple_of(tl.load(row + QK_RANK), ALIGN), constant_base, DTYPE,
                    CONSTANT, NODES, HEADS_PER_KV, HALF, FAST, TILE_ROWS, WIDTH, ABSORBED_COLUMNS, PLANES, NODE_ROWS,
                    BASIS_STAGES, 0, PRECISION,
                )  # fmt: skip
        index = start + tl.arange(0, TILE)
        valid = (index >= first) & (index < end)
        if AHEAD:
            # The inner loop below keeps the compiler from copying asynchronously: what it is to hide is loaded here.
            pieces = ahead
            ahead = load_pieces(
                key_base, tile + 1, last_tile, first, end, sequence, block_table, table_stride, key_block, key_row,
                key_places, KEYS, PAGE, TILE, DTYPE,
            )  # fmt: skip
            value_pieces = load_pieces(
                value_base, tile, last_tile, first, end, sequence, block_table, table_stride, value_block, value_row,
                value_places, VALUES, PAGE, TILE, DTYPE,
            )  # fmt: skip
        elif COLUMNS == 0:
            pieces = load_pieces(
                key_base, tile, last_tile, first, end, sequence, block_table, table_stride, key_block, key_row,
                key_places, KEYS, PAGE, TILE, DTYPE,
            )  # fmt: skip
        latents = ()
        block = 0
        block_row = 0
        if COLUMNS == 0:
            for p in tl.static_range(len(KEYS)):
                latents += (numbers_of(pieces[p], KEYS[p][0], KEYS[p][2], TILE, DTYPE),)
        else:
            block, block_row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, TILE)
        if len(NODES) > 0:
            scores = slow_scores(
                absorbed, absorbed_constant, key_places, latents, key_base, block, block_row, key_block, key_row,
                valid, index % BLOCK, KEYS, CONSTANT, NODES, ROWS, TILE_ROWS, WIDTH, COLUMNS, TILE, ALIGN, ROW_ALIGN,
                DTYPE, PRECISION,
            )  # fmt: skip
        else:
            scores = tl.zeros((TILE, TILE_ROWS), tl.float32)
        if PRE:
            # As many steps as an argument says: known, few would be unrolled, and all bases hoisted into registers.
            for step in range(steps):
                head = step // (FAST // FREQUENCIES)
                frequency = (step % (FAST // FREQUENCIES)) * FREQUENCIES
                rows = basis_row + head * (2 * HALF) + frequency
                if COLUMNS > 0:
                    key_0, key_1 = rebuilt_tile(
                        key_base, block, block_row, key_block, key_row, valid, key_places, basis_base, basis_stride,
                        rows, HALF - frequency, KEYS, HALF, FREQUENCIES, COLUMNS, TILE, ALIGN, ROW_ALIGN, DTYPE,
                        PRECISION,
                    )  # fmt: skip
                else:
                    key_0, key_1 = _rebuilt_keys(
                        latents, key_places, basis_base, basis_stride, rows, HALF - frequency, KEYS, HALF, FREQUENCIES,
                        TILE, PRECISION,
                    )  # fmt: skip
                scores = _head_scores(
                    scores, key_0, key_1, head, frequency, start, head_base, constant_base, cos, sin, rotation_len,
                    rotation_stride, DTYPE, CONSTANT, HEADS_PER_KV, HALF, FREQUENCIES, ROWS, TILE_ROWS, TILE,
                    PRECISION,
                )  # fmt: skip
        else:
            for p in tl.static_range(len(KEYS)):
                scores = tl.dot(latents[p], queries[p], scores, input_precision=PRECISION)
        scores = scaled_logits(scores, scale, softcap, SOFT_CAP)
        attended = attended_keys(index, valid, mask, mask_stride, holes, end, sequence, MASK)
        scores = tl.where(attended[:, None], scores, float("-inf"))
        weight, shrink, largest, total = weighed(scores, largest, total)
        weight = tl.trans(weight).to(DTYPE)
        if not AHEAD:
            value_pieces = load_pieces(
                value_base, tile, last_tile, first, end, sequence, block_table, table_stride, value_block, value_row,
                value_places, VALUES, PAGE, TILE, DTYPE,
            )  # fmt: skip
        added = ()
        for p in tl.static_range(len(VALUES)):
            values = numbers_of(value_pieces[p], VALUES[p][0], VALUES[p][2], TILE, DTYPE)
            added += (tl.dot(weight, values, weighted[p] * shrink[:, None], input_precision=PRECISION),)
        weighted = added

    store_result(
        partial, partial_lse, output, lse, row, slot, sequence, output_stride, lse_stride, largest, total, weighted,
        value_places, VALUES, ROWS, TILE_ROWS, TILE_ROWS, SPLIT, ALIGN, PARTIAL_WIDTH,
    )  # fmt: skip


INTEGERS = [
    "batch_size", "query_stride", "head_stride", "key_block", "key_row", "value_block", "value_row", "table_stride",
    "mask_stride", "rotation_len", "rotation_stride", "basis_stride", "output_stride", "lse_stride", "parts",
    "total_work", "steps",
]  # fmt: skip
"""Not specialised on their values: what divides them is said by ALIGN, so that one compiled kernel serves them all."""


@triton.jit(do_not_specialize=INTEGERS)
def decode_kernel(
    query, key, value, partial, partial_lse, output, lse, table, first_key, end_key, holes, tile_prefix, order, bounds,
    block_table, mask, cos, sin, basis, constant, absorbed, absorbed_constant, batch_size, query_stride, head_stride,
    key_block, key_row, value_block, value_row, table_stride, mask_stride, rotation_len, rotation_stride, basis_stride,
    output_stride, lse_stride, parts, total_work, steps, scale, softcap,
    BODIES: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr,
    FREQUENCIES: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    MASK: tl.constexpr, SOFT_CAP: tl.constexpr, SCHEDULE: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    PARTIAL_WIDTH: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS_PADDED: tl.constexpr, BATCH_PADDED: tl.constexpr, FAST: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ABSORBED_COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    NODE_ROWS: tl.constexpr, KEPT_ROWS: tl.constexpr, BASIS_STAGES: tl.constexpr, STEP: tl.constexpr,
    TILE_NODES: tl.constexpr, CHUNK: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """See `decode_attention`. BODIES: the pieces of each body (see `layer_table`); the table says which serves a part.

    Strides come in units of ALIGN elements, of the key and value rows in ROW_ALIGN, so that the compiler knows what
    divides them (or it would load latents two bytes at a time); of offsets and widths it knows by `multiple_of`.
    Products with strides are of 64 bits, since a large cache has more than 2^31 elements.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    key_block = key_block.to(tl.int64) * ROW_ALIGN
    key_row = key_row.to(tl.int64) * ROW_ALIGN
    value_block = value_block.to(tl.int64) * ROW_ALIGN
    value_row = value_row.to(tl.int64) * ROW_ALIGN
    query_stride = query_stride.to(tl.int64) * ALIGN
    head_stride = head_stride.to(tl.int64) * ALIGN
    basis_stride = basis_stride * ALIGN
    output_stride = output_stride.to(tl.int64) * ALIGN
    rotation_stride = rotation_stride * ALIGN
    if SCHEDULE == "stream":
        total_tiles = tl.load(tile_prefix + batch_size)
        begin = program * (total_tiles * total_work) // programs
        finish = (program + 1) * (total_tiles * total_work) // programs
        first_unit = _unit_at(begin, table, tile_prefix, parts, batch_size, PARTS_PADDED, BATCH_PADDED)
        last_unit = _unit_at(finish - 1, table, tile_prefix, parts, batch_size, PARTS_PADDED, BATCH_PADDED)
        if begin >= finish:
            last_unit = first_unit - 1
        places_begin = first_unit
        places_end = last_unit + 1
    elif SCHEDULE == "lpt":
        places_begin = tl.load(bounds + program)
        places_end = tl.load(bounds + program + 1)
    else:
        places_begin = program.to(tl.int32)
        places_end = places_begin + 1
    for i in range(places_begin, places_end):
        if SCHEDULE == "lpt":
            unit = tl.load(order + i)
        else:
            unit = i
        part = unit // batch_size
        sequence = unit % batch_size
        first = tl.load(first_key + sequence)
        end = tl.load(end_key + sequence)
        first_tile = 0
        last_tile = tl.load(tile_prefix + sequence + 1) - tl.load(tile_prefix + sequence)
        if SCHEDULE == "stream":
            start, work, tiles = unit_on_the_line(table, tile_prefix, part, sequence, batch_size)
            first_tile = tiles_before(begin, start, work, tiles).to(tl.int32)
            last_tile = tiles_before(finish, start, work, tiles)
        first_tile += first // TILE
        last_tile = last_tile.to(tl.int32) + first // TILE
        row = table + part * FIELDS
        body = tl.load(row + BODY)
        if (SCHEDULE != "stream") | (first_tile < last_tile):
            for choice in tl.static_range(len(BODIES)):
                if body == choice:
                    if STEP > 0:
                        stepped_segment(
                            query, key, value, partial, partial_lse, output, lse, row, program + unit, first_tile,
                            last_tile, first, end, tl.load(holes + sequence), sequence, block_table, mask, cos, sin,
                            basis, constant, absorbed + program * (KEPT_ROWS * WIDTH),
                            absorbed_constant + program * KEPT_ROWS, query_stride, head_stride, key_block, key_row,
                            value_block, value_row, table_stride, mask_stride, rotation_len, rotation_stride,
                            basis_stride, output_stride, lse_stride, steps, scale, softcap, BODIES[choice][0],
                            BODIES[choice][1], CONSTANT, HEADS_PER_KV, HALF, ROWS, TILE_ROWS, TILE, PAGE, MASK,
                            SOFT_CAP, SCHEDULE == "stream", ALIGN, ROW_ALIGN, PARTIAL_WIDTH, PRECISION, JOINT, NODES,
                            BLOCK, CHUNK, STEP, TILE_NODES, WIDTH, ABSORBED_COLUMNS, PLANES, NODE_ROWS,
                            BASIS_STAGES,
                        )  # fmt: skip
                    else:
                        _segment(
                            query, key, value, partial, partial_lse, output, lse, row, program + unit, first_tile,
                            last_tile, first, end, tl.load(holes + sequence), sequence, block_table, mask, cos, sin,
                            basis, constant, absorbed + program * (KEPT_ROWS * WIDTH),
                            absorbed_constant + program * KEPT_ROWS, query_stride, head_stride, key_block, key_row,
                            value_block, value_row, table_stride, mask_stride, rotation_len, rotation_stride,
                            basis_stride, output_stride, lse_stride, steps, scale, softcap, BODIES[choice][0],
                            BODIES[choice][1], PRE, CONSTANT, HEADS_PER_KV, HALF, FREQUENCIES, ROWS, TILE_ROWS, TILE,
                            PAGE, MASK, SOFT_CAP, SCHEDULE == "stream", ALIGN, ROW_ALIGN, PARTIAL_WIDTH, PRECISION,
                            AHEAD, COLUMNS, FAST, NODES, BLOCK, WIDTH, ABSORBED_COLUMNS, PLANES, NODE_ROWS,
                            BASIS_STAGES,
                        )  # fmt: skip


@triton.jit
def _unit_at(place, table, tile_prefix, parts, batch_size, PARTS_PADDED: tl.constexpr, BATCH_PADDED: tl.constexpr):
    """The unit that a place on the line of all work lies in: counts of what begins before it, no search."""
    total_tiles = tl.load(tile_prefix + batch_size)
    column = tl.arange(0, PARTS_PADDED)
    before = tl.load(table + column * FIELDS + WORK_BEFORE, mask=column < parts, other=0).to(tl.int64) * total_tiles
    part = tl.sum(((before <= place) & (column < parts)).to(tl.int32), 0) - 1
    part = tl.maximum(part, 0)
    row = table + part * FIELDS
    work = tl.load(row + WORK).to(tl.int64)
    rest = place - tl.load(row + WORK_BEFORE).to(tl.int64) * total_tiles
    column = tl.arange(0, BATCH_PADDED)
    before = tl.load(tile_prefix + column, mask=column < batch_size, other=0) * work
    sequence = tl.sum(((before <= rest) & (column < batch_size)).to(tl.int32), 0) - 1
    return part * batch_size + tl.maximum(sequence, 0)
