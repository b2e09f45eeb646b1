# mypy: disable-error-code="no-untyped-def"
"""Join the partial results of the slices of a line of tiles by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import NEG_INF, UNSEEN
from .ranges import count_tiles, slices, tiles_of

INTEGERS = ["batch_size", "groups", "programs", "output_stride"]
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["output", "begin", "until", "query_start"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""


@triton.jit
def slices_of_group(begin, until, batch_size, groups, programs, sequence, group, STEP: tl.constexpr):
    """First and last program of decoding whose slices have tiles of a group of a sequence; without tiles low - 1."""
    # The group's tiles on the line: start ... start + tiles - 1.
    total = count_tiles(begin, until, batch_size, STEP) * groups
    tiles = tiles_of(tl.load(begin + sequence), tl.load(until + sequence), STEP)
    start = count_tiles(begin, until, sequence, STEP) * groups + group * tiles
    shared_by = slices(total, programs)
    # Slice p begins at floor(p * total / programs).
    low = ((start + 1).to(tl.int64) * shared_by - 1) // tl.maximum(total, 1)
    high = ((start + tiles).to(tl.int64) * shared_by - 1) // tl.maximum(total, 1)
    return low, tl.where(tiles > 0, high, low - 1)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def join_kernel(
    partial, partial_lse, output, table, begin, until, query_start,
    batch_size, groups, programs, output_stride,
    CODED: tl.constexpr, GROUP_ROWS: tl.constexpr, TOKENS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Join the partial results of one query head and one new token. Grid: query heads, sequences times TOKENS.

    output: [tokens, ...], the heads of a group one after another. table: as for `decode_kernel`.
    SLICES: partial results that are read at once. PADDED: columns of all operands, padded.
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
        low, high = slices_of_group(begin, until, batch_size, groups, programs, sequence, group, STEP)
        slot = (sequence * groups + group).to(tl.int64)
        column = tl.arange(0, PADDED)
        largest = UNSEEN
        weight = 0.0
        joined = tl.zeros((PADDED,), tl.float32)
        # Online softmax over the partial results, SLICES at a time: their number is not known when this is compiled.
        for first in range(low, high + 1, SLICES):
            program = first + tl.arange(0, SLICES)
            there = program <= high
            index = (program + slot) * (TOKENS * GROUP_ROWS) + row
            log_sum = tl.load(partial_lse + index, mask=there, other=NEG_INF)
            now_largest = tl.maximum(largest, tl.max(log_sum, 0))
            weights = tl.exp2(log_sum - now_largest)  # 0 for slices without attended keys
            shrink = tl.exp2(largest - now_largest)
            at = partial + index[:, None] * (OPERANDS * VALUE_COLUMNS) + column[None, :]
            values = tl.load(at, mask=there[:, None] & (column < OPERANDS * VALUE_COLUMNS)[None, :], other=0.0)
            joined = joined * shrink + tl.sum(values * weights[:, None], 0)
            weight = weight * shrink + tl.sum(weights, 0)
            largest = now_largest
        joined = joined / tl.where(weight > 0, weight, 1.0)  # 0 if no slice has an attended key
        # Operands are stored one after another, each with its first `width` columns.
        width = tl.load(table + group * 8 + 2)
        place = column // VALUE_COLUMNS * width + column % VALUE_COLUMNS
        out = output + token.to(tl.int64) * output_stride + tl.load(table + group * 8 + 6)
        out += head % GROUP_ROWS * width * OPERANDS + place
        tl.store(out, joined.to(DTYPE), mask=(column % VALUE_COLUMNS < width) & (column < OPERANDS * VALUE_COLUMNS))
