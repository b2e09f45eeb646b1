"""The asymmetric code of groups that KIVI, KCVT and per-token quantisation share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .store import Codec, Parts, heads_apart, heads_together

LARGEST = torch.finfo(torch.float16).max

UNITS = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1), 1: (8, 1)}
"""{bits: (fewest codes that fill whole bytes, their bytes)}."""


@dataclass(frozen=True)
class AffineCode(Codec):
    """x ~ zero + scale * code, code = round((x - zero) / scale), zero = min, scale = (max - min) / (2^bits - 1).

    Groups are rectangles of tokens and columns. Zero and scale are float16; the code is taken against the rounded ones.

    Args:
        bits: 8, 4, 3 or 2, packed in uint8.
        tokens: tokens in a group; None: all tokens that are coded at once.
        columns: columns in a group; None: all. The last group has the columns that are left.
        heads_together: a token's heads lie side by side, so that a group can reach over all of them.
    Limits: numbers beyond 65504 saturate.
    Source: GEAR section 2, equation 2; KIVI (arXiv 2402.02750) section 3.
    """

    bits: int
    tokens: int | None = 1
    columns: int | None = None
    heads_together: bool = False

    def encode(self, states: Tensor) -> Parts:
        """(codes [batch_size, heads, tokens, bytes] uint8, scale and zero [batch_size, heads, groups, groups] float16);
        heads is 1 where they lie together."""
        numbers = states.float().clamp(-LARGEST, LARGEST)
        numbers = heads_together(numbers) if self.heads_together else numbers
        length, width = numbers.shape[-2:]
        tokens, columns = self.tokens or length, min(self.columns or width, width)
        whole = functional.pad(numbers, (0, -width % columns, 0, 0), mode="replicate")
        groups = whole.unflatten(-1, (-1, columns)).unflatten(2, (-1, tokens))
        zero = groups.amin((3, 5)).half()
        span = groups.amax((3, 5)) - zero.float()
        scale = (span / (2**self.bits - 1)).clamp(0, LARGEST).half()
        steps = _per_number(scale, tokens, columns, width)
        codes = (numbers - _per_number(zero, tokens, columns, width)) / steps
        codes = torch.where(steps > 0, codes, torch.zeros_like(codes)).round().clamp(0, 2**self.bits - 1)
        return pack(codes, self.bits), scale, zero

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        packed, scale, zero = parts
        laid = width * num_heads if self.heads_together else width
        codes = unpack(packed, self.bits, laid).float()
        tokens, columns = codes.shape[2] // scale.shape[2], min(self.columns or laid, laid)
        numbers = codes.mul_(_per_number(scale, tokens, columns, laid)).add_(_per_number(zero, tokens, columns, laid))
        return heads_apart(numbers, num_heads) if self.heads_together else numbers


def _per_number(values: Tensor, tokens: int, columns: int, width: int) -> Tensor:
    """Repeat one number a group for each number in it, float32: [..., groups, groups] -> [..., tokens, width], or
    what broadcasts to it."""
    values = values.float()
    if tokens > 1:
        values = values.repeat_interleave(tokens, dim=-2)
    return values.repeat_interleave(columns, dim=-1)[..., :width] if values.shape[-1] > 1 and columns > 1 else values


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., width] integers below 2^bits -> [..., width * bits / 8, rounded up] uint8, without gaps: the lowest bits of
    the first byte are the first code."""
    count, size = UNITS[bits]
    return _regrouped(codes, count, bits, size, 8)[..., : -(-codes.shape[-1] * bits // 8)].contiguous()


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `pack`, [..., width] uint8."""
    count, size = UNITS[bits]
    return _regrouped(packed, size, 8, count, bits)[..., :width]


def _regrouped(fields: Tensor, count: int, bits: int, into: int, into_bits: int) -> Tensor:
    """Regroup runs of `count` fields of `bits` bits into runs of `into` fields of `into_bits` bits, uint8."""
    dtype = torch.int32 if max(count, into) == 8 else torch.uint8  # what holds a run
    runs = functional.pad(fields.to(dtype), (0, -fields.shape[-1] % count)).unflatten(-1, (-1, count))
    shifts, into_shifts = (torch.arange(n, dtype=dtype, device=fields.device) for n in (count, into))
    words = (runs << shifts * bits).sum(-1, keepdim=True, dtype=dtype)
    return (words >> into_shifts * into_bits & 2**into_bits - 1).to(torch.uint8).flatten(-2)
