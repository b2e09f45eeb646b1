"""Tile sizes, warps and stages of the kernel of few queries, whose keys are split over programs (`few_kernel`).

By rule, as `tile_sizes` has them for the other kernels: arithmetic alone, without Triton.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from rotor.format.kernel_config import DEFAULT_SLICES, LayerKernels
from rotor.format.layout import LayerLayout

from ..decode.tile_sizes import most_pieces
from ..defaults import default_layer
from ..gpu import HOPPER, Gpu, precision, shrink_to_fit
from ..layer_table import (
    REBUILT_COLUMNS,
    REGISTER_COLUMNS,
    SHARES,
    Bodies,
    Column,
    LayerParts,
    layer_parts,
)
from ..occupancy import MOST_REGISTERS
from ..widths import chunks, padded
from .tile_sizes import MANY_PIECES, narrow_tile, padded_columns, prefill_shape, prefill_shared_bytes

ROWS = 16, 64
"""Rows of a tile: two kernels serve all numbers of queries."""


@lru_cache(maxsize=4096)
def few_constants(
    layout: LayerLayout,
    heads_per_kv: int,
    element_bytes: int,
    head_dim: int,
    seq_len: int,
    rebuilt: bool,
    gpu: Gpu = HOPPER,
    kernels: LayerKernels | None = None,
) -> dict[str, Any]:
    """What the kernel is compiled for in a layer, with num_warps and num_stages.

    Bound by memory: no more rows than there are queries, and one tile of keys more in flight where registers hold it.
    Every group is served by the body that serves it in decoding; of keys that are rebuilt first (`rebuilt`) a body has
    head_dim columns.
    """
    kernels = kernels or default_layer(layout, head_dim)
    parts = layer_parts(layout, heads_per_kv, head_dim, kernels, element_bytes)
    per_head, pre = layout.domain == "pre", layout.domain == "pre" and not rebuilt
    bodies = _rebuilt_bodies(parts, head_dim) if rebuilt else parts.bodies
    key, value = (max(padded_columns(body[side]) for body in bodies) for side in (0, 1))
    heads, pack = (layout.group_size, heads_per_kv) if per_head else (1, heads_per_kv * layout.group_size)
    blocks = [cls.rebuilt if rebuilt else cls.blocks for cls in kernels.classes]
    most_rows, most_keys = min(b.rows for b in blocks if b), min(b.columns for b in blocks if b)
    rows, tile, warps = prefill_shape([(key, 0), (value, 0)], most_rows, most_keys, element_bytes, pre, gpu)
    few, many = ROWS
    wanted = few if seq_len * pack <= few else many
    if _crowded(bodies, pre):
        wanted = few if pre and gpu.registers_hold_operands else many
    rows = min(rows, wanted)
    wide = pre and max(key, value) > REGISTER_COLUMNS
    if wide and value > REGISTER_COLUMNS:
        rows = few
    # What is not yet unpacked takes registers too.
    if layout.coded and pre and (gpu.registers_hold_operands or most_pieces(bodies) >= MANY_PIECES):
        tile = min(tile, 16)
    elif layout.coded and not rebuilt and gpu.registers_hold_operands and value > 64:
        tile = 16
    narrow = rows == few and not pre
    if narrow:
        tile = min(narrow_tile(tile, values) for _, values in bodies)
    half = head_dim // 2 if pre else 0
    constants = {
        "BODIES": bodies,
        "PRE": pre,
        "REBUILT": head_dim if rebuilt else 0,
        "HEADS": heads,
        "PACK": pack,
        "HALF": half,
        "HALF_PADDED": padded(half),
        "ROWS": rows,
        "TILE": tile,
        "WIDTH": padded(max(group.v_rank for group in layout.groups)),
        "GROUPS_PADDED": max(16, padded(len(layout.groups))),
        "EVEN": rebuilt or all(row[Column.SHARE] == SHARES for row in parts.table),
        "PRECISION": precision(element_bytes),
        "COLUMNS": REBUILT_COLUMNS if wide else 0,
        "num_warps": 4 if narrow else warps,
        "num_stages": 2,
        # Left to itself the assembler stops earlier, where several bodies spill; two programs an SM have so many.
        "maxnreg": MOST_REGISTERS if (narrow or warps == 4) and len(bodies) > 1 else None,
    }
    tight = narrow and gpu.registers_hold_operands and value > 128  # spills 8 bytes with three stages
    deeper = constants | {"num_stages": 3}
    if not pre and not tight and few_shared_bytes(deeper, element_bytes) <= gpu.shared_bytes:
        constants = deeper
    needed = partial(few_shared_bytes, constants, element_bytes)
    shrink_to_fit(constants, needed, gpu, ("TILE", 16), ("num_stages", 1), ("ROWS", 16))
    return constants


def _crowded(bodies: Bodies, pre: bool) -> bool:
    """Whether values have codes of all four widths, or keys are rebuilt here from many: the registers then hold one
    number of rows without spilling, 64 where products read their operands from shared memory, else 16.
    """
    return max(len(values) for _, values in bodies) > 3 or (pre and most_pieces(bodies) >= MANY_PIECES)


def _rebuilt_bodies(parts: LayerParts, head_dim: int) -> Bodies:
    """The bodies with keys of head_dim numbers, of which the second number of a piece is its first column."""
    whole, rest = chunks(head_dim)
    keys = ((0, 0, whole), (0, whole, rest)) if rest else ((0, 0, whole),)
    return tuple((keys, values) for _, values in parts.bodies)


def few_shared_bytes(constants: dict[str, Any], element_bytes: int) -> int:
    """Shared memory of a program, estimated from above."""
    return max(
        prefill_shared_bytes(constants | {"KEYS": keys, "VALUES": values}, element_bytes)
        for keys, values in constants["BODIES"]
    )


def chunk_programs(kernels: LayerKernels | None, sms: int) -> int:
    """Programs over which the keys of few queries are split; 0 where they never are."""
    return sms * (DEFAULT_SLICES if kernels is None else kernels.slices_per_sm)
