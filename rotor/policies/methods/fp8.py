"""FP8 (e4m3): eight bits of floating point, with one scale a token or one for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..quantiser import Quantiser
from ..store import Codec, Parts, Stream

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


@dataclass(frozen=True)
class FP8(Quantiser):
    """x ~ scale * e4m3(x / scale).

    scale: `token`: max |x| / 448 in float16, of each token and head; bytes of a number are 1 + 2 / width. `tensor`: one
        for all, 1, which is what engines take that were given no other (vLLM's --kv-cache-dtype fp8); what is beyond
        448 becomes that, and a number takes a byte.
    Source: Micikevicius et al., arXiv 2209.05433, section 3.
    """

    method: ClassVar[str] = "fp8"
    scale: Literal["token", "tensor"] = "token"

    def streams(self) -> tuple[Stream, Stream]:
        stream = Stream(FP8Code() if self.scale == "token" else UnscaledFP8Code())
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


class UnscaledFP8Code(Codec):
    """Parts: bytes [batch_size, num_heads, tokens, width] uint8."""

    def encode(self, states: Tensor) -> Parts:
        return (states.float().clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8),)

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        return parts[0].view(FLOAT8).float()
