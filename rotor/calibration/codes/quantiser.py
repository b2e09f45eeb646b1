"""The code of a channel of a latent: equally spaced levels, static, at a width of its own.

A number z of a channel of b bits becomes code = clamp(floor((z - mean) / scale + 2^(b-1)), 0, 2^b - 1) and is read as
mean + scale (code + 1/2 - 2^(b-1)): a uniform mid-rise quantiser. Mean and scale come from calibration, so they fold
into the projections and cost no byte in the cache. Channels of 0 bits are not stored: their mean stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint.bases import ChannelCode
from ...errors import NumericsError
from ...numerics import one_thread

SAMPLES = 4096
"""Tokens of which keys and values are kept: enough to fit the code of a channel."""

CLIPS = 12
"""Starting scales that are tried: the clip falls from the largest deviation by factors of the square root of two."""

HALVINGS = 4
"""Then scales on both sides of the best, at half the distance each time."""

REFITS = 4
"""Refits of mean and scale by least squares, given the codes."""

GRID_BITS = 8
"""The most bits that are fitted so; more of them go by the fit with fewer, and by WIDER."""

WIDER = (1.0, 2.0**0.5, 2.0, 4.0)
"""Clips of a fit with more bits, against the one with fewer: what is cut off weighs more where levels are finer."""


class ChannelFit(NamedTuple):
    """The best code of every channel at every width, on samples; means are weighted.

    variance: [channels]. mean, scale: [widths, channels]. distortion: likewise, the mean squared error as a share of
    the variance; 1 at 0 bits; 0 where the variance is.
    """

    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor


def measure_channels(
    latents: Tensor, weights: Tensor | None, widths: tuple[int, ...], exact: Tensor | None = None
) -> ChannelFit:
    """Fit mean and scale of every channel at every width by the weighted squared error on samples.

    Scales come from a grid of clips, halved around the best; mean and scale then by Lloyd's method with its levels kept
    equally spaced: assign codes, and fit both to them by least squares. The error never rises. Of more than GRID_BITS
    the projection's own rounding in bfloat16 is part of the error.

    Args:
        latents: [samples, channels], float64.
        weights: likewise, what a squared error of each sample costs in each channel, in any unit; None: all the same.
        widths: bits, rising.
        exact: [channels], a latent to be read as it is: levels move by half of one at most, to go through it.
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
                fits.append(_fit(latents, weights, bits, (fits[-1], before) if before and bits > GRID_BITS else None))
        if exact is not None:
            fits = [_moved(latents, weights, bits, fit, exact) for bits, fit in zip(widths, fits, strict=True)]
    means, scales, errors = (torch.stack(parts) for parts in zip(*fits, strict=True))
    distortion = torch.where(variance > 0, errors / variance.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return ChannelFit(variance, means, scales, distortion)


_Fit = tuple[Tensor, Tensor, Tensor]
"""(mean, scale, mean squared error) of each channel, [channels]."""


def _moved(latents: Tensor, weights: Tensor, bits: int, fit: _Fit, exact: Tensor) -> _Fit:
    """A fit whose levels go through a vector, see `measure_channels`."""
    mean, scale, _ = fit
    code = ChannelCode(torch.full_like(mean, bits), mean, scale)
    off = (bits > 0) * (exact - code.decode(code.encode(exact))).clamp(min=-scale / 2, max=scale / 2)
    return mean + off, scale, (weights * (code.decode(code.encode(latents - off)) + off - latents).square()).sum(0)


def _fit(latents: Tensor, weights: Tensor, bits: int, narrower: tuple[_Fit, int] | None) -> _Fit:
    """The code of each channel at so many bits; weights of a channel sum to one.

    Args:
        narrower: a fit with fewer bits and how many, not 0, to begin at; None for the grid of clips.
    """
    half = 2.0 ** (bits - 1)
    tiny = torch.finfo(torch.float64).tiny
    mean = (weights * latents).sum(0)
    reach = (latents - mean).abs().amax(0)
    reach = torch.where(reach > 0, reach, 1.0)  # nothing to code: any scale will do that can be divided by
    best_mean, best_scale, best = mean, reach / half, torch.full_like(mean, torch.inf)

    def levels(mean: Tensor, scale: Tensor) -> Tensor:
        steps = (latents - mean) / scale
        if bits > GRID_BITS:
            steps = steps.to(torch.bfloat16).to(steps.dtype)
        return steps.floor().clamp(-half, half - 1) + 0.5

    def keep(mean: Tensor, scale: Tensor) -> None:
        nonlocal best_mean, best_scale, best
        error = (weights * (mean + scale * levels(mean, scale) - latents).square()).sum(0)
        better = error < best
        best_mean, best_scale = torch.where(better, mean, best_mean), torch.where(better, scale, best_scale)
        best = torch.where(better, error, best)

    if narrower is not None:
        (known_mean, known_scale, _), known_bits = narrower
        keep(mean, reach / half)
        for wider in WIDER:
            keep(known_mean, known_scale * wider * 2.0 ** (known_bits - bits))
        return best_mean, best_scale, best
    for step in range(CLIPS):
        keep(mean, reach / half * 2.0 ** (-step / 2))
    for halving in range(1, HALVINGS + 1):
        middle = best_scale
        for side in (-1, 1):
            keep(mean, middle * 2.0 ** (side * 0.5 ** (halving + 1)))
    for _ in range(REFITS):
        at = levels(best_mean, best_scale)
        centred = at - (weights * at).sum(0)
        power = (weights * centred.square()).sum(0)
        slope = (weights * centred * latents).sum(0) / power.clamp(min=tiny)
        slope = torch.where((power > 0) & (slope > 0), slope, best_scale)
        keep((weights * (latents - slope * at)).sum(0), slope)
    return best_mean, best_scale, best
