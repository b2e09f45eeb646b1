# mypy: disable-error-code="no-untyped-def"
"""Prefill: many query positions a sequence, against the packed rows of a layer that hold the new keys already.

Floor: FLOPs of the attended pairs of queries and keys, 2 (d_qk + d_v) each (and 2 qk_rank head_dim a key and KV head
for keys rebuilt in domain `pre`) / the matrix rate. One launch a class of groups, compiled for its widths as sums of
two powers of two (80 = 64 + 16).

In domain `pre` keys are rebuilt once, in memory, before the attention (`rebuild`); where there are few row blocks, or
no memory for it, by each row block for itself, in registers.

Rows of a tile are (position, query head) pairs of the heads that share keys, positions slowest, so that a chunk of few
positions still fills a tile. Rows know the range of keys that they attend to: causal, windows, padding, chunks
against an existing cache and sequences of different lengths are all ranges. The longest row blocks are launched first,
and those of a last round that would not fill the GPU in pieces, by a launch of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.kernel_config import LayerKernels
from rotor.layout import LayerLayout

from .ahead import Variant
from .decode import alignment_of, check_page
from .launch import launch
from .rebuild import rebuild_keys, rebuild_variant
from .schedule import last_round
from .shapes import (
    HOPPER,
    Gpu,
    can_be_cut,
    gpu_of,
    pieces_of,
    prefill_constants,
    prefill_workers,
    rebuilding_pays,
    sm_count,
)
from .slices import PrefillKeys
from .tiles import key_rows, load_basis, load_latents, load_rotation, marked_keys, rotate_tile, scaled_logits

INTEGERS = [
    "batch_size", "units", "blocks", "seq_len", "query_offset", "query_batch", "query_head", "query_position",
    "key_offset", "key_block", "key_row", "value_offset", "value_block", "value_row", "output_offset", "output_batch",
    "output_position", "lse_offset", "lse_batch", "lse_head", "table_stride", "mask_batch", "mask_query",
    "rotation_stride", "basis_stride", "first_task",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def _load_queries(base, rows, head_stride, position_stride, valid, WIDTH: tl.constexpr, PACK: tl.constexpr,
                  FIRST: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """[rows, SIZE] of the queries, columns from FIRST on of WIDTH; zeros where there is none."""
    column = FIRST + tl.arange(0, SIZE)
    offset = (rows // PACK).to(tl.int64) * position_stride + (rows % PACK) * head_stride
    return tl.load(base + offset[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    query, key, value, output, lse, first_key, end_key, holes, block_table, mask, cos, sin, basis, batch_size, units,
    blocks, seq_len, query_offset, query_batch, query_head, query_position, key_offset, key_block, key_row,
    value_offset, value_block, value_row, output_offset, output_batch, output_position, lse_offset, lse_batch,
    lse_head, table_stride, mask_batch, mask_query, rotation_stride, basis_stride, first_task, scale, softcap,
    QK: tl.constexpr, V: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PRE: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS of the ROWS * SPLIT of a task, a row block of one unit of one sequence; see `prefill_attention`. Offsets and
    strides in units of ALIGN.

    A unit is a group, or in domain `pre` one of the HEADS KV heads of a group; PACK query heads share its keys. PRE:
    keys are rebuilt here; else `key` has them, QK columns a unit.
    """
    task = first_task + tl.program_id(0) // SPLIT
    row_block = blocks - 1 - task // (units * batch_size)
    unit = task // batch_size % units
    sequence = task % batch_size
    group = unit // HEADS
    rows = (row_block * SPLIT + tl.program_id(0) % SPLIT) * ROWS + tl.arange(0, ROWS)
    in_range = rows < seq_len * PACK
    place = sequence * seq_len + rows // PACK
    first = tl.load(first_key + place, mask=in_range, other=0)
    end = tl.load(end_key + place, mask=in_range, other=0)
    attends = first < end
    tile_begin = tl.min(tl.where(attends, first, 2147483647), 0) // TILE
    tile_end = (tl.max(tl.where(attends, end, 0), 0) + TILE - 1) // TILE

    # Of 64 bits: a large cache, or a long prompt, has more than 2^31 elements.
    key_block = key_block.to(tl.int64) * ALIGN
    key_row = key_row.to(tl.int64) * ALIGN
    value_block = value_block.to(tl.int64) * ALIGN
    value_row = value_row.to(tl.int64) * ALIGN
    head_stride = query_head.to(tl.int64) * ALIGN
    position_stride = query_position.to(tl.int64) * ALIGN
    query_base = query + sequence * (query_batch.to(tl.int64) * ALIGN)
    query_base += unit * PACK * head_stride + query_offset.to(tl.int64) * ALIGN
    # Latents are a group's, rebuilt keys a head's.
    key_base = key + (key_offset * ALIGN + (group if PRE else unit) * QK)
    value_base = value + (value_offset * ALIGN + group * V)
    if PRE:
        width: tl.constexpr = 2 * HALF
        # A pad of the first half would be the second: load each by itself.
        query_0 = _load_queries(query_base, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED)
        query_1 = _load_queries(
            query_base + HALF, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED
        )
        basis_base = basis + key_offset * ALIGN + group * QK
        basis_row = (unit % HEADS) * width
    else:
        query_0 = _load_queries(query_base, rows, head_stride, position_stride, in_range, QK, PACK, 0, K0)
        if K1 > 0:
            query_1 = _load_queries(query_base, rows, head_stride, position_stride, in_range, QK, PACK, K0, K1)
    if MASK:
        has_holes = tl.load(holes + place, mask=in_range, other=0) > 0
        mask_rows = mask + sequence.to(tl.int64) * mask_batch + (rows // PACK).to(tl.int64) * mask_query
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum_0 = tl.zeros((ROWS, V0), tl.float32)
    if V1 > 0:
        sum_1 = tl.zeros((ROWS, V1), tl.float32)

    for tile in range(tile_begin, tile_end):
        start = tile * TILE
        index = start + tl.arange(0, TILE)
        # Rows behind the last key of the tile's rows may hold anything, pages behind it may not exist.
        valid = (index < tl.max(end, 0)) & (index >= tl.min(tl.where(attends, first, 2147483647), 0))
        block, row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, TILE)
        latent_0 = load_latents(key_base, block, row, key_block, key_row, QK, valid, 0, K0)
        if K1 > 0:
            latent_1 = load_latents(key_base, block, row, key_block, key_row, QK, valid, K0, K1)
        if PRE:
            stride = basis_stride * ALIGN
            basis_0 = load_basis(basis_base, stride, basis_row, HALF, QK, 0, K0, HALF_PADDED)
            basis_1 = load_basis(basis_base, stride, basis_row + HALF, HALF, QK, 0, K0, HALF_PADDED)
            key_0 = tl.dot(latent_0, basis_0, input_precision=PRECISION)
            key_1 = tl.dot(latent_0, basis_1, input_precision=PRECISION)
            if K1 > 0:
                basis_0 = load_basis(basis_base, stride, basis_row, HALF, QK, K0, K1, HALF_PADDED)
                basis_1 = load_basis(basis_base, stride, basis_row + HALF, HALF, QK, K0, K1, HALF_PADDED)
                key_0 = tl.dot(latent_1, basis_0, key_0, input_precision=PRECISION)
                key_1 = tl.dot(latent_1, basis_1, key_1, input_precision=PRECISION)
            turn = (start + tl.zeros((), tl.int64)) * (rotation_stride * ALIGN)
            place_in_tile = tl.arange(0, TILE)
            tile_cos, tile_sin = load_rotation(
                cos + turn, sin + turn, place_in_tile, valid, rotation_stride * ALIGN, 0, HALF, HALF_PADDED
            )
            key_0, key_1 = rotate_tile(key_0, key_1, tile_cos, tile_sin)
            scores = tl.dot(query_0, tl.trans(key_0.to(query_0.dtype)), input_precision=PRECISION)
            scores = tl.dot(query_1, tl.trans(key_1.to(query_0.dtype)), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(query_0, tl.trans(latent_0), input_precision=PRECISION)
            if K1 > 0:
                scores = tl.dot(query_1, tl.trans(latent_1), scores, input_precision=PRECISION)
        scores = scaled_logits(scores, scale, softcap, SOFT_CAP)
        attended = (index[None, :] >= first[:, None]) & (index[None, :] < end[:, None])
        if MASK:
            attended = attended & marked_keys(mask_rows, start, has_holes, TILE)
        scores = tl.where(attended, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, 1)
        largest = new_largest
        value_0 = load_latents(value_base, block, row, value_block, value_row, V, valid, 0, V0)
        weight = weight.to(value_0.dtype)
        sum_0 = tl.dot(weight, value_0, sum_0 * shrink[:, None], input_precision=PRECISION)
        if V1 > 0:
            value_1 = load_latents(value_base, block, row, value_block, value_row, V, valid, V0, V1)
            sum_1 = tl.dot(weight, value_1, sum_1 * shrink[:, None], input_precision=PRECISION)

    safe_total = tl.where(total == 0.0, 1.0, total)
    head = unit * PACK + rows % PACK
    natural = (largest + tl.log2(safe_total)) * 0.6931471805599453
    lse_place = lse + sequence.to(tl.int64) * lse_batch + (lse_offset + head).to(tl.int64) * lse_head + rows // PACK
    tl.store(lse_place, natural, mask=in_range)
    offset = sequence * (output_batch.to(tl.int64) * ALIGN) + rows // PACK * (output_position.to(tl.int64) * ALIGN)
    out = output + (offset + output_offset * ALIGN + head * V)[:, None]
    column = tl.arange(0, V0)
    out_mask = in_range[:, None] & (column[None, :] < V)
    tl.store(out + column[None, :], (sum_0 / safe_total[:, None]).to(output.dtype.element_ty), mask=out_mask)
    if V1 > 0:
        column = V0 + tl.arange(0, V1)
        out_mask = in_range[:, None] & (column[None, :] < V)
        tl.store(out + column[None, :], (sum_1 / safe_total[:, None]).to(output.dtype.element_ty), mask=out_mask)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    keys: PrefillKeys,
    heads_per_kv: int,
    scaling: float,
    *,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    rebuilt: bool | None = None,
    kernels: LayerKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several query positions of each sequence over a layer's packed rows.

    Args:
        query: domain `pre`: [batch_size, num_heads, seq_len, head_dim], rotated; else [batch_size, seq_len, width],
            projected, the rows of a group beside each other. The innermost stride is 1.
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width]; with a block table
            [num_pages, page_size, .]. They hold the new keys.
        keys: which keys each query attends to.
        query_basis, key_rotation: domain `pre`: [group_size * head_dim, qk_width], and cos and sin by index in the
            cache, [at least kv_len, head_dim].
        block_table, softcap: as in `decode_attention`.
        rebuilt: domain `pre`, contiguous: whether keys are rebuilt in memory first; by default where that pays.
        kernels: the classes, one launch each, and their blocks; by default by rule.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of the
        logits [batch_size, num_heads, seq_len], float32. Queries without keys give zeros and minus infinity.
    """
    pre, head_dim = layout.domain == "pre", query.shape[-1]
    batch_size, seq_len = keys.first.shape
    if rebuilt is None:
        tokens = key.shape[0] * key.shape[1]
        rebuilt = block_table is None and rebuilding_pays(
            layout, heads_per_kv, head_dim, seq_len, tokens, key.element_size()
        )
    if rebuilt:
        assert query_basis is not None
        assert key_rotation is not None
        key = rebuild_keys(key, layout, query_basis, key_rotation, *keys.union)
    page = check_page(key, block_table)
    group_rows = layout.group_size * heads_per_kv
    num_heads = group_rows * len(layout.groups)
    output = torch.empty(batch_size, seq_len, group_rows * layout.v_width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch_size, num_heads, seq_len, dtype=torch.float32, device=query.device)
    cos, sin = key_rotation if key_rotation is not None else (query, query)
    basis = query if query_basis is None else query_basis
    empty = keys.first
    for cls, constants in prefill_constants(
        layout, heads_per_kv, query.element_size(), head_dim, rebuilt, gpu_of(query.device), kernels
    ):
        units = cls.count * constants["HEADS"]
        key_offset = cls.start * layout.group_size * head_dim if rebuilt else cls.qk_offset
        if pre:
            query_strides = [cls.start * group_rows * query.stride(1), query.stride(0), query.stride(1)]
            query_strides += [query.stride(2)]
        else:
            query_strides = [group_rows * cls.qk_offset, query.stride(0), cls.qk_rank, query.stride(1)]
        strides = [
            *query_strides, key_offset, key.stride(0), key.stride(1), cls.v_offset, value.stride(0), value.stride(1),
            group_rows * cls.v_offset, output.stride(0), output.stride(1),
        ]  # fmt: skip
        rotation = [cos.stride(0), basis.stride(0)] if constants["PRE"] else [0, 0]
        align = alignment_of(constants["QK"], cls.v_rank, *strides, *rotation)
        blocks = triton.cdiv(seq_len * constants["PACK"], constants["ROWS"])
        arguments: list[Any] = [
            query, key, value, output, lse, keys.first, keys.end, empty if keys.holes is None else keys.holes,
            empty if block_table is None else block_table, lse if keys.mask is None else keys.mask, cos, sin, basis,
            batch_size, units, blocks, seq_len, *(stride // align for stride in strides),
            cls.start * group_rows, lse.stride(0), lse.stride(1),
            0 if block_table is None else block_table.stride(0),
            *((0, 0) if keys.mask is None else (keys.mask.stride(0), keys.mask.stride(1))),
            *(stride // align for stride in rotation),
        ]  # fmt: skip
        real = scaling, 1.0 if softcap is None else softcap
        flags = {"PAGE": page, "MASK": keys.mask is not None, "SOFT_CAP": softcap is not None, "ALIGN": align}
        tasks, workers = blocks * units * batch_size, prefill_workers(constants, sm_count(query.device))
        whole, cut = tasks, False
        if can_be_cut(constants):
            rows, pack = constants["ROWS"], constants["PACK"]
            whole, cut = last_round(seq_len, keys.past, rows, pack, units * batch_size, workers)
        if whole:
            launch(prefill_kernel, (whole,), *arguments, 0, *real, **constants, **flags)
        if cut:
            pieces = pieces_of(constants)
            grid = ((tasks - whole) * pieces["SPLIT"],)
            launch(prefill_kernel, grid, *arguments, whole, *real, **pieces, **flags)
    return output, lse


def prefill_variants(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    page: int = 0,
    mask: bool = False,
    softcap: bool = False,
    gpu: Gpu = HOPPER,
    kernels: LayerKernels | None = None,
) -> list[Variant]:
    """What `prefill_attention` compiles for a layer whose widths and strides are multiples of 8 elements."""
    pointers = {
        **dict.fromkeys(("query", "key", "value", "output", "basis"), dtype),
        **dict.fromkeys(("cos", "sin"), torch.float32 if layout.domain == "pre" else dtype),
        **dict.fromkeys(("first_key", "end_key", "holes", "block_table"), torch.int32),
        "lse": torch.float32,
        "mask": torch.int64 if mask else torch.float32,
    }
    once = layout.domain == "pre" and page == 0
    variants = [rebuild_variant(layout, head_dim, dtype)] if once else []
    for rebuilt in (True, False) if once else (False,):
        for cls, constants in prefill_constants(layout, heads_per_kv, dtype.itemsize, head_dim, rebuilt, gpu, kernels):
            key_numbers = (head_dim,) if rebuilt else (cls.qk_rank, cls.qk_offset, layout.qk_width)
            align = alignment_of(*key_numbers, cls.v_rank, cls.v_offset, layout.v_width)
            flags = {"PAGE": page, "MASK": mask, "SOFT_CAP": softcap, "ALIGN": align}
            keys = f"{cls.qk_rank} rebuilt" if rebuilt else str(cls.qk_rank)
            name = f"prefill {layout.domain} {constants['HEADS']}x{constants['PACK']} rows {keys}+{cls.v_rank}"
            for shape in (constants, pieces_of(constants)) if can_be_cut(constants) else (constants,):
                options = {option: shape[option] for option in ("num_warps", "num_stages")}
                fixed = {k: v for k, v in shape.items() if k not in options} | flags
                pieces = ", pieces" if shape["SPLIT"] > 1 else ""
                variants.append(Variant(name + pieces, prefill_kernel, pointers, fixed, ("scale", "softcap"), options))
    return variants
