"""KIVI: keys per channel in groups of tokens, values per token in groups of channels, and an uncoded residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from ..affine import AffineCode
from ..policy import Bits
from ..quantiser import Quantiser
from ..store import Codec, Stream


@dataclass(frozen=True)
class KIVI(Quantiser):
    """Keys: each channel in groups of `group` tokens, coded once there are `residual` of them. Values: each token in
    groups of `group` channels, coded once there are `residual` newer tokens.

    Args:
        bits: 8, 4, 3 or 2. group: g. residual: R, a multiple of g.

    Bytes of a number: bits / 8 + 4 / g; and up to R uncoded keys and R uncoded values.
    Limits: exact as published when tokens come one at a time; the tokens of a longer step see each other exactly.
        Padding must be known (use_cache_policy).
    Source: KIVI (arXiv 2402.02750), section 3.2, algorithm 1; its settings; GEAR section 4 takes g = R = 64.
    """

    method: ClassVar[str] = "kivi"
    bits: Bits = 2
    group: PositiveInt = 32
    residual: PositiveInt = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.residual % self.group == 0, "residual", f"a multiple of the group, {self.group}")

    def streams(self) -> tuple[Stream, Stream]:
        key, value = self.codecs()
        return Stream(key, block=self.residual), Stream(value, window=self.residual)

    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and of values."""
        return AffineCode(self.bits, tokens=self.group, columns=1), AffineCode(self.bits, 1, self.group)
