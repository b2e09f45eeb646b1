"""SqueezeAttention: budgets that differ between layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import pvariance
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CLUSTERS = 3


def token_cosines(before: Tensor, after: Tensor) -> Tensor:
    """Cosine of the hidden states of each token before and after a layer's attention.

    Args:
        before, after: [batch_size, seq_len, hidden_size].
    Returns:
        [batch_size, seq_len] float64.
    Source: SqueezeAttention, equation 5.
    """
    return functional.cosine_similarity(before.double(), after.double(), dim=-1)


def squeeze_shares(cosines: Sequence[float], p: float) -> list[float]:
    """Share of each layer in the budget that all layers would have alike; the mean over layers is 1.

    Layers are put in three clusters by how alike hidden states are before and after their attention (cosine, mean over
    the prompt). The cluster with the largest, G3, keeps p; the others share what it gives up. With fewer than two
    clusters nothing is shared.

    Source: SqueezeAttention, Algorithm 1 (its text calls p the share that is removed; the algorithm is followed).
    """
    layers, cluster = len(cosines), three_means(cosines)
    largest = max(cluster)
    third = cluster.count(largest)
    if largest == 0:
        return [1.0] * layers
    rest = (layers - third * p) / (layers - third)
    return [p if c == largest else rest for c in cluster]


def three_means(values: Sequence[float]) -> list[int]:
    """The cluster of each value, 0 for the smallest: least squared distance to the clusters' means, exactly.

    Numbers that are equal share a cluster; there are no more clusters than different numbers.
    """
    distinct = sorted(set(values))

    def loss(starts: tuple[int, ...]) -> float:
        bounds = pairwise((0, *starts, len(distinct)))
        parts = [[v for v in values if distinct[first] <= v <= distinct[end - 1]] for first, end in bounds]
        return sum(len(part) * pvariance(part) for part in parts)

    starts = min(combinations(range(1, len(distinct)), min(CLUSTERS, len(distinct)) - 1), key=loss)
    return [sum(value >= distinct[start] for start in starts) for value in values]


class SqueezeBudgets:
    """Budgets of the layers of one cache, set when the last layer has read the prompt.

    Args:
        p: see squeeze_shares. layers: the layers whose `budget` is set, sequence by sequence, and which are then cut.
    """

    def __init__(self, p: float, layers: Sequence[Any]) -> None:
        self._p, self._layers = p, layers
        self.reset()

    def reset(self) -> None:
        self.done = False
        self._cosines: list[Tensor] = []

    def observe(self, index: int, before: Tensor, after: Tensor, tokens: Tensor) -> None:
        """Take note of the prompt's hidden states before and after a layer's attention.

        Args:
            before, after: [batch_size, seq_len, hidden_size]. tokens: [batch_size, seq_len] bool, False for padding.
        """
        assert index == len(self._cosines)
        cosine = token_cosines(before, after)
        tokens = tokens.to(cosine.device)
        seen = torch.where(tokens, cosine, 0.0)  # what stands at padding may be no number
        self._cosines.append(seen.sum(-1) / tokens.sum(-1).clamp(min=1))
        if len(self._cosines) < len(self._layers):
            return
        rows = torch.stack([cosine.cpu() for cosine in self._cosines], dim=1).tolist()
        shares = [squeeze_shares(row, self._p) for row in rows]
        self.done = True
        for layer, layer_shares in zip(self._layers, zip(*shares, strict=True), strict=True):
            for sequence, share in zip(layer.sequences, layer_shares, strict=True):
                sequence.budget = sequence.budget and max(1, round(sequence.budget * share))
            layer.evict()
