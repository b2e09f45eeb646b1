"""Non-uniform codes, as KVQuant's: levels that lie where a channel's numbers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .affine import LARGEST
from .codec import Codec, Parts
from .levels import nearest, nearest_means
from .packing import pack, unpack
from .quantiser import Quantiser
from .store import Stream


@dataclass(frozen=True)
class NUQ(Quantiser):
    """x ~ level[code], the nearest of 2^bits levels. Keys: levels of each channel. Values: of each head, for numbers
    that are divided by the largest of their token.

    Levels are the prompt's quantiles (i + 1/2) / 2^bits, then means of what is nearest to them, `loops` times over;
    they stay what they are for later tokens.

    Args:
        bits: 4, 3 or 2.

    Bytes of a number: bits / 8, of values + 2 / width; and once, levels of 2 bytes: 2^bits for a channel of keys and a
    head of values.
    Limits: levels come from the prompt, unweighted, and nothing is taken out; for KVQuant's own, see `kvquant`. Padding
    must be known (make_cache).
    Source: after Hooper et al., KVQuant (arXiv 2401.18079), sections 3.1 and 3.3.
    """

    method: ClassVar[str] = "nuq"
    bits: int = 4
    loops: int = 3

    def __post_init__(self) -> None:
        self.require(self.bits in (4, 3, 2), "bits", "one of (4, 3, 2)")
        self.require(0 <= self.loops <= 100, "loops", "0 to 100")

    def streams(self) -> tuple[Stream, Stream]:
        return tuple(Stream(LevelCode(self.bits, self.loops, keys)) for keys in (True, False))  # type: ignore[return-value]


@dataclass(frozen=True)
class LevelCode(Codec):
    """Parts: codes [batch_size, num_heads, tokens, bytes] uint8; levels, float16, [batch_size, num_heads, 1, width or
    1, 2^bits], fixed by the first tokens; unless per_channel each token's scale [batch_size, num_heads, tokens, 1].
    """

    bits: int
    loops: int
    per_channel: bool

    def encode(self, states: Tensor) -> Parts:
        numbers, scale = self._scaled(states)
        columns = numbers if self.per_channel else numbers.flatten(2).unsqueeze(-1)
        levels = nearest_means(columns.mT, 2**self.bits, self.loops).half().unsqueeze(2)
        return self._codes(numbers, levels), levels, *scale

    def append(self, segments: list[Parts], states: Tensor) -> None:
        if not segments:
            segments.append(self.encode(states))
            return
        codes, levels, *before = segments[0]
        numbers, scale = self._scaled(states)
        together = [torch.cat(pair, dim=2) for pair in zip(before, scale, strict=True)]
        segments[0] = torch.cat([codes, self._codes(numbers, levels)], dim=2), levels, *together

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        packed, levels, *scale = parts
        codes = unpack(packed, self.bits, width).long().unsqueeze(-1)
        numbers = levels.float().expand(-1, -1, codes.shape[2], width, -1).gather(-1, codes).squeeze(-1)
        return numbers * scale[0].float() if scale else numbers

    def _scaled(self, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        numbers = states.float().clamp(-LARGEST, LARGEST)
        if self.per_channel:
            return numbers, []
        scale = numbers.abs().amax(-1, keepdim=True).clamp(min=2**-14).half()
        return numbers / scale.float(), [scale]

    def _codes(self, numbers: Tensor, levels: Tensor) -> Tensor:
        return pack(nearest(numbers, levels.float()), self.bits)
