"""What decoding compiles for a layer, ahead of time."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..ahead import Variant
from ..gpu import HOPPER, Gpu
from ..layer_table import LayerParts, pieces_name, rebuilding_all
from ..masks import range_variants
from ..strides import alignment
from .combine import combine_variant
from .kernel import decode_kernel
from .longest_first import assign_variant
from .tile_sizes import decode_config


def decode_variants(
    parts: LayerParts,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    batch_size: int = 1,
    schedule: str = "stream",
    page: int = 0,
    mask: bool = False,
    softcap: bool = False,
    gpu: Gpu = HOPPER,
) -> list[Variant]:
    """What `decode_attention` compiles for a layer whose widths and strides are multiples of 8 elements.

    Where slow planes are interpolated also the kernel for caches shorter than their blocks, which rebuilds all.
    """
    variants = []
    interpolates = parts.slow is not None and not gpu.registers_hold_operands
    whole = parts if parts.slow is None else rebuilding_all(parts)
    for served in (parts, whole) if interpolates else (whole,):
        config = decode_config(served, heads_per_kv, dtype.itemsize, head_dim if parts.domain == "pre" else 0, gpu)
        options = {name: config.pop(name) for name in ("num_warps", "num_stages", "maxnreg")}
        constants = {"PAGE": page, "MASK": mask, "SOFT_CAP": softcap, "SCHEDULE": schedule}
        constants |= {"BATCH_PADDED": triton.next_power_of_2(batch_size)}
        variants.append(_attention(served, dtype, config | constants, options))
        if schedule == "stream":
            units = triton.next_power_of_2(len(parts.table)) * triton.next_power_of_2(batch_size)
            variants.append(combine_variant(config["PARTIAL_WIDTH"], config["TILE_ROWS"], units, dtype))
        elif schedule == "lpt":
            variants.append(assign_variant(len(parts.table), batch_size))
        variants += range_variants(config["TILE"], batch_size, words=False, masked=mask)
    return variants


def _attention(parts: LayerParts, dtype: torch.dtype, constants: dict[str, Any], options: dict[str, Any]) -> Variant:
    """The decode kernel itself."""
    single, integer = torch.float32, torch.int32
    align, row_align = alignment(parts, [], [])
    pointers = {
        **dict.fromkeys(("query", "output", "basis", "absorbed"), dtype),
        **dict.fromkeys(("key", "value"), integer if parts.coded else dtype),
        **dict.fromkeys(("partial", "partial_lse", "lse", "constant", "absorbed_constant"), single),
        **dict.fromkeys(("cos", "sin"), single if parts.domain == "pre" else dtype),
        **dict.fromkeys(("table", "first_key", "end_key", "holes", "order", "bounds", "block_table"), integer),
        "mask": torch.uint8 if constants["MASK"] else single,
        "tile_prefix": torch.int64,
    }
    given = {"CONSTANT": parts.coded and parts.domain == "pre", "ALIGN": align, "ROW_ALIGN": row_align}
    bodies = " ".join(f"{pieces_name(keys)}+{pieces_name(values)}" for keys, values in parts.bodies)
    name = f"decode {parts.domain} {parts.heads}x{parts.rows // parts.heads} rows {bodies} {constants['SCHEDULE']}"
    if parts.slow is not None:
        name += f", {parts.slow.rebuilt} planes rebuilt, {parts.slow.nodes} nodes in {parts.slow.block} keys"
    elif constants["STEP"]:
        name += f", no key rebuilt, queries turned every {constants['STEP']} keys"
    return Variant(name, decode_kernel, pointers, constants | given, ("scale", "softcap"), options)
