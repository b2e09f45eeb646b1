"""FP8 (e4m3): eight bits of floating point with one scale a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..quantiser import Quantiser
from ..store import Codec, Parts, Stream

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


@dataclass(frozen=True)
class FP8(Quantiser):
    """x ~ scale * e4m3(x / scale), scale = max |x| / 448 in float16, of each token and head.

    Bytes of a number: 1 + 2 / width.
    Source: Micikevicius et al., arXiv 2209.05433, section 3.
    """

    method: ClassVar[str] = "fp8"

    def streams(self) -> tuple[Stream, Stream]:
        stream = Stream(FP8Code())
        return stream, stream


class FP8Code(Codec):
    """Parts: bytes [batch_size, num_heads, tokens, width] uint8; scale [batch_size, num_heads, tokens, 1] float16."""

    def encode(self, states: Tensor) -> Parts:
        numbers = states.float()
        # Rounding upwards, so that the largest number does not exceed 448.
        scale = (numbers.abs().amax(-1, keepdim=True) * ((1 + 2**-10) / LARGEST)).clamp(2**-24, 65504).half()
        return (numbers / scale.float()).clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8), scale

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        codes, scale = parts
        return codes.view(FLOAT8).float() * scale.float()
