"""Warp instructions that attention issues for a key, by layout: counted once in machine code, looked up afterwards.

`instructions.json` holds what `rotor compile --table` counted, for the sizes that the kernels are specialised for, per
key and group: of decoding, and of absorbing queries for each block of positions.

What the table does not have follows from what it has. Widths, query rows and fast planes are padded to the next entry,
as kernels pad them. What rebuilding planes adds is taken in proportion to planes times KV heads; what shorter blocks
of positions multiply by, as in the nearest width and rows. Keys and values of different widths cost the mean of both;
joint latents of numbers as much as two of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from ..format.channels import Latent
from ..format.layout import AttentionShape, GroupLayout, LayerLayout

TABLE = "instructions.json"
BLOCK = 64
HEAD_DIM = 128
WIDTHS = (64, 128, 256, 512)
ROWS = (8, 16, 32, 64)
"""Places of a latent, and query rows of a group (query heads that share its keys), that kernels are specialised for."""

PLANES = (16, 32, 64)
"""Fast planes of a KV head that a tile rebuilds, likewise."""

REBUILT = ((16, 1), (32, 1), (64, 1), (16, 2), (16, 4))
"""(fast planes, KV heads of a group) that the table has, beside those that rebuild nothing; the last one alone for more
query rows than FEW_ROWS, which no group of one KV head has."""

FEW_ROWS = 16


SHORT_BLOCKS = (16, 32)
"""Positions of a block for which the table has joint latents of the first two widths and rows, nothing rebuilt."""


class Specialisation(NamedTuple):
    """What a kernel is compiled for. kind: `joint`, `apart` (of codes) or `numbers`.

    rope_block: of joint latents; the table has the others for all positions.
    """

    kind: str
    width: int
    rows: int
    fast_planes: int = 0
    kv_heads: int = 1
    rope_block: int = BLOCK


@dataclass(frozen=True)
class Counts:
    """Warp instructions a key and group: of decoding, and of absorbing queries, for blocks of BLOCK positions or once.

    spilled_bytes: of a thread's registers.
    """

    decode: float
    absorb: float = 0.0
    spilled_bytes: int = 0


Table = Mapping[Specialisation, Counts]


def grid() -> list[Specialisation]:
    """What the table is to have: joint latents in blocks of positions, those apart for all positions."""
    found = []
    for rows in ROWS:
        for width in WIDTHS:
            found += [Specialisation(kind, width, rows) for kind in ("joint", "apart", "numbers")]
            rebuilt = REBUILT if rows <= FEW_ROWS else REBUILT[-1:]
            found += [Specialisation("joint", width, rows, *each) for each in rebuilt]
    short = [(width, rows, block) for width in WIDTHS[:2] for rows in ROWS[:2] for block in SHORT_BLOCKS]
    return found + [Specialisation("joint", width, rows, rope_block=block) for width, rows, block in short]


@lru_cache(maxsize=1)
def bundled_table() -> Table:
    """The table that comes with rotor."""
    return read_table(json.loads((resources.files("rotor.prediction") / TABLE).read_text("utf-8")))


def read_table(data: Mapping[str, Any]) -> Table:
    """What `write_table` wrote."""
    names = Specialisation._fields
    return {
        Specialisation(*(entry[name] for name in names)): Counts(
            **{name: value for name, value in entry.items() if name not in names}
        )
        for entry in data["entries"]
    }


def table_data(table: Table, **about: Any) -> dict[str, Any]:
    """A table in JSON's types; `about` says what it was counted with."""
    entries = [key._asdict() | asdict(table[key]) for key in sorted(table)]
    return {**about, "block": BLOCK, "head_dim": HEAD_DIM, "entries": entries}


def kind_of(layout: LayerLayout) -> str:
    """Of a layer's kernels; see Specialisation."""
    if layout.coded:
        return "joint" if layout.joint else "apart"
    return "numbers"


@lru_cache(maxsize=1 << 14)
def group_instructions(layout: LayerLayout, group: GroupLayout, shape: AttentionShape) -> float:
    """Warp instructions of a step for one cached key of one group: all of its KV heads and their query heads.

    Of more rows than the table has, that many launches' worth; of wider latents, in proportion.
    """
    kv_heads = len(group.kv_heads)
    rows, most = kv_heads * shape.heads_per_kv, ROWS[-1]
    launches, padded = -(-rows // most), next((r for r in ROWS if r >= rows), most)
    block = layout.rope_block or BLOCK
    absorbed = rows / (launches * padded) * shape.head_dim / HEAD_DIM * BLOCK / block if shape.rotary_dim else 0.0
    total = 0.0
    for width in (padded_width(group.key), padded_width(group.values)):
        sizes = min(width, WIDTHS[-1]), padded, layout.fast_planes, kv_heads, block
        counts = look_up(bundled_table(), Specialisation(kind_of(layout), *sizes))
        total += (counts.decode + absorbed * counts.absorb) * max(1.0, width / WIDTHS[-1]) / 2
    return launches * total


def padded_width(latent: Latent) -> int:
    """Places that a kernel gives a latent: the next of WIDTHS, or a multiple of the last."""
    return next((width for width in WIDTHS if width >= latent.width), -(-latent.width // WIDTHS[-1]) * WIDTHS[-1])


def look_up(table: Table, wanted: Specialisation) -> Counts:
    """The counts of a specialisation, from its own entry or, as the module says, from others.

    Args:
        wanted: its width and rows are among WIDTHS and ROWS.
    """
    if wanted.rope_block != BLOCK:
        counts = look_up(table, wanted._replace(rope_block=BLOCK))
        return replace(counts, decode=counts.decode * _shorter(table, wanted))
    plain = table[wanted._replace(fast_planes=0, kv_heads=1)]
    if not wanted.fast_planes:
        return plain
    planes = next((p for p in PLANES if p >= wanted.fast_planes), wanted.fast_planes)
    rebuilding = wanted._replace(kind="joint", fast_planes=planes)
    size = planes * wanted.kv_heads

    def distance(key: Specialisation) -> tuple[float, bool]:
        ratio = size / (key.fast_planes * key.kv_heads)
        return max(ratio, 1 / ratio), key.kv_heads != wanted.kv_heads

    similar = [key for key in table if key.fast_planes and key[:3] == rebuilding[:3]]
    nearest = rebuilding if rebuilding in table else min(similar, key=distance)
    added = table[nearest].decode - table[nearest._replace(fast_planes=0, kv_heads=1)].decode
    share = size / (nearest.fast_planes * nearest.kv_heads)
    spilled = table[nearest].spilled_bytes if nearest == wanted else plain.spilled_bytes
    return Counts(plain.decode + share * added, table[nearest].absorb, spilled)


def _shorter(table: Table, wanted: Specialisation) -> float:
    """What tiles of a shorter block cost a key, over those of BLOCK positions."""
    block = next((b for b in SHORT_BLOCKS if b >= wanted.rope_block), BLOCK)
    like = Specialisation("joint", min(wanted.width, WIDTHS[1]), min(wanted.rows, ROWS[1]))
    ratio = table[like._replace(rope_block=block)].decode / table[like].decode
    return ratio * max(1.0, block / wanted.rope_block)
