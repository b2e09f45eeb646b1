"""Each token by itself: groups of neighbouring columns, optionally rotated so that no column stands out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from .affine import AffineCode
from .codec import Codec, Exact, Parts
from .quantiser import BITS, Quantiser
from .store import Stream


@dataclass(frozen=True)
class PerToken(Quantiser):
    """Asymmetric quantisation of each token's keys and values in groups of columns.

    Args:
        bits: 16 (no code), 8, 4, 3 or 2.
        group: columns in a group; at most the width of a head, or of a packed row.
        hadamard: multiply each head by a Hadamard matrix first and back afterwards, which spreads outliers.

    Bytes of a number: bits / 8 + 4 / group. Nothing waits; a token's own step reads its code.
    Source: GEAR section 2, equation 2 (FlexGen's groups); the rotation is QuaRot's (arXiv 2404.00456, section 4).
    """

    method: ClassVar[str] = "per-token"
    bits: int = 4
    group: int = 64
    hadamard: bool = False

    def __post_init__(self) -> None:
        self.require(self.bits in BITS, "bits", f"one of {BITS}")
        self.require(self.group >= 1, "group", "at least 1")

    def streams(self) -> tuple[Stream, Stream]:
        codec: Codec = Exact() if self.bits == 16 else AffineCode(self.bits, 1, self.group)
        stream = Stream(Rotated(codec) if self.hadamard and self.bits < 16 else codec)
        return stream, stream


@dataclass(frozen=True)
class Rotated(Codec):
    """A codec of numbers that are multiplied by an orthonormal, symmetric Hadamard matrix.

    Limits: columns are rotated in blocks of the largest power of two that divides their number.
    """

    codec: Codec

    def encode(self, states: Tensor) -> Parts:
        return self.codec.encode(_rotate(states.float()))

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        return _rotate(self.codec.decode(parts, num_heads, width))


def _rotate(numbers: Tensor) -> Tensor:
    width = numbers.shape[-1]
    size = width & -width
    matrix = hadamard(size).to(numbers.device)
    return (numbers.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


@cache
def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of Sylvester, [size, size] float32; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
