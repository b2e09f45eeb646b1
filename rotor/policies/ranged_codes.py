"""Codes of numbers by fixed levels inside a range, with the numbers farthest beyond it kept as they are."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .affine import LARGEST
from .codec import Codec, Parts, heads_apart, heads_together
from .levels import nearest
from .outliers import filled, stored_index
from .packing import pack, unpack

LEAST_HALF = 2**-14
"""Of a range: a float16 that is not subnormal."""


@dataclass(frozen=True)
class Ranged:
    """Numbers over their range, [..., width]: inside from -1 to 1; those that are taken out, their indices, and the
    middle and half of the range, as they are stored."""

    numbers: Tensor
    outliers: Tensor
    index: Tensor
    middle: Tensor
    half: Tensor


@dataclass(frozen=True)
class RangedCode(Codec):
    """Parts: codes [batch_size, 1, tokens, bytes] uint8, outliers and their indices [batch_size, 1, tokens, outliers]
    float16 and int16, and what is stored of a token's range; of the `first` tokens the numbers alone."""

    bits: int
    outliers: float
    first: int
    levels: tuple[float, ...]

    @abstractmethod
    def ranged(self, rows: Tensor) -> tuple[Ranged, Parts]:
        """Rows [batch_size, 1, tokens, width] over their ranges, and what is stored of these."""

    @abstractmethod
    def ranges(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Middle and half, broadcastable to rows."""

    def encode(self, states: Tensor) -> Parts:
        rows = heads_together(states.float().clamp(-LARGEST, LARGEST))
        found, stored = self.ranged(rows)
        codes = pack(nearest(found.numbers, self._levels.to(rows.device)), self.bits)
        return codes, found.outliers.half(), stored_index(found.index, rows.shape[-1]), *stored

    def append(self, segments: list[Parts], states: Tensor) -> None:
        held = segments[0][0].shape[2] if segments else 0
        whole = min(max(0, self.first - held), states.shape[2])
        if whole:
            exact = states[:, :, :whole].clone()
            segments[:1] = [(torch.cat([segments[0][0], exact], dim=2) if segments else exact,)]
        if whole < states.shape[2]:
            super().append(segments, states[:, :, whole:])

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        codes, outliers, index, *stored = parts
        middle, half = self.ranges(tuple(stored))
        numbers = self._levels.to(codes.device)[unpack(codes, self.bits, num_heads * width).long()]
        rows = (numbers * half.to(codes.device) + middle.to(codes.device)).scatter(-1, index.long(), outliers.float())
        return heads_apart(rows, num_heads)

    @cached_property
    def _levels(self) -> Tensor:
        return torch.tensor(self.levels)


@dataclass(frozen=True)
class ChannelCode(RangedCode):
    """Each channel has a range that is known before; nothing is stored of it."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def ranged(self, rows: Tensor) -> tuple[Ranged, Parts]:
        low, high = (part.to(rows.device) for part in self._ends)
        numbers, half = of_channels(rows, low, high)
        index = numbers.abs().topk(outlier_count(self.outliers, rows.shape[-1]), dim=-1).indices
        return Ranged(numbers, rows.gather(-1, index), index, (low + high) / 2, half), ()

    def ranges(self, parts: Parts) -> tuple[Tensor, Tensor]:
        low, high = self._ends
        return (low + high) / 2, half_of(low, high)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.low), torch.tensor(self.high)


@dataclass(frozen=True)
class TokenCode(RangedCode):
    """Each token has the range of its own numbers, without its outliers: middle and half, float16."""

    def ranged(self, rows: Tensor) -> tuple[Ranged, Parts]:
        found = of_tokens(rows, self.outliers)
        stored = found.middle.half(), found.half.half()
        numbers = (rows - stored[0].float()) / stored[1].float()
        return replace(found, numbers=numbers), stored

    def ranges(self, parts: Parts) -> tuple[Tensor, Tensor]:
        return parts[0].float(), parts[1].float()


def of_channels(rows: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., width] over the ranges of their channels, and half of these, [width]."""
    half = half_of(low, high)
    return (rows - (low + high) / 2) / half, half


def of_tokens(rows: Tensor, share: float) -> Ranged:
    """Rows [..., width], each over the range of its own numbers without the `share` that is farthest from its mean."""
    index = (rows - rows.mean(-1, keepdim=True)).abs().topk(outlier_count(share, rows.shape[-1]), dim=-1).indices
    outliers, index, rest = filled(rows, index, -1)
    low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
    half, middle = half_of(low, high), (low + high) / 2
    return Ranged((rows - middle) / half, outliers, index, middle, half)


def outlier_count(share: float, width: int) -> int:
    """Outliers of a token of so many numbers: to the nearest, and one where there are to be any."""
    return max(1, round(share * width)) if share > 0 else 0


def half_of(low: Tensor, high: Tensor) -> Tensor:
    return ((high - low) / 2).clamp(min=LEAST_HALF)
