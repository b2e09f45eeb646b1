"""Decoding launched: what `decode_attention` passes to the kernel, in which units, with which schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rotor.errors import UsageError

from ..gpu import gpu_of, sm_count
from ..key_ranges import DecodeKeys
from ..launch import launch
from ..layer_table import Column, LayerParts, rebuilding_all, table_on
from ..occupancy import GRID_PROGRAMS
from ..strides import alignment, as_words, check_page
from ..tuning import chosen_constants
from ..workspace import Workspace
from .combine import combine_constants, combine_kernel
from .kernel import decode_kernel
from .longest_first import longest_first
from .tile_sizes import decode_config, rebuilding_steps

SCHEDULES = ("stream", "lpt", "none")


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
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query position of each sequence over a layer's packed rows; nothing waits for the host.

    Args:
        query: domain `pre`: [batch_size, num_heads, head_dim], rotated; else [batch_size, width] with the rows of each
            group beside each other, projected: [groups][query rows of a group][qk_rank].
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width] in query's dtype, or
            rows of codes [batch_size, kv_len, bytes], uint8; with a block table [num_pages, page_size, .]. The
            innermost stride is 1. Dimensions of one may stand between the first and the last, in `query` too.
        parts: of `layer_parts`.
        keys: which keys of each sequence are attended.
        heads_per_kv, scaling: as in the uncompressed model.
        query_basis, key_rotation: domain `pre`: [group_size * head_dim, qk_width], and cos and sin by index in the
            cache, [at least kv_len, head_dim], both halves alike; where keys are turned within blocks of positions
            those of the beginning of each index's block.
        constant_key: domain `pre`: [num_kv_heads, head_dim], contiguous, float32: added to rebuilt keys before their
            rotation.
        block_table: [batch_size, pages of a sequence], int32; a page holds a power of two of keys.
        softcap: logits become softcap * tanh(logits / softcap).
        schedule: `stream`, `lpt` or `none`.
        programs: how many share the work, for `stream` and `lpt`; default by the device.
        workspace: memory of partial results and of the log-sum-exp, which then holds until the workspace is used again;
            by default they are allocated.
    Returns:
        [batch_size, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of the logits
        [batch_size, num_heads], float32. Sequences with no keys give zeros and minus infinity.
    """
    batch_size, device = query.shape[0], query.device
    if parts.coded:
        key, value = as_words(key), as_words(value)
    if parts.slow is not None and (key_rotation is None or len(key_rotation[0]) < parts.slow.block):
        parts = rebuilding_all(parts)  # no turns of the nodes
    cos, sin = key_rotation if key_rotation is not None else (query, query)
    basis = query if query_basis is None else query_basis
    strides = [query.stride(0), 0, 0, 0, parts.output_width]
    if parts.domain == "pre":
        strides[1:4] = query.stride(1), cos.stride(0), basis.stride(0)
    row_strides = [key.stride(0), key.stride(-2), value.stride(0), value.stride(-2)]
    steady = _steady_launches(
        parts, heads_per_kv, query.element_size(), 0 if query_basis is None else query.shape[-1], batch_size, device,
        schedule, programs or default_programs(device), check_page(key, block_table), keys.mask is not None,
        constant_key is not None, softcap is not None, *alignment(parts, strides, row_strides), chosen_constants(),
    )  # fmt: skip
    align, row_align = steady.constants["ALIGN"], steady.constants["ROW_ALIGN"]
    output = query.new_empty(batch_size, parts.output_width)
    lse, *partials = workspace.take(*steady.shapes) if workspace is not None else _allocated(steady.shapes, device)
    partial, partial_lse = partials or (lse, lse)
    absorbed, absorbed_constant = query, lse
    if steady.constants["NODES"]:
        absorbed, absorbed_constant = _absorbed(steady.constants, steady.grid, query)
    prefix = keys.tile_prefix(steady.constants["TILE"])
    order = bounds = first = keys.first
    if schedule == "lpt":
        length = (keys.end - first).clamp(min=0).long()
        d_sum = steady.table[:, Column.WORK] + 1
        order, bounds = longest_first(d_sum[:, None] * length, steady.grid)
    query_stride, head_stride, rotation_stride, basis_stride, output_stride = (s // align for s in strides)
    launch(
        decode_kernel, (steady.grid,), query, key, value, partial, partial_lse, output, lse, steady.table, first,
        keys.end, first if keys.holes is None else keys.holes, prefix, order, bounds,
        first if block_table is None else block_table, lse if keys.mask is None else keys.mask, cos, sin, basis,
        lse if constant_key is None else constant_key, absorbed, absorbed_constant, batch_size, query_stride,
        head_stride, *(stride // row_align for stride in row_strides),
        0 if block_table is None else block_table.stride(0), 0 if keys.mask is None else keys.mask.stride(0),
        cos.shape[0], rotation_stride, basis_stride, output_stride, steady.heads, *steady.numbers, scaling,
        1.0 if softcap is None else softcap, **steady.constants,
    )  # fmt: skip
    if schedule == "stream":
        launch(
            combine_kernel, steady.joining_grid, partial, partial_lse, output, lse, steady.table, prefix, batch_size,
            parts.output_width, steady.heads, steady.grid, parts.total_work, **steady.joining,
        )  # fmt: skip
    return output, lse


def _absorbed(constants: dict[str, Any], programs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what each program keeps of absorbed queries, and for their products with the constant key."""
    rows = programs * constants["KEPT_ROWS"]
    return like.new_empty(rows * constants["WIDTH"]), like.new_empty(rows, dtype=torch.float32)


class _Steady(NamedTuple):
    """What is alike in all steps of a layer at a batch size; only tensors, their strides and two numbers come anew.

    grid, joining_grid: of the decode kernel, and of what joins its slices. heads: query heads.
    shapes: of the log-sum-exp, and of partial results and their log-sum-exps where there are any.
    numbers: parts, their work per tile, steps of rebuilding. constants, joining: that both kernels are compiled for.
    """

    grid: int
    joining_grid: tuple[int, ...]
    heads: int
    shapes: tuple[tuple[int, ...], ...]
    table: Tensor
    numbers: tuple[int, int, int]
    constants: dict[str, Any]
    joining: dict[str, Any]


@lru_cache(maxsize=4096)
def _steady_launches(
    parts: LayerParts, heads_per_kv: int, element_bytes: int, head_dim: int, batch_size: int, device: torch.device,
    schedule: str, programs: int, page: int, masked: bool, constant: bool, capped: bool, align: int, row_align: int,
    chosen: tuple[tuple[str, Any], ...],
) -> _Steady:  # fmt: skip
    """See `decode_attention`; `chosen` is what `decode_config` goes by besides its arguments."""
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r}: expected stream, lpt or none.", "Choose one of them.")
    config = decode_config(parts, heads_per_kv, element_bytes, head_dim, gpu_of(device))
    units = len(parts.table) * batch_size
    heads = parts.rows * len(parts.table)
    shapes: list[tuple[int, ...]] = [(batch_size, heads)]
    if schedule == "stream":
        shapes += [
            (programs + units, config["TILE_ROWS"], config["PARTIAL_WIDTH"]),
            (programs + units, config["TILE_ROWS"]),
        ]
    constants = {
        **config,
        "CONSTANT": constant,
        "PAGE": page,
        "MASK": masked,
        "SOFT_CAP": capped,
        "SCHEDULE": schedule,
        "ALIGN": align,
        "ROW_ALIGN": row_align,
        "BATCH_PADDED": triton.next_power_of_2(batch_size),
    }
    padded_units = triton.next_power_of_2(len(parts.table)) * constants["BATCH_PADDED"]
    joining = combine_constants(config["PARTIAL_WIDTH"], config["TILE_ROWS"], padded_units)
    return _Steady(
        {"stream": programs, "lpt": min(programs, units), "none": units}[schedule],
        (units, parts.rows, triton.cdiv(joining["PARTIAL_WIDTH"], joining["COLUMNS"])),
        heads,
        tuple(shapes),
        table_on(parts, device),
        (len(parts.table), parts.total_work, rebuilding_steps(parts, config)),
        constants,
        joining,
    )


def _allocated(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)


def default_programs(device: torch.device) -> int:
    """Programs of a decode step."""
    return GRID_PROGRAMS * sm_count(device)
