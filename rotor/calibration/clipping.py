"""Gradients of few tokens that are far longer than all others, shortened to the rest's length.

Lengths of gradients have a heavy tail: on the bundled model ten tokens of 32,768 bear 0.2 to 0.9 of the first layer's
Fisher information, so that its basis was that of a few drawn tokens. Cut to the length that one token in a hundred
exceeds, no token decides alone, and two draws of tokens agree better (artifacts/NOTES.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARE = 0.01
"""Of the tokens, whose gradients are shortened."""


class GradientClip:
    """Finds the longest gradients while batches pass by; no batch's size matters.

    Args:
        tokens: that will come. Of fewer than 150 nothing is shortened: one gradient is the longest.
    """

    def __init__(self, tokens: int) -> None:
        self._count = max(1, round(SHARE * tokens))
        self._longest: Tensor | None = None  # [at most count, num_kv_heads, n]

    def add(self, gradients: Tensor) -> None:
        """Add those of the next tokens, [tokens, num_kv_heads, n]."""
        both = gradients if self._longest is None else torch.cat([self._longest, gradients])
        self._longest = both[torch.topk(_squares(both), min(self._count, len(both))).indices]

    def excess(self) -> Tensor:
        """Vectors whose second moment is what the shortened gradients' lacks, [at most count, num_kv_heads, n]."""
        assert self._longest is not None
        lost = 1 - self._shares(self._longest)
        return self._longest * lost.sqrt().to(self._longest.dtype)[:, None, None]

    def shortened(self, gradients: Tensor) -> Tensor:
        """Some of the gradients that were added, [tokens, num_kv_heads, n], of the clip's length at most."""
        return gradients * self._shares(gradients).sqrt().to(gradients.dtype)[:, None, None]

    def _shares(self, gradients: Tensor) -> Tensor:
        """What is kept of each one's square, [tokens], float64."""
        assert self._longest is not None
        bound = _squares(self._longest).min().to(gradients.device)
        squares = _squares(gradients)
        return torch.where(squares > bound, bound / squares, 1.0)


def _squares(gradients: Tensor) -> Tensor:
    """Squared lengths, [tokens], float64."""
    return gradients.flatten(1).double().square().sum(1)
