"""What a prefill compiles for a layer, ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..gpu import HOPPER, Gpu
from ..layer_table import layer_parts, pieces_name
from ..masks import range_variants
from ..strides import alignment, alignment_of
from .few_kernel import few_kernel
from .few_tile_sizes import ROWS, chunk_programs, few_constants
from .kernel import prefill_kernel
from .launch import prefill_alignment, row_elements, row_places
from .rebuild import rebuild_variant
from .slices import slice_variants
from .tile_sizes import can_be_cut, pieces_of, prefill_constants


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
        **dict.fromkeys(("query", "output", "basis"), dtype),
        **dict.fromkeys(("cos", "sin"), torch.float32 if layout.domain == "pre" else dtype),
        **dict.fromkeys(("first_key", "end_key", "holes", "block_table"), torch.int32),
        **dict.fromkeys(("tasks", "query_start_loc", "slices", "table"), torch.int32),
        **dict.fromkeys(("lse", "constant", "partial", "partial_lse"), torch.float32),
        "mask": torch.int64 if mask else torch.float32,
    }
    groups = len(layout.groups)
    row_widths = row_elements(layout, dtype.itemsize)
    pre = layout.domain == "pre"
    variants = [rebuild_variant(layout, head_dim, dtype, page)] if pre else []
    variants += range_variants(0, 0, words=True, masked=mask)
    for rebuilt in (True, False) if pre else (False,):
        for cls, constants in prefill_constants(layout, heads_per_kv, dtype.itemsize, head_dim, rebuilt, gpu, kernels):
            places = [list(row_places(layout, g, dtype.itemsize, head_dim if rebuilt else 0)) for g in range(groups)]
            widths = [head_dim if rebuilt else row_widths[0], row_widths[1]]
            align, key_align, value_align = prefill_alignment(
                constants,
                [cls.qk_offset, cls.v_offset],
                *([place[side] for place in places] + [widths[side]] for side in (0, 1)),
            )
            flags = {"PAGE": page, "KEY_PAGE": 0 if rebuilt else page, "MASK": mask, "SOFT_CAP": softcap}
            flags["ALIGN"] = align
            flags |= {"KEY_ALIGN": key_align, "VALUE_ALIGN": value_align, "PACKED": page > 0}
            flags["CONSTANT"] = constants["PRE"] and layout.coded
            row = torch.int32 if layout.coded else dtype
            pointers |= {"key": dtype if rebuilt else row, "value": row}
            keys = f"{cls.qk_rank} rebuilt" if rebuilt else str(cls.qk_rank)
            name = f"prefill {layout.domain} {constants['HEADS']}x{constants['PACK']} rows {keys}+{cls.v_rank}"
            for suffix, shape in (("", constants), (", pieces", pieces_of(constants)))[: 1 + can_be_cut(constants)]:
                variants.append(_variant(name + suffix, prefill_kernel, pointers, shape | flags))
        if chunk_programs(kernels, 1):
            row = torch.int32 if layout.coded else dtype
            pointers |= {"key": dtype if rebuilt else row, "value": row}
            flags = {"PAGE": page, "KEY_PAGE": 0 if rebuilt else page, "MASK": mask, "SOFT_CAP": softcap}
            sizes = layout, heads_per_kv, dtype.itemsize, head_dim
            for constants in _few_shapes(*sizes, rebuilt, gpu, kernels):
                parts = layer_parts(layout, heads_per_kv, head_dim, kernels, dtype.itemsize)
                align, row_align = alignment(parts, [], [])
                flags |= {"ALIGN": align, "KEY_ALIGN": alignment_of(head_dim) if rebuilt else row_align}
                flags |= {"VALUE_ALIGN": row_align, "PACKED": page > 0}
                flags["CONSTANT"] = constants["PRE"] and layout.coded
                bodies = " ".join(f"{pieces_name(keys)}+{pieces_name(values)}" for keys, values in constants["BODIES"])
                name = f"few {layout.domain} {constants['HEADS']}x{constants['PACK']} rows {bodies}"
                name += f"{' rebuilt' if rebuilt else ''}, {constants['ROWS']} at a time"
                variants.append(_variant(name, few_kernel, pointers, constants | flags))
                variants += slice_variants(constants, dtype, page > 0)
    return variants


def _variant(name: str, kernel: Any, pointers: dict[str, torch.dtype], constants: dict[str, Any]) -> Variant:
    options = {name: constants[name] for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    fixed = {k: v for k, v in constants.items() if k not in options}
    return Variant(name, kernel, dict(pointers), fixed, ("scale", "softcap"), options)


def _few_shapes(
    layout: LayerLayout, heads_per_kv: int, element_bytes: int, head_dim: int, rebuilt: bool, gpu: Gpu,
    kernels: LayerKernels | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The constants of the kernel of few queries for the fewest queries, and for more where these take others."""
    first, rest = (
        few_constants(layout, heads_per_kv, element_bytes, head_dim, seq_len, rebuilt, gpu, kernels)
        for seq_len in (1, max(ROWS) + 1)
    )
    yield first
    if rest != first:
        yield rest
