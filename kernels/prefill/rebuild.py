# mypy: disable-error-code="no-untyped-def"
"""Keys of domain `pre` rebuilt once, before a prefill, for all of its row blocks.

What is rebuilt is the truncated key, B z, rotated: what decoding will see of it. The exact keys of the chunk are not at
hand (the basis is folded into k_proj), and a prefill that used them would differ from the decoding that follows.

Floor: 2 qk_rank head_dim FLOPs a key and KV head / the matrix rate, or the bytes of the keys written / bandwidth.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.columns import WORD_BYTES
from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..gpu import precision
from ..launch import launch
from ..layer_table import WORDS_OF_A_LOAD
from ..projection.rotation import rank_alignment
from ..rows import key_columns
from ..strides import check_page
from ..tiles import elements_of, key_rows, load_basis, load_piece, load_rotation, numbers_of, rotate_tile
from ..widths import padded

INTEGERS = [
    "blocks", "kv_heads", "key_batch", "key_row", "table_stride", "basis_stride", "rotation_stride", "out_batch",
    "out_row",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def rebuild_kernel(
    key, out, basis, cos, sin, constant, table, first_key, end_key, block_table, blocks, kv_heads, key_batch, key_row,
    table_stride, basis_stride, rotation_stride, out_batch, out_row,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CODED: tl.constexpr, CONSTANT: tl.constexpr, KEY_ALIGN: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """ROWS keys of one KV head of one sequence; heads are fastest, since those of a group read the same latents."""
    program = tl.program_id(0)
    head = program % kv_heads
    start = (program // kv_heads % blocks) * ROWS
    sequence = program // (kv_heads * blocks)
    group = head // SIZE
    first = tl.load(first_key + sequence)
    end = tl.load(end_key + sequence)
    if (start < end) & (start + ROWS > first):
        index = start + tl.arange(0, ROWS)
        valid = (index >= first) & (index < end)
        block, block_row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, ROWS)
        key_0 = tl.zeros((ROWS, HALF_PADDED), tl.float32)
        key_1 = tl.zeros((ROWS, HALF_PADDED), tl.float32)
        basis_row = (head % SIZE) * (2 * HALF)
        stride = basis_stride * ALIGN
        batch_stride = key_batch.to(tl.int64) * KEY_ALIGN
        row_stride = key_row.to(tl.int64) * KEY_ALIGN
        DTYPE: tl.constexpr = basis.dtype.element_ty
        widths: tl.constexpr = (16, 8, 4, 2) if CODED else (0,)
        row = table + group * FIELDS
        offset = tl.multiple_of(tl.load(row), KEY_ALIGN)
        first_column = tl.multiple_of(tl.load(row + 1), ALIGN)
        for w in tl.static_range(len(widths)):
            count = tl.multiple_of(tl.load(row + 2 + w), ALIGN)
            elements = tl.multiple_of(elements_of(count, widths[w], DTYPE), KEY_ALIGN)
            for column in range(0, count, COLUMNS):
                width = count - column
                place = tl.multiple_of(elements_of(column, widths[w], DTYPE), KEY_ALIGN)
                piece = load_piece(
                    key + offset + place, block, block_row, batch_stride, row_stride, elements - place, valid,
                    widths[w], COLUMNS, DTYPE,
                )  # fmt: skip
                latent = numbers_of(piece, widths[w], COLUMNS, ROWS, DTYPE)
                columns = basis + first_column + column
                basis_0 = load_basis(columns, stride, basis_row, HALF, width, 0, COLUMNS, HALF_PADDED)
                basis_1 = load_basis(columns, stride, basis_row + HALF, HALF, width, 0, COLUMNS, HALF_PADDED)
                key_0 = tl.dot(latent, basis_0, key_0, input_precision=PRECISION)
                key_1 = tl.dot(latent, basis_1, key_1, input_precision=PRECISION)
            offset = tl.multiple_of(offset + elements, KEY_ALIGN)
            first_column = tl.multiple_of(first_column + count, ALIGN)
        if CONSTANT:
            half = tl.arange(0, HALF_PADDED)
            of_head = constant + head * (2 * HALF) + half
            key_0 += tl.load(of_head, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
            key_1 += tl.load(of_head + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
        turn = start.to(tl.int64) * (rotation_stride * ALIGN)
        place_in_block = tl.arange(0, ROWS)
        tile_cos, tile_sin = load_rotation(
            cos + turn, sin + turn, place_in_block, valid, rotation_stride * ALIGN, 0, HALF, HALF_PADDED
        )
        key_0, key_1 = rotate_tile(key_0, key_1, tile_cos, tile_sin)
        half = tl.arange(0, HALF_PADDED)
        place = sequence * (out_batch.to(tl.int64) * ALIGN) + index * (out_row.to(tl.int64) * ALIGN) + head * (2 * HALF)
        to = out + place[:, None] + half[None, :]
        mask = valid[:, None] & (half[None, :] < HALF)
        tl.store(to, key_0.to(out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, key_1.to(out.dtype.element_ty), mask=mask)


def rebuild_keys(
    key: Tensor,
    layout: LayerLayout,
    query_basis: Tensor,
    key_rotation: tuple[Tensor, Tensor],
    first: Tensor,
    end: Tensor,
    constant_key: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_len: int = 0,
) -> Tensor:
    """Rotated keys of all KV heads from their latents.

    Args:
        key: packed rows [batch_size, kv_len, qk_width] in query_basis's dtype, or rows of codes in words [batch_size,
            kv_len, words], int32; with a block table [num_pages, page_size, .].
        query_basis, key_rotation: [group_size * head_dim, qk_width], and cos and sin by index in the cache, [at least
            kv_len, head_dim].
        first, end: [batch_size], int32: the keys of each sequence that are wanted.
        constant_key: [num_kv_heads, head_dim], added before the rotation.
        block_table: [batch_size, pages of a sequence], int32. kv_len: with it, the most keys of a sequence.
    Returns:
        [batch_size, kv_len, num_kv_heads * head_dim] in query_basis's dtype, heads in the order of the layout; other
        keys than the wanted ones hold anything.
    """
    batch_size = len(first)
    if block_table is None:
        kv_len = key.shape[1]
    head_dim = query_basis.shape[0] // layout.group_size
    kv_heads = len(layout.groups) * layout.group_size
    dtype = query_basis.dtype
    out = torch.empty(batch_size, kv_len, kv_heads * head_dim, dtype=dtype, device=key.device)
    cos, sin = key_rotation
    key_strides = [key.stride(0), key.stride(1)]
    strides = [query_basis.stride(0), cos.stride(0), out.stride(0), out.stride(1)]
    align, key_align = rebuild_alignment(layout, dtype.itemsize, strides, key_strides)
    constants = rebuild_constants(layout, head_dim, dtype.itemsize)
    blocks = triton.cdiv(kv_len, constants["ROWS"])
    launch(
        rebuild_kernel, (blocks * kv_heads * batch_size,), key, out, query_basis, cos, sin,
        cos if constant_key is None else constant_key, rebuilt_groups(layout, dtype.itemsize, key.device),
        first, end, first if block_table is None else block_table, blocks, kv_heads,
        *(stride // key_align for stride in key_strides), 0 if block_table is None else block_table.stride(0),
        *(stride // align for stride in strides), **constants, CONSTANT=constant_key is not None, ALIGN=align,
        KEY_ALIGN=key_align, PAGE=check_page(key, block_table),
    )  # fmt: skip
    return out


def rebuild_alignment(
    layout: LayerLayout, element_bytes: int, strides: list[int], key_strides: list[int]
) -> tuple[int, int]:
    """ALIGN and KEY_ALIGN: what divides ranks and strides, and places and strides in the key rows."""
    if not layout.coded:
        return (rank_alignment(layout, [*strides, *key_strides]),) * 2
    sizes = [s.size_bytes // WORD_BYTES for columns in key_columns(layout) for s in columns.segments(element_bytes)]
    counts = [count for columns in key_columns(layout) for count in columns.counts]
    return math.gcd(16, *strides, *counts), math.gcd(WORDS_OF_A_LOAD, *key_strides, *sizes)


FIELDS = tl.constexpr(6)


@lru_cache(maxsize=4096)
def rebuilt_groups(layout: LayerLayout, element_bytes: int, device: torch.device) -> Tensor:
    """[groups, FIELDS], int32: elements before the group in the key row, columns before it in the basis, and its
    columns at 16, 8, 4 and 2 bits (all of them first where rows are of the model's dtype).
    """
    rows = []
    for index, (group, (column, _)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        if group.qk_columns is None:
            rows.append([column, column, group.qk_rank, 0, 0, 0])
        else:
            place = layout.byte_offsets(element_bytes)[index][0] // WORD_BYTES
            rows.append([place, column, *group.qk_columns.counts])
    return torch.tensor(rows, dtype=torch.int32, device=device)


def rebuild_constants(layout: LayerLayout, head_dim: int, element_bytes: int) -> dict[str, Any]:
    half = head_dim // 2
    return {
        "SIZE": layout.group_size,
        "HALF": half,
        "HALF_PADDED": padded(half),
        "ROWS": 32 if layout.coded else 64,  # words and numbers both take registers
        "COLUMNS": 64 if layout.coded else 32,  # of two bits four words, what a thread loads at once
        "CODED": layout.coded,
        "PRECISION": precision(element_bytes),
        "num_warps": 4,
        "num_stages": 2,
    }


def rebuild_variant(layout: LayerLayout, head_dim: int, dtype: torch.dtype, page: int = 0) -> Variant:
    """What `rebuild_keys` compiles for a layer whose widths and strides are multiples of 8 elements."""
    constants = rebuild_constants(layout, head_dim, dtype.itemsize)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    row_width = layout.read_bytes(dtype.itemsize)[0] // WORD_BYTES if layout.coded else layout.qk_width
    align, key_align = rebuild_alignment(layout, dtype.itemsize, [head_dim], [row_width])
    constants |= {"CONSTANT": layout.coded, "ALIGN": align, "KEY_ALIGN": key_align, "PAGE": page}
    pointers = {
        "key": torch.int32 if layout.coded else dtype,
        **dict.fromkeys(("out", "basis"), dtype),
        **dict.fromkeys(("cos", "sin", "constant"), torch.float32),
        **dict.fromkeys(("table", "first_key", "end_key", "block_table"), torch.int32),
    }
    name = f"rebuild {layout.group_size} heads of {head_dim}"
    return Variant(name, rebuild_kernel, pointers, constants, (), options)
