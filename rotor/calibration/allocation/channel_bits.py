"""Choose the bits of every channel for a given number of bytes.

The loss of a channel at b bits is w sigma^2 D(b): weight times variance times the share of the variance that remains as
error. It takes b / 2 crumbs of a row, and rows grow in units of 16 nibbles. Channels are taken in descending order of
w sigma^2, which becomes their order in the checkpoint. Dynamic programming over crumbs then gives the exact best widths
for every number of units. A second one over these curves gives the best split of bytes among the latents of a model.

Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3) with whole units
inside the optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...checkpoint.rows import CRUMB_BITS, NIBBLE_BITS, UNIT_NIBBLES, WIDTHS, CodedRow


@dataclass(frozen=True)
class BitCurve:
    """Least loss of a latent for every number of units from 0 on, and the channels that reach it.

    loss: [units + 1], float64, never rising; infinite if no channel is stored.
    counts: [units + 1, len(WIDTHS)], number of channels at each width; the remaining channels have 0 bits.
    scaled: rows have a scale.
    """

    loss: np.ndarray
    counts: np.ndarray
    scaled: bool = False

    def channels(self, units: int) -> CodedRow:
        """Channels of a latent of so many units; more than all channels take are left empty."""
        n16, n12, n8, n6, n4, n2 = self.counts[min(units, len(self.counts) - 1)].tolist()
        return CodedRow(n16, n12, n8, n6, n4, n2, scaled=self.scaled)


def bit_curve(losses: Tensor, widths: Sequence[int], scaled: bool = False, unit: int = UNIT_NIBBLES) -> BitCurve:
    """Compute the best widths of a latent's channels for every number of units.

    Args:
        losses: [widths, channels], float64, of each channel at each of `widths` (bits, 0 among them, in any order).
        scaled: a nibble of the first unit holds the scale of a row. unit: nibbles of one.
    """
    table, given = losses.numpy(), list(widths)
    whole = table[given.index(0)]
    # The channels that cost most when they are dropped come first. An exchange shows that some best choice then gives
    # them widths that never rise, so that channels of one width lie side by side.
    order = np.argsort(-whole, kind="stable")
    used = [width for width in WIDTHS if width in given]
    crumbs = [width // CRUMB_BITS for width in used]
    channels = len(order)
    most = channels * crumbs[0]
    # best[n, c]: most loss saved by at most c crumbs when exactly the first n channels are stored.
    best = np.full((channels + 1, most + 1), -np.inf)
    best[0] = 0.0
    lengths = [
        _add_channels(best, (whole - table[given.index(width)])[order], size, crumbs[0])
        for width, size in zip(used, crumbs, strict=True)
    ]
    # A row is as long as its units whatever is in them, so only whole units are asked for; a scale takes room too.
    of_unit, of_scale = (nibbles * NIBBLE_BITS // CRUMB_BITS for nibbles in (unit, int(scaled)))
    units = np.arange(-(-(most + of_scale) // of_unit) + 1)
    room = np.clip(of_unit * units - of_scale, 0, most)
    numbers = np.arange(1, channels + 1)[:, None]
    of_units = best[numbers, np.minimum(room, crumbs[0] * numbers)]
    ends = of_units.argmax(0) + 1
    saved = of_units.max(0)
    counts = np.zeros((len(units), len(WIDTHS)), dtype=np.int64)
    # Walk back: how many channels of the narrowest width the choice ends with, then of the next wider one.
    left = room.copy()
    for width, size, of_width in reversed(list(zip(used, crumbs, lengths, strict=True))):
        count = of_width[ends, np.minimum(left, crumbs[0] * ends)]
        counts[:, WIDTHS.index(width)] = count
        left, ends = left - size * count, ends - count
    return BitCurve(whole.sum() - saved, counts, scaled)


def _add_channels(best: np.ndarray, gain: np.ndarray, size: int, largest: int) -> np.ndarray:
    """Extend `best` [ends, crumbs], in place, by channels of `size` crumbs each, which save `gain` [channels].

    So many channels take `size` crumbs each or more, and `largest` or fewer: no more than that is looked at.

    Returns:
        [ends, crumbs] int16, with how many such channels the best choice ends.
    """
    lengths = np.zeros(best.shape, dtype=np.int16)
    for end in range(1, len(best)):
        fewest, most = size * end, largest * end
        here, before = slice(fewest, most + 1), slice(fewest - size, most - size + 1)
        # Either one more channel of this width at the end, or the best choice that was known without it.
        longer, known = best[end - 1, before] + gain[end - 1], best[end, here]
        np.multiply(lengths[end - 1, before] + 1, longer > known, out=lengths[end, here])
        np.maximum(longer, known, out=known)
        # Crumbs beyond what all channels take save nothing more; the next end looks this far.
        for of_end in (best[end], lengths[end]):
            of_end[most + 1 : most + 1 + largest] = of_end[most]
    return lengths


@dataclass(frozen=True)
class BitPath:
    """Best split of every number of units of bytes among the latents of a model.

    loss: [units + 1], least total loss for each number of units.
    """

    loss: np.ndarray
    _taken: tuple[np.ndarray, ...]

    def split(self, units: int) -> list[int]:
        """Units of each curve when all curves share `units`."""
        sizes = []
        for taken in reversed(self._taken):
            sizes.append(int(taken[units]))
            units -= sizes[-1]
        return sizes[::-1]


def bit_path(curves: Sequence[np.ndarray]) -> BitPath:
    """Compute the best split of units of bytes among curves.

    Args:
        curves: loss of each curve at 0, 1, ... units.
    """
    total, taken = np.zeros(1), []
    for loss in curves:
        size = len(total) + len(loss) - 1
        # The best total of all curves so far at every sum of units, and what this curve has of them.
        merged, units = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        for count, value in enumerate(loss):
            part = slice(count, count + len(total))
            better = total + value < merged[part]
            units[part] = np.where(better, count, units[part])
            np.minimum(merged[part], total + value, out=merged[part])
        total = merged
        taken.append(units)
    return BitPath(total, tuple(taken))
