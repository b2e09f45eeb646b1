# mypy: disable-error-code="no-untyped-def"
"""New rows of codes: what the projections put out, floored, clamped and packed.

Floor: bytes of the latents read and of the rows written / memory bandwidth.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.columns import WORD_BYTES, Columns

from ..ahead import Variant
from ..launch import launch
from ..layer_table import WORDS_OF_A_LOAD

ROWS = 16
WORDS = 16
"""Tokens, and words of one segment, that one program packs."""

FIELDS = tl.constexpr(4)
INTEGERS = ["tokens", "latent_stride", "row_stride", "page_stride"]
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


@triton.jit(do_not_specialize=INTEGERS)
def append_kernel(
    latents, rows, slots, segments, tokens, latent_stride, row_stride, page_stride, SLOTS: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """See `pack_rows`; grid (blocks of ROWS tokens, segments, blocks of WORDS words); strides in units of
    ALIGN elements and ROW_ALIGN words. PAGE: rows of a page, 0 where all rows are one after the other.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    row = token.to(tl.int64)
    if SLOTS:
        row = tl.load(slots + token, mask=valid, other=-1)
        valid &= row >= 0
    segment = segments + tl.program_id(1) * FIELDS
    bits = tl.load(segment)
    column = tl.multiple_of(tl.load(segment + 1), ALIGN)
    place = tl.multiple_of(tl.load(segment + 2), ROW_ALIGN)
    words = tl.multiple_of(tl.load(segment + 3), ROW_ALIGN)
    first = tl.program_id(2) * WORDS
    if first < words:
        index = first + tl.arange(0, WORDS)
        source = latents + token.to(tl.int64) * (latent_stride.to(tl.int64) * ALIGN) + column
        if PAGE > 0:
            page = row // PAGE * (page_stride.to(tl.int64) * ROW_ALIGN)
            row = row % PAGE * (row_stride.to(tl.int64) * ROW_ALIGN) + page + place
        else:
            row = row * (row_stride.to(tl.int64) * ROW_ALIGN) + place
        for choice in tl.static_range(4):
            if bits == 16 >> choice:
                _append(source, rows, row, index, first, valid, words, 16 >> choice, ROWS, WORDS)


@triton.jit
def _append(source, rows, row, index, first, valid, words, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    PLACES: tl.constexpr = 1 if BITS == 16 and source.dtype.element_ty.primitive_bitwidth == 32 else 32 // BITS
    column = first * PLACES + tl.arange(0, WORDS * PLACES)
    some = valid[:, None] & (column < words * PLACES)[None, :]
    numbers = tl.load(source[:, None] + column[None, :], mask=some, other=0.0)
    to = rows + row[:, None] + index[None, :]
    tl.store(to, _packed(numbers, WORDS, ROWS, BITS), mask=valid[:, None] & (index < words)[None, :])


def pack_rows(
    latents: Tensor, columns: tuple[Columns, ...], rows: Tensor | None = None, slots: Tensor | None = None
) -> Tensor:
    """As `rows.pack_layer`, by a kernel: rows of codes of the groups of a layer.

    Args:
        latents: [..., sum of ranks], what the key or value projection puts out.
        columns: of each group.
        rows: a cache to write into, uint8: [number of rows, bytes], or pages [number, rows of a page, bytes], a view
            whose innermost stride is 1.
        slots: with `rows`: the row of each token (in pages, page times rows of a page plus the row in it), [tokens],
            int64; nothing is written where it is negative.
    Returns:
        `rows`, or new ones [..., bytes], uint8.
    """
    if not columns:  # values that are read from the key rows
        return latents.new_empty(*latents.shape[:-1], 0, dtype=torch.uint8) if rows is None else rows
    table = segment_table(columns, latents.element_size(), latents.device)
    size = sum(of_group.row_bytes(latents.element_size()) for of_group in columns)
    tokens = latents.reshape(-1, latents.shape[-1])
    out = rows if rows is not None else torch.empty(len(tokens), size, dtype=torch.uint8, device=latents.device)
    words = out.view(torch.int32)
    page = rows.shape[1] if rows is not None and rows.dim() == 3 else 0
    most = max(s.size_bytes for of_group in columns for s in of_group.segments(latents.element_size())) // WORD_BYTES
    if len(tokens):
        strides = words.stride()[:-1]
        align, row_align = append_alignment(columns, latents.element_size(), tokens.stride(0), *strides)
        launch(
            append_kernel, (triton.cdiv(len(tokens), ROWS), len(table), triton.cdiv(most, WORDS)), tokens, words,
            table if slots is None else slots, table, len(tokens), tokens.stride(0) // align,
            strides[-1] // row_align, strides[0] // row_align, SLOTS=slots is not None, PAGE=page, ROWS=ROWS,
            WORDS=WORDS, ALIGN=align, ROW_ALIGN=row_align, num_warps=4,
        )  # fmt: skip
    return out if rows is not None else out.view(*latents.shape[:-1], size)


def append_alignment(
    columns: tuple[Columns, ...], element_bytes: int, latent_stride: int, *row_strides: int
) -> tuple[int, int]:
    """ALIGN and ROW_ALIGN: what divides columns and stride of the latents, and words and strides of the rows."""
    segments = [s for of_group in columns for s in of_group.segments(element_bytes)]
    align = math.gcd(16, latent_stride, *(s.count for s in segments))
    return align, math.gcd(WORDS_OF_A_LOAD, *row_strides, *(s.size_bytes // WORD_BYTES for s in segments))


@lru_cache(maxsize=4096)
def segment_table(columns: tuple[Columns, ...], element_bytes: int, device: torch.device) -> Tensor:
    """[segments, FIELDS], int32: bits, first column, first word in the row, words, of every segment of every group."""
    table = []
    column = place = 0
    for of_group in columns:
        for s in of_group.segments(element_bytes):
            offset = place + s.offset_bytes
            table.append([s.bits, column + s.first, offset // WORD_BYTES, s.size_bytes // WORD_BYTES])
        column, place = column + of_group.rank, place + of_group.row_bytes(element_bytes)
    return torch.tensor(table, dtype=torch.int32, device=device)


def append_variant(columns: tuple[Columns, ...], dtype: torch.dtype, slots: bool = False, page: int = 0) -> Variant:
    """What `pack_rows` compiles for a layer whose latents are contiguous; with slots, rows are in pages or not."""
    pointers = {"latents": dtype, "rows": torch.int32, "segments": torch.int32}
    pointers["slots"] = torch.int64 if slots else torch.int32
    width = sum(of_group.rank for of_group in columns)
    size = sum(of_group.row_bytes(dtype.itemsize) for of_group in columns)
    align, row_align = append_alignment(columns, dtype.itemsize, width, size // WORD_BYTES)
    constants = {"SLOTS": slots, "PAGE": page, "ROWS": ROWS, "WORDS": WORDS, "ALIGN": align, "ROW_ALIGN": row_align}
    return Variant("append", append_kernel, pointers, constants, (), {"num_warps": 4})
