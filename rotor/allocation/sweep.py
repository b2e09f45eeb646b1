"""A sweep over prices of a unit of cost: for each price the plan of least loss plus price times cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .plan import RankPlan

PRICES = 2000
"""Prices in the sweep, equally spaced in logarithm."""

GAP, HALVINGS = 0.005, 10
"""Where neighbouring plans are further apart in saving than GAP and several sides changed at once, the interval of
prices between them is halved, at most this often: a small model has few plans, and each may be the one."""


def price_range(top: float, count: int = PRICES) -> Tensor:
    """Prices [count] from next to nothing to `top`, at which nothing is worth its cost."""
    return torch.logspace(-12, 0, count, dtype=torch.float64) * top


def sweep(plans_at: Callable[[Tensor], list[RankPlan]], top: float) -> list[RankPlan]:
    """The plans of all prices up to `top`, by rising price.

    Args:
        plans_at: prices [n] -> the best plan at each, whose `parameter` is the price.
    """
    plans = plans_at(price_range(top))
    for _ in range(HALVINGS):
        crowded = [a.parameter * b.parameter for a, b in pairwise(plans) if _crowded(a, b)]
        if not crowded:
            break
        plans += plans_at(torch.tensor(crowded, dtype=torch.float64).sqrt())
        plans.sort(key=lambda plan: plan.parameter)
    return plans


def _crowded(first: RankPlan, second: RankPlan) -> bool:
    """Whether a plan between these two is wanted, and there may be one."""
    if abs(second.saving - first.saving) <= GAP:
        return False
    changes = 0
    for keys, layers in zip(
        zip(first.choice, second.choice, strict=True), zip(_sides(first), _sides(second), strict=True), strict=True
    ):
        if keys[0] != keys[1]:
            changes += 1
        else:
            changes += sum(a != b for pairs in zip(*layers, strict=True) for a, b in zip(*pairs, strict=True))
    return changes > 1


def _sides(plan: RankPlan) -> Sequence[Sequence[tuple[object, object]]]:
    """What each layer's groups store of keys and of values."""
    return plan.rounded if plan.channels is None else plan.channels
