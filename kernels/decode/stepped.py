# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
"""Decoding keys that RoPE turned within blocks of STEP positions before they were compressed: none is rebuilt.

What is left of a key's turn is that of the beginning of its block, so that a query which is turned back to there, a
node, and taken into the latent's basis (`absorbed`) meets the latents themselves. Queries are absorbed for a CHUNK of
keys, and then its tiles are gone through in a loop of loads and products alone, which the compiler can copy ahead for.

A tile has several nodes. The query rows of each are rows of their own, side by side, which attend to the keys of their
node alone and have a softmax of their own: few query rows so fill a matrix product that they would leave empty. In the
end `_joined_nodes` joins them.
"""

import triton
import triton.language as tl

from ..table_fields import BASIS_COLUMN, BASIS_ROW, FIRST_HEAD, QK_16, QK_OFFSET, QK_RANK, V_16, V_OFFSET
from ..tiles import numbers_of, piece_places, scaled_logits
from .absorbed import absorb_queries
from .softmax import attended_keys, load_pieces, store_result, weighed


@triton.jit
def _logits(
    absorbed, absorbed_constant, places, latents, KEYS: tl.constexpr, CONSTANT: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of a tile of latents with the queries of all of its nodes, [keys, TILE_ROWS]; only those of a key's own
    node are logits.

    `absorbed` and `absorbed_constant` are where what `absorb_queries` stored of the tile's first node begins: ROWS
    query rows of each node, the next node's STRIDE rows behind them.
    """
    query_row = tl.arange(0, TILE_ROWS)
    used = query_row % STRIDE < ROWS
    scores = tl.zeros((TILE, TILE_ROWS), tl.float32)
    for p in tl.static_range(len(KEYS)):
        column = tl.arange(0, KEYS[p][2])
        rows = absorbed + places[p][0] + query_row[:, None] * WIDTH + column[None, :]
        queries = tl.load(rows, mask=used[:, None] & (column < places[p][1])[None, :], other=0.0)
        scores = tl.dot(latents[p], tl.trans(queries), scores, input_precision=PRECISION)
    if CONSTANT:
        scores += tl.load(absorbed_constant + query_row, mask=used, other=0.0)[None, :]
    return scores


@triton.jit
def _joined_nodes(largest, total, weighted, NODES: tl.constexpr, STRIDE: tl.constexpr):
    """The largest logits (base 2), sums of weights and weighted values of query rows, [STRIDE] or [STRIDE, columns],
    from those of each of a tile's nodes, which lie behind each other.
    """
    of_nodes = tl.reshape(largest, (NODES, STRIDE))
    over_all = tl.max(of_nodes, 0)
    reference = tl.where(over_all == float("-inf"), 0.0, over_all)
    shrink = tl.exp2(of_nodes - reference[None, :])
    added = ()
    for p in tl.static_range(len(weighted)):
        values = tl.reshape(weighted[p], (NODES, STRIDE, weighted[p].shape[1]))
        added += (tl.sum(values * shrink[:, :, None], 0),)
    return over_all, tl.sum(tl.reshape(total, (NODES, STRIDE)) * shrink, 0), added


@triton.jit
def stepped_segment(
    query, key, value, partial, partial_lse, output, lse, row, slot, first_tile, last_tile, first, end, holes, sequence,
    block_table, mask, cos, sin, basis, constant, absorbed, absorbed_constant, query_stride, head_stride, key_block,
    key_row, value_block, value_row, table_stride, mask_stride, rotation_len, rotation_stride, basis_stride,
    output_stride, lse_stride, heads, scale, softcap,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CONSTANT: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    PARTIAL_WIDTH: tl.constexpr, PRECISION: tl.constexpr, JOINT: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, TILE_NODES: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PLANES: tl.constexpr, NODE_ROWS: tl.constexpr, BASIS_STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles first_tile ... last_tile - 1 of one unit, `row` being its part's row of the table, of so many KV heads.

    Queries are absorbed a BLOCK of keys at a time. JOINT: values are the numbers that were read as keys.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    STRIDE: tl.constexpr = TILE_ROWS // TILE_NODES
    key_base = key + tl.multiple_of(tl.load(row + QK_OFFSET), ROW_ALIGN)
    value_base = value + tl.multiple_of(tl.load(row + V_OFFSET), ROW_ALIGN)
    key_places = piece_places(row + QK_16, KEYS, DTYPE, ALIGN, ROW_ALIGN)
    value_places = piece_places(row + V_16, VALUES, DTYPE, ALIGN, ROW_ALIGN)
    first_head = tl.load(row + FIRST_HEAD)
    query_base = query + sequence.to(tl.int64) * query_stride + first_head * head_stride
    basis_base = basis + tl.multiple_of(tl.load(row + BASIS_COLUMN), ALIGN)
    basis_row = tl.load(row + BASIS_ROW)
    qk_rank = tl.multiple_of(tl.load(row + QK_RANK), ALIGN)
    constant_base = constant + first_head // HEADS_PER_KV * (2 * HALF)
    query_row = tl.arange(0, TILE_ROWS)
    largest = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS,), tl.float32)
    weighted = ()
    for p in tl.static_range(len(VALUES)):
        weighted += (tl.zeros((TILE_ROWS, VALUES[p][2]), tl.float32),)
    for chunk in range(first_tile * TILE // CHUNK, tl.cdiv(last_tile * TILE, CHUNK)):
        chunk_first = tl.maximum(first_tile, chunk * (CHUNK // TILE))
        chunk_last = tl.minimum(last_tile, (chunk + 1) * (CHUNK // TILE))
        for block in range(chunk_first * TILE // BLOCK, tl.cdiv(chunk_last * TILE, BLOCK)):
            place = block % (CHUNK // BLOCK) * (len(NODES) * STRIDE)
            absorb_queries(
                absorbed + place * WIDTH, absorbed_constant + place, heads, query_base, head_stride, block * BLOCK, cos,
                sin, rotation_len, rotation_stride, basis_base, basis_stride, basis_row, qk_rank, constant_base, DTYPE,
                CONSTANT, NODES, HEADS_PER_KV, HALF, 0, STRIDE, WIDTH, COLUMNS, PLANES, NODE_ROWS, BASIS_STAGES, STEP,
                PRECISION,
            )  # fmt: skip
        for tile in range(chunk_first, chunk_last):
            pieces = load_pieces(
                key_base, tile, last_tile, first, end, sequence, block_table, table_stride, key_block, key_row,
                key_places, KEYS, PAGE, TILE, DTYPE,
            )  # fmt: skip
            latents = ()
            for p in tl.static_range(len(KEYS)):
                latents += (numbers_of(pieces[p], KEYS[p][0], KEYS[p][2], TILE, DTYPE),)
            place = tile * TILE % CHUNK // STEP * STRIDE
            scores = _logits(
                absorbed + place * WIDTH, absorbed_constant + place, key_places, latents, KEYS, CONSTANT, ROWS, STRIDE,
                TILE_ROWS, WIDTH, TILE, PRECISION,
            )  # fmt: skip
            scores = scaled_logits(scores, scale, softcap, SOFT_CAP)
            index = tile * TILE + tl.arange(0, TILE)
            valid = (index >= first) & (index < end)
            attended = attended_keys(index, valid, mask, mask_stride, holes, end, sequence, MASK)[:, None]
            if TILE_NODES > 1:
                attended = attended & ((index // STEP % TILE_NODES)[:, None] == (query_row // STRIDE)[None, :])
            scores = tl.where(attended, scores, float("-inf"))
            weight, shrink, largest, total = weighed(scores, largest, total)
            weight = tl.trans(weight).to(DTYPE)
            if not JOINT:
                pieces = load_pieces(
                    value_base, tile, last_tile, first, end, sequence, block_table, table_stride, value_block,
                    value_row, value_places, VALUES, PAGE, TILE, DTYPE,
                )  # fmt: skip
            added = ()
            for p in tl.static_range(len(VALUES)):
                if JOINT:
                    values = latents[p]
                else:
                    values = numbers_of(pieces[p], VALUES[p][0], VALUES[p][2], TILE, DTYPE)
                added += (tl.dot(weight, values, weighted[p] * shrink[:, None], input_precision=PRECISION),)
            weighted = added
    if TILE_NODES > 1:
        largest, total, weighted = _joined_nodes(largest, total, weighted, TILE_NODES, STRIDE)
    store_result(
        partial, partial_lse, output, lse, row, slot, sequence, output_stride, lse_stride, largest, total, weighted,
        value_places, VALUES, ROWS, STRIDE, TILE_ROWS, SPLIT, ALIGN, PARTIAL_WIDTH,
    )  # fmt: skip
