"""Rows of codes: how the columns of a latent lie in the bytes that a cache keeps for one token.

A compressed layer keeps one row of bytes a token for keys and one for values. A row holds the groups of the layer in
the order of its layout, each group whole before the next. A group's columns come in the order of the checkpoint, most
bits first: columns of 16 bits, then 8, 4, 2; those of equal width are a *segment*. A segment is whole 32-bit words, so
its columns are a multiple of 2 (16 bits), 4 (8), 8 (4) or 16 (2); there is no padding, and nothing beside the columns.

Within a word of b-bit columns, the even columns lie in its lower half and the odd ones in its upper half, both from the
lowest bits up: column 2 i at bit b i, column 2 i + 1 at bit 16 + b i, words being little-endian. So one shift and one
mask take two neighbouring columns out of a word, side by side as two 16-bit numbers. (At 16 bits that is the usual
order.)

Columns of 8, 4 and 2 bits are codes. With a column's mean m and step s,

    stored    u = clamp(floor((z - m) / s) + 2^(b-1), 0, 2^b - 1)
    read as   n = u - 2^(b-1)                                        a whole number from -2^(b-1) to 2^(b-1) - 1
    meaning   z = m + s (n + 1/2)

A projection puts out x = (z - m) / s, so that floor, clamp and a fixed offset of 2^(b-1) are all that is left to do,
and attention multiplies with n: numbers around zero are what 16-bit formats round least (n is exact in all of them).
Of the rest, s is in the query's basis (keys after RoPE), in the basis that rebuilds keys (before RoPE), or in W_o
(values), and m + s/2 is no one's business (keys after RoPE: the softmax does not see it), a constant key, or a bias.

Columns of 16 bits hold the latent's number itself in the model's dtype, with neither step nor mean; a model that is run
in float32 keeps them in float32, two words where there was one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import CheckpointError

WIDTHS = (16, 8, 4, 2)
"""Bits of a column, in the order of the segments."""

EXACT_BITS = 16
"""Columns of this width are numbers of 16 bits, no codes."""

WORD_BYTES = 4


@dataclass(frozen=True)
class Segment:
    """Columns of equal width of a group.

    bits: of a column. first, count: the group's columns that these are. offset_bytes, size_bytes: in the group's row.
    """

    bits: int
    first: int
    count: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, order=True)
class Columns:
    """Counts of the columns of a group's key or value latent at 16, 8, 4 and 2 bits.

    Raises:
        CheckpointError: a count is negative or does not fill whole words; there is no column.
    """

    n16: int = 0
    n8: int = 0
    n4: int = 0
    n2: int = 0

    def __post_init__(self) -> None:
        for bits, count in zip(WIDTHS, self.counts, strict=True):
            if count < 0 or count % columns_per_word(bits):
                raise CheckpointError(
                    f"{count} columns of {bits} bits: expected a multiple of {columns_per_word(bits)}, whole words of "
                    f"{WORD_BYTES} bytes.",
                    "The folder was edited or is from another version of rotor.",
                )
        if not self.rank:
            raise CheckpointError(
                "a latent of no columns.", "The folder was edited or is from another version of rotor."
            )

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """By width, in the order of WIDTHS."""
        return self.n16, self.n8, self.n4, self.n2

    @property
    def rank(self) -> int:
        """Columns of any width."""
        return sum(self.counts)

    def row_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of a token's row in a model whose dtype takes element_bytes."""
        return self.n16 * element_bytes + self.n8 + self.n4 // 2 + self.n2 // 4

    def segments(self, element_bytes: int = 2) -> Iterator[Segment]:
        """Those that there are, in the order of the row."""
        first = offset_bytes = 0
        for bits, count in zip(WIDTHS, self.counts, strict=True):
            size_bytes = count * element_bytes if bits == 16 else count * bits // 8
            if count:
                yield Segment(bits, first, count, offset_bytes, size_bytes)
            first, offset_bytes = first + count, offset_bytes + size_bytes

    def to_dict(self) -> dict[str, int]:
        """Bits -> columns, of the widths that there are."""
        return {str(bits): count for bits, count in zip(WIDTHS, self.counts, strict=True) if count}

    @classmethod
    def from_dict(cls, data: dict[str, int], where: str) -> Columns:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: a width that there is none of; a count that is not of whole words; names `where`.
        """
        unknown = sorted(set(data) - {str(bits) for bits in WIDTHS})
        if unknown:
            raise CheckpointError(
                f"{where}: columns of {', '.join(unknown)} bits: expected {', '.join(map(str, WIDTHS))}.",
                "The folder was edited or is from another version of rotor.",
            )
        try:
            return cls(*(data.get(str(bits), 0) for bits in WIDTHS))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error.message}", error.hint) from None


def in_words(columns: Iterable[Columns]) -> str:
    """How many columns of each width there are in all, for a table."""
    counts = [found.counts for found in columns]
    totals = [sum(of_all[place] for of_all in counts) for place in range(len(WIDTHS))]
    return ", ".join(f"{total} at {bits} bits" for bits, total in zip(WIDTHS, totals, strict=True) if total)


def columns_per_word(bits: int) -> int:
    """Columns in 4 bytes, those of 16 bits in a dtype of two bytes."""
    return 8 * WORD_BYTES // bits
