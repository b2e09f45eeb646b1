"""Rows of codes: how the channels of a latent lie in the bytes that a cache keeps for one token.

The one width in a row is 4 bits. A channel of 4, 8, 12 or 16 bits is 1, 2, 3 or 4 *nibbles*; its code

    u = clamp(floor((z - mean) / scale) + 2^(bits - 1), 0, 2^bits - 1) = sum_i 16^i n_i

means z = mean + scale (u + 1/2 - 2^(bits - 1)). A projection puts out (z - mean) / scale, so that floor, clamp and a
fixed offset are all that is left to do. Attention multiplies with the signed nibbles n_i - 8, one column each: the
basis that reads the latent has a channel's column once for each of its nibbles, 16^i times as large, and what the
means, halves and eights add is a constant key and a bias of o_proj. Kernels know nibbles, not channels.

The nibbles of a group's latent, channels most bits first and within a channel the highest first, have the *places*
0, 1, ...; their number is rounded up to a multiple of 16 (a plane, 8 bytes), and what is left over is the nibble 8.
With W = places / 4 little-endian 16-bit words, nibble j (bits 4 j to 4 j + 3) of word w is place j W + w: one shift and
one mask take a plane's nibbles out of the words, side by side, and nothing is interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from ..errors import CheckpointError

WIDTHS = (16, 12, 8, 4)
"""Bits of a channel, in the order of a row and of the fields of Channels."""

NIBBLE_BITS = 4
PLANE = 16
"""Nibbles by which a row grows: 8 bytes."""

SIGNED = 8
"""What a nibble is less, when attention multiplies with it; the nibble of an empty place."""

EDITED = "The folder was edited or is from another version of rotor; export it again."


@dataclass(frozen=True, order=True)
class Channels:
    """Counts of a latent's channels at each of WIDTHS.

    Raises:
        CheckpointError: a count is negative; there is no channel.
    """

    n16: int = 0
    n12: int = 0
    n8: int = 0
    n4: int = 0

    def __post_init__(self) -> None:
        if min(self.counts) < 0 or not self.rank:
            raise CheckpointError(f"a latent of {self.counts} channels at {WIDTHS} bits: expected some.", EDITED)

    @property
    def coded(self) -> bool:
        return True

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """By width, in the order of WIDTHS."""
        return tuple(getattr(self, f"n{bits}") for bits in WIDTHS)

    @property
    def rank(self) -> int:
        """Channels: what a projection into the latent puts out."""
        return sum(self.counts)

    @cached_property
    def width(self) -> int:
        """Places of a row: the columns of what reads it."""
        nibbles = sum(bits // NIBBLE_BITS * count for bits, count in zip(WIDTHS, self.counts, strict=True))
        return -(-nibbles // PLANE) * PLANE

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Of each channel, most first."""
        return tuple(bits for bits, count in zip(WIDTHS, self.counts, strict=True) for _ in range(count))

    @cached_property
    def nibbles(self) -> tuple[tuple[int, int] | None, ...]:
        """Of each place: the channel, and the power of 16 that its nibble counts; None for an empty one."""
        places: list[tuple[int, int] | None] = [
            (channel, power) for channel, bits in enumerate(self.bits) for power in reversed(range(bits // NIBBLE_BITS))
        ]
        return tuple(places + [None] * (self.width - len(places)))

    def row_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of a token's row, whatever the model's dtype."""
        return self.width // 2

    def to_dict(self) -> dict[str, int]:
        """Bits -> channels, of the widths that there are."""
        return {str(bits): count for bits, count in zip(WIDTHS, self.counts, strict=True) if count}


@dataclass(frozen=True, order=True)
class Numbers:
    """A latent of so many numbers in the model's dtype; the same interface as `Channels`."""

    rank: int

    @property
    def coded(self) -> bool:
        return False

    @property
    def width(self) -> int:
        return self.rank

    def row_bytes(self, element_bytes: int = 2) -> int:
        return self.rank * element_bytes

    def to_dict(self) -> int:
        return self.rank


Latent = Channels | Numbers
"""What the cache holds of a token for keys or values of a group (or both)."""


MAX_RANK = 1 << 24
"""No latent has as many channels; a larger number comes from a damaged file."""


def _stored_latent(data: Any) -> Latent:
    """Read what `to_dict` gave."""
    if type(data) is int and 0 < data <= MAX_RANK:
        return Numbers(data)
    widths = {str(bits) for bits in WIDTHS}
    if isinstance(data, dict) and data and data.keys() <= widths:
        counts = [data.get(str(bits), 0) for bits in WIDTHS]
        if all(type(count) is int and 0 <= count <= MAX_RANK for count in counts) and any(counts):
            return Channels(*counts)
    raise ValueError


StoredLatent = Annotated[
    Latent,
    PlainValidator(_stored_latent),
    WithJsonSchema({"expected": f"a number of channels, or channels by bits ({', '.join(map(str, WIDTHS))})"}),
]
"""A latent in a file: what `to_dict` gives."""


@lru_cache(maxsize=4096)
def aligned(width: int, groups: int) -> int:
    """Bytes from one group of codes to the next: whole sectors of memory are read, so they do not begin anywhere."""
    size_bytes = width // 2
    if groups == 1:
        return size_bytes
    unit = 32 if width >= 64 else 16
    return -(-size_bytes // unit) * unit
