"""Few queries launched: what `prefill_attention` passes to the kernel of split keys, for all groups of a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout

from ..defaults import default_layer
from ..gpu import gpu_of, sm_count
from ..key_ranges import PrefillKeys
from ..launch import launch
from ..layer_table import SHARES, Column, LayerParts, layer_parts, table_on
from ..schedule import keys_are_split
from ..strides import alignment, alignment_of
from ..table_fields import FIELDS
from ..workspace import Workspace
from .few_kernel import few_kernel
from .few_tile_sizes import chunk_programs, few_constants
from .slices import Split, join_constants, join_kernel, planned_slices
from .tasks import row_blocks, task_count


class FewQueries(NamedTuple):
    """How the keys of few queries are split in a layer. row_size: of a group in the table of parts."""

    parts: LayerParts
    constants: dict[str, Any]
    split: Split
    row_size: int


def few_queries(
    layout: LayerLayout,
    keys: PrefillKeys,
    heads_per_kv: int,
    element_bytes: int,
    head_dim: int,
    rebuilt: bool,
    device: torch.device,
    kernels: LayerKernels | None,
    programs: int | None,
) -> FewQueries | None:
    """None where the row blocks of a layer's classes fill the GPU as they are. Arguments as in `prefill_attention`."""
    if programs is None:
        programs = chunk_programs(kernels, sm_count(device))
    gpu = gpu_of(device)
    constants = few_constants(layout, heads_per_kv, element_bytes, head_dim, keys.seq_len, rebuilt, gpu, kernels)
    count = task_count(keys, constants["ROWS"], constants["PACK"])
    parts = layer_parts(layout, heads_per_kv, head_dim, kernels, element_bytes)
    groups, classes = len(layout.groups), len((kernels or default_layer(layout, head_dim)).classes)
    if not keys_are_split(count, constants["HEADS"] * groups, classes, programs):
        return None
    of_group = len(parts.table) // groups
    work = [SHARES if constants["EVEN"] else row[Column.SHARE] for row in parts.table[::of_group]]
    split = Split.of(work, constants["HEADS"], count, programs)
    return FewQueries(parts, constants, split, of_group * FIELDS.value)


def few_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: PrefillKeys,
    few: FewQueries,
    output: Tensor,
    scaling: float,
    *,
    basis: Tensor,
    cos: Tensor,
    sin: Tensor,
    constant_key: Tensor | None,
    block_table: Tensor | None,
    page: int,
    softcap: float | None,
    workspace: Workspace | None,
) -> Tensor:
    """Writes the attention of all groups into `output`; one launch and one that joins it.

    Args:
        query, key, value: as `prefill_attention` has them, rows of codes in words, keys perhaps rebuilt.
        output: [queries of all sequences, width].
        basis, cos, sin: of domain `pre`; any tensor where they are not read.
        page: keys of a page of the cache, 0 for a contiguous one.
        workspace: memory of partial results and of the log-sum-exp; by default they are allocated.
    Returns:
        The natural log-sum-exp, [num_heads, queries], float32.
    """
    parts, constants, split, row_size = few
    rows, pack, device = constants["ROWS"], constants["PACK"], query.device
    per_head, packed = parts.domain == "pre", keys.query_start_loc is not None
    num_heads = len(split.steps) * constants["HEADS"] * pack
    shapes = [(num_heads, keys.first.numel()), (split.programs, rows, constants["WIDTH"]), (split.programs, rows)]
    if workspace is None:
        lse, partial, partial_lse = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    else:
        lse, partial, partial_lse = workspace.take(*shapes)
    # From one sequence to the next, or from one packed query to the next, from head to head and in a sequence.
    strides = [query.stride(0), query.stride(1) if per_head else 0, query.stride(0 if packed else -2)]
    strides += [cos.stride(0), basis.stride(0)] if constants["PRE"] else [0, 0]
    key_strides, value_strides = list(key.stride()[:2]), list(value.stride()[:2])
    rebuilt = constants["REBUILT"]
    align, row_align = alignment(parts, strides, value_strides if rebuilt else key_strides + value_strides)
    key_align = alignment_of(*key_strides, rebuilt) if rebuilt else row_align
    if rebuilt:
        align = alignment_of(*strides, parts.align, rebuilt)
    table, empty = table_on(parts, device), keys.first
    slices, starts = planned_slices(keys, rows, pack, constants["TILE"], split)
    blocks, first_step = triton.cdiv(keys.seq_len * pack, rows), split.planned[0]
    places = row_blocks(keys, rows, pack)
    numbers = len(split.steps), row_size, split.base, split.count, first_step
    launch(
        few_kernel, (split.programs,), query, key, value, partial, partial_lse, table, slices, keys.first, keys.end,
        empty if keys.holes is None else keys.holes, empty if block_table is None else block_table,
        lse if keys.mask is None else keys.mask, cos, sin, basis, lse if constant_key is None else constant_key,
        *places, *numbers, split.slice_rows, keys.batch_size, blocks, keys.seq_len,
        *(stride // align for stride in strides[:3]), *(stride // key_align for stride in key_strides),
        *(stride // row_align for stride in value_strides), 0 if block_table is None else block_table.stride(0),
        0 if keys.mask is None else keys.mask.stride(1), *(stride // align for stride in strides[3:]), scaling,
        1.0 if softcap is None else softcap, **constants, CONSTANT=constants["PRE"] and constant_key is not None,
        PAGE=page, KEY_PAGE=0 if rebuilt else page, MASK=keys.mask is not None, SOFT_CAP=softcap is not None,
        ALIGN=align, KEY_ALIGN=key_align, VALUE_ALIGN=row_align, PACKED=packed,
    )  # fmt: skip
    launch(
        join_kernel, (len(split.steps) * constants["HEADS"] * split.count, rows), partial, partial_lse, output, lse,
        table, *places, starts, *numbers, keys.batch_size, blocks, keys.seq_len, output.stride(0), lse.stride(0),
        **join_constants(constants), PACKED=packed,
    )  # fmt: skip
    return lse
