"""What divides strides and offsets, and views of rows that all launches share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rotor.errors import UsageError

from .layer_table import LayerParts


def alignment_of(*numbers: int) -> int:
    """What divides all offsets, widths and strides, in elements: 16 at most, and 16 bytes suffice."""
    return math.gcd(16, *numbers)


def alignment(parts: LayerParts, strides: list[int], row_strides: list[int]) -> tuple[int, int]:
    """What divides widths, offsets and strides of queries, bases and outputs, in elements, and those of the rows, in
    theirs.
    """
    align, row_align = math.gcd(parts.align, *strides), math.gcd(parts.row_align, *row_strides)
    return (align, row_align) if parts.coded else (math.gcd(align, row_align),) * 2


def as_words(rows: Tensor) -> Tensor:
    """Rows of codes [..., bytes], uint8, in words of four bytes, int32; a view."""
    return rows.view(torch.int32)


def check_page(key: Tensor, block_table: Tensor | None) -> int:
    """Keys of a page, 0 for a contiguous cache."""
    page = 0 if block_table is None else key.shape[1]
    if page & (page - 1):
        raise UsageError(f"pages of {page} keys: expected a power of two.", "Choose another page size.")
    return page
