"""Widths as the powers of two that tiles are made of."""

from __future__ import annotations


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
