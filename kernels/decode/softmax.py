# mypy: disable-error-code="no-untyped-def, assignment"
"""What decoding does alike whether it rebuilds keys or not: tiles of rows loaded, an online softmax, results stored.

Logits are [keys, query rows], in base 2.
"""

import triton
import triton.language as tl

from ..table_fields import FIRST_HEAD, OUTPUT_OFFSET, V_RANK
from ..tiles import key_rows, load_piece


@triton.jit
def load_pieces(
    base, tile, last_tile, first, end, sequence, block_table, table_stride, block_stride, row_stride, places,
    PIECES: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The pieces of a tile of keys as they are stored; nothing from last_tile on."""
    start = tile * TILE
    index = start + tl.arange(0, TILE)
    valid = (index >= first) & (index < end) & (index < last_tile * TILE)
    block, row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, TILE)
    pieces = ()
    for p in tl.static_range(len(PIECES)):
        pieces += (
            load_piece(
                base + places[p][2], block, row, block_stride, row_stride, places[p][3], valid, PIECES[p][0],
                PIECES[p][2], DTYPE,
            ),
        )  # fmt: skip
    return pieces


@triton.jit
def attended_keys(index, valid, mask, mask_stride, holes, end, sequence, MASK: tl.constexpr):
    """Which keys of a tile are attended, [keys]: those that are `valid`, without the holes that a mask has."""
    if MASK:
        place_in_mask = mask + sequence.to(tl.int64) * mask_stride + index
        read = valid & (index < tl.where(holes > 0, end, 0))
        return valid & (tl.load(place_in_mask, mask=read, other=1) > 0)
    else:
        return valid


@triton.jit
def weighed(scores, largest, total):
    """Weights of a tile's logits, what shrinks the sums before, and both states of the softmax after the tile."""
    new_largest = tl.maximum(largest, tl.max(scores, 0))
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(scores - reference[None, :])
    shrink = tl.exp2(largest - reference)
    return weight, shrink, new_largest, total * shrink + tl.sum(weight, 0)


@triton.jit
def store_result(
    partial, partial_lse, output, lse, row, slot, sequence, output_stride, lse_stride, largest, total, weighted, places,
    VALUES: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, SLOT_ROWS: tl.constexpr, SPLIT: tl.constexpr,
    ALIGN: tl.constexpr, PARTIAL_WIDTH: tl.constexpr,
):  # fmt: skip
    """The averages and log-sum-exps of ROWS query rows, in tiles of TILE_ROWS: into a slot of SLOT_ROWS rows of the
    partial results (base 2), or where they belong (natural).
    """
    query_row = tl.arange(0, TILE_ROWS)
    safe_total = tl.where(total == 0.0, 1.0, total)
    base_2_lse = largest + tl.log2(safe_total)
    in_tile = query_row < ROWS
    if SPLIT:
        tl.store(partial_lse + slot * SLOT_ROWS + query_row, base_2_lse, mask=in_tile)
        out = partial + (slot * SLOT_ROWS + query_row[:, None]) * PARTIAL_WIDTH
    else:
        natural = base_2_lse * 0.6931471805599453
        tl.store(lse + sequence * lse_stride + tl.load(row + FIRST_HEAD) + query_row, natural, mask=in_tile)
        v_rank = tl.multiple_of(tl.load(row + V_RANK), ALIGN)
        out = output + sequence.to(tl.int64) * output_stride + query_row[:, None] * v_rank
        out += tl.multiple_of(tl.load(row + OUTPUT_OFFSET), ALIGN)
    for p in tl.static_range(len(VALUES)):
        column = tl.arange(0, VALUES[p][2])[None, :]
        some = in_tile[:, None] & (column < places[p][1])
        result = (weighted[p] / safe_total[:, None]).to(out.dtype.element_ty)
        tl.store(out + places[p][0] + column, result, mask=some)
