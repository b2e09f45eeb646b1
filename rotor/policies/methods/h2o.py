"""H2O: keep the newest tokens and those that drew most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..eviction import ScoringEviction


@dataclass(frozen=True)
class H2O(ScoringEviction):
    """A token's score is the sum of the attention weights that it drew from itself and later tokens, averaged over the
    query heads that share it: s_j = sum_i softmax(q_i K^T)_j.

    Limits: an uncompressed model stores all weights of a step, length^2 a head; a compressed one sums their columns.
    Source: Zhang et al., H2O (arXiv 2306.14048), algorithm 1, half recent and half heavy.
    """

    method: ClassVar[str] = "h2o"
