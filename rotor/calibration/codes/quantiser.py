"""Fit the code of each channel of a latent: equally spaced static levels, with a number of bits per channel.

A number z of a channel with b bits becomes code = clamp(floor((z - mean) / scale + 2^(b-1)), 0, 2^b - 1) and is read as
mean + scale (code + 1/2 - 2^(b-1)): a uniform mid-rise quantiser. Mean and scale come from calibration, so they fold
into the projections and cost no byte in the cache. A channel of 0 bits is not stored and read as its mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint.bases import ChannelCode
from ...errors import NumericsError
from ...numerics import one_thread

CLIP_CANDIDATES = 12
"""Scales of the initial grid: the clip falls from the largest deviation by factors of the square root of two."""

CLIP_HALVINGS = 4
"""Refinements of the grid: each tries a scale on both sides of the best, at half the previous distance."""

LEAST_SQUARES_REFITS = 4
"""Refits of mean and scale by least squares, given the codes."""

MAX_GRID_BITS = 8
"""Most bits that are fitted with the grid; wider codes start from the next narrower fit, with WIDER_CLIPS."""

WIDER_CLIPS = (1.0, 2.0**0.5, 2.0, 4.0)
"""Clips that a wider code tries, relative to the narrower fit's: clipping costs relatively more with finer levels."""


class ChannelFit(NamedTuple):
    """The best code of every channel at every width, fitted to weighted samples.

    variance: [channels].
    mean, scale: [widths, channels].
    distortion: [widths, channels], mean squared error as a share of the variance; 1 at 0 bits, 0 if the variance is 0.
    """

    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor


def measure_channels(
    latents: Tensor, weights: Tensor | None, widths: tuple[int, ...], on_level: Tensor | None = None
) -> ChannelFit:
    """Fit mean and scale of every channel at every width by the weighted squared error on samples.

    The scale is searched on a grid of clips, refined around the best. Then Lloyd's method with equally spaced levels
    refines mean and scale: assign codes, and fit both to them by least squares. The error never rises. With more than
    MAX_GRID_BITS bits, the rounding of the projection's output to bfloat16 is part of the error.

    Args:
        latents: [samples, channels], float64.
        weights: [samples, channels], cost of a squared error in any unit; None for equal weights.
        widths: bits, rising.
        on_level: [channels], a latent that should be coded without error: levels move by at most half a step to hit it.
    Raises:
        NumericsError: a sample is not finite.
    """
    if not torch.isfinite(latents).all():
        raise NumericsError("a latent that a code is fitted to has elements that are NaN or Inf.", "Calibrate again.")
    weights = torch.ones_like(latents) if weights is None else weights
    total = weights.sum(0)
    weights = torch.where(total > 0, weights / total.clamp(min=torch.finfo(torch.float64).tiny), 1 / len(latents))
    mean = (weights * latents).sum(0)
    variance = (weights * (latents - mean).square()).sum(0)
    fits = []
    with one_thread():
        for bits in widths:
            if bits == 0:
                fits.append((mean, torch.ones_like(mean), variance))
            else:
                before = widths[len(fits) - 1] if fits else 0
                fits.append(
                    _fit(latents, weights, bits, (fits[-1], before) if before and bits > MAX_GRID_BITS else None)
                )
        if on_level is not None:
            fits = [_through(on_level, latents, weights, bits, fit) for bits, fit in zip(widths, fits, strict=True)]
    means, scales, errors = (torch.stack(parts) for parts in zip(*fits, strict=True))
    distortion = torch.where(variance > 0, errors / variance.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return ChannelFit(variance, means, scales, distortion)


_Fit = tuple[Tensor, Tensor, Tensor]
"""(mean, scale, mean squared error) of each channel, [channels]."""


def _through(on_level: Tensor, latents: Tensor, weights: Tensor, bits: int, fit: _Fit) -> _Fit:
    """Shift the levels of a fit so that a latent lies on one, see `measure_channels`."""
    mean, scale, _ = fit
    code = ChannelCode(torch.full_like(mean, bits), mean, scale)
    shift = (bits > 0) * (on_level - code.decode(code.encode(on_level))).clamp(min=-scale / 2, max=scale / 2)
    error = code.decode(code.encode(latents - shift)) + shift - latents
    return mean + shift, scale, (weights * error.square()).sum(0)


def _fit(latents: Tensor, weights: Tensor, bits: int, narrower: tuple[_Fit, int] | None) -> _Fit:
    """Fit the code of each channel at `bits` bits; weights of a channel sum to one.

    Args:
        narrower: a fit with fewer bits to start from, and its bits (not 0); None searches the grid of clips.
    """
    half = 2.0 ** (bits - 1)
    tiny = torch.finfo(torch.float64).tiny
    mean = (weights * latents).sum(0)
    reach = (latents - mean).abs().amax(0)
    reach = torch.where(reach > 0, reach, 1.0)  # a constant channel can have any scale that is not 0
    best_mean = mean
    best_scale = reach / half
    best = torch.full_like(mean, torch.inf)

    def levels(mean: Tensor, scale: Tensor) -> Tensor:
        scaled = (latents - mean) / scale
        if bits > MAX_GRID_BITS:
            scaled = scaled.to(torch.bfloat16).to(scaled.dtype)
        return scaled.floor().clamp(-half, half - 1) + 0.5

    def keep_if_better(mean: Tensor, scale: Tensor) -> None:
        nonlocal best_mean, best_scale, best
        error = (weights * (mean + scale * levels(mean, scale) - latents).square()).sum(0)
        better = error < best
        best_mean = torch.where(better, mean, best_mean)
        best_scale = torch.where(better, scale, best_scale)
        best = torch.where(better, error, best)

    if narrower is not None:
        (known_mean, known_scale, _), known_bits = narrower
        keep_if_better(mean, reach / half)
        for wider in WIDER_CLIPS:
            keep_if_better(known_mean, known_scale * wider * 2.0 ** (known_bits - bits))
        return best_mean, best_scale, best
    for candidate in range(CLIP_CANDIDATES):
        keep_if_better(mean, reach / half * 2.0 ** (-candidate / 2))
    for halving in range(1, CLIP_HALVINGS + 1):
        middle = best_scale
        for side in (-1, 1):
            keep_if_better(mean, middle * 2.0 ** (side * 0.5 ** (halving + 1)))
    for _ in range(LEAST_SQUARES_REFITS):
        at = levels(best_mean, best_scale)
        centred = at - (weights * at).sum(0)
        power = (weights * centred.square()).sum(0)
        slope = (weights * centred * latents).sum(0) / power.clamp(min=tiny)
        slope = torch.where((power > 0) & (slope > 0), slope, best_scale)
        keep_if_better((weights * (latents - slope * at)).sum(0), slope)
    return best_mean, best_scale, best
