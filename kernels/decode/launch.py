"""Decoding launched: what `decode_attention` passes to the kernel, in which units, with which schedule."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from rotor.errors import UsageError

from ..key_ranges import DecodeKeys
from ..launch import launch
from ..layer_table import Column, LayerParts, rebuilding_all, table_on
from ..occupancy import GRID_PROGRAMS
from ..strides import alignment, as_words, check_page
from ..tile_sizes import decode_config, gpu_of, rebuilding_steps, sm_count
from .combine import combine_constants, combine_kernel
from .kernel import decode_kernel
from .longest_first import longest_first


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: LayerParts,
    keys: DecodeKeys,
    heads_per_kv: int,
    scaling: float,
    *,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    constant_key: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    schedule: str = "stream",
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query position of each sequence over a layer's packed rows; nothing waits for the host.

    Args:
        query: domain `pre`: [batch_size, num_heads, head_dim], rotated; else [batch_size, width] with the rows of each
            group beside each other, projected: [groups][query rows of a group][qk_rank].
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width] in query's dtype, or
            rows of codes [batch_size, kv_len, bytes], uint8; with a block table [num_pages, page_size, .]. The
            innermost stride is 1.
        parts: of `layer_parts`.
        keys: which keys of each sequence are attended.
        heads_per_kv, scaling: as in the uncompressed model.
        query_basis, key_rotation: domain `pre`: [group_size * head_dim, qk_width], and cos and sin by index in the
            cache, [at least kv_len, head_dim], both halves alike.
        constant_key: domain `pre`: [num_kv_heads, head_dim], contiguous, float32: added to rebuilt keys before their
            rotation.
        block_table: [batch_size, pages of a sequence], int32; a page holds a power of two of keys.
        softcap: logits become softcap * tanh(logits / softcap).
        schedule: `stream`, `lpt` or `none`.
        programs: how many share the work, for `stream` and `lpt`; default by the device.
    Returns:
        [batch_size, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of the logits
        [batch_size, num_heads], float32. Sequences with no keys give zeros and minus infinity.
    """
    batch_size = query.shape[0]
    device = query.device
    page = check_page(key, block_table)
    if parts.coded:
        key, value = as_words(key), as_words(value)
    head_dim = 0 if query_basis is None else query.shape[-1]
    if parts.slow is not None and (key_rotation is None or len(key_rotation[0]) < parts.slow.block):
        parts = rebuilding_all(parts)  # no turns of the nodes
    config = decode_config(parts, heads_per_kv, query.element_size(), head_dim, gpu_of(device))
    units = len(parts.table) * batch_size
    programs = programs or default_programs(device)
    width = parts.rows * sum(row[Column.V_RANK] for row in parts.table)
    output = torch.empty(batch_size, width, dtype=query.dtype, device=device)
    lse = torch.empty(batch_size, parts.rows * len(parts.table), dtype=torch.float32, device=device)
    table = table_on(parts, device)
    prefix = keys.tile_prefix(config["TILE"])
    partial = partial_lse = lse
    order = bounds = keys.first
    grid = units
    if schedule == "stream":
        grid = programs
        partial = torch.empty(
            programs + units, config["TILE_ROWS"], config["PARTIAL_WIDTH"], dtype=torch.float32, device=device
        )
        partial_lse = torch.empty(programs + units, config["TILE_ROWS"], dtype=torch.float32, device=device)
    elif schedule == "lpt":
        grid = min(programs, units)
        length = (keys.end - keys.first).clamp(min=0).long()
        d_sum = table[:, Column.WORK] + 1
        order, bounds = longest_first(d_sum[:, None] * length, grid)
    elif schedule != "none":
        raise UsageError(f"schedule {schedule!r}: expected stream, lpt or none.", "Choose one of them.")
    absorbed, absorbed_constant = _absorbed(config, grid, query) if config["NODES"] else (query, lse)
    cos, sin = key_rotation if key_rotation is not None else (query, query)
    basis = query if query_basis is None else query_basis
    strides = [query.stride(0), 0, 0, 0, output.stride(0)]
    if parts.domain == "pre":
        strides[1:4] = query.stride(1), cos.stride(0), basis.stride(0)
    row_strides = [*key.stride()[:2], *value.stride()[:2]]
    align, row_align = alignment(parts, strides, row_strides)
    query_stride, head_stride, rotation_stride, basis_stride, output_stride = (s // align for s in strides)
    launch(
        decode_kernel, (grid,), query, key, value, partial, partial_lse, output, lse, table, keys.first, keys.end,
        keys.first if keys.holes is None else keys.holes, prefix, order, bounds,
        keys.first if block_table is None else block_table, lse if keys.mask is None else keys.mask, cos, sin, basis,
        lse if constant_key is None else constant_key, absorbed, absorbed_constant, batch_size, query_stride,
        head_stride, *(stride // row_align for stride in row_strides),
        0 if block_table is None else block_table.stride(0), 0 if keys.mask is None else keys.mask.stride(0),
        cos.shape[0], rotation_stride, basis_stride, output_stride, lse.stride(0), len(parts.table),
        parts.total_work, rebuilding_steps(parts, config), scaling, 1.0 if softcap is None else softcap,
        **config,
        CONSTANT=constant_key is not None,
        PAGE=page,
        MASK=keys.mask is not None,
        SOFT_CAP=softcap is not None,
        SCHEDULE=schedule,
        ALIGN=align,
        ROW_ALIGN=row_align,
        BATCH_PADDED=triton.next_power_of_2(batch_size),
    )  # fmt: skip
    if schedule == "stream":
        launch(
            combine_kernel, (units, parts.rows), partial, partial_lse, output, lse, table, prefix, batch_size,
            output.stride(0), lse.stride(0), programs, parts.total_work,
            **combine_constants(config["PARTIAL_WIDTH"], config["TILE_ROWS"]),
        )  # fmt: skip
    return output, lse


def _absorbed(config: dict[str, Any], programs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for each program's queries absorbed at the nodes of a block, and for their products with the constant
    key.
    """
    rows = programs * len(config["NODES"]) * config["TILE_ROWS"]
    return like.new_empty(rows * config["WIDTH"]), like.new_empty(rows, dtype=torch.float32)


def default_programs(device: torch.device) -> int:
    """Programs of a decode step."""
    return GRID_PROGRAMS * sm_count(device)
