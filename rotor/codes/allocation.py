"""Bits of every column for a number of bytes.

The loss of a column at b bits is w sigma^2 D(b): its weight, its variance, the share of it that the code leaves. A
group's side stores its columns by width, widest first, each segment whole words, and at least one of them. For columns
in descending order of w sigma^2 (which becomes their order in the checkpoint) the best widths for every number of words
follow exactly by dynamic programming, and from such curves of all sides of a model the best split of every number of
words.

Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3) with whole words
inside the optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..format.columns import EXACT_BITS

WORD_BITS = 32
"""Bits of a word, in whole numbers of which each segment is stored."""


@dataclass(frozen=True)
class BitCurve:
    """The least loss of one side of a group for every number of words from 0 on, and the columns that give it.

    loss: [words + 1], float64, never rising; infinite where no column is stored. counts: [words + 1, widths], columns
        at each of `widths` (bits, widest first); the columns after them have 0 bits. filled: [words + 1], the words
        that these take, which may be fewer. order: [columns], the column that stands at each place.
    """

    widths: tuple[int, ...]
    loss: np.ndarray
    counts: np.ndarray
    filled: np.ndarray
    order: np.ndarray

    @property
    def exact_loss(self) -> np.ndarray:
        """The loss for each number of words where all of them are filled, elsewhere infinite, [words + 1]."""
        return np.where(self.filled == np.arange(len(self.loss)), self.loss, np.inf)

    def bits(self, words: int) -> np.ndarray:
        """Bits of each column, in the columns' own order, [columns]."""
        bits = np.zeros(len(self.order), dtype=np.int64)
        start = 0
        for width, count in zip(self.widths, self.counts[words], strict=True):
            bits[self.order[start : start + count]] = width
            start += count
        return bits


def bit_curve(losses: Tensor, widths: Sequence[int], word_bits: int = WORD_BITS, element_words: int = 1) -> BitCurve:
    """The best widths of the columns of one side of a group for every number of words.

    Args:
        losses: [widths, columns], float64, of each column at each of `widths` (bits, 0 among them, in any order).
        element_words: words that two columns of 16 bits take: 2 where the model's own numbers have 32 bits.
    """
    table, given = losses.numpy(), list(widths)
    whole = table[given.index(0)]
    order = np.argsort(-whole, kind="stable")
    used = tuple(sorted((w for w in given if w), reverse=True))
    columns = len(order)
    units = [(word_bits // width, element_words if width == EXACT_BITS else 1) for width in used]
    most = max(columns // count * words for count, words in units)
    best = np.full((most + 1, columns + 1), -np.inf)  # saved by at most so many words, of the first columns
    best[:, 0] = 0.0
    extended = []
    for width, unit in zip(used, units, strict=True):
        gain = np.zeros(columns + 1)  # what the first columns save at this width
        gain[1:] = np.cumsum((whole - table[given.index(width)])[order])
        extended.append(_add_segment(best, gain, *unit))
    counts = np.zeros((most + 1, len(used)), dtype=np.int64)
    ends = best[:, 1:].argmax(1) + 1
    saved = best[np.arange(most + 1), ends]
    for words in np.flatnonzero(np.isfinite(saved)).tolist():
        left, end = words, int(ends[words])
        for i in reversed(range(len(used))):
            start = end
            while extended[i][left, start]:
                left, start = left - units[i][1], start - units[i][0]
            counts[words, i] = end - start
            end = start
    filled = sum(counts[:, i] // columns_each * words_each for i, (columns_each, words_each) in enumerate(units))
    return BitCurve(used, whole.sum() - saved, counts, np.asarray(filled), order)


def _add_segment(best: np.ndarray, gain: np.ndarray, unit_columns: int, unit_words: int) -> np.ndarray:
    """Let `unit_columns` columns at a time, in `unit_words` words, follow what `best` [words + 1, columns + 1] has.

    `best` is changed in place.

    Returns:
        [words + 1, columns + 1], whether the best ends in such columns.
    """
    extended = np.zeros(best.shape, dtype=bool)
    step = gain[unit_columns:] - gain[:-unit_columns]
    for words in range(unit_words, len(best)):
        longer = best[words - unit_words, :-unit_columns] + step
        extended[words, unit_columns:] = longer > best[words, unit_columns:]
        np.maximum(best[words, unit_columns:], longer, out=best[words, unit_columns:])
    return extended


def priced_counts(
    losses: Tensor, widths: Sequence[int], costs: Sequence[float], prices: np.ndarray, word_bits: int = WORD_BITS
) -> np.ndarray:
    """The columns of one side of a group of least loss plus price times cost, at every price: at least one word.

    Args:
        losses: as of `bit_curve`.
        costs: of a column at each of `widths`, none negative; that of 0 bits is not looked at.
        prices: [n], of a unit of cost.
    Returns:
        [n, widths], columns at each of the widths that are used, widest first, as in `BitCurve.counts`; all 0 where
        the columns fill no word.
    """
    table, given = losses.numpy(), list(widths)
    whole = table[given.index(0)]
    order = np.argsort(-whole, kind="stable")
    used = sorted((w for w in given if w), reverse=True)
    columns = len(order)
    least = np.full(
        (columns + 1, len(prices)), np.inf
    )  # of the first columns: price of those stored less what they save
    least[0] = 0.0
    starts = []
    for width in used:
        index = given.index(width)
        saved = np.concatenate([[0.0], np.cumsum((whole - table[index])[order])])
        value = costs[index] * np.arange(columns + 1)[:, None] * prices - saved[:, None]
        least, start = _best_starts(least, value, word_bits // width)
        starts.append(start)
    each = np.arange(len(prices))
    end = least[1:].argmin(0) + 1
    end[~np.isfinite(least[end, each])] = 0
    counts = np.zeros((len(prices), len(used)), dtype=np.int64)
    for i in reversed(range(len(used))):
        start = starts[i][end, each]
        counts[:, i] = end - start
        end = start
    return counts


def _best_starts(before: np.ndarray, value: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Let whole units of columns of one width follow what ends at each column, none of them where that is best.

    Args:
        before: [columns + 1, n], the least of what ends there. value: likewise, of the first columns at this width.
    Returns:
        The least of what ends at each column, and where its columns of this width start.
    """
    rows = -(-len(before) // unit)
    padding = ((0, rows * unit - len(before)), (0, 0))
    rest = np.pad(before - value, padding, constant_values=np.inf).reshape(rows, unit, -1)
    best = np.minimum.accumulate(rest, axis=0)
    places = np.arange(rows * unit).reshape(rows, unit, 1)
    start = np.maximum.accumulate(np.where(rest <= best, places, 0), axis=0)
    size = len(before)
    return best.reshape(rows * unit, -1)[:size] + value, start.reshape(rows * unit, -1)[:size]


@dataclass(frozen=True)
class BitPath:
    """The best split of every number of words among the sides of a model.

    loss: [words + 1], the least total for each number of words.
    """

    loss: np.ndarray
    _taken: tuple[np.ndarray, ...]

    def split(self, words: int) -> list[int]:
        """Words of each curve, when there are `words` in all."""
        sizes = []
        for taken in reversed(self._taken):
            sizes.append(int(taken[words]))
            words -= sizes[-1]
        return sizes[::-1]


def bit_path(curves: Sequence[np.ndarray]) -> BitPath:
    """Split words among curves, exactly.

    Args:
        curves: the loss of each side of each group at 0, 1, ... words, in one unit, as of `BitCurve.loss`.
    """
    total, taken = np.zeros(1), []
    for loss in curves:
        size = len(total) + len(loss) - 1
        merged, words = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        for own, value in enumerate(loss):
            part = slice(own, own + len(total))
            better = total + value < merged[part]
            words[part] = np.where(better, own, words[part])
            np.minimum(merged[part], total + value, out=merged[part])
        total = merged
        taken.append(words)
    return BitPath(total, tuple(taken))


@dataclass(frozen=True)
class EqualPath:
    """For every number of words the best split into as many for each curve, which may leave some over.

    loss: [words + 1], the least total, never rising; infinite where there is no such split. each: [words + 1], words of
        a curve, 0 where there is none.
    """

    loss: np.ndarray
    each: np.ndarray
    _curves: int

    def split(self, words: int) -> list[int]:
        """Words of each curve, when there are at most `words` in all."""
        return [int(self.each[words])] * self._curves


def equal_path(curves: Sequence[np.ndarray]) -> EqualPath:
    """Give each curve as many words.

    Args:
        curves: the loss of each at exactly 0, 1, ... words, infinite where it cannot fill them: see
            `BitCurve.exact_loss`.
    """
    rows = min(map(len, curves))
    total = np.sum([loss[:rows] for loss in curves], axis=0)
    best = np.zeros(rows, dtype=np.int64)
    for words in range(1, rows):
        best[words] = words if total[words] < total[best[words - 1]] else best[words - 1]
    best[~np.isfinite(total[best])] = 0
    each = np.repeat(best, len(curves))[: (rows - 1) * len(curves) + 1]
    return EqualPath(total[each], each, len(curves))
