"""The code of a column of a latent: equally spaced levels, static, at a width of its own.

A number z of a column of b bits becomes code = clamp(floor((z - mean) / scale + 2^(b-1)), 0, 2^b - 1) and is read as
mean + scale (code + 1/2 - 2^(b-1)): a uniform mid-rise quantiser. Mean and scale come from calibration, so they fold
into the projections and cost no byte in the cache. Columns of 16 bits are stored as they are; of 0 bits, not at all:
their mean stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import NumericsError
from ..format.columns import EXACT_BITS
from ..numerics import one_thread

SAMPLES = 4096
"""Tokens of which keys and values are kept: enough to fit the code of a column."""

CLIPS = 12
"""Starting scales that are tried: the clip falls from the largest deviation by factors of the square root of two."""

HALVINGS = 4
"""Then scales on both sides of the best, at half the distance each time."""

REFITS = 4
"""Refits of mean and scale by least squares, given the codes."""


@dataclass(frozen=True)
class ColumnCode:
    """How each column of a latent is coded; all [columns].

    bits: 0, 2, 4, 8 or 16 (any width up to 8 works). mean, scale: float64; of a column of 0 or 16 bits scale is 1.
    """

    bits: Tensor
    mean: Tensor
    scale: Tensor

    @property
    def levels(self) -> Tensor:
        """Number of codes of each column, 2^bits, float64."""
        return 2.0 ** self.bits.to(torch.float64)

    @property
    def is_coded(self) -> Tensor:
        """Which columns are integers in the cache."""
        return (self.bits > 0) & (self.bits < EXACT_BITS)

    def encode(self, latents: Tensor) -> Tensor:
        """[..., columns] -> codes, in the dtype of `latents`; columns of 16 bits as they are, of 0 bits zero."""
        _, mean, scale, levels, coded = self._like(latents)
        codes = ((latents - mean) / scale + levels / 2).floor().clamp(min=0)
        codes = torch.minimum(codes, levels - 1)
        kept = torch.where(self.bits.to(latents.device) == EXACT_BITS, latents, torch.zeros_like(latents))
        return torch.where(coded, codes, kept)

    def decode(self, codes: Tensor) -> Tensor:
        """What `encode` gave -> latents: the middle of each level; the mean of a column of 0 bits."""
        bits, mean, scale, levels, coded = self._like(codes)
        read = mean + scale * (codes + 0.5 - levels / 2)
        return torch.where(coded, read, torch.where(bits == EXACT_BITS, codes, mean))

    def _like(self, tensor: Tensor) -> tuple[Tensor, ...]:
        bits = self.bits.to(tensor.device)
        numbers = (self.mean, self.scale, self.levels)
        return bits, *(n.to(tensor.device, tensor.dtype) for n in numbers), self.is_coded.to(tensor.device)


class ColumnStatistics(NamedTuple):
    """Of every column of a latent, measured on samples, at every width.

    Means over samples are weighted. variance: [columns], about the mean, or about zero where the constant is lost.
    mean, scale: [widths, columns].
    distortion: [widths, columns], the mean squared error as a share of the variance; 1 at 0 bits; 0 where the variance
        is.
    """

    widths: tuple[int, ...]
    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor

    def code(self, bits: Tensor) -> ColumnCode:
        """The code at the given bits of each column, [columns]; every one of them must be among `widths`."""
        index = torch.tensor([self.widths.index(b) for b in bits.tolist()])
        columns = torch.arange(len(bits))
        return ColumnCode(bits.clone(), self.mean[index, columns], self.scale[index, columns])

    def errors(self) -> Tensor:
        """Mean squared error of each column at each width, [widths, columns]."""
        return self.distortion * self.variance


def measure_columns(
    latents: Tensor, weights: Tensor | None, widths: tuple[int, ...], no_constant: bool = False
) -> ColumnStatistics:
    """Fit mean and scale of every column at every width by the weighted squared error on samples.

    Scales come from a grid of clips, halved around the best; mean and scale then by Lloyd's method with its levels kept
    equally spaced: assign codes, and fit both to them by least squares. The error never rises.

    Args:
        latents: [samples, columns], float64.
        weights: likewise, what a squared error of each sample costs in each column, in any unit; None: all the same.
        widths: bits, 0 and 16 among them where wanted.
        no_constant: read codes without the constant mean + scale / 2: the mean is -scale / 2, and 0 at 0 bits. Keys
            after RoPE under a soft cap of the logits, which sees a constant, need that.
    Raises:
        NumericsError: a sample is not finite.
    """
    if not torch.isfinite(latents).all():
        raise NumericsError("a latent that a code is fitted to has elements that are NaN or Inf.", "Calibrate again.")
    weights = torch.ones_like(latents) if weights is None else weights
    total = weights.sum(0)
    weights = torch.where(total > 0, weights / total.clamp(min=torch.finfo(torch.float64).tiny), 1 / len(latents))
    mean = torch.zeros_like(latents[0]) if no_constant else (weights * latents).sum(0)
    variance = (weights * (latents - mean).square()).sum(0)
    fits = []
    with one_thread():
        for bits in widths:
            if bits == 0:
                fits.append((mean, torch.ones_like(mean), variance))
            elif bits == EXACT_BITS:
                error = (weights * (latents.to(torch.bfloat16).to(torch.float64) - latents).square()).sum(0)
                fits.append((mean, torch.ones_like(mean), error))
            else:
                fits.append(_fit(latents, weights, bits, no_constant))
    means, scales, errors = (torch.stack(parts) for parts in zip(*fits, strict=True))
    distortion = torch.where(variance > 0, errors / variance.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return ColumnStatistics(widths, variance, means, scales, distortion)


def _fit(latents: Tensor, weights: Tensor, bits: int, no_constant: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, scale, mean squared error) of each column, [columns]; weights of a column sum to one."""
    half = 2.0 ** (bits - 1)
    tiny = torch.finfo(torch.float64).tiny
    mean = (weights * latents).sum(0)
    reach = (latents if no_constant else latents - mean).abs().amax(0)
    reach = torch.where(reach > 0, reach, 1.0)  # nothing to code: any scale will do that can be divided by
    best_mean, best_scale, best = mean, reach / half, torch.full_like(mean, torch.inf)

    def levels(mean: Tensor, scale: Tensor) -> Tensor:
        return ((latents - mean) / scale).floor().clamp(-half, half - 1) + 0.5

    def keep(mean: Tensor, scale: Tensor) -> None:
        nonlocal best_mean, best_scale, best
        mean = -scale / 2 if no_constant else mean
        error = (weights * (mean + scale * levels(mean, scale) - latents).square()).sum(0)
        better = error < best
        best_mean, best_scale = torch.where(better, mean, best_mean), torch.where(better, scale, best_scale)
        best = torch.where(better, error, best)

    for step in range(CLIPS):
        keep(mean, reach / half * 2.0 ** (-step / 2))
    for halving in range(1, HALVINGS + 1):
        middle = best_scale
        for side in (-1, 1):
            keep(mean, middle * 2.0 ** (side * 0.5 ** (halving + 1)))
    for _ in range(REFITS):
        at = levels(best_mean, best_scale)
        if no_constant:
            at = at - 0.5
        spread = at if no_constant else at - (weights * at).sum(0)
        power = (weights * spread.square()).sum(0)
        slope = (weights * spread * latents).sum(0) / power.clamp(min=tiny)
        slope = torch.where((power > 0) & (slope > 0), slope, best_scale)
        keep((weights * (latents - slope * at)).sum(0), slope)
    return best_mean, best_scale, best
