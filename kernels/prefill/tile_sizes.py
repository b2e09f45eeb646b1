"""Tile sizes, warps and stages of the prefill kernel, by rule: what fits into an SM's registers and shared memory.

Arithmetic alone, so that a launch, `rotor compile` and the simulator choose alike, without Triton. That the compiler
spills nothing at these sizes, and needs no more shared memory than estimated here, is what the compile tests assert.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rotor.format.columns import WORD_BYTES, Columns
from rotor.format.kernel_config import Blocks, LayerKernels
from rotor.format.layout import GroupClass, LayerLayout

from ..defaults import default_layer
from ..gpu import HOPPER, Gpu, precision, shrink_to_fit
from ..layer_table import REBUILT_COLUMNS, REGISTER_COLUMNS, Piece
from ..schedule import PIECES
from ..widths import chunks, padded

MANY_PIECES = 5
"""Widths of codes in keys and values together, from which on tiles have 16 keys where keys are rebuilt in registers:
with 32 the compiler spills at 80 + 48 columns."""

REBUILT_BYTES = 1 << 30
"""The most that rebuilt keys of a layer may take for the time of its prefill."""


def rebuilding_pays(
    layout: LayerLayout, heads_per_kv: int, head_dim: int, seq_len: int, tokens: int, element_bytes: int
) -> bool:
    """Whether keys of domain `pre` are rebuilt once in memory rather than by every row block in registers.

    For n row blocks that saves (n - 1) 2 qk_rank head_dim FLOPs a key and KV head, and costs 4 head_dim bytes written
    and read again, in 16 bits: with 180 FLOP in the time of a byte it pays from (n - 1) qk_rank = 360 on.

    Args:
        seq_len: queries of a sequence. tokens: cached keys of all sequences.
    """
    if layout.domain != "pre":
        return False
    rebuilt_bytes = tokens * len(layout.groups) * layout.group_size * head_dim * element_bytes
    row_blocks = -(-seq_len * heads_per_kv // 64)
    saved = (row_blocks - 1) * max(group.qk_rank for group in layout.groups)
    return rebuilt_bytes <= REBUILT_BYTES and saved >= 360


def prefill_constants(
    layout: LayerLayout,
    heads_per_kv: int,
    element_bytes: int,
    head_dim: int,
    rebuilt: bool,
    gpu: Gpu = HOPPER,
    kernels: LayerKernels | None = None,
) -> list[tuple[GroupClass, dict[str, Any]]]:
    """Each class of a layer, widest first, with the constants that its prefill kernel is compiled for.

    Row blocks are those of `kernels` (by default by rule: balanced by d_sum, FDC section 5.3), in powers of two. Of
    keys that are rebuilt first the kernel reads head_dim columns. Tiles shrink where the GPU has little shared memory.
    """
    kernels = kernels or default_layer(layout, head_dim)
    per_head, pre = layout.domain == "pre", layout.domain == "pre" and not rebuilt
    half = head_dim // 2 if pre else 0
    result = []
    for cls, blocks in _launched_classes(kernels, rebuilt):
        qk_width, v_rank = head_dim if rebuilt else cls.qk_rank, cls.v_rank
        whole = pre and max(qk_width, v_rank) > 64  # more pieces take more registers
        widths = [(padded(width), 0) if whole else chunks(width) for width in (qk_width, v_rank)]
        rows, tile, warps = prefill_shape(widths, blocks.rows, blocks.columns, element_bytes, pre, gpu)
        group = layout.groups[cls.start]
        keys = static_pieces(None if rebuilt else group.qk_columns, qk_width, widths[0], element_bytes)
        values = static_pieces(group.v_columns, v_rank, widths[1], element_bytes)
        # What is not yet unpacked takes registers too.
        if layout.coded and pre and (gpu.registers_hold_operands or len(keys) + len(values) >= MANY_PIECES):
            tile = min(tile, 16)
        elif layout.coded and not rebuilt and gpu.registers_hold_operands and sum(widths[1]) > 64:
            tile = 16
        wide = pre and max(padded_columns(keys), padded_columns(values)) > REGISTER_COLUMNS
        if wide and padded_columns(values) > REGISTER_COLUMNS:
            rows = 16
        constants = {
            "QK": qk_width,
            "V": v_rank,
            "KEYS": keys,
            "VALUES": values,
            "QK_ROW": sum(piece[5] for piece in keys),
            "V_ROW": sum(piece[5] for piece in values),
            "PRE": pre,
            "HEADS": layout.group_size if per_head else 1,
            "PACK": heads_per_kv if per_head else heads_per_kv * layout.group_size,
            "HALF": half,
            "HALF_PADDED": padded(half),
            "ROWS": rows,
            "SPLIT": 1,
            "TILE": tile,
            "PRECISION": precision(element_bytes),
            "COLUMNS": REBUILT_COLUMNS if wide else 0,
            "num_warps": warps,
            "num_stages": 2,
        }
        needed = partial(prefill_shared_bytes, constants, element_bytes)
        shrink_to_fit(constants, needed, gpu, ("TILE", 16), ("num_stages", 1), ("ROWS", 16))
        result.append((cls, constants))
    return result


StaticPiece = tuple[int, int, int, int, int, int]
"""What the prefill kernel loads of a latent at a time: bits (0 in rows of the model's dtype), its first column of the
group's, a power of two of columns that it fits into, how many it has, its place in the group's row, and its elements
there."""


def static_pieces(
    columns: Columns | None, rank: int, widths: tuple[int, int], element_bytes: int
) -> tuple[StaticPiece, ...]:
    """The segments of rows of codes, or a rank in pieces of `widths`."""
    if columns is None:
        first, second = widths
        whole = (0, 0, first, min(rank, first), 0, min(rank, first))
        return (whole, (0, first, second, rank - first, first, rank - first)) if second else (whole,)
    return tuple(
        (s.bits, s.first, padded(s.count), s.count, s.offset_bytes // WORD_BYTES, s.size_bytes // WORD_BYTES)
        for s in columns.segments(element_bytes)
    )


def padded_columns(pieces: tuple[StaticPiece, ...] | tuple[Piece, ...]) -> int:
    """Columns of a tile for all pieces."""
    return sum(piece[2] for piece in pieces)


def _launched_classes(kernels: LayerKernels, rebuilt: bool) -> Iterator[tuple[GroupClass, Blocks]]:
    """The classes with their places in the layer and in the packed rows, and their blocks."""
    start = qk_offset = v_offset = 0
    for cls in kernels.classes:
        blocks = cls.rebuilt if rebuilt else cls.blocks
        assert blocks is not None  # KernelConfig.check
        yield GroupClass(start, cls.groups, cls.qk_rank, cls.v_rank, qk_offset, v_offset), blocks
        start, qk_offset = start + cls.groups, qk_offset + cls.groups * cls.qk_rank
        v_offset += cls.groups * cls.v_rank


def prefill_shape(
    widths: list[tuple[int, int]], row_block: int, column_block: int, element_bytes: int, pre: bool, gpu: Gpu
) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps: the balanced block sizes as powers of two that the registers can hold.

    Args:
        widths: of keys and of values, as one or two powers of two.
        pre: whether keys are rebuilt in registers: they and their rotation take as many again as the scores.
    """
    key, value = (sum(width) for width in widths)
    rows = min(128, 1 << (row_block.bit_length() - 1))
    tile = column_block
    while rows > 16 and rows * (value + tile) > 24576:
        rows //= 2
    if element_bytes == 4 or pre:
        rows, tile = min(rows, 64), min(tile, 16 if pre and max(key, value) > 128 else 32)
    elif value > 128:
        tile = min(tile, 32)
    if gpu.registers_hold_operands and pre:
        rows = min(rows, 32)
    elif gpu.registers_hold_operands:
        in_pieces = widths[1][1] > 0
        rows = min(rows, 64) if value > 64 else rows
        tile = min(tile, 16 if value > 128 else 32) if in_pieces and value > 80 else tile
    return rows, tile, 8 if rows * (value + tile) > 8192 or pre else 4


def can_be_cut(constants: dict[str, Any]) -> bool:
    """Whether a kernel's row blocks may be cut into PIECES; not where each would rebuild keys for itself."""
    return not constants["PRE"] and constants["ROWS"] >= 16 * PIECES


def pieces_of(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a prefill kernel for row blocks that are cut into PIECES; see `schedule.last_round`.

    Codes take three stages: with two the compiler spills 8 and 16 bytes of three and four widths.
    """
    values = constants["VALUES"]
    rows = constants["ROWS"] // PIECES
    tile = min(16 if rows * padded_columns(values) > 2048 else 32, narrow_tile(constants["TILE"], values))
    stages = 3 if values[0][0] else constants["num_stages"]
    return constants | {"ROWS": rows, "SPLIT": PIECES, "TILE": tile, "num_warps": 4, "num_stages": stages}


NARROW_COLUMNS = 96
"""Columns of values in codes of three widths, from which on a tile of 32 keys spills beside 16 rows in four warps."""


def narrow_tile(tile: int, values: tuple[StaticPiece, ...] | tuple[Piece, ...]) -> int:
    """Keys of a tile that four warps hold beside 16 rows: fewer where values have codes of three widths, or of four."""
    if len(values) < 3:
        return tile
    return min(tile, 16 if len(values) > 3 or padded_columns(values) > NARROW_COLUMNS else 32)


def prefill_workers(constants: dict[str, Any], sms: int) -> int:
    """Programs of a prefill kernel that a GPU holds at a time: its registers allow two of four warps an SM, or one."""
    return sms * (8 // constants["num_warps"])


def prefill_shared_bytes(constants: dict[str, Any], element_bytes: int) -> int:
    """Shared memory of a program of the prefill kernel, estimated from above."""
    key, value = padded_columns(constants["KEYS"]), padded_columns(constants["VALUES"])
    rows, tile, head_dim = constants["ROWS"], constants["TILE"], 2 * constants["HALF_PADDED"]
    if constants["COLUMNS"]:
        key = constants["COLUMNS"] * constants["num_stages"]
    elements = constants["num_stages"] * tile * (key + value) + rows * tile
    elements += (rows + key) * head_dim if constants["PRE"] else rows * key
    rotation = 4 * tile * head_dim if constants["PRE"] else 0
    return elements * element_bytes + rotation + 16 * rows + 1024
