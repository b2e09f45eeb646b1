# mypy: disable-error-code="no-untyped-def"
"""Joining the partial results of units that several programs shared, by their log-sum-exp.

Each program of the join makes some columns of one query row; it looks at as many pieces at a time as the few units of
a small batch may be cut into, and sums them as a tree.

Programs own slices of equal work along one line: all tiles of part 0 and sequence 0, then sequence 1, ... then part 1.
Where a slice begins and ends follows from the program's index, so nothing has to be stored about it. The slot of
program p in unit u is p + u: along the line each further piece has a larger p or a larger u.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..ahead import Variant
from ..table_fields import FIELDS, FIRST_HEAD, OUTPUT_OFFSET, V_RANK, WORK, WORK_BEFORE


@triton.jit
def unit_on_the_line(table, tile_prefix, part, sequence, batch_size):
    """Where a unit begins on the line of all work (int64), its work per tile, and its tiles."""
    row = table + part * FIELDS
    work = tl.load(row + WORK).to(tl.int64)
    before = tl.load(tile_prefix + sequence)
    tiles = tl.load(tile_prefix + sequence + 1) - before
    start = tl.load(tile_prefix + batch_size) * tl.load(row + WORK_BEFORE) + before * work
    return start, work, tiles


@triton.jit
def tiles_before(place, start, work, tiles):
    """How many tiles of a unit lie before a place on the line: a tile belongs to the slice in which it begins."""
    reached = (tl.maximum(place - start, 0) + work - 1) // work
    return tl.minimum(reached, tiles)


@triton.jit
def joined(largest, total, accumulator, partial, partial_lse, slot, used, column, width, WIDTH: tl.constexpr):
    """What was joined so far, and some more results: those in the slots that are `used`.

    `partial` [slots, WIDTH] has averages, `partial_lse` [slots] their weights as base-2 logarithms. largest and total
    are the largest of these logarithms and the sum of all weights over it, accumulator [columns] the weighted sum.
    """
    logarithm = tl.load(partial_lse + slot, mask=used, other=float("-inf"))
    rows = tl.load(
        partial + slot[:, None] * WIDTH + column[None, :], mask=used[:, None] & (column[None, :] < width), other=0.0
    )
    new_largest = tl.maximum(largest, tl.max(logarithm, 0))
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(logarithm - reference)
    shrink = tl.exp2(largest - reference)
    total = total * shrink + tl.sum(weight, 0)
    return new_largest, total, accumulator * shrink + tl.sum(rows * weight[:, None], 0)


INTEGERS = ["batch_size", "output_stride", "lse_stride", "programs", "total_work"]
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def combine_kernel(
    partial, partial_lse, output, lse, table, tile_prefix, batch_size, output_stride, lse_stride, programs, total_work,
    PARTIAL_WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the output of one query row of one unit, and its lse; grid (units, rows of a part, blocks of
    columns).

    partial [slots, TILE_ROWS, PARTIAL_WIDTH] and partial_lse [slots, TILE_ROWS] (base 2), float32; output [batch_size,
    width]; lse [batch_size, num_heads] (natural), float32. A unit without keys gives zeros and minus infinity.
    """
    unit = tl.program_id(0)
    query_row = tl.program_id(1)
    part = unit // batch_size
    sequence = unit % batch_size
    start, work, tiles = unit_on_the_line(table, tile_prefix, part, sequence, batch_size)
    total = tl.load(tile_prefix + batch_size) * total_work
    # Generous bounds on the programs that share the unit; the exact condition is in the loop.
    low = tl.maximum(start * programs // tl.maximum(total, 1) - 1, 0)
    high = tl.minimum((start + tiles * work) * programs // tl.maximum(total, 1) + 1, programs)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    width = tl.load(table + part * FIELDS + V_RANK)
    largest = tl.full((), float("-inf"), tl.float32)
    total_weight = tl.zeros((), tl.float32)
    accumulator = tl.zeros((COLUMNS,), tl.float32)
    for first in range(low, high, BLOCK):
        program = first + tl.arange(0, BLOCK).to(tl.int64)
        begin = tiles_before(program * total // programs, start, work, tiles)
        end = tiles_before((program + 1) * total // programs, start, work, tiles)
        used = (program < high) & (begin < end)
        slot = (program + unit) * TILE_ROWS + query_row
        largest, total_weight, accumulator = joined(
            largest, total_weight, accumulator, partial, partial_lse, slot, used, column, width, PARTIAL_WIDTH
        )
    safe_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
    row = table + part * FIELDS
    place = output + sequence.to(tl.int64) * output_stride + tl.load(row + OUTPUT_OFFSET) + query_row * width
    tl.store(place + column, (accumulator / safe_weight).to(output.dtype.element_ty), mask=column < width)
    natural = (largest + tl.log2(safe_weight)) * 0.6931471805599453
    if tl.program_id(2) == 0:
        tl.store(lse + sequence * lse_stride + tl.load(row + FIRST_HEAD) + query_row, natural)


MOST_COLUMNS = 32
"""Of a program; a wide latent's are shared out."""

PIECES = 16, 128
"""At the least and at the most, that a program looks at together."""


def combine_constants(partial_width: int, tile_rows: int, units: int) -> dict[str, Any]:
    """By the partial results' sizes and a power of two of units: the fewer, the more pieces each is cut into."""
    few, many = PIECES
    return {
        "PARTIAL_WIDTH": partial_width,
        "TILE_ROWS": tile_rows,
        "COLUMNS": min(MOST_COLUMNS, partial_width),
        "BLOCK": max(few, min(many, 2 * many // units)),
        "num_warps": 4,
    }


def combine_variant(partial_width: int, tile_rows: int, units: int, dtype: torch.dtype) -> Variant:
    """What joins the results of a decode kernel whose partial results have these sizes."""
    constants = combine_constants(partial_width, tile_rows, units)
    options = {"num_warps": constants.pop("num_warps")}
    pointers = {
        **dict.fromkeys(("partial", "partial_lse", "lse"), torch.float32),
        "output": dtype,
        "table": torch.int32,
        "tile_prefix": torch.int64,
    }
    name = f"combine {tile_rows} rows {partial_width}"
    return Variant(name, combine_kernel, pointers, constants, (), options)
