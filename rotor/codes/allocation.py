"""Bits of every column for a number of bytes.

The loss of a column at b bits is w sigma^2 D(b): its weight, its variance, the share of it that the code leaves. A
group's side stores its columns by width, widest first, each segment whole words. For columns in descending order of
w sigma^2 (which becomes their order in the checkpoint) the best widths for every number of words follow exactly by
dynamic programming, and from such curves of all sides of a model the best split of every number of words.

Source: DESIGN section 7; reverse water-filling of transform coding, with whole words inside the optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

WORD_BITS = 32
"""Bits of a word, in whole numbers of which each segment is stored."""


@dataclass(frozen=True)
class BitCurve:
    """The least loss of one side of a group for every number of words from 0 on, and the columns that give it.

    loss: [words + 1], float64, never rising. counts: [words + 1, widths], columns at each of `widths` (bits, widest
    first); the columns after them have 0 bits. order: [columns], the column that stands at each place.
    """

    widths: tuple[int, ...]
    loss: np.ndarray
    counts: np.ndarray
    order: np.ndarray

    def bits(self, words: int) -> np.ndarray:
        """Bits of each column, in the columns' own order, [columns]."""
        bits = np.zeros(len(self.order), dtype=np.int64)
        start = 0
        for width, count in zip(self.widths, self.counts[words], strict=True):
            bits[self.order[start : start + count]] = width
            start += count
        return bits


def bit_curve(losses: Tensor, widths: Sequence[int], word_bits: int = WORD_BITS) -> BitCurve:
    """The best widths of the columns of one side of a group for every number of words.

    Columns of no loss are put behind the last one, so that its word may end empty. No other word needs to: whatever
    column comes next takes its place at no cost.

    Args:
        losses: [widths, columns], float64, of each column at each of `widths` (bits, 0 among them, in any order).
    """
    table, given = losses.numpy(), list(widths)
    whole = table[given.index(0)]
    order = np.argsort(-whole, kind="stable")
    used = tuple(sorted((w for w in given if w), reverse=True))
    columns, padding = len(order), word_bits // used[-1] - 1
    most = -(-columns * used[0] // word_bits)
    best = np.full((most + 1, columns + padding + 1), -np.inf)  # saved by at most so many words, of the first columns
    best[:, 0] = 0.0
    extended = []
    for width in used:
        gain = np.zeros(columns + padding + 1)  # what the first columns save at this width
        gain[1 : columns + 1] = np.cumsum((whole - table[given.index(width)])[order])
        gain[columns + 1 :] = gain[columns]
        extended.append(_add_segment(best, gain, word_bits // width))
    counts = np.zeros((most + 1, len(used)), dtype=np.int64)
    ends = best.argmax(1)
    for words, end in enumerate(ends.tolist()):
        left = words
        for i in reversed(range(len(used))):
            start, per_word = end, word_bits // used[i]
            while extended[i][left, start]:
                left, start = left - 1, start - per_word
            counts[words, i] = min(end, columns) - min(start, columns)
            end = start
    saved = best[np.arange(most + 1), ends]
    return BitCurve(used, whole.sum() - saved, counts, order)


def _add_segment(best: np.ndarray, gain: np.ndarray, per_word: int) -> np.ndarray:
    """Let words of `per_word` columns follow what `best` [words + 1, columns + 1] has, in place.

    Returns:
        [words + 1, columns + 1], whether the best ends in such a word.
    """
    extended = np.zeros(best.shape, dtype=bool)
    step = gain[per_word:] - gain[:-per_word]
    for words in range(1, len(best)):
        longer = best[words - 1, :-per_word] + step
        extended[words, per_word:] = longer > best[words, per_word:]
        np.maximum(best[words, per_word:], longer, out=best[words, per_word:])
    return extended


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
