"""How the kernels see a layer: its groups, cut to what one tile of query rows can hold, as rows of a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from rotor.format.columns import WIDTHS, WORD_BYTES
from rotor.format.kernel_config import LayerKernels, SlowPlanes, serving
from rotor.format.layout import GroupLayout, LayerLayout

from .defaults import default_layer
from .widths import padded


class Column(IntEnum):
    """Columns of the table of parts (int32).

    Ranks; offsets in the key and value rows, in elements, of rows of codes in words; offsets in the packed query and
    output rows, and of its columns in the basis; the part's first query head, and its first row in the basis; the work
    per tile of the parts before it, and its own; the body of the kernel that serves it; the work of its group in SHARES
    of the mean group's, rounded down; columns of keys and of values at 16, 8, 4 and 2 bits, in rows of the model's
    dtype all at the first.
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
    WORK = 10
    BASIS_COLUMN = 11
    SHARE = 12
    QK_16 = 13
    QK_8 = 14
    QK_4 = 15
    QK_2 = 16
    V_16 = 17
    V_8 = 18
    V_4 = 19
    V_2 = 20


SHARES, MOST_SHARES = 4, 16
"""Steps in which work is shared out over groups: so many of a mean group's, and the most that a group counts as."""


Piece = tuple[int, int, int]
"""Columns of a latent that the kernels load at a time: their bits, 0 in rows of the model's dtype; the column of the
table of parts that counts them, from QK_16 or V_16 on; a power of two of columns that they fit into."""

Bodies = tuple[tuple[tuple[Piece, ...], tuple[Piece, ...]], ...]
"""For each body of the decode kernel its pieces of keys and of values."""

WORDS_OF_A_LOAD = 4
"""The most that a thread loads at once."""

MAX_TILE_ELEMENTS = 1 << 14
"""Query rows times padded v_rank of a tile: the float32 accumulator, a quarter of an SM's registers."""


REGISTER_COLUMNS = 256
"""The widest latents of domain `pre` that a decode tile keeps in registers while keys are rebuilt from them. Of wider
ones some columns at a time are loaded for every head."""

REBUILT_COLUMNS = 64
"""Of a latent that are loaded at a time for every head, where a tile's do not stay in registers: what one row of a tile
takes of 16-bit numbers is a cache line, and of codes of two bits four words, what a thread loads at once."""


@dataclass(frozen=True)
class LayerParts:
    """The groups of a layer cut into parts of equal size, each the work of one program at a time.

    A part is a group, or some of its heads where the rows of all of them would not fit into registers; the parts of a
    group then read the same latents (from the L2 cache, mostly).

    heads: KV heads of a part (1 in domains where a latent serves its query rows alike).
    rows: query rows of a part.
    bodies: for each body of the kernel, the pieces of keys and those of values that it is compiled for.
    table: for each part, a number for each Column.
    tile: keys of a tile, as `LayerKernels` says.
    align: what divides the widths of all pieces, in columns; row_align: what divides their sizes and the groups'
        offsets in the rows, in elements: 16 bytes suffice.
    slow: planes that are interpolated rather than rebuilt; None for none, as where a head has no more than those that
        are to be rebuilt.
    rope_block: positions of the blocks that keys are turned within where decoding rebuilds none of them, but turns
        queries back to the beginning of each block; 1 where it rebuilds them.
    joint: values are read from the rows of the keys.
    """

    domain: str
    heads: int
    rows: int
    bodies: Bodies
    table: tuple[tuple[int, ...], ...]
    tile: int
    align: int
    row_align: int
    slow: SlowPlanes | None = None
    rope_block: int = 1
    joint: bool = False

    @cached_property
    def _hash(self) -> int:
        sizes = self.heads, self.rows, self.tile, self.row_align, self.rope_block, self.joint
        return hash((self.domain, self.bodies, self.table, *sizes))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash

    @cached_property
    def coded(self) -> bool:
        """Whether rows are words of codes."""
        return self.bodies[0][0][0][0] > 0

    @property
    def widest(self) -> tuple[int, int]:
        """Columns of the widest body, of keys and of values."""
        return _widest(self.bodies)

    @property
    def wide(self) -> bool:
        """Whether keys are rebuilt from latents wider than registers hold."""
        return self.domain == "pre" and max(self.widest) > REGISTER_COLUMNS

    @cached_property
    def total_work(self) -> int:
        return sum(row[Column.WORK] for row in self.table)

    @cached_property
    def output_width(self) -> int:
        """Columns of the output of all query heads."""
        return self.rows * sum(row[Column.V_RANK] for row in self.table)


@lru_cache(maxsize=4096)
def layer_parts(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    kernels: LayerKernels | None = None,
    element_bytes: int = 2,
) -> LayerParts:
    """Cut the groups of a layer into parts and choose the bodies that serve them; `kernels` is by default by rule.

    element_bytes is that of the model's dtype, which the columns of 16 bits in rows of codes have.
    """
    kernels = kernels or default_layer(layout, head_dim)
    ranks = tuple(sorted(kernels.specialisations, reverse=True))
    served: list[list[GroupLayout]] = [[] for _ in ranks]
    body_of = []
    for group in layout.groups:
        serves = serving(ranks, group.qk_rank, group.v_rank)
        assert serves is not None  # KernelConfig.check
        body_of.append(ranks.index(serves))
        served[body_of[-1]].append(group)
    bodies = tuple(_pieces(widths, groups) for widths, groups in zip(ranks, served, strict=True))
    widest_value = max(padded(group.v_rank) for group in layout.groups)
    heads, rows = layout.group_size, layout.group_size * heads_per_kv
    if layout.domain != "pre":
        # Rows are alike: cut anywhere.
        while padded(rows) * widest_value > MAX_TILE_ELEMENTS and rows % 2 == 0 and rows > 16:
            rows //= 2
        heads = 1
    else:
        most = MAX_TILE_ELEMENTS // 2 if max(_widest(bodies)) > REGISTER_COLUMNS else MAX_TILE_ELEMENTS
        while padded(rows) * widest_value > most and heads % 2 == 0:
            heads, rows = heads // 2, rows // 2
    group_rows = layout.group_size * heads_per_kv
    table = []
    work_before = 0
    total_work = sum(sum(row_elements(group, element_bytes)) for group in layout.groups)
    for index, (group, columns, places) in enumerate(
        zip(layout.groups, layout.offsets(), _places(layout, element_bytes), strict=True)
    ):
        work = sum(row_elements(group, element_bytes))
        for part in range(group_rows // rows):
            numbers = {
                Column.QK_RANK: group.qk_rank,
                Column.V_RANK: group.v_rank,
                Column.QK_OFFSET: places[0],
                Column.V_OFFSET: places[1],
                Column.QUERY_OFFSET: group_rows * columns[0] + part * rows * group.qk_rank,
                Column.OUTPUT_OFFSET: group_rows * columns[1] + part * rows * group.v_rank,
                Column.FIRST_HEAD: index * group_rows + part * rows,
                Column.BASIS_ROW: part * heads * head_dim if layout.domain == "pre" else 0,
                Column.WORK_BEFORE: work_before,
                Column.BODY: body_of[index],
                Column.WORK: work,
                Column.BASIS_COLUMN: columns[0],
                Column.SHARE: min(MOST_SHARES, max(1, SHARES * work * len(layout.groups) // total_work)),
                **dict(zip(list(Column)[Column.QK_16 :], _counts(group), strict=True)),
            }
            table.append(tuple(numbers[column] for column in Column))
            work_before += work
    counts = [count for group in layout.groups for count in _counts(group)]
    sizes = [size for group in layout.groups for size in _segment_sizes(group, element_bytes)]
    slow = None if layout.turned_in_blocks else kernels.slow_planes
    return LayerParts(
        layout.domain,
        heads,
        rows,
        bodies,
        tuple(table),
        kernels.tile,
        math.gcd(16, *counts),
        math.gcd(WORDS_OF_A_LOAD if layout.coded else 16, *sizes),
        slow if slow is not None and 2 * slow.rebuilt < head_dim else None,
        layout.rope_block if _queries_are_absorbed(layout.rope_block, heads_per_kv, bodies) else 1,
        layout.joint,
    )


def _queries_are_absorbed(rope_block: int, heads_per_kv: int, bodies: Bodies) -> bool:
    """Whether decoding turns queries back to each block, rather than keys: where a block has more keys than a KV head
    has query heads, as else there is more to take into the latent's basis than out of it, and latents fit registers.
    """
    return heads_per_kv < rope_block and max(_widest(bodies)) <= REGISTER_COLUMNS


@lru_cache(maxsize=4096)
def rebuilding_all(parts: LayerParts) -> LayerParts:
    """The same with whole keys rebuilt."""
    return replace(parts, slow=None, rope_block=1)


def _widest(bodies: Bodies) -> tuple[int, int]:
    key, value = (max(sum(size for *_, size in body[side]) for body in bodies) for side in (0, 1))
    return key, value


def pieces_name(pieces: tuple[Piece, ...]) -> str:
    """Widths for a variant's name: 64, or of codes 16x16,8x32,..., columns by bits."""
    return ",".join(str(size) if bits == 0 else f"{size}x{bits}" for bits, _, size in pieces)


def row_elements(group: GroupLayout, element_bytes: int) -> tuple[int, int]:
    """Elements of a group in the key and value rows: numbers, or words of codes."""
    if group.qk_columns is None:
        return group.qk_rank, group.v_rank
    qk_bytes, v_bytes = group.read_bytes(element_bytes)
    return qk_bytes // WORD_BYTES, v_bytes // WORD_BYTES


def _segment_sizes(group: GroupLayout, element_bytes: int) -> list[int]:
    """Elements of what a group's rows consist of, whose sums are all offsets."""
    if group.qk_columns is None or group.v_columns is None:
        return [group.qk_rank, group.v_rank]
    sides = group.qk_columns, group.v_columns
    return [s.size_bytes // WORD_BYTES for columns in sides for s in columns.segments(element_bytes)]


def _places(layout: LayerLayout, element_bytes: int) -> list[tuple[int, int]]:
    """Elements before each group in the key and value rows."""
    if not layout.coded:
        return layout.offsets()
    return [(qk // WORD_BYTES, v // WORD_BYTES) for qk, v in layout.byte_offsets(element_bytes)]


def _counts(group: GroupLayout) -> tuple[int, ...]:
    """Columns of keys and of values at 16, 8, 4 and 2 bits."""
    if group.qk_columns is None or group.v_columns is None:
        return group.qk_rank, 0, 0, 0, group.v_rank, 0, 0, 0
    return *group.qk_columns.counts, *group.v_columns.counts


def _pieces(widths: tuple[int, int], groups: list[GroupLayout]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of a body that serves `groups`, no wider than `widths` in all."""
    if groups[0].qk_columns is None:
        return ((0, 0, widths[0]),), ((0, 0, widths[1]),)
    counts = [max(column) for column in zip(*(_counts(group) for group in groups), strict=True)]
    pieces = [
        tuple((bits, i, padded(count)) for i, (bits, count) in enumerate(zip(WIDTHS, side, strict=True)) if count)
        for side in (counts[:4], counts[4:])
    ]
    return pieces[0], pieces[1]


@lru_cache(maxsize=4096)
def table_on(parts: LayerParts, device: torch.device) -> Tensor:
    """The table of a layer on a device, [parts, columns], int32; made once."""
    return torch.tensor(parts.table, dtype=torch.int32, device=device)
