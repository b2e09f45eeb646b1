# mypy: disable-error-code="no-untyped-def"
"""RoPE, projection and packing of what is new, all groups of a layer in one launch: rows of codes in domain `post`.

Floor: bytes of the bases, queries, keys and values read, and of the rows written / memory bandwidth.
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
from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..launch import launch
from ..rows import LayerColumns
from .append import FIELDS, Segments, append_segment, columns_of_a_word, load_segment, segments_on, store_words
from .rotation import (
    COLUMNS,
    INTEGERS,
    group_table,
    projected,
    rank_alignment,
    rotation_constants,
    store_projected,
)


@triton.jit(do_not_specialize=[*INTEGERS, "value_stride", "value_row_stride", "groups", "key_segments"])
def rotate_and_pack_kernel(
    query, key, value, query_rows, key_rows, value_rows, query_basis, key_basis, key_shift, cos, sin, table, segments,
    groups, key_segments, tokens, seq_len, query_batch, query_position, query_head, key_batch, key_position, key_head,
    basis_stride, cos_batch, cos_position, query_row_stride, value_stride, key_row_stride, value_row_stride,
    SIZE: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks of queries, jobs, blocks of columns). The jobs: the heads of each group that share a basis, then
    the segments of the keys, then those of the values. Strides in units of ALIGN elements, and of ROW_ALIGN words.
    """
    row_block = tl.program_id(0)
    job = tl.program_id(1)
    first = tl.program_id(2) * COLUMNS
    # Of 64 bits: many long prompts have more than 2^31 elements.
    query_batch = query_batch.to(tl.int64) * ALIGN
    query_position = query_position.to(tl.int64) * ALIGN
    query_head = query_head.to(tl.int64) * ALIGN
    key_batch = key_batch.to(tl.int64) * ALIGN
    key_position = key_position.to(tl.int64) * ALIGN
    key_head = key_head.to(tl.int64) * ALIGN
    cos_batch = cos_batch.to(tl.int64) * ALIGN
    if job < groups * SIZE:
        group = job // SIZE
        rank = tl.multiple_of(tl.load(table + group * 2), ALIGN)
        offset = tl.multiple_of(tl.load(table + group * 2 + 1), ALIGN)
        if first < rank:
            store_projected(
                query, query_rows, query_basis, cos, sin, tokens, seq_len, query_batch, query_position,
                query_head, basis_stride * ALIGN, cos_batch, cos_position * ALIGN, query_row_stride * ALIGN,
                job * HEADS_PER_KV, (job % SIZE) * 2 * HALF, 1, rank, offset,
                offset * SIZE * HEADS_PER_KV + (job % SIZE) * HEADS_PER_KV * rank, first, row_block, HEADS_PER_KV, HALF,
                HALF_PADDED, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip
    elif row_block * ROWS < tokens:
        token = row_block * ROWS + tl.arange(0, ROWS)
        valid = token < tokens
        segment = segments + (job - groups * SIZE) * FIELDS
        if job < groups * SIZE + key_segments:
            bits, column, place, words = load_segment(segment, ALIGN, ROW_ALIGN)
            places = columns_of_a_word(bits, key.dtype.element_ty)
            if first < words * places:
                numbers = projected(
                    key, key_basis, key_shift, cos, sin, token, valid, seq_len, key_batch, key_position, key_head,
                    basis_stride * ALIGN, cos_batch, cos_position * ALIGN, tl.load(segment + 4) * SIZE, 0, SIZE,
                    words * places, column, first, 1, HALF, HALF_PADDED, ROWS, COLUMNS, PRECISION, True,
                ).to(key.dtype.element_ty)  # fmt: skip
                start = token.to(tl.int64) * (key_row_stride.to(tl.int64) * ROW_ALIGN) + place
                store_words(key_rows + start, numbers, bits, first, words, valid, COLUMNS, ROWS)
        else:
            append_segment(
                value, value_rows, segment, token, token.to(tl.int64), valid, first, value_stride, value_row_stride,
                value_row_stride, 0, ROWS, COLUMNS, ALIGN, ROW_ALIGN,
            )  # fmt: skip


def rotate_and_pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    query_basis: Tensor,
    key_basis: Tensor,
    key_shift: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotation.rotate_and_project`, and `append.pack_rows` of the keys that it gives and of the values.

    Args:
        value: [batch_size, seq_len, v_width], as its projection puts it out.
        key_shift: [qk_width], float32, contiguous: added to the keys' latents before they are rounded.
    Returns:
        Queries [batch_size, seq_len, sum over query heads of qk_rank], and the rows of keys and of values
        [batch_size, seq_len, bytes], uint8.
    """
    batch_size, seq_len, _, head_dim = query.shape
    tokens, element_bytes, value = batch_size * seq_len, query.element_size(), value.contiguous()
    of = _steady_launch(layout, heads_per_kv, element_bytes, query.device)
    segments = of.segments
    query_rows = query.new_empty(batch_size, seq_len, layout.group_size * heads_per_kv * layout.qk_width)
    rows = [query.new_empty(batch_size, seq_len, size, dtype=torch.uint8) for size in segments.row_bytes]
    words = [side.view(torch.int32) for side in rows]
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = [
        *query.stride()[:3], *key.stride()[:3], query_basis.stride(0), cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1), query_rows.stride(1), value.stride(1),
    ]  # fmt: skip
    row_strides = [side.stride(1) for side in words]
    align, row_align = math.gcd(of.align, *strides), math.gcd(segments.row_align, *row_strides)
    constants = rotation_constants(layout, heads_per_kv, head_dim, tokens, element_bytes)
    grid = triton.cdiv(tokens * heads_per_kv, constants["ROWS"]), of.jobs, of.column_blocks
    launch(
        rotate_and_pack_kernel, grid, query, key, value, query_rows, *words, query_basis, key_basis, key_shift, cos,
        sin, of.table, segments.table, len(layout.groups), segments.of_keys, tokens, seq_len,
        *(stride // align for stride in strides), *(stride // row_align for stride in row_strides), **constants,
        ALIGN=align, ROW_ALIGN=row_align,
    )  # fmt: skip
    return query_rows, rows[0], rows[1]


class _Steady(NamedTuple):
    """What is alike in all steps of a layer.

    jobs, column_blocks: of the grid. align: what divides ranks and columns. table: of `rotation.group_table`.
    """

    jobs: int
    column_blocks: int
    align: int
    table: Tensor
    segments: Segments


@lru_cache(maxsize=4096)
def _steady_launch(layout: LayerLayout, heads_per_kv: int, element_bytes: int, device: torch.device) -> _Steady:
    segments = segments_on(LayerColumns.of(layout), element_bytes, device)
    widest = max(segments.most_columns, *(group.qk_rank for group in layout.groups))
    return _Steady(
        len(layout.groups) * layout.group_size + len(segments.table),
        triton.cdiv(widest, COLUMNS),
        math.gcd(rank_alignment(layout, []), segments.align),
        group_table(layout, device),
        segments,
    )


def rotate_and_pack_variants(
    layout: LayerLayout, heads_per_kv: int, head_dim: int, dtype: torch.dtype, cos_dtype: torch.dtype | None = None
) -> list[Variant]:
    """What `rotate_and_pack` compiles while decoding and in a prefill, widths being multiples of 8 elements."""
    names = ("query", "key", "value", "query_rows", "query_basis", "key_basis")
    pointers = dict.fromkeys(names, dtype) | dict.fromkeys(("cos", "sin"), cos_dtype or dtype)
    integers = ("key_rows", "value_rows", "table", "segments")
    pointers |= {"key_shift": torch.float32} | dict.fromkeys(integers, torch.int32)
    of = _steady_launch(layout, heads_per_kv, dtype.itemsize, torch.device("cpu"))
    align = math.gcd(of.align, head_dim, layout.v_width)
    row_align = math.gcd(of.segments.row_align, *(size // WORD_BYTES for size in of.segments.row_bytes))
    variants = []
    for name, tokens in (("decode", 1), ("prefill", 4096)):
        constants = rotation_constants(layout, heads_per_kv, head_dim, tokens, dtype.itemsize)
        options = {option: int(constants.pop(option)) for option in ("num_warps", "num_stages")}
        constants |= {"ALIGN": align, "ROW_ALIGN": row_align}
        label = f"rotation {layout.group_size}x{heads_per_kv} rows, packed, {name}"
        variants.append(Variant(label, rotate_and_pack_kernel, pointers, constants, (), options))
    return variants
