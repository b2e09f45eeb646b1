"""Tile sizes, warps and stages of the decode kernel, by rule: what fits into an SM's registers and shared memory.

Arithmetic alone, so that a launch, `rotor compile` and the simulator choose alike, without Triton. That the compiler
spills nothing at these sizes, and needs no more shared memory than estimated here, is what the compile tests assert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from ..gpu import HOPPER, Gpu, precision, shrink_to_fit
from ..layer_table import REBUILT_COLUMNS, Bodies, Column, LayerParts, Piece, rebuilding_all
from ..slow_planes import ABSORBED_COLUMNS, absorbing_constants
from ..tuning import chosen_constants
from ..widths import padded

LEAST_ROWS = 16
"""Query rows of a matrix product."""

MOST_REGISTERS = 200
"""Of a thread of four warps where a decode kernel has several bodies. Left to itself the assembler stops at 168, at
which three programs fit an SM, and spills; the grid has two an SM."""

ALL_REGISTERS = 255
"""Of a thread, where keys are not rebuilt: two programs of four warps fit an SM, which is what the grid has."""

BYTES_IN_FLIGHT = 9 << 10
"""Of rows of codes that a program of the decode kernel waits for at a time: with two an SM that is what covers the
memory's latency on an H100 (3.35 TB/s, 700 ns, 132 SMs)."""

MOST_STAGES = 6
"""Of the pipeline of loads."""

MANY_PIECES = 6
"""Widths of codes in keys and values together, from which on tiles have 16 keys where keys are rebuilt in registers:
with 64 the compiler spills at 112 + 112 columns, three widths each, and with 32 at more."""


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
    if parts.rope_block > 1:
        config = _absorbing_config(parts, heads_per_kv, element_bytes, head_dim, gpu)
        if config is not None:
            return config
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
    elif parts.coded and head_dim and most_pieces(parts.bodies) >= MANY_PIECES:
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
        **absorbing_constants(parts.slow, heads_per_kv, half, padded(widest[0]), absorbed_planes, tile_rows),
        "num_warps": warps,
        "num_stages": stages,
        "maxnreg": MOST_REGISTERS if warps == 4 and len(parts.bodies) > 1 else None,
    }
    shrink_to_fit(config, partial(decode_shared_bytes, config, element_bytes), gpu, ("TILE", 16), ("num_stages", 1))
    return config


ABSORBED_ROWS = 32
"""Query rows of a KV head that are absorbed at a time, of all nodes of a block: the basis is read once for them. With
more a slice of keys that begins inside a block would absorb more in vain."""

MOST_CHUNK, ABSORBED_BYTES = 1024, 64 << 10
"""Keys for which queries are absorbed before they are attended, and what the absorbed ones may take, so that those of
all programs stay in the L2 cache: with fewer keys the loads of tiles would run dry more often."""

ABSORBED_PLANES = 16
"""Rotary planes of which queries are absorbed at a time: with 32 codes of three and four widths spill."""

LEAST_KEYS = 32
"""Of a tile of keys that are not rebuilt, where registers hold so many: below it the work of a tile is not that of its
products."""


def _absorbing_config(
    parts: LayerParts, heads_per_kv: int, element_bytes: int, head_dim: int, gpu: Gpu
) -> dict[str, Any] | None:
    """As `decode_config`, where keys are turned within blocks of positions and none is rebuilt; None where registers
    have no room for it.

    A tile has as many keys as blocks whose query rows, each block's by themselves, fill a matrix product; and its
    queries are absorbed for several tiles at a time, where ABSORBED_ROWS are not reached by one.
    """
    own_rows = 1 << (parts.rows - 1).bit_length()
    tile = min(parts.tile, max(LEAST_KEYS, parts.rope_block * max(1, LEAST_ROWS // own_rows)))
    # Codes take registers as words and as numbers, of each width; and where products read operands from registers.
    many = parts.coded and most_pieces(parts.bodies) >= MANY_PIECES
    narrow = many or (parts.coded and gpu.registers_hold_operands)
    if narrow:
        tile = min(tile, 16 if many and gpu.registers_hold_operands else LEAST_KEYS)
    config = _absorbing(parts, heads_per_kv, element_bytes, head_dim, tile, narrow)
    if many and config["num_warps"] > 4:
        config = _absorbing(parts, heads_per_kv, element_bytes, head_dim, 16, narrow)
    full = gpu.registers_hold_operands or most_pieces(parts.bodies) > MANY_PIECES
    if narrow and full and config["TILE_ROWS"] > LEAST_ROWS:
        return None
    while decode_shared_bytes(config, element_bytes) > gpu.shared_bytes and config["TILE"] > 16:
        config = _absorbing(parts, heads_per_kv, element_bytes, head_dim, config["TILE"] // 2, narrow)
    return config


def _absorbing(
    parts: LayerParts, heads_per_kv: int, element_bytes: int, head_dim: int, tile: int, narrow: bool
) -> dict[str, Any]:
    """The constants of `_absorbing_config` for tiles of so many keys."""
    step = parts.rope_block
    key, value = parts.widest
    nodes, block = max(1, tile // step), max(tile, step)
    tile_rows = max(LEAST_ROWS, nodes << (parts.rows - 1).bit_length())
    while 2 * block // step * heads_per_kv <= (ABSORBED_ROWS // 2 if parts.coded else ABSORBED_ROWS):
        block *= 2
    node_bytes = tile_rows // nodes * padded(key) * element_bytes
    chunk = block
    while 2 * chunk <= MOST_CHUNK and 2 * chunk // step * node_bytes <= ABSORBED_BYTES:
        chunk *= 2
    read = [(keys, () if parts.joint else values) for keys, values in parts.bodies]
    of_key = _piece_bytes(read, element_bytes) if parts.coded else (key + value) * element_bytes
    stages = max(2, min(MOST_STAGES, 1 - -BYTES_IN_FLIGHT // (tile * of_key)))
    return {
        "BODIES": parts.bodies,
        "PRE": True,
        "HEADS_PER_KV": heads_per_kv,
        "HALF": head_dim // 2,
        "FREQUENCIES": 0,
        "ROWS": parts.rows,
        "TILE_ROWS": tile_rows,
        "TILE": tile,
        "PARTIAL_WIDTH": padded(max(row[Column.V_RANK] for row in parts.table)),
        "PRECISION": precision(element_bytes),
        "AHEAD": False,
        "COLUMNS": 0,
        "PARTS_PADDED": 1 << (len(parts.table) - 1).bit_length(),
        "FAST": 0,
        "NODES": tuple(range(0, block, step)),
        "BLOCK": block,
        "WIDTH": padded(key),
        "ABSORBED_COLUMNS": min(ABSORBED_COLUMNS // 2 if narrow else ABSORBED_COLUMNS, padded(key)),
        "PLANES": ABSORBED_PLANES,
        "NODE_ROWS": padded(block // step * heads_per_kv),
        "STEP": step,
        "TILE_NODES": nodes,
        "CHUNK": chunk,
        "KEPT_ROWS": chunk // step * (tile_rows // nodes),
        "BASIS_STAGES": 1 if narrow else 2,
        "JOINT": parts.joint,
        "num_warps": 4 if tile_rows * value <= 4096 else 8,
        "num_stages": stages,
        "maxnreg": ALL_REGISTERS,
    }


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


def _piece_bytes(bodies: Iterable[tuple[tuple[Piece, ...], ...]], element_bytes: int) -> int:
    """Bytes of a key and its value in the widest body, as rows of codes."""
    return max(
        sum(size * element_bytes if bits == 16 else size * bits // 8 for side in body for bits, _, size in side)
        for body in bodies
    )


def _widened(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces of at least 32 columns."""
    return tuple((bits, field, max(32, size)) for bits, field, size in pieces)


def rebuilding_steps(parts: LayerParts, config: dict[str, Any]) -> int:
    """Steps in which the decode kernel rebuilds the keys of a tile: FREQUENCIES of one head in each. Where it rebuilds
    none, heads whose queries it absorbs.
    """
    return parts.heads if config["STEP"] else parts.heads * (config["FAST"] // config["FREQUENCIES"])


def decode_shared_bytes(config: dict[str, Any], element_bytes: int) -> int:
    """Shared memory of a program of the decode kernel, estimated from above."""
    key, value = (max(sum(size for *_, size in body[side]) for body in config["BODIES"]) for side in (0, 1))
    tile, rows, stages, frequencies = (config[name] for name in ("TILE", "TILE_ROWS", "num_stages", "FREQUENCIES"))
    scores = 4 * tile * rows
    if config["STEP"]:
        # Rows and absorbed queries of tiles in flight, both as operands; queries to absorb and the basis they meet.
        coded = config["BODIES"][0][0][0][0] > 0
        row_bytes = _piece_bytes(config["BODIES"], element_bytes) if coded else (key + value) * element_bytes
        met = (stages + 1) * (tile * row_bytes + rows * key * element_bytes)
        met += (tile * max(key, value) + rows * tile) * element_bytes
        absorbing = stages * 2 * config["PLANES"] * (config["ABSORBED_COLUMNS"] + config["NODE_ROWS"])
        sums = 4 * config["NODE_ROWS"] * config["ABSORBED_COLUMNS"] + 4 * rows * value
        return met + absorbing * element_bytes + sums + scores + 1024
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
