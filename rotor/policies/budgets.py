"""Budgets that differ between layers: SqueezeAttention's, and by measured sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CLUSTERS = 3


def squeeze_shares(cosines: Sequence[float], p: float) -> list[float]:
    """What each layer keeps, as a share of the budget that all would have alike; the mean over layers is 1.

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


def three_means(values: Sequence[float], clusters: int = CLUSTERS) -> list[int]:
    """The cluster of each value, 0 for the smallest: least squared distance to the clusters' means, exactly, in order.

    Numbers that are equal share a cluster; there are no more clusters than different numbers.
    """
    distinct = sorted(set(values))
    counts = [list(values).count(value) for value in distinct]
    clusters = min(clusters, len(distinct))

    def spread(first: int, end: int) -> float:
        part, weight = distinct[first:end], counts[first:end]
        mean = sum(v * c for v, c in zip(part, weight, strict=True)) / sum(weight)
        return sum(c * (v - mean) ** 2 for v, c in zip(part, weight, strict=True))

    best: list[list[tuple[float, list[int]]]] = [[(spread(0, end), [0]) for end in range(1, len(distinct) + 1)]]
    for _ in range(clusters - 1):
        row: list[tuple[float, list[int]]] = []
        for end in range(1, len(distinct) + 1):
            options = [
                (best[-1][start - 1][0] + spread(start, end), [*best[-1][start - 1][1], start])
                for start in range(len(best), end)
            ]
            row.append(min(options, default=(float("inf"), []), key=lambda option: option[0]))
        best.append(row)
    starts = best[-1][-1][1]
    place = {value: sum(index >= start for start in starts) - 1 for index, value in enumerate(distinct)}
    return [place[value] for value in values]


class SqueezeBudgets:
    """Budgets of the layers of one cache, known when the last layer has seen the prompt.

    Args:
        p: see squeeze_shares. layers: those whose `budget` is set, row by row, and which are then cut.
    """

    def __init__(self, p: float, layers: Sequence[Any]) -> None:
        self._p, self._layers = p, layers
        self.reset()

    def reset(self) -> None:
        self.done = False
        self._cosines: list[Tensor] = []

    def observe(self, index: int, before: Tensor, after: Tensor, tokens: Tensor) -> None:
        """What a layer's attention made of the prompt's hidden states, [batch_size, seq_len, hidden_size].

        Args:
            tokens: [batch_size, seq_len] bool, false where there is padding.
        """
        assert index == len(self._cosines)
        cosine = functional.cosine_similarity(before.double(), after.double(), dim=-1)
        tokens = tokens.to(cosine.device)
        self._cosines.append((cosine * tokens).sum(-1) / tokens.sum(-1).clamp(min=1))
        if len(self._cosines) < len(self._layers):
            return
        rows = torch.stack([cosine.cpu() for cosine in self._cosines], dim=1).tolist()
        shares = torch.tensor([squeeze_shares(row, self._p) for row in rows], dtype=torch.float64)
        self.done = True
        for layer, share in zip(self._layers, shares.unbind(1), strict=True):
            layer.budget = (layer.budget * share.to(layer.budget.device)).round().long().clamp(min=1)
            layer.evict()


def sensitivity_shares(losses: Sequence[Sequence[float]], shares: Sequence[float], mean: float) -> list[float]:
    """The share of its tokens that each layer keeps so that the losses add up to least, at most `mean` in the mean.

    Shares grow from the smallest where that gains most per share, over the lower convex hull of each layer's losses.

    Args:
        losses: of each layer, cut by itself, at each of `shares`, in nats. shares: ascending. mean: at least the first.
    Source: rotor's own; the greedy choice is the best there is for convex losses.
    """
    hulls = [_hull(list(zip(shares, layer, strict=True))) for layer in losses]
    at, left = [0] * len(hulls), mean * len(hulls) - shares[0] * len(hulls)
    while True:
        options = [
            ((hull[i][1] - hull[i + 1][1]) / (hull[i + 1][0] - hull[i][0]), -index)
            for index, (hull, i) in enumerate(zip(hulls, at, strict=True))
            if i + 1 < len(hull) and hull[i + 1][0] - hull[i][0] <= left + 1e-9
        ]
        if not options or max(options)[0] <= 0:
            return [hull[i][0] for hull, i in zip(hulls, at, strict=True)]
        index = -max(options)[1]
        left -= hulls[index][at[index] + 1][0] - hulls[index][at[index]][0]
        at[index] += 1


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of points in ascending order."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull
