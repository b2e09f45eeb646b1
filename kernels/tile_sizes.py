"""Tile sizes, warps and stages of every kernel, by rule: what fits into an SM's registers and shared memory.

Arithmetic alone, so that a launch, `rotor compile` and the simulator choose alike, without Triton. That the compiler
spills nothing at these sizes, and needs no more shared memory than estimated here, is what the compile tests assert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rotor.format.columns import WORD_BYTES, Columns
from rotor.format.kernel_config import Blocks, LayerKernels
from rotor.format.layout import GroupClass, LayerLayout

from .defaults import default_layer
from .layer_table import REGISTER_COLUMNS, Bodies, Column, LayerParts, Piece, layer_parts, rebuilding_all
from .schedule import PIECES
from .slow_planes import absorbing_constants
from .tuning import chosen_constants
from .widths import chunks, padded

SHARED_KB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory that one program may have, by compute capability. Source: CUDA programming guide."""


@dataclass(frozen=True)
class Gpu:
    """What tiles depend on: the compute capability (90 is 9.0), and bytes of shared memory that a program may have."""

    capability: int
    shared_bytes: int

    @classmethod
    def of_capability(cls, capability: int, unknown_bytes: int = 64 << 10) -> Gpu:
        """A GPU that need not be there; unknown_bytes where nothing is known of its shared memory."""
        return cls(capability, SHARED_KB[capability] << 10 if capability in SHARED_KB else unknown_bytes)

    @property
    def registers_hold_operands(self) -> bool:
        """Whether matrix products read all of their operands from registers, not from shared or tensor memory."""
        return not 90 <= self.capability < 120


HOPPER = Gpu.of_capability(90)


@lru_cache(maxsize=16)
def gpu_of(device: torch.device) -> Gpu:
    """Of a device; where there is no GPU (in Triton's interpreter), as for an H100."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 64 << 10)  # ROCm does not say; it has 64 KB
    return Gpu.of_capability(10 * properties.major + properties.minor, shared_bytes)


MOST_REGISTERS = 200
"""Of a thread of four warps where a decode kernel has several bodies. Left to itself the assembler stops at 168, at
which three programs fit an SM, and spills; the grid has two an SM."""

BYTES_IN_FLIGHT = 9 << 10
"""Of rows of codes that a program of the decode kernel waits for at a time: with two an SM that is what covers the
memory's latency on an H100 (3.35 TB/s, 700 ns, 132 SMs)."""

MOST_STAGES = 6
"""Of the pipeline of loads."""

MANY_PIECES, MANY_PIECES_DECODED = 5, 6
"""Widths of codes in keys and values together, from which on tiles have 16 keys everywhere, where keys are rebuilt in
registers: in a prefill, which with 32 keys spills at 80 + 48 columns, and in decoding, which with 64 does at 112 + 112,
three widths each, and with 32 at more."""

REBUILT_BYTES = 1 << 30
"""The most that rebuilt keys of a layer may take for the time of its prefill."""


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; two where there is no GPU (in Triton's interpreter)."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def decode_config(
    parts: LayerParts, heads_per_kv: int, element_bytes: int, head_dim: int, gpu: Gpu = HOPPER
) -> dict[str, Any]:
    """Constants of the decode kernel that follow from the layer alone, with num_warps and num_stages.

    head_dim is 0 except in domain `pre`. Tiles shrink where the GPU has little shared memory. `tuning.decode_constants`
    puts others in their place.
    """
    return {**_decode_config(parts, heads_per_kv, element_bytes, head_dim, gpu), **dict(chosen_constants())}


@lru_cache(maxsize=4096)
def _decode_config(parts: LayerParts, heads_per_kv: int, element_bytes: int, head_dim: int, gpu: Gpu) -> dict[str, Any]:
    if gpu.registers_hold_operands:
        parts = rebuilding_all(parts)  # these have none left for the absorbed queries
    widest = parts.widest
    tile_rows = padded(parts.rows)
    # Rebuilding from wide latents takes registers, more of them where they hold both operands or serve two bodies:
    # fewer frequencies at a time, and then more rows and columns.
    crowded = gpu.registers_hold_operands or len(parts.bodies) > 1
    wide_pre = parts.domain == "pre" and (parts.coded or max(widest) > 128 or (crowded and max(widest) == 128))
    if wide_pre:
        tile_rows = max(32, tile_rows)
    half = head_dim // 2
    frequencies = 16 if wide_pre else min(32, padded(half))
    columns = REBUILT_COLUMNS if in_pieces(parts, gpu) else 0
    tile, warps, stages = decode_shape(parts.tile, widest, tile_rows, element_bytes, head_dim, gpu)
    if columns:
        tile_rows, stages = padded(parts.rows), 2
        tile, frequencies = _wide_tile(parts, head_dim, gpu)
    elif parts.coded and head_dim and gpu.registers_hold_operands:
        tile, stages = min(tile, 16), 1  # words and numbers both take registers
    elif parts.coded and head_dim and most_pieces(parts.bodies) >= MANY_PIECES_DECODED:
        tile = min(tile, 16)
    elif parts.coded and not head_dim:
        stages = max(
            stages, min(MOST_STAGES, 1 - -BYTES_IN_FLIGHT // (tile * _piece_bytes(parts.bodies, element_bytes)))
        )
    if parts.slow is not None:
        frequencies = math.gcd(frequencies, parts.slow.rebuilt)
    absorbed_planes = 32 if parts.coded else 16  # what the compiler does not spill at
    config = {
        # Smaller tiles than these would be loaded two bytes at a time.
        "BODIES": tuple(tuple(map(_widened, body)) for body in parts.bodies) if wide_pre else parts.bodies,
        "PRE": parts.domain == "pre",
        "HEADS_PER_KV": heads_per_kv,
        "HALF": half,
        "FREQUENCIES": frequencies,
        "ROWS": parts.rows,
        "TILE_ROWS": tile_rows,
        "TILE": tile,
        "PARTIAL_WIDTH": padded(max(row[Column.V_RANK] for row in parts.table)),
        "PRECISION": precision(element_bytes),
        "AHEAD": parts.coded and parts.domain == "pre" and not columns,
        "COLUMNS": columns,
        "PARTS_PADDED": 1 << (len(parts.table) - 1).bit_length(),
        **absorbing_constants(parts.slow, heads_per_kv, half, padded(widest[0]), absorbed_planes),
        "num_warps": warps,
        "num_stages": stages,
        "maxnreg": MOST_REGISTERS if warps == 4 and len(parts.bodies) > 1 else None,
    }
    while decode_shared_bytes(config, element_bytes) > gpu.shared_bytes and shrink(
        config, ("TILE", 16), ("num_stages", 1)
    ):
        pass
    return config


REBUILT_COLUMNS = 64
"""Of a latent that are loaded at a time for every head, where a tile's do not stay in registers: what one row of a tile
takes of 16-bit numbers is a cache line, and of codes of two bits four words, what a thread loads at once."""


def in_pieces(parts: LayerParts, gpu: Gpu) -> bool:
    """Whether the decode kernel rebuilds keys from columns that it loads for every head: of wide latents, and from 129
    numbers on where products read their operands from shared memory: tiles of 64 keys then take no more registers than
    those of 16 whose latents stay in them, and the basis is read for four times as many keys. Beside queries that are
    absorbed fewer latents stay in registers.
    """
    if parts.slow is not None and max(parts.widest) >= 128:
        return True
    narrow = gpu.registers_hold_operands or parts.coded or parts.domain != "pre" or len(parts.bodies) > 1
    return parts.wide or (not narrow and max(parts.widest) > 128)


def _wide_tile(parts: LayerParts, head_dim: int, gpu: Gpu) -> tuple[int, int]:
    """Keys of a tile and frequencies at a time that the compiler does not spill at, of latents `in_pieces`."""
    # Words take registers beside the numbers, and so do operands that are not read from shared memory.
    tile, frequencies = (16, 32) if parts.coded or gpu.registers_hold_operands else (64, 64)
    if parts.slow is not None:
        tile, frequencies = 2 * tile if tile == 64 else tile, frequencies // 2
    return min(parts.tile, tile), min(frequencies, padded(head_dim // 2))


def most_pieces(bodies: Bodies) -> int:
    """Pieces of a key and its value, in the body that has most."""
    return max(len(keys) + len(values) for keys, values in bodies)


def _piece_bytes(bodies: Bodies, element_bytes: int) -> int:
    """Bytes of a key and its value in the widest body, as rows of codes."""
    return max(
        sum(size * element_bytes if bits == 16 else size * bits // 8 for side in body for bits, _, size in side)
        for body in bodies
    )


def _widened(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces of at least 32 columns."""
    return tuple((bits, field, max(32, size)) for bits, field, size in pieces)


def rebuilding_steps(parts: LayerParts, config: dict[str, Any]) -> int:
    """Steps in which the decode kernel rebuilds the keys of a tile: FREQUENCIES of one head in each."""
    return parts.heads * (config["FAST"] // config["FREQUENCIES"])


def decode_shared_bytes(config: dict[str, Any], element_bytes: int) -> int:
    """Shared memory of a program of the decode kernel, estimated from above."""
    key, value = (max(sum(size for *_, size in body[side]) for body in config["BODIES"]) for side in (0, 1))
    tile, rows, stages, frequencies = (config[name] for name in ("TILE", "TILE_ROWS", "num_stages", "FREQUENCIES"))
    scores = 4 * tile * rows
    absorbed = len(config["NODES"]) * rows
    if config["COLUMNS"]:
        beside = max(2 * frequencies, absorbed)
        rebuilding = stages * config["COLUMNS"] * (tile + beside) + 2 * frequencies * tile
        return (rebuilding + tile * (value + 2 * rows)) * element_bytes + 8 * frequencies * tile + scores + 1024
    if config["BODIES"][0][0][0][0]:
        words = stages * tile * _piece_bytes(config["BODIES"], element_bytes)
        rebuilding = 2 * frequencies * ((key + tile) * element_bytes + 4 * tile) if config["PRE"] else 0
        return (
            words
            + (tile * max(key, value) + max(rows, absorbed) * key) * element_bytes
            + rebuilding
            + 4 * scores
            + 1024
        )
    if config["PRE"]:
        rebuilding = 2 * frequencies * ((key + tile) * element_bytes + 4 * tile)
        return (stages * tile * (key + value) + absorbed * key) * element_bytes + rebuilding + scores + 1024
    return (max(1, stages - 1) * tile * (key + value) + rows * key) * element_bytes + 4 * scores + 1024


def shrink(config: dict[str, Any], *order: tuple[str, int]) -> bool:
    """Halve the first of `order` that is above its least; False where none is."""
    for name, least in order:
        if config[name] > least:
            config[name] = max(least, config[name] // 2)
            return True
    return False


def decode_shape(
    tile: int, widest: tuple[int, int], tile_rows: int, element_bytes: int, head_dim: int, gpu: Gpu
) -> tuple[int, int, int]:
    """Keys of a tile, warps, and stages of the pipeline of loads; head_dim is 0 except in domain `pre`.

    `tile` is what was chosen for 16-bit numbers: half as many of 32 bits, and in `pre` at most what the compiler does
    not spill at.
    """
    if head_dim:
        narrow = max(widest) < 128 or (max(widest) == 128 and not gpu.registers_hold_operands)
        return min(tile, 64 if narrow else 16), 4 if sum(widest) <= 64 else 8, 2
    return max(16, tile * 2 // max(2, element_bytes)), 4 if tile_rows * widest[1] <= 4096 else 8, 3


def precision(element_bytes: int) -> str:
    """Of matrix products: float32 is multiplied as such."""
    return "ieee" if element_bytes == 4 else "tf32"


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
        order = ("TILE", 16), ("num_stages", 1), ("ROWS", 16)
        while prefill_shared_bytes(constants, element_bytes) > gpu.shared_bytes and shrink(constants, *order):
            pass
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


@lru_cache(maxsize=4096)
def fits_shared_memory(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    element_bytes: int,
    gpu: Gpu,
    kernels: LayerKernels | None = None,
) -> bool:
    """Whether decoding and prefill, in their smallest tiles, fit into the shared memory that a program may have."""
    parts = layer_parts(layout, heads_per_kv, head_dim, kernels, element_bytes)
    config = decode_config(parts, heads_per_kv, element_bytes, head_dim if layout.domain == "pre" else 0, gpu)
    prefills = prefill_constants(layout, heads_per_kv, element_bytes, head_dim, False, gpu, kernels)
    needed = [decode_shared_bytes(config, element_bytes)]
    needed += [prefill_shared_bytes(constants, element_bytes) for _, constants in prefills]
    return max(needed) <= gpu.shared_bytes
