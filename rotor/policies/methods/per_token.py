"""Per-token quantisation in groups of neighbouring columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from ..affine import AffineCode
from ..policy import Bits
from ..quantiser import Quantiser
from ..store import Stream


@dataclass(frozen=True)
class PerToken(Quantiser):
    """Asymmetric quantisation of each token's keys and values in groups of columns.

    Args:
        bits: 8, 4, 3 or 2.
        group: columns in a group; at most the width of a head, or of a packed row.

    Bytes of a number: bits / 8 + 4 / group. Nothing waits: a token's code is read from its own step on.
    Source: GEAR section 2, equation 2 (FlexGen's groups).
    """

    method: ClassVar[str] = "per-token"
    bits: Bits = 4
    group: PositiveInt = 64

    def streams(self) -> tuple[Stream, Stream]:
        stream = Stream(AffineCode(self.bits, 1, self.group))
        return stream, stream
