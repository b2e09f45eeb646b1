"""How the kernels see a layer: its groups, cut to what one tile of query rows can hold, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from rotor.kernel_config import LayerKernels, serving
from rotor.layout import LayerLayout

from .defaults import default_layer
from .widths import padded


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


MAX_TILE_ELEMENTS = 1 << 14
"""Query rows times padded v_rank of a tile: the float32 accumulator, a quarter of an SM's registers."""


@dataclass(frozen=True)
class LayerParts:
    """The groups of a layer cut into parts of equal size, each the work of one program at a time.

    A part is a group, or some of its heads where the rows of all of them would not fit into registers; the parts of a
    group then read the same latents (from the L2 cache, mostly).

    heads: KV heads of a part (1 in domains where a latent serves its query rows alike).
    rows: query rows of a part.
    bodies: (qk_rank, v_rank) that the kernel is compiled for, widest first.
    table: for each part, a number for each Column.
    tile: keys of a tile, as `LayerKernels` says.
    """

    domain: str
    heads: int
    rows: int
    bodies: tuple[tuple[int, int], ...]
    table: tuple[tuple[int, ...], ...]
    tile: int

    @property
    def total_work(self) -> int:
        return sum(row[Column.QK_RANK] + row[Column.V_RANK] for row in self.table)


@lru_cache(maxsize=4096)
def layer_parts(
    layout: LayerLayout, heads_per_kv: int, head_dim: int, kernels: LayerKernels | None = None
) -> LayerParts:
    """Cut the groups of a layer into parts and choose the bodies that serve them; `kernels` is by default by rule."""
    kernels = kernels or default_layer(layout, head_dim)
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
    bodies = tuple(sorted(kernels.specialisations, reverse=True))
    table = []
    work = 0
    for index, (group, (qk_offset, v_offset)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        serves = serving(bodies, group.qk_rank, group.v_rank)
        assert serves is not None  # KernelConfig.check
        body = bodies.index(serves)
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
    return LayerParts(layout.domain, heads, rows, bodies, tuple(table), kernels.tile)


@lru_cache(maxsize=4096)
def table_on(parts: LayerParts, device: torch.device) -> Tensor:
    """The table of a layer on a device, [parts, columns], int32; made once."""
    return torch.tensor(parts.table, dtype=torch.int32, device=device)
