"""How the kernels see a layer: its groups, cut to what one tile of query rows can hold, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from rotor.layout import LayerLayout


class Column(IntEnum):
    """Columns of the table of parts (int32).

    Ranks; offsets in elements in the packed key and value rows, and in the packed query and output rows; the part's
    first query head, and its first row in the basis; the work per tile of the parts before it; the body of the kernel
    that serves it.
    """

    QK_RANK = 0
    V_RANK = 1
    QK_OFFSET = 2
    V_OFFSET = 3
    QUERY_OFFSET = 4
    OUTPUT_OFFSET = 5
    FIRST_HEAD = 6
    BASIS_ROW = 7
    WORK_BEFORE = 8
    BODY = 9


MAX_BODIES = {"post": 3, "none": 3, "pre": 2}
"""Distinct widths that one decode kernel is compiled for; a narrower part runs in a wider body, its columns masked.
More would cost registers, since those of all bodies are kept."""

MAX_TILE_ELEMENTS = 1 << 14
"""Query rows times padded v_rank of a tile: the float32 accumulator, a quarter of an SM's registers."""


def padded(width: int) -> int:
    """A power of two of at least 16, what tiles are made of. Masked columns cost no memory traffic; splitting a width
    into several powers of two would cost more registers than the columns do.
    """
    return max(16, 1 << (width - 1).bit_length())


def chunks(width: int) -> tuple[int, int]:
    """A width as at most two powers of two of at least 16, the second 0 where one is enough: 80 is (64, 16), 112 is
    (128, 0) with 16 columns masked. For kernels limited by arithmetic.
    """
    whole = max(16, 1 << (width.bit_length() - 1))
    if whole >= width:
        return whole, 0
    rest = padded(width - whole)
    return (2 * whole, 0) if rest == whole else (whole, rest)


@dataclass(frozen=True)
class LayerParts:
    """The groups of a layer cut into parts of equal size, each the work of one program at a time.

    A part is a group, or some of its heads where the rows of all of them would not fit into registers; the parts of a
    group then read the same latents (from the L2 cache, mostly).

    heads: KV heads of a part (1 in domains where a latent serves its query rows alike).
    rows: query rows of a part.
    bodies: (qk_rank, v_rank) that the kernel is compiled for, widest first.
    table: for each part, a number for each Column.
    """

    domain: str
    heads: int
    rows: int
    bodies: tuple[tuple[int, int], ...]
    table: tuple[tuple[int, ...], ...]

    @property
    def total_work(self) -> int:
        return sum(row[Column.QK_RANK] + row[Column.V_RANK] for row in self.table)


@lru_cache(maxsize=4096)
def layer_parts(layout: LayerLayout, heads_per_kv: int, head_dim: int) -> LayerParts:
    """Cut the groups of a layer into parts and choose the bodies that serve them."""
    widest_value = max(padded(group.v_rank) for group in layout.groups)
    heads, rows = layout.group_size, layout.group_size * heads_per_kv
    if layout.domain != "pre":
        # Rows are alike: cut anywhere.
        while padded(rows) * widest_value > MAX_TILE_ELEMENTS and rows % 2 == 0 and rows > 16:
            rows //= 2
        heads = 1
    else:
        while padded(rows) * widest_value > MAX_TILE_ELEMENTS and heads % 2 == 0:
            heads, rows = heads // 2, rows // 2
    group_rows = layout.group_size * heads_per_kv
    bodies = _bodies(sorted({(g.qk_rank, g.v_rank) for g in layout.groups}, reverse=True), MAX_BODIES[layout.domain])
    table = []
    work = 0
    for index, (group, (qk_offset, v_offset)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        body = max(i for i, b in enumerate(bodies) if b[0] >= group.qk_rank and b[1] >= group.v_rank)
        for part in range(group_rows // rows):
            table.append(
                (
                    group.qk_rank,
                    group.v_rank,
                    qk_offset,
                    v_offset,
                    group_rows * qk_offset + part * rows * group.qk_rank,
                    group_rows * v_offset + part * rows * group.v_rank,
                    index * group_rows + part * rows,
                    part * heads * head_dim if layout.domain == "pre" else 0,
                    work,
                    body,
                )
            )
            work += group.qk_rank + group.v_rank
    return LayerParts(layout.domain, heads, rows, bodies, tuple(table))


def _bodies(widths: list[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """At most `count` widths, each pair of `widths` being served by one that is no narrower; fewest padded columns.

    Pairs are merged into the larger of both, cheapest first.
    """
    bodies = sorted({(padded(qk), padded(v)) for qk, v in widths}, reverse=True)
    while len(bodies) > count:

        def waste(pair: tuple[int, int], among: list[tuple[int, int]] = bodies) -> int:
            (qk, v), (other_qk, other_v) = among[pair[0]], among[pair[1]]
            return 2 * (max(qk, other_qk) + max(v, other_v)) - qk - v - other_qk - other_v

        first, second = min(((i, j) for i in range(len(bodies)) for j in range(i)), key=waste)
        merged = tuple(max(a, b) for a, b in zip(bodies[first], bodies[second], strict=True))
        kept = [b for i, b in enumerate(bodies) if i not in (first, second)]
        bodies = sorted({*kept, (merged[0], merged[1])}, reverse=True)
    return tuple(bodies)


@lru_cache(maxsize=4096)
def table_on(parts: LayerParts, device: torch.device) -> Tensor:
    """The table of a layer on a device, [parts, columns], int32; made once."""
    return torch.tensor(parts.table, dtype=torch.int32, device=device)
