# mypy: disable-error-code="no-untyped-def, assignment"
"""Attention of a row block: some rows of queries that share keys, against the tiles of keys that they are given.

What the kernel of whole prompts and that of few queries do alike; they differ in how they find their rows, widths and
tiles, and in where results go.
"""

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


@triton.jit
def load_queries(base, rows, head_stride, position_stride, valid, width, PACK: tl.constexpr, SIZE: tl.constexpr):
    """[rows, SIZE] of the queries, from `base` on; zeros behind `width` columns, and where there is no query."""
    column = tl.arange(0, SIZE)
    offset = (rows // PACK).to(tl.int64) * position_stride + (rows % PACK) * head_stride
    return tl.load(base + offset[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < width), other=0.0)


@triton.jit
def attended_rows(
    query, head_stride, position_stride, rows, in_range, place, first, end, tile_begin, tile_end, sequence, key, value,
    key_places, value_places, key_block, key_row, value_block, value_row, holes, block_table, table_stride, mask,
    mask_query, cos, sin, rotation_stride, basis, basis_stride, basis_row, constant, scale, softcap,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr, PACK: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr, MASK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each row (base 2), the sum of its weights over that, and for each piece of a value the
    weighted sum [ROWS, padded columns], float32.

    `query`, `key`, `value`, `basis` and `constant` are where those of the unit begin, `place` is where `first`, `end`,
    holes and masks have the rows' queries. Pieces of keys and values are (bits, ., padded columns, ...); their places,
    as `tiles.piece_places` gives them, may be constants or numbers of run time. Strides are in elements.
    """
    if PRE:
        # A pad of the first half would be the second: load each by itself.
        query_0 = load_queries(query, rows, head_stride, position_stride, in_range, HALF, PACK, HALF_PADDED)
        query_1 = load_queries(query + HALF, rows, head_stride, position_stride, in_range, HALF, PACK, HALF_PADDED)
        frequency = tl.arange(0, HALF_PADDED)
    else:
        queries = ()
        for p in tl.static_range(len(KEYS)):
            queries += (
                load_queries(
                    query + key_places[p][0], rows, head_stride, position_stride, in_range, key_places[p][1], PACK,
                    KEYS[p][2],
                ),
            )  # fmt: skip
    if MASK:
        has_holes = tl.load(holes + place, mask=in_range, other=0) > 0
        mask_rows = mask + place.to(tl.int64) * mask_query
    attends = first < end
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = ()
    for p in tl.static_range(len(VALUES)):
        weighted += (tl.zeros((ROWS, VALUES[p][2]), tl.float32),)

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
                    key + key_places[p][2], block_of_key, row_of_key, key_block, key_row, key_places[p][3], valid,
                    KEYS[p][0], KEYS[p][2], DTYPE,
                )  # fmt: skip
                latents += (numbers_of(piece, KEYS[p][0], KEYS[p][2], TILE, DTYPE),)
        if PRE:
            if COLUMNS > 0:
                key_0, key_1 = rebuilt_tile(
                    key, block_of_key, row_of_key, key_block, key_row, valid, key_places, basis, basis_stride,
                    basis_row, HALF, KEYS, HALF, HALF_PADDED, COLUMNS, TILE, ALIGN, KEY_ALIGN, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                key_0 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                key_1 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                for p in tl.static_range(len(KEYS)):
                    columns = basis + key_places[p][0]
                    width = key_places[p][1]
                    basis_0 = load_basis(columns, basis_stride, basis_row, HALF, width, 0, KEYS[p][2], HALF_PADDED)
                    basis_1 = load_basis(
                        columns, basis_stride, basis_row + HALF, HALF, width, 0, KEYS[p][2], HALF_PADDED
                    )
                    key_0 = tl.dot(latents[p], basis_0, key_0, input_precision=PRECISION)
                    key_1 = tl.dot(latents[p], basis_1, key_1, input_precision=PRECISION)
            if CONSTANT:
                some = frequency < HALF
                key_0 += tl.load(constant + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
                key_1 += tl.load(constant + HALF + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
            turn = (start + tl.zeros((), tl.int64)) * rotation_stride
            place_in_tile = tl.arange(0, TILE)
            tile_cos, tile_sin = load_rotation(
                cos + turn, sin + turn, place_in_tile, valid, rotation_stride, 0, HALF, HALF_PADDED
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
                value + value_places[p][2], block, row, value_block, value_row, value_places[p][3], valid, VALUES[p][0],
                VALUES[p][2], DTYPE,
            )  # fmt: skip
            values = numbers_of(piece, VALUES[p][0], VALUES[p][2], TILE, DTYPE)
            added += (tl.dot(weight, values, weighted[p] * shrink[:, None], input_precision=PRECISION),)
        weighted = added
    return largest, total, weighted
