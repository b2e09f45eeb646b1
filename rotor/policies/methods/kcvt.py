"""KCVT: keys per channel, values per token, without finer groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from ..affine import AffineCode
from ..policy import Bits
from ..quantiser import Quantiser
from ..store import Codec, Stream


@dataclass(frozen=True)
class KCVT(Quantiser):
    """Groups are all keys of a channel that are coded together, and all values of a token over its heads.

    The prompt is one run of tokens; later tokens wait, uncoded, until there are `buffer` of them.

    Args:
        bits: 8, 4, 3 or 2. buffer: tokens that wait (n_b).

    Bytes of a number: keys bits / 8 + 4 / n (n the prompt, then `buffer`), values bits / 8 + 4 / (heads * width).
    Limits: the range of a channel is that of the whole prompt; padding must be known (use_cache_policy).
    Source: GEAR section 2, "KCVT"; its buffer: section 3, "Streaming Buffer".
    """

    method: ClassVar[str] = "kcvt"
    bits: Bits = 4
    buffer: PositiveInt = 20

    def streams(self) -> tuple[Stream, Stream]:
        key, value = self.codecs()
        return Stream(key, self.buffer, whole_prompt=True), Stream(value, self.buffer, whole_prompt=True)

    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and of values."""
        return AffineCode(self.bits, tokens=None, columns=1), AffineCode(self.bits, heads_together=True)
