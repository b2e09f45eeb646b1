"""FP8 (e4m3): eight bits of floating point with one scale a token or one for all."""

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
    """x ~ scale * e4m3(x / scale), scale = max |x| / 448 in float16.

    Args:
        scale: `token`, one for each token and head; `tensor`, one for each layer, side and row, from the prompt, as
            transformers' and vLLM's caches have it. What exceeds it later saturates.

    Bytes of a number: 1, + 2 / width with a scale a token.
    Source: Micikevicius et al., arXiv 2209.05433, section 3.
    """

    method: ClassVar[str] = "fp8"
    scale: Literal["token", "tensor"] = "token"

    def streams(self) -> tuple[Stream, Stream]:
        stream = Stream(FP8Code(self.scale == "tensor"))
        return stream, stream


@dataclass(frozen=True)
class FP8Code(Codec):
    """Parts: bytes [batch_size, num_heads, tokens, width] uint8; scale [batch_size, num_heads, tokens, 1] float16, or
    [batch_size, 1, 1, 1], fixed by the first tokens."""

    fixed: bool = False

    def encode(self, states: Tensor) -> Parts:
        largest = states.float().abs().amax((1, 2, 3) if self.fixed else -1, keepdim=True)
        # Rounding upwards, so that the largest number does not exceed 448.
        scale = (largest * ((1 + 2**-10) / LARGEST)).clamp(2**-24, 65504).half()
        return self._codes(states, scale), scale

    def append(self, segments: list[Parts], states: Tensor) -> None:
        if self.fixed and segments:
            codes, scale = segments[0]
            segments[0] = torch.cat([codes, self._codes(states, scale)], dim=2), scale
        else:
            super().append(segments, states)

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        codes, scale = parts
        return codes.view(FLOAT8).float() * scale.float()

    def _codes(self, states: Tensor, scale: Tensor) -> Tensor:
        return (states.float() / scale.float()).clamp(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)
