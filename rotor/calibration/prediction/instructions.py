"""Warp instructions that attention issues for a key, by layout: counted once in machine code, looked up afterwards.

`instructions.json` holds what artifacts/count_instructions.py counted, for the sizes that the kernels are specialised
for, per key and group: of decoding, and of absorbing queries for each block of positions.

What the table does not have follows from what it has. Widths, query rows and fast planes are padded to the next entry,
as kernels pad them, and beyond the last in proportion. What rebuilding planes adds is taken in proportion to planes, KV
heads and width, from the entry nearest in these; what shorter blocks of positions multiply by, from the narrowest one.
Keys and values of different widths cost the mean of both; joint latents of numbers as much as two of them. Each split
plane, whose crumbs are read too, adds SPLIT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from ...checkpoint.channels import WORD_PLANES, Numbers
from ...checkpoint.layout import AttentionShape, GroupLayout, LayerLayout

TABLE = "instructions.json"
BLOCK = 64
HEAD_DIM = 128
WIDTHS, ROWS = (64, 128, 256, 512), (8, 16, 32)
"""Places of a latent, and query rows of a group (query heads that share its keys), that kernels are specialised for."""

PLANES = (16, 32, 64)
"""Fast planes of a KV head that a tile rebuilds, likewise."""

SHORT_BLOCKS = (16, 32)
"""Positions of a block, beside BLOCK, that the table has of joint latents with nothing rebuilt."""


SPLIT = 0.12
"""Counted: 0.09 and 0.17 more with one and two split planes of 64 nibbles, 0.13 and 0.10 with one of 128, one KV head
and two."""


class Specialisation(NamedTuple):
    """What a kernel is compiled for. kind: `joint`, `apart` (of codes) or `numbers`.

    width: nibbles, or numbers, of a latent. rope_block: of joint latents; the table has the others for all positions.
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
    """Warp instructions a key and group: of decoding, and of absorbing queries, for blocks of BLOCK positions or once.

    spilled_bytes: of a thread's registers.
    """

    decode: float
    absorb: float = 0.0
    spilled_bytes: int = 0


Table = Mapping[Specialisation, Counts]


@lru_cache(maxsize=1)
def bundled_table() -> Table:
    """The table that comes with rotor."""
    return read_table(json.loads((resources.files("rotor.calibration.prediction") / TABLE).read_text("utf-8")))


def read_table(data: Mapping[str, Any]) -> Table:
    """What is in its file."""
    names = Specialisation._fields
    return {
        Specialisation(**{name: entry[name] for name in names if name in entry}): Counts(
            **{name: value for name, value in entry.items() if name not in names}
        )
        for entry in data["entries"]
    }


def kind_of(layout: LayerLayout) -> str:
    """Name the kind of kernels that serve a layer; see Specialisation."""
    if layout.coded:
        return "joint" if layout.joint else "apart"
    return "numbers"


@lru_cache(maxsize=1 << 14)
def group_instructions(layout: LayerLayout, group: GroupLayout, shape: AttentionShape) -> float:
    """Warp instructions of a step for one cached key of one group: all of its KV heads and their query heads."""
    kv_heads, block = len(group.kv_heads), layout.rope_block or BLOCK
    rows = kv_heads * shape.heads_per_kv
    total = 0.0
    for latent in (group.key, group.values):
        width, split = (latent.width, 0) if isinstance(latent, Numbers) else (WORD_PLANES * latent.words, latent.split)
        wanted = Specialisation(kind_of(layout), width, rows, layout.fast_planes, kv_heads, block, split)
        counts = look_up(bundled_table(), wanted)
        absorb = counts.absorb * shape.head_dim / HEAD_DIM * BLOCK / block if shape.rotary_dim else 0.0
        total += (counts.decode + absorb) / 2
    return total


def _padded(sizes: Iterable[int], wanted: int) -> tuple[int, float]:
    """The next size, or the largest and how many times as much is wanted."""
    found = sorted(sizes)
    return next(((size, 1.0) for size in found if size >= wanted), (found[-1], wanted / found[-1]))


def look_up(table: Table, wanted: Specialisation) -> Counts:
    """The counts of a specialisation, from its own entry or, as the module says, from others."""
    if wanted in table:
        return table[wanted]
    if wanted.split:
        whole, more = look_up(table, wanted._replace(split=0)), 1 + SPLIT * wanted.split
        return Counts(whole.decode * more, whole.absorb * more, whole.spilled_bytes)
    plain = [key for key in table if key.kind == wanted.kind and not key.fast_planes and key.rope_block == BLOCK]
    width, wider = _padded({key.width for key in plain}, wanted.width)
    rows, more = _padded({key.rows for key in plain if key.width == width}, wanted.rows)
    like = Specialisation(wanted.kind, width, rows)
    decode, absorb = table[like].decode * wider * more, table[like].absorb * wider * wanted.rows / rows
    if wanted.fast_planes:
        planes, above = _padded(PLANES, wanted.fast_planes)
        size = planes * above * wanted.kv_heads * width * wider

        def distance(key: Specialisation) -> tuple[float, bool]:
            return abs(math.log(_rebuilt(key) / size)), key.kv_heads != wanted.kv_heads

        nearest = min((key for key in table if key.fast_planes), key=distance)
        added = table[nearest].decode - table[nearest._replace(fast_planes=0, kv_heads=1)].decode
        decode += added * size / _rebuilt(nearest)
    if wanted.rope_block != BLOCK:
        block, _ = _padded((*SHORT_BLOCKS, BLOCK), wanted.rope_block)
        narrow = Specialisation("joint", WIDTHS[0], ROWS[0])
        decode *= table[narrow._replace(rope_block=block)].decode / table[narrow].decode * block / wanted.rope_block
    return Counts(decode, absorb, table[like].spilled_bytes)


def _rebuilt(key: Specialisation) -> int:
    """What rebuilding is in proportion to."""
    return key.fast_planes * key.kv_heads * key.width
