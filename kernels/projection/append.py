# mypy: disable-error-code="no-untyped-def"
"""New rows of codes: what the projections put out, floored, clamped and packed, keys and values in one launch.

Floor: bytes of the latents read and of the rows written / memory bandwidth.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.columns import WORD_BYTES

from ..ahead import Variant
from ..launch import launch
from ..layer_table import WORDS_OF_A_LOAD
from ..rows import LayerColumns

ROWS = 16
COLUMNS = 128
"""Tokens, and columns of one segment, that one program packs: of two bits a column they are 32 bytes, a sector."""

FIELDS = tl.constexpr(5)
INTEGERS = [
    "key_segments", "tokens", "key_stride", "value_stride", "key_row", "value_row", "key_page", "value_page",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def _packed(latents, COUNT: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr):
    """[TOKENS, columns] -> [TOKENS, COUNT] words."""
    if BITS == 16 and latents.dtype.primitive_bitwidth == 32:
        return latents.to(tl.int32, bitcast=True)
    else:
        PLACES: tl.constexpr = 32 // BITS
        if BITS == 16:
            codes = latents.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        else:
            middle: tl.constexpr = 1 << (BITS - 1)
            whole = tl.floor(latents.to(tl.float32))
            codes = tl.minimum(tl.maximum(whole, -middle), middle - 1).to(tl.int32) + middle
        place = tl.arange(0, PLACES)
        shift = place // 2 * BITS + place % 2 * 16
        spread = tl.reshape(codes, (TOKENS, COUNT, PLACES)) << shift[None, None, :]
        return tl.sum(spread, 2)  # no two have a bit in common


@triton.jit
def load_segment(segment, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr):
    """Bits of a segment's columns, its first column and first word, and its words; see `Segments`."""
    bits = tl.load(segment)
    column = tl.multiple_of(tl.load(segment + 1), ALIGN)
    place = tl.multiple_of(tl.load(segment + 2), ROW_ALIGN)
    words = tl.multiple_of(tl.load(segment + 3), ROW_ALIGN)
    return bits, column, place, words


@triton.jit
def columns_of_a_word(bits, DTYPE: tl.constexpr):
    """Columns of `bits` bits in a word; numbers of 32 bits take one each where others take 16 bits."""
    if DTYPE.primitive_bitwidth == 32:
        return tl.where(bits == 16, 1, 32 // bits)
    else:
        return 32 // bits


@triton.jit
def store_words(place, numbers, bits, first, words, valid, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Writes numbers [ROWS, COLUMNS], columns of `bits` bits from `first` on of a segment, to its `words` words, which
    begin at `place` [ROWS], where valid.
    """
    for choice in tl.static_range(4):
        if bits == 16 >> choice:
            WIDE: tl.constexpr = choice == 0 and numbers.dtype.primitive_bitwidth == 32
            PLACES: tl.constexpr = 1 if WIDE else 32 // (16 >> choice)
            COUNT: tl.constexpr = COLUMNS // PLACES
            index = first // PLACES + tl.arange(0, COUNT)
            mask = valid[:, None] & (index < words)[None, :]
            tl.store(place[:, None] + index[None, :], _packed(numbers, COUNT, ROWS, 16 >> choice), mask=mask)


@triton.jit
def append_segment(
    latents, rows, segment, token, row, valid, first, latent_stride, row_stride, page_stride, PAGE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Packs the columns from `first` on of a segment of each token into its row; strides as in `append_kernel`."""
    bits, column, place, words = load_segment(segment, ALIGN, ROW_ALIGN)
    places = columns_of_a_word(bits, latents.dtype.element_ty)
    if first < words * places:
        index = first + tl.arange(0, COLUMNS)
        source = latents + token.to(tl.int64) * (latent_stride.to(tl.int64) * ALIGN) + column
        some = valid[:, None] & (index < words * places)[None, :]
        numbers = tl.load(source[:, None] + index[None, :], mask=some, other=0.0)
        if PAGE > 0:
            page = row // PAGE * (page_stride.to(tl.int64) * ROW_ALIGN)
            start = row % PAGE * (row_stride.to(tl.int64) * ROW_ALIGN) + page + place
        else:
            start = row * (row_stride.to(tl.int64) * ROW_ALIGN) + place
        store_words(rows + start, numbers, bits, first, words, valid, COLUMNS, ROWS)


@triton.jit(do_not_specialize=INTEGERS)
def append_kernel(
    key, value, key_rows, value_rows, slots, segments, key_segments, tokens, key_stride, value_stride, key_row,
    value_row, key_page, value_page, SLOTS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """See `pack_rows`; grid (blocks of ROWS tokens, segments of keys and then of values, blocks of COLUMNS columns);
    strides in units of ALIGN elements and ROW_ALIGN words. PAGE: rows of a page, 0 where all rows are one after the
    other.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    row = token.to(tl.int64)
    if SLOTS:
        row = tl.load(slots + token, mask=valid, other=-1)
        valid &= row >= 0
    segment = segments + tl.program_id(1) * FIELDS
    first = tl.program_id(2) * COLUMNS
    if tl.program_id(1) < key_segments:
        append_segment(
            key, key_rows, segment, token, row, valid, first, key_stride, key_row, key_page, PAGE, ROWS, COLUMNS, ALIGN,
            ROW_ALIGN,
        )  # fmt: skip
    else:
        append_segment(
            value, value_rows, segment, token, row, valid, first, value_stride, value_row, value_page, PAGE, ROWS,
            COLUMNS, ALIGN, ROW_ALIGN,
        )  # fmt: skip


def pack_rows(
    key: Tensor,
    value: Tensor,
    columns: LayerColumns,
    rows: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `rows.pack_layer`, by a kernel: rows of codes of the groups of a layer.

    Args:
        key, value: [..., sum of ranks], what the projections put out; the innermost stride is 1.
        columns: of the layer.
        rows: caches of keys and of values to write into, uint8: [number of rows, bytes], or pages [number, rows of a
            page, bytes], views whose innermost stride is 1.
        slots: with `rows`: the row of each token (in pages, page times rows of a page plus the row in it), [tokens],
            int64; nothing is written where it is negative.
    Returns:
        `rows`, or new ones [..., bytes], uint8.
    """
    of = segments_on(columns, key.element_size(), key.device)
    sides = key, value if columns.value else key  # else values are read from the key rows, and have none
    latents = [side.reshape(-1, side.shape[-1]) for side in sides]
    tokens = len(latents[0])
    into = rows
    if into is None:
        made = [key.new_empty(tokens, size, dtype=torch.uint8) for size in of.row_bytes]
        into = made[0], made[1]
    words = into[0].view(torch.int32), into[1 if columns.value else 0].view(torch.int32)
    if tokens:
        latent_strides = latents[0].stride(0), latents[1].stride(0)
        row_strides = words[0].stride(-2), words[1].stride(-2), words[0].stride(0), words[1].stride(0)
        align, row_align = math.gcd(of.align, *latent_strides), math.gcd(of.row_align, *row_strides)
        launch(
            append_kernel, (triton.cdiv(tokens, ROWS), len(of.table), triton.cdiv(of.most_columns, COLUMNS)), *latents,
            *words, of.table if slots is None else slots, of.table, of.of_keys, tokens,
            *(stride // align for stride in latent_strides), *(stride // row_align for stride in row_strides),
            SLOTS=slots is not None, PAGE=into[0].shape[1] if into[0].dim() == 3 else 0, ROWS=ROWS, COLUMNS=COLUMNS,
            ALIGN=align, ROW_ALIGN=row_align, num_warps=4,
        )  # fmt: skip
    if rows is not None:
        return rows
    return into[0].view(*key.shape[:-1], of.row_bytes[0]), into[1].view(*key.shape[:-1], of.row_bytes[1])


class Segments(NamedTuple):
    """The segments of every group of a layer: those of its keys, and then those of its values.

    table: [segments, FIELDS], int32: bits, first column, first word in the row, words, and the group.
    of_keys: how many of them. most_columns: of one. row_bytes: of a token's key and value row.
    align, row_align: what divides all columns, 16 at most, and all words, as many as a thread loads at most.
    """

    table: Tensor
    of_keys: int
    most_columns: int
    row_bytes: tuple[int, int]
    align: int
    row_align: int


@lru_cache(maxsize=4096)
def segments_on(columns: LayerColumns, element_bytes: int, device: torch.device) -> Segments:
    """The segments of a layer in a model whose dtype takes element_bytes, their table on a device."""
    table, lengths, sizes = [], [], []
    for side in (columns.key, columns.value):
        column = place = 0
        for group, of_group in enumerate(side):
            for s in of_group.segments(element_bytes):
                words = (place + s.offset_bytes) // WORD_BYTES, s.size_bytes // WORD_BYTES
                table.append((s.bits, column + s.first, *words, group))
                lengths.append(s.count)
            column, place = column + of_group.rank, place + of_group.row_bytes(element_bytes)
        sizes.append(place)
    return Segments(
        torch.tensor(table, dtype=torch.int32, device=device),
        sum(len(list(of_group.segments(element_bytes))) for of_group in columns.key),
        max(lengths),
        (sizes[0], sizes[1]),
        math.gcd(16, *lengths),
        math.gcd(WORDS_OF_A_LOAD, *(row[3] for row in table)),
    )


def append_variant(columns: LayerColumns, dtype: torch.dtype, slots: bool = False, page: int = 0) -> Variant:
    """What `pack_rows` compiles for a layer whose latents are contiguous; with slots, rows are in pages or not."""
    pointers = {**dict.fromkeys(("key", "value"), dtype), **dict.fromkeys(("key_rows", "value_rows"), torch.int32)}
    pointers |= {"segments": torch.int32, "slots": torch.int64 if slots else torch.int32}
    of = segments_on(columns, dtype.itemsize, torch.device("cpu"))
    align = math.gcd(of.align, *(sum(of_group.rank for of_group in side) for side in (columns.key, columns.value)))
    row_align = math.gcd(of.row_align, *(size // WORD_BYTES for size in of.row_bytes))
    constants = {"SLOTS": slots, "PAGE": page, "ROWS": ROWS, "COLUMNS": COLUMNS, "ALIGN": align, "ROW_ALIGN": row_align}
    return Variant("append", append_kernel, pointers, constants, (), {"num_warps": 4})
