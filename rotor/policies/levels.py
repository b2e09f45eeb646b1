"""Levels of non-uniform codes: quantiles, then means of what is nearest to them, as K-means has it."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_means(numbers: Tensor, weights: Tensor, count: int, loops: int) -> Tensor:
    """Levels [count], ascending, that make the sum of weight * (number - nearest level)^2 small: K-means, float64.

    They begin at the quantiles of the numbers with a weight; a level that nothing with a weight is nearest to stays
    where it is.

    Args:
        numbers, weights: [n], of any number of dimensions; weights are 0 or more.
    """
    numbers, weights = numbers.flatten().double(), weights.flatten().double()
    weighed = weights > 0
    if not bool(weighed.any()):  # nothing reads them: all count alike
        weights, weighed = torch.ones_like(numbers), torch.ones_like(weighed)
    ordered, order = numbers[weighed].sort()
    weights = weights[weighed][order]
    zero = weights.new_zeros(1)
    mass, moment = (torch.cat([zero, part.cumsum(0)]) for part in (weights, weights * ordered))
    n = len(ordered)
    levels = ordered[((torch.arange(count, device=ordered.device) + 0.5) / count * n).long().clamp(max=n - 1)]
    for _ in range(loops):
        ends = torch.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2, right=True)
        bounds = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), n)])
        held = mass[bounds[1:]] - mass[bounds[:-1]]
        sums = moment[bounds[1:]] - moment[bounds[:-1]]
        levels = torch.where(held > 0, sums / held.clamp(min=torch.finfo(held.dtype).tiny), levels)
    return levels


def nearest(numbers: Tensor, levels: Tensor) -> Tensor:
    """The index of the level nearest to each number: numbers [...], ascending levels broadcastable to [..., count]."""
    middles = (levels[..., 1:] + levels[..., :-1]) / 2
    codes = torch.zeros(numbers.shape, dtype=torch.int64, device=numbers.device)
    for middle in middles.unbind(-1):
        codes += numbers > middle
    return codes
