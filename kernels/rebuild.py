# mypy: disable-error-code="no-untyped-def"
"""Keys of domain `pre` rebuilt once, before a prefill, for all of its row blocks.

What is rebuilt is the truncated key, B z, rotated: what decoding will see of it. The exact keys of the chunk are not at
hand (the basis is folded into k_proj), and a prefill that used them would differ from the decoding that follows.

Floor: 2 qk_rank head_dim FLOPs a key and KV head / the matrix rate, or the bytes of the keys written / bandwidth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.layout import LayerLayout

from .ahead import Variant
from .launch import launch
from .rotation import group_table, rank_alignment
from .shapes import precision
from .tiles import load_basis, load_latents, load_rotation, rotate_tile
from .widths import padded

INTEGERS = [
    "blocks", "kv_heads", "key_batch", "key_row", "basis_stride", "rotation_stride", "out_batch", "out_row",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def rebuild_kernel(
    key, out, basis, cos, sin, table, first_key, end_key, blocks, kv_heads, key_batch, key_row, basis_stride,
    rotation_stride, out_batch, out_row,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS keys of one KV head of one sequence; heads are fastest, since those of a group read the same latents."""
    program = tl.program_id(0)
    head = program % kv_heads
    start = (program // kv_heads % blocks) * ROWS
    sequence = program // (kv_heads * blocks)
    group = head // SIZE
    rank = tl.multiple_of(tl.load(table + group * 2), ALIGN)
    offset = tl.multiple_of(tl.load(table + group * 2 + 1), ALIGN)
    first = tl.load(first_key + sequence)
    end = tl.load(end_key + sequence)
    if (start < end) & (start + ROWS > first):
        index = start + tl.arange(0, ROWS)
        valid = (index >= first) & (index < end)
        key_0 = tl.zeros((ROWS, HALF_PADDED), tl.float32)
        key_1 = tl.zeros((ROWS, HALF_PADDED), tl.float32)
        basis_row = (head % SIZE) * (2 * HALF)
        stride = basis_stride * ALIGN
        for column in range(0, rank, COLUMNS):
            width = rank - column
            base = key + offset + column
            latent = load_latents(
                base,
                sequence + 0 * index,
                index,
                key_batch.to(tl.int64) * ALIGN,
                key_row.to(tl.int64) * ALIGN,
                width,
                valid,
                0,
                COLUMNS,
            )
            columns = basis + offset + column
            basis_0 = load_basis(columns, stride, basis_row, HALF, width, 0, COLUMNS, HALF_PADDED)
            basis_1 = load_basis(columns, stride, basis_row + HALF, HALF, width, 0, COLUMNS, HALF_PADDED)
            key_0 = tl.dot(latent, basis_0, key_0, input_precision=PRECISION)
            key_1 = tl.dot(latent, basis_1, key_1, input_precision=PRECISION)
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
) -> Tensor:
    """Rotated keys of all KV heads from their latents.

    Args:
        key: packed rows [batch_size, kv_len, qk_width].
        query_basis, key_rotation: [group_size * head_dim, qk_width], and cos and sin by index in the cache, [at least
            kv_len, head_dim].
        first, end: [batch_size], int32: the keys of each sequence that are wanted.
    Returns:
        [batch_size, kv_len, num_kv_heads * head_dim] in key's dtype, heads in the order of the layout; other keys than
        the wanted ones hold anything.
    """
    batch_size, kv_len = key.shape[:2]
    head_dim = query_basis.shape[0] // layout.group_size
    kv_heads = len(layout.groups) * layout.group_size
    out = torch.empty(batch_size, kv_len, kv_heads * head_dim, dtype=key.dtype, device=key.device)
    cos, sin = key_rotation
    strides = [key.stride(0), key.stride(1), query_basis.stride(0), cos.stride(0), out.stride(0), out.stride(1)]
    align = rank_alignment(layout, strides)
    constants = rebuild_constants(layout, head_dim, key.element_size())
    blocks = triton.cdiv(kv_len, constants["ROWS"])
    launch(
        rebuild_kernel, (blocks * kv_heads * batch_size,), key, out, query_basis, cos, sin,
        group_table(layout, key.device), first, end, blocks, kv_heads,
        *(stride // align for stride in strides), **constants, ALIGN=align,
    )  # fmt: skip
    return out


def rebuild_constants(layout: LayerLayout, head_dim: int, element_bytes: int) -> dict[str, Any]:
    half = head_dim // 2
    return {
        "SIZE": layout.group_size,
        "HALF": half,
        "HALF_PADDED": padded(half),
        "ROWS": 64,
        "COLUMNS": 32,
        "PRECISION": precision(element_bytes),
        "num_warps": 4,
        "num_stages": 2,
    }


def rebuild_variant(layout: LayerLayout, head_dim: int, dtype: torch.dtype) -> Variant:
    """What `rebuild_keys` compiles for a layer whose widths and strides are multiples of 8 elements."""
    constants = rebuild_constants(layout, head_dim, dtype.itemsize)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants["ALIGN"] = rank_alignment(layout, [head_dim])
    pointers = {
        **dict.fromkeys(("key", "out", "basis"), dtype),
        **dict.fromkeys(("cos", "sin"), torch.float32),
        **dict.fromkeys(("table", "first_key", "end_key"), torch.int32),
    }
    name = f"rebuild {layout.group_size} heads of {head_dim}"
    return Variant(name, rebuild_kernel, pointers, constants, (), options)
