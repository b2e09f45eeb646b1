"""Bits of every channel for a number of bytes.

The loss of a channel at b bits is w sigma^2 D(b): its weight, its variance, the share of it that the code leaves; it
takes b / 2 crumbs of a row, which grows by planes of 32. For channels in descending order of w sigma^2 (which becomes
their order in the checkpoint) the best widths for every number of planes follow exactly by dynamic programming over
crumbs, and from such curves of all latents of a model the best split of every number of bytes.

Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3) with whole planes
inside the optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...checkpoint.channels import CRUMB_BITS, NIBBLE_BITS, PLANE, WIDTHS, Channels

PLANE_CRUMBS = PLANE * NIBBLE_BITS // CRUMB_BITS


@dataclass(frozen=True)
class BitCurve:
    """The least loss of a latent for every number of planes from 0 on, and the channels that give it.

    loss: [planes + 1], float64, never rising; infinite where no channel is stored. counts: [planes + 1, len(WIDTHS)],
        channels at each width; those after them have 0 bits.
    """

    loss: np.ndarray
    counts: np.ndarray

    def channels(self, planes: int) -> Channels:
        """Those of a row of so many planes."""
        return Channels(*self.counts[planes].tolist())


def bit_curve(losses: Tensor, widths: Sequence[int]) -> BitCurve:
    """The best widths of the channels of a latent for every number of planes.

    Args:
        losses: [widths, channels], float64, of each channel at each of `widths` (bits, 0 among them, in any order).
    """
    table, given = losses.numpy(), list(widths)
    whole = table[given.index(0)]
    order = np.argsort(-whole, kind="stable")
    used = [width for width in WIDTHS if width in given]
    crumbs = [width // CRUMB_BITS for width in used]
    channels = len(order)
    most = channels * crumbs[0]
    best = np.full((most + 1, channels + 1), -np.inf)  # saved by at most so many crumbs, of the first channels
    best[:, 0] = 0.0
    extended = [
        _add_channels(best, (whole - table[given.index(width)])[order], size)
        for width, size in zip(used, crumbs, strict=True)
    ]
    planes = np.minimum(PLANE_CRUMBS * np.arange(-(-most // PLANE_CRUMBS) + 1), most)
    ends = best[planes, 1:].argmax(1) + 1
    saved = best[planes, ends]
    counts = np.zeros((len(planes), len(WIDTHS)), dtype=np.int64)
    for plane in np.flatnonzero(np.isfinite(saved)).tolist():
        left, end = int(planes[plane]), int(ends[plane])
        for width, size, of_width in reversed(list(zip(used, crumbs, extended, strict=True))):
            start = end
            while of_width[left, start]:
                left, start = left - size, start - 1
            counts[plane, WIDTHS.index(width)] = end - start
            end = start
    return BitCurve(whole.sum() - saved, counts)


def _add_channels(best: np.ndarray, gain: np.ndarray, size: int) -> np.ndarray:
    """Let channels of `size` crumbs each, which save `gain` [channels], follow what `best` [crumbs, ends] has.

    `best` is changed in place.

    Returns:
        [crumbs, ends], whether the best ends in such a channel.
    """
    extended = np.zeros(best.shape, dtype=bool)
    for crumbs in range(size, len(best)):
        longer = best[crumbs - size, :-1] + gain
        extended[crumbs, 1:] = longer > best[crumbs, 1:]
        np.maximum(best[crumbs, 1:], longer, out=best[crumbs, 1:])
    return extended


@dataclass(frozen=True)
class BitPath:
    """The best split of every number of units of bytes among the latents of a model.

    loss: [units + 1], the least total for each number of them.
    """

    loss: np.ndarray
    _taken: tuple[np.ndarray, ...]

    def split(self, units: int) -> list[int]:
        """Units of each curve, when there are so many in all."""
        sizes = []
        for taken in reversed(self._taken):
            sizes.append(int(taken[units]))
            units -= sizes[-1]
        return sizes[::-1]


def bit_path(curves: Sequence[np.ndarray]) -> BitPath:
    """Split units of bytes among curves, exactly.

    Args:
        curves: the loss of each at 0, 1, ... units.
    """
    total, taken = np.zeros(1), []
    for loss in curves:
        size = len(total) + len(loss) - 1
        merged, units = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        for own, value in enumerate(loss):
            part = slice(own, own + len(total))
            better = total + value < merged[part]
            units[part] = np.where(better, own, units[part])
            np.minimum(merged[part], total + value, out=merged[part])
        total = merged
        taken.append(units)
    return BitPath(total, tuple(taken))
