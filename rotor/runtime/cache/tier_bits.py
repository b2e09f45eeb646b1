"""Rows of codes cut to fewer bits: a code of b bits shifted right by s places is one of b - s bits, 2^s steps wide.

What is read of a column n (see rotor.format.columns) is m + step (n + 1/2). Of the shifted number n' the middle of its
level is n = 2^s n' + (2^s - 1) / 2, and of a column that is gone the mean is n = -1/2: neither takes a byte beside the
code. Steps and clips stay those of the wider code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ...format.columns import EXACT_BITS, WIDTHS, Columns, columns_per_word
from ...kernels.rows import pack_layer, unpack_layer

GONE = -0.5
"""What a column that is not stored is read as, in steps: its mean."""


@lru_cache(maxsize=4096)
def narrowed(columns: Columns, size: int) -> Columns:
    """Columns in which each has the bits that one some places behind it had: as near to `size` bytes as that comes.

    Where bits are allocated by what they gain, the columns at the end of every segment gain least by a bit, and if what
    columns are worth falls evenly, a higher price of a bit moves the ends of all segments by as many columns. Columns
    of 16 bits are no codes: they keep their bits, and are dropped when no other column is left.

    Args:
        size: bytes of a row in which a column of 16 bits takes two.
    """
    return min(_candidates(columns), key=lambda one: abs(one.row_bytes() - size))


def _candidates(columns: Columns) -> Iterator[Columns]:
    """From `columns` themselves to a single word, each with no more bits in any column than the one before."""
    ends = list(accumulate(columns.counts))
    exact, rank = columns.n16, columns.rank
    before = columns
    for places in range(rank):
        first = max(0, min(exact, rank - places))
        counts = [_whole_words(first, EXACT_BITS, exact)]
        for bits, end in zip(WIDTHS[1:], ends[1:], strict=True):
            start = sum(counts)
            counts.append(_whole_words(max(0, end - places - start), bits, end - start))
        if any(counts):
            found = Columns(*counts)
            if fits(found, before):
                before = found
                yield found


def fits(inner: Columns, outer: Columns) -> bool:
    """Whether no column of `inner` has more bits than in `outer`, and those of 16 bits are the same."""
    return len(bits_of(inner)) <= outer.rank and all(
        own == bits or own < bits < EXACT_BITS for own, bits in zip(bits_of(inner), bits_of(outer), strict=False)
    )


def bits_of(columns: Columns) -> list[int]:
    """The bits of each column, in order."""
    return [bits for bits, count in zip(WIDTHS, columns.counts, strict=True) for _ in range(count)]


def _whole_words(count: int, bits: int, most: int) -> int:
    """The next number of columns that fills words, or where that is too many the one before."""
    step = columns_per_word(bits)
    up = -(-count // step) * step
    return up if up <= most else most // step * step


@dataclass(frozen=True)
class BitCut:
    """Cuts rows of a layer to fewer bits.

    outer, inner: the columns of each group before and after. dtype: of the model, that of columns of 16 bits.
    kept: the columns that stay, [inner rank of all groups]. factor: 2^-s of each.
    """

    outer: tuple[Columns, ...]
    inner: tuple[Columns, ...]
    dtype: torch.dtype
    kept: Tensor
    factor: Tensor

    @classmethod
    def of(cls, outer: Sequence[Columns], inner: Sequence[Columns], dtype: torch.dtype, device: torch.device) -> BitCut:
        kept: list[int] = []
        shifts: list[int] = []
        start = 0
        for before, after in zip(outer, inner, strict=True):
            kept += range(start, start + after.rank)
            shifts += [wide - own for wide, own in zip(bits_of(before), bits_of(after), strict=False)]
            start += before.rank
        factor = torch.tensor([2.0**-shift for shift in shifts], dtype=dtype, device=device)
        return cls(tuple(outer), tuple(inner), dtype, torch.tensor(kept, device=device), factor)

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., bytes of outer] -> [..., bytes of inner], uint8."""
        numbers = unpack_layer(rows, self.outer, self.dtype)[..., self.kept]
        return pack_layer(numbers * self.factor, self.inner)


def reading(whole: Columns, inner: Columns) -> tuple[list[float], list[float]]:
    """How the numbers of cut columns are read in the whole columns' steps: factors of those that there are, [inner
    rank], and what is added, [rank]."""
    factors = [2.0 ** (wide - own) for wide, own in zip(bits_of(whole), bits_of(inner), strict=False)]
    gone = [0.0 if wide == EXACT_BITS else GONE for wide in bits_of(whole)[inner.rank :]]
    return factors, [(factor - 1) / 2 for factor in factors] + gone
