"""What a prefill compiles for a layer, ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..gpu import HOPPER, Gpu
from ..masks import range_variants
from .kernel import prefill_kernel
from .launch import prefill_alignment, row_elements, row_places
from .rebuild import rebuild_variant
from .slices import slice_variants
from .tile_sizes import can_be_cut, chunk_programs, pieces_of, prefill_constants, sliced


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
        **dict.fromkeys(("tasks", "query_start_loc", "slices"), torch.int32),
        **dict.fromkeys(("lse", "constant"), torch.float32),
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
            for suffix, shape in _shapes(constants, dtype.itemsize, gpu, kernels):
                options = {option: shape[option] for option in ("num_warps", "num_stages")}
                fixed = {k: v for k, v in shape.items() if k not in options} | flags
                results = dict.fromkeys(("output", "lse"), torch.float32) if shape["SLICED"] else {}
                variants.append(
                    Variant(name + suffix, prefill_kernel, pointers | results, fixed, ("scale", "softcap"), options)
                )
                if shape["SLICED"]:
                    variants += slice_variants(shape, dtype, page > 0)
    return variants


def _shapes(
    constants: dict[str, Any], element_bytes: int, gpu: Gpu, kernels: LayerKernels | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The constants of a class as it is launched for many queries, in pieces, and for few, and what to call each."""
    yield "", constants
    if can_be_cut(constants):
        yield ", pieces", pieces_of(constants)
    if chunk_programs(kernels, 1):
        few, many = (sliced(constants, seq_len, element_bytes, gpu) for seq_len in (1, constants["ROWS"]))
        yield f", {few['ROWS']} sliced", few
        if many["ROWS"] != few["ROWS"]:
            yield f", {many['ROWS']} sliced", many
