"""Where the groups of a compressed layer lie in the rows of its cache, and the slots of rows that are kept."""

from __future__ import annotations

from torch import Tensor

from ..format.layout import LayerLayout


def spans_of(layout: LayerLayout, element_bytes: int) -> list[tuple[slice, slice]]:
    """Where each group lies in the elements (of rows of codes: bytes) of a compressed layer's key and value rows."""
    unit = 1 if layout.coded else element_bytes
    ends = [*layout.byte_offsets(element_bytes)[1:], layout.row_bytes(element_bytes)]
    starts, none = layout.byte_offsets(element_bytes), slice(0, 0)
    sides = [
        [slice(start[side] // unit, end[side] // unit) for start, end in zip(starts, ends, strict=True)]
        for side in (0, 1)
    ]
    return list(zip(sides[0], [none] * len(starts) if layout.joint else sides[1], strict=True))


def slots_of(rows: Tensor, order: Tensor) -> Tensor:
    """The slots `order`, [batch_size, 1 or heads, kept], of rows [batch_size, heads, slots, *]."""
    index = order.to(rows.device).expand(-1, rows.shape[1], -1).unsqueeze(-1)  # an offloaded layer's are on the CPU
    return rows.gather(2, index.expand(-1, -1, -1, rows.shape[-1]))
