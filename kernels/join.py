# mypy: disable-error-code="no-untyped-def"
"""Results of the slices of a line of tiles, joined by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import NOTHING, UNSEEN
from .ranges import count_tiles, slices, tiles_of

INTEGERS = ["batch_size", "groups", "programs", "output_stride"]
"""Not specialised on their values: one compiled kernel serves them all."""

ADDRESSES = ["output", "begin", "until", "query_start"]
"""Not specialised on being multiples of 16 bytes: they are, or not, by the part of a batch."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def join_kernel(
    partial, partial_lse, output, table, begin, until, query_start,
    batch_size, groups, programs, output_stride,
    CODED: tl.constexpr, GROUP_ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: query heads, sequences times TOKENS. SLICES: results that are read at once. PADDED: columns of all
    operands.

    output: [tokens, .], heads of a group behind each other.
    """
    DTYPE: tl.constexpr = output.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    head = tl.program_id(0)
    sequence = tl.program_id(1) // TOKENS
    new = tl.program_id(1) % TOKENS
    token = sequence
    some = True
    if TOKENS > 1:
        token = tl.load(query_start + sequence) + new
        some = token < tl.load(query_start + sequence + 1)
    if some:
        group = head // GROUP_ROWS
        row = new * GROUP_ROWS + head % GROUP_ROWS
        total = count_tiles(begin, until, batch_size, STEP) * groups
        tiles = tiles_of(tl.load(begin + sequence), tl.load(until + sequence), STEP)
        start = count_tiles(begin, until, sequence, STEP) * groups + group * tiles
        shared_by = slices(total, programs)
        # The programs whose slices hold the first tile and the last: slice p begins at floor(p total / programs).
        low = ((start + 1).to(tl.int64) * shared_by - 1) // tl.maximum(total, 1)
        high = ((start + tiles).to(tl.int64) * shared_by - 1) // tl.maximum(total, 1)
        high = tl.where(tiles > 0, high, low - 1)
        slot = (sequence * groups + group).to(tl.int64)
        column = tl.arange(0, PADDED)
        largest = UNSEEN
        weight = 0.0
        joined = tl.zeros((PADDED,), tl.float32)
        for first in range(low, high + 1, SLICES):
            program = first + tl.arange(0, SLICES)
            there = program <= high
            index = (program + slot) * (TOKENS * GROUP_ROWS) + row
            log_sum = tl.load(partial_lse + index, mask=there, other=NOTHING)
            now_largest = tl.maximum(largest, tl.max(log_sum, 0))
            weights = tl.exp2(log_sum - now_largest)  # 0 of slices in which nothing was seen
            shrink = tl.exp2(largest - now_largest)
            at = partial + index[:, None] * (OPERANDS * VALUE_COLUMNS) + column[None, :]
            values = tl.load(at, mask=there[:, None] & (column < OPERANDS * VALUE_COLUMNS)[None, :], other=0.0)
            joined = joined * shrink + tl.sum(values * weights[:, None], 0)
            weight = weight * shrink + tl.sum(weights, 0)
            largest = now_largest
        joined = joined / tl.where(weight > 0, weight, 1.0)  # 0 where no slice saw a key
        width = tl.load(table + group * 8 + 2)
        place = column // VALUE_COLUMNS * width + column % VALUE_COLUMNS
        out = output + token.to(tl.int64) * output_stride + tl.load(table + group * 8 + 6)
        out += head % GROUP_ROWS * width * OPERANDS + place
        tl.store(out, joined.to(DTYPE), mask=(column % VALUE_COLUMNS < width) & (column < OPERANDS * VALUE_COLUMNS))
