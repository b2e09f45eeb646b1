"""Where the groups of a compressed layer lie in the rows of its cache, and the slots of rows that are kept."""

from __future__ import annotations

from itertools import accumulate

from torch import Tensor

from ...format.layout import LayerLayout


def spans_of(layout: LayerLayout, element_bytes: int) -> list[tuple[slice, slice]]:
    """Where each group lies in the elements (of rows of codes: bytes) of a compressed layer's key and value rows."""
    unit = 1 if layout.coded else element_bytes
    sizes = [group.row_bytes(element_bytes) for group in layout.groups]
    sides = [[size // unit for size in side] for side in zip(*sizes, strict=True)]
    spans = [[slice(end - size, end) for size, end in zip(side, accumulate(side), strict=True)] for side in sides]
    return list(zip(spans[0], spans[1], strict=True))


def slots_of(rows: Tensor, order: Tensor) -> Tensor:
    """The slots `order`, [batch_size, 1 or heads, kept], of rows [batch_size, heads, slots, *]."""
    index = order.to(rows.device).expand(-1, rows.shape[1], -1).unsqueeze(-1)  # an offloaded layer's are on the CPU
    return rows.gather(2, index.expand(-1, -1, -1, rows.shape[-1]))
