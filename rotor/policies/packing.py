"""Codes of 2, 3, 4 or 8 bits in bytes, without gaps: the lowest bits of the first byte are the first code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

UNITS = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1)}
"""By bits: the fewest codes that fill whole bytes, and how many bytes those are."""


def packed_bytes(width: int, bits: int) -> int:
    """Bytes that `width` codes take."""
    return -(-width * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., width] integers below 2^bits -> [..., packed_bytes(width, bits)] uint8."""
    if bits == 8:
        return codes.to(torch.uint8)
    count, size = UNITS[bits]
    width = codes.shape[-1]
    fields = functional.pad(codes.to(torch.int32), (0, -width % count)).unflatten(-1, (-1, count))
    words = (fields << _shifts(count, bits, fields)).sum(-1, keepdim=True, dtype=torch.int32)
    packed = (words >> _shifts(size, 8, words)) & 255
    return packed.to(torch.uint8).flatten(-2)[..., : packed_bytes(width, bits)].contiguous()


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `pack`: [..., packed_bytes(width, bits)] uint8 -> [..., width] uint8."""
    if bits == 8:
        return packed
    count, size = UNITS[bits]
    words = packed.unsqueeze(-1)
    if size > 1:
        padded = functional.pad(packed, (0, -packed.shape[-1] % size)).to(torch.int32).unflatten(-1, (-1, size))
        words = (padded << _shifts(size, 8, padded)).sum(-1, keepdim=True, dtype=torch.int32)
    codes = (words >> _shifts(count, bits, words)) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :width]


def _shifts(count: int, bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * bits, bits, dtype=like.dtype, device=like.device)
