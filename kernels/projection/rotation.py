# mypy: disable-error-code="no-untyped-def"
"""RoPE and projection of new queries and keys into packed rows, all groups of a layer in one launch (domain `post`).

Floor: bytes of the bases, queries and keys / memory bandwidth; while decoding, the bases are nearly all of it.
Nothing is ever projected back (FDC section 4.1).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..gpu import precision
from ..launch import launch
from ..strides import alignment_of
from ..tiles import load_rotation, rotate_tile
from ..widths import padded

COLUMNS = 64
"""Columns of a packed row that one program makes."""

INTEGERS = [
    "tokens", "seq_len", "query_batch", "query_position", "query_head", "key_batch", "key_position", "key_head",
    "basis_stride", "cos_batch", "cos_position", "query_row_stride", "key_row_stride",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def projected(
    source, basis, shift, cos, sin, row, valid, seq_len, batch_stride, position_stride, head_stride, basis_stride,
    cos_batch, cos_position, first_head, basis_row, heads, rank, basis_column, first_column, PACK: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Rows (token, one of PACK heads) times COLUMNS of `rank` columns of a basis, summed over `heads` heads, [ROWS,
    COLUMNS], float32; with SHIFT, plus the columns' numbers in `shift`.
    """
    token = row // PACK
    sequence = token // seq_len
    position = token % seq_len
    half = tl.arange(0, HALF_PADDED)
    column = first_column + tl.arange(0, COLUMNS)
    in_half = half < HALF
    tile_cos, tile_sin = load_rotation(
        cos, sin, sequence * cos_batch + position * cos_position, valid, 1, 0, HALF, HALF_PADDED
    )
    place = sequence.to(tl.int64) * batch_stride + position.to(tl.int64) * position_stride
    place += (first_head + row % PACK) * head_stride
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for head in range(heads):
        start = source + (place + head * head_stride)[:, None] + half[None, :]
        mask = valid[:, None] & in_half[None, :]
        first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(start + HALF, mask=mask, other=0.0).to(tl.float32)
        first, second = rotate_tile(first, second, tile_cos, tile_sin)
        block = basis + (basis_row + head * 2 * HALF + half[:, None]) * basis_stride + basis_column + column[None, :]
        mask = in_half[:, None] & (column[None, :] < rank)
        basis_0 = tl.load(block, mask=mask, other=0.0)
        basis_1 = tl.load(block + HALF * basis_stride, mask=mask, other=0.0)
        result = tl.dot(first.to(basis_0.dtype), basis_0, result, input_precision=PRECISION)
        result = tl.dot(second.to(basis_0.dtype), basis_1, result, input_precision=PRECISION)
    if SHIFT:
        result += tl.load(shift + basis_column + column, mask=column < rank, other=0.0)[None, :]
    return result


@triton.jit
def store_projected(
    source, output, basis, cos, sin, tokens, seq_len, batch_stride, position_stride, head_stride, basis_stride,
    cos_batch, cos_position, output_stride, first_head, basis_row, heads, rank, basis_column, output_column,
    first_column, row_block, PACK: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `projected` finds for a row block, written to `output`: PACK times `rank` columns of a token."""
    row = row_block * ROWS + tl.arange(0, ROWS)
    token = row // PACK
    valid = token < tokens
    result = projected(
        source, basis, basis, cos, sin, row, valid, seq_len, batch_stride, position_stride, head_stride, basis_stride,
        cos_batch, cos_position, first_head, basis_row, heads, rank, basis_column, first_column, PACK, HALF,
        HALF_PADDED, ROWS, COLUMNS, PRECISION, False,
    )  # fmt: skip
    column = first_column + tl.arange(0, COLUMNS)
    out = output + (token.to(tl.int64) * output_stride + output_column + (row % PACK) * rank)[:, None] + column[None, :]
    tl.store(out, result.to(output.dtype.element_ty), mask=valid[:, None] & (column[None, :] < rank))


@triton.jit(do_not_specialize=INTEGERS)
def rotation_kernel(
    query, key, query_rows, key_rows, query_basis, key_basis, cos, sin, table, tokens, seq_len, query_batch,
    query_position, query_head, key_batch, key_position, key_head, basis_stride, cos_batch, cos_position,
    query_row_stride, key_row_stride,
    SIZE: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks of queries, groups x (SIZE + 1), blocks of columns); the last job of a group is its keys."""
    row_block = tl.program_id(0)
    group = tl.program_id(1) // (SIZE + 1)
    job = tl.program_id(1) % (SIZE + 1)
    first_column = tl.program_id(2) * COLUMNS
    rank = tl.multiple_of(tl.load(table + group * 2), ALIGN)
    offset = tl.multiple_of(tl.load(table + group * 2 + 1), ALIGN)
    # Of 64 bits: many long prompts have more than 2^31 elements.
    query_batch = query_batch.to(tl.int64) * ALIGN
    query_position = query_position.to(tl.int64) * ALIGN
    query_head = query_head.to(tl.int64) * ALIGN
    key_batch = key_batch.to(tl.int64) * ALIGN
    key_position = key_position.to(tl.int64) * ALIGN
    key_head = key_head.to(tl.int64) * ALIGN
    cos_batch = cos_batch.to(tl.int64) * ALIGN
    if first_column < rank:
        if job < SIZE:
            store_projected(
                query, query_rows, query_basis, cos, sin, tokens, seq_len, query_batch, query_position,
                query_head, basis_stride * ALIGN, cos_batch, cos_position * ALIGN,
                query_row_stride * ALIGN, (group * SIZE + job) * HEADS_PER_KV, job * 2 * HALF, 1, rank, offset,
                offset * SIZE * HEADS_PER_KV + job * HEADS_PER_KV * rank, first_column, row_block, HEADS_PER_KV, HALF,
                HALF_PADDED, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip
        elif row_block * ROWS < tokens:
            store_projected(
                key, key_rows, key_basis, cos, sin, tokens, seq_len, key_batch, key_position, key_head,
                basis_stride * ALIGN, cos_batch, cos_position * ALIGN,
                key_row_stride * ALIGN, group * SIZE, 0, SIZE, rank, offset, offset, first_column, row_block, 1, HALF,
                HALF_PADDED, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip


def rotate_and_project(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    query_basis: Tensor,
    key_basis: Tensor,
) -> tuple[Tensor, Tensor]:
    """Latents of queries and keys, packed side by side, from those that RoPE has not turned yet.

    Args:
        query, key: [batch_size, seq_len, num_heads, head_dim] and [batch_size, seq_len, num_kv_heads, head_dim], KV
            heads in the order of the layout; the innermost stride is 1.
        cos, sin: [batch_size or 1, seq_len, head_dim], both halves alike.
        query_basis, key_basis: [group_size * head_dim, qk_width].
    Returns:
        [batch_size, seq_len, sum over query heads of qk_rank] (as domain `none` wants it), and
        [batch_size, seq_len, qk_width].
    """
    batch_size, seq_len, _, head_dim = query.shape
    tokens, size = batch_size * seq_len, layout.group_size
    query_rows = torch.empty(
        batch_size, seq_len, size * heads_per_kv * layout.qk_width, dtype=query.dtype, device=query.device
    )
    key_rows = torch.empty(batch_size, seq_len, layout.qk_width, dtype=query.dtype, device=query.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = [
        *query.stride()[:3], *key.stride()[:3], query_basis.stride(0), cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1), query_rows.stride(1), key_rows.stride(1),
    ]  # fmt: skip
    align = rank_alignment(layout, strides)
    constants = rotation_constants(layout, heads_per_kv, head_dim, tokens, query.element_size())
    grid = (
        triton.cdiv(tokens * heads_per_kv, constants["ROWS"]),
        len(layout.groups) * (size + 1),
        triton.cdiv(max(group.qk_rank for group in layout.groups), COLUMNS),
    )
    launch(
        rotation_kernel, grid, query, key, query_rows, key_rows, query_basis, key_basis, cos, sin,
        group_table(layout, query.device), tokens, seq_len, *(stride // align for stride in strides), **constants,
        ALIGN=align,
    )  # fmt: skip
    return query_rows, key_rows


def rotation_constants(
    layout: LayerLayout, heads_per_kv: int, head_dim: int, tokens: int, element_bytes: int
) -> dict[str, int | str]:
    half = head_dim // 2
    return {
        "SIZE": layout.group_size,
        "HEADS_PER_KV": heads_per_kv,
        "HALF": half,
        "HALF_PADDED": padded(half),
        "ROWS": 16 if tokens * heads_per_kv <= 512 else 64,
        "COLUMNS": COLUMNS,
        "PRECISION": precision(element_bytes),
        "num_warps": 4,
        "num_stages": 2,
    }


def rotation_variants(
    layout: LayerLayout, heads_per_kv: int, head_dim: int, dtype: torch.dtype, cos_dtype: torch.dtype | None = None
) -> list[Variant]:
    """What `rotate_and_project` compiles while decoding and in a prefill, widths being multiples of 8 elements."""
    names = ("query", "key", "query_rows", "key_rows", "query_basis", "key_basis")
    pointers = dict.fromkeys(names, dtype)
    pointers |= dict.fromkeys(("cos", "sin"), cos_dtype or dtype) | {"table": torch.int32}
    variants = []
    for name, tokens in (("decode", 1), ("prefill", 4096)):
        constants = rotation_constants(layout, heads_per_kv, head_dim, tokens, dtype.itemsize)
        options = {option: int(constants.pop(option)) for option in ("num_warps", "num_stages")}
        constants["ALIGN"] = rank_alignment(layout, [head_dim])
        label = f"rotation {layout.group_size}x{heads_per_kv} rows, {name}"
        variants.append(Variant(label, rotation_kernel, pointers, constants, (), options))
    return variants


def rank_alignment(layout: LayerLayout, strides: list[int]) -> int:
    """What divides the strides, and all key ranks and so their offsets."""
    return alignment_of(*strides, *(group.qk_rank for group in layout.groups))


@lru_cache(maxsize=4096)
def group_table(layout: LayerLayout, device: torch.device) -> Tensor:
    """[groups, 2], int32: qk_rank and its offset."""
    rows = [[group.qk_rank, offset] for group, (offset, _) in zip(layout.groups, layout.offsets(), strict=True)]
    return torch.tensor(rows, dtype=torch.int32, device=device)
