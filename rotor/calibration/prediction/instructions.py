"""Warp instructions that attention issues per key, by layout: counted once in machine code and looked up here.

artifacts/count_instructions.py counted `instructions.json` for the sizes that kernels are specialised for. Counts are
per key and group: for decoding, and for absorbing queries for each block of positions.

Other sizes are derived from the table:
- Widths, query rows and fast planes are padded to the next entry, as kernels pad them; beyond the last entry, counts
  grow in proportion.
- Rebuilding planes adds instructions in proportion to planes, KV heads and width, from the entry nearest in these.
- Shorter blocks of positions multiply the count by the factor of the narrowest entry.
- Keys and values of different widths cost the mean of both; joint latents of numbers cost as much as two latents.
- Each split plane, whose crumbs are read too, adds SPLIT_PLANE_SHARE.
- Absorbing for heads of another size than HEAD_DIM takes ABSORBED_ANYWAY as it is, and the rest in proportion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from ...checked import JsonObject
from ...checkpoint.channels import WORD_PLANES, Numbers
from ...checkpoint.layout import AttentionShape, GroupLayout, LayerLayout

TABLE = "instructions.json"
BLOCK = 64
HEAD_DIM = 128
WIDTH_SIZES = (64, 128, 256, 512)
"""Widths of a latent that kernels are specialised for."""

QUERY_ROW_SIZES = (8, 16, 32)
"""Query rows of a group (query heads that share its keys) that kernels are specialised for."""

FAST_PLANE_SIZES = (16, 32, 64)
"""Fast planes of a KV head, rebuilt in a tile, that kernels are specialised for."""

SHORT_BLOCKS = (16, 32)
"""Positions of a block, besides BLOCK, that the table has for joint latents without rebuilt planes."""

SPLIT_PLANE_SHARE = 0.12
"""Share of instructions that a split plane adds. Counted: 0.09 and 0.17 for one and two split planes of 64 nibbles,
0.13 and 0.10 for one of 128 with one and two KV heads."""

ABSORBED_ANYWAY = 0.4
"""Share of the instructions of absorbing that does not depend on head_dim. Counted: heads of 64 take 0.68 to 0.81 of
those of 128, heads of 256 1.59 to 1.85."""


class Specialisation(NamedTuple):
    """Sizes that a kernel is compiled for.

    kind: `joint`, `apart` (separate coded latents) or `numbers`.
    width: nibbles, or numbers, of a latent.
    rope_block: positions of a block, for joint latents; the table has the other kinds for all positions at once.
    split: planes of nibbles whose crumbs are read too; see rotor.checkpoint.channels.
    """

    kind: str
    width: int
    rows: int
    fast_planes: int = 0
    kv_heads: int = 1
    rope_block: int = BLOCK
    split: int = 0


@dataclass(frozen=True)
class Counts:
    """Warp instructions per key and group.

    decode: instructions of decoding.
    absorb: instructions of absorbing queries, once per block of BLOCK positions.
    spilled_bytes: registers that a thread spills to memory.
    """

    decode: float
    absorb: float = 0.0
    spilled_bytes: int = 0


Table = Mapping[Specialisation, Counts]


@lru_cache(maxsize=1)
def bundled_table() -> Table:
    """The table that comes with rotor."""
    return read_table(json.loads((resources.files("rotor.calibration.prediction") / TABLE).read_text("utf-8")))


def read_table(data: JsonObject) -> Table:
    """Read a table from the content of its file."""
    names = Specialisation._fields
    return {
        Specialisation(**{name: entry[name] for name in names if name in entry}): Counts(
            **{name: value for name, value in entry.items() if name not in names}
        )
        for entry in data["entries"]
    }


@lru_cache(maxsize=1 << 14)
def group_instructions(layout: LayerLayout, group: GroupLayout, shape: AttentionShape) -> float:
    """Warp instructions of a decode step for one cached key of a group, for all of its query heads."""
    kv_heads, block = len(group.kv_heads), layout.rope_block or BLOCK
    rows = kv_heads * shape.heads_per_kv
    of_heads = ABSORBED_ANYWAY + (1 - ABSORBED_ANYWAY) * shape.head_dim / HEAD_DIM
    total = 0.0
    for latent in (group.key, group.values):
        width, split = (latent.width, 0) if isinstance(latent, Numbers) else (WORD_PLANES * latent.words, latent.split)
        wanted = Specialisation(layout.kind, width, rows, layout.fast_planes, kv_heads, block, split)
        counts = look_up(bundled_table(), wanted)
        absorb = counts.absorb * of_heads * BLOCK / block if shape.rotary_dim else 0.0
        total += (counts.decode + absorb) / 2
    return total


def _padded(sizes: Iterable[int], wanted: int) -> tuple[int, float]:
    """The next larger size and factor 1, or the largest size and the factor by which `wanted` exceeds it."""
    ascending = sorted(sizes)
    return next(((size, 1.0) for size in ascending if size >= wanted), (ascending[-1], wanted / ascending[-1]))


def look_up(table: Table, wanted: Specialisation) -> Counts:
    """Counts of a specialisation: its entry in the table, or derived from other entries (see the module)."""
    if wanted in table:
        return table[wanted]
    if wanted.split:
        whole = look_up(table, wanted._replace(split=0))
        more = 1 + SPLIT_PLANE_SHARE * wanted.split
        return Counts(whole.decode * more, whole.absorb * more, whole.spilled_bytes)
    plain = [key for key in table if key.kind == wanted.kind and not key.fast_planes and key.rope_block == BLOCK]
    width, wider = _padded({key.width for key in plain}, wanted.width)
    rows, more = _padded({key.rows for key in plain if key.width == width}, wanted.rows)
    like = Specialisation(wanted.kind, width, rows)
    decode = table[like].decode * wider * more
    absorb = table[like].absorb * wider * wanted.rows / rows
    if wanted.fast_planes:
        planes, above = _padded(FAST_PLANE_SIZES, wanted.fast_planes)
        size = planes * above * wanted.kv_heads * width * wider

        def distance(key: Specialisation) -> tuple[float, bool]:
            return abs(math.log(_rebuilt(key) / size)), key.kv_heads != wanted.kv_heads

        without = {key: key._replace(fast_planes=0, kv_heads=1) for key in table if key.fast_planes}
        nearest = min((key for key, other in without.items() if other in table), key=distance)
        added = table[nearest].decode - table[without[nearest]].decode
        decode += added * size / _rebuilt(nearest)
    if wanted.rope_block != BLOCK:
        block, _ = _padded((*SHORT_BLOCKS, BLOCK), wanted.rope_block)
        narrow = Specialisation("joint", WIDTH_SIZES[0], QUERY_ROW_SIZES[0])
        decode *= table[narrow._replace(rope_block=block)].decode / table[narrow].decode * block / wanted.rope_block
    return Counts(decode, absorb, table[like].spilled_bytes)


def _rebuilt(key: Specialisation) -> int:
    """Size that the instructions of rebuilding planes are proportional to."""
    return key.fast_planes * key.kv_heads * key.width
