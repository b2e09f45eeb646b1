"""ZDC's Oracle and its regression: ratios from a grid of all that equation 6 allows.

The Oracle is the best of the grid. The regression learns, from the best of the grid for several losses, what ratios go
with a loss, and gives those of the loss that is asked.

Source: ZDC sections 5.2 and 6.2. Differs: one model at a time, so that its type is no input of the regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ..calibration.allocation.plan import Plan
from ..errors import AccuracyError
from ..recipe.sections import Search
from .evaluation.accuracy import Fidelity
from .plan_choice import find_plan
from .ratio_search import LARGEST, SHARES, Cache, RatioPath, RatioPlan, rising_shares

if TYPE_CHECKING:
    from ..policies import Tiers

LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Values of each of the four ratios."""

LOSSES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Losses of accuracy from whose best ratios the regression learns, but for the one that is asked."""

LEAST_LOSS = 0.001
"""Least loss that the regression is asked for."""

Measure = Callable[[RatioPlan], Fidelity]


def find_optimum(cache: Cache, policy: Tiers, target: float, search: Search, measure: Measure) -> Tiers:
    """The Oracle: the ratios and shares of the grid that remove most of those that keep the accuracy.

    What removes less than one that keeps it, and what is harsher in everything than one that does not, is left out
    unmeasured.

    Args:
        As find_ratios.
    Raises:
        AccuracyError: none keeps it.
    """
    del search
    grid = _Grid(cache, policy, measure)
    best = grid.best(target)
    if best is None:
        raise grid.out_of_reach(target)
    return replace(best, search=False)


def find_by_regression(cache: Cache, policy: Tiers, target: float, search: Search, measure: Measure) -> Tiers:
    """The ratios that a linear regression on the logarithm of the loss gives.

    Where they do not keep the accuracy, they are scaled together until they do.

    Args:
        As find_ratios.
    Raises:
        AccuracyError: no ratios of the grid, or of the regression at any scale, keep the accuracy.
    """
    from sklearn.linear_model import LinearRegression  # slow to import

    grid, layers = _Grid(cache, policy, measure), len(cache.layouts)
    known = [loss for loss in LOSSES if not math.isclose(loss, 1 - target, rel_tol=1e-6)]
    learnt = [(math.log(loss), best) for loss in known if (best := grid.best(1 - loss)) is not None]
    if not learnt:
        raise grid.out_of_reach(target)
    losses, numbers = np.array([[loss] for loss, _ in learnt]), np.array([_numbers(best, layers) for _, best in learnt])
    asked = [[math.log(max(1 - target, LEAST_LOSS))]]
    given = _policy(policy, LinearRegression().fit(losses, numbers).predict(asked)[0].tolist(), layers)
    if measure(cache.with_ratios(given)).accuracy >= target:
        return replace(given, search=False)

    def fidelity(plan: Plan) -> Fidelity:
        assert isinstance(plan, RatioPlan)
        return measure(plan)

    scaled = find_plan(RatioPath(cache, given), search, target, fidelity)
    assert isinstance(scaled, RatioPlan)
    assert scaled.policy is not None
    return replace(scaled.policy, search=False)


class _Grid:
    """All policies of the grid, each measured once where it must be."""

    def __init__(self, cache: Cache, policy: Tiers, measure: Measure) -> None:
        self.layers, self.measure = len(cache.layouts), measure
        plans = map(cache.with_ratios, _policies(policy, self.layers))
        self.plans = sorted(plans, key=lambda plan: plan.stored)
        self.accuracies: dict[Tiers, float] = {}

    def best(self, target: float) -> Tiers | None:
        """Find what removes most and keeps the accuracy, if accuracy falls as everything gets harsher."""
        best, left = None, list(self.plans)
        while left:
            plan = left[len(left) // 2]
            assert plan.policy is not None
            if self._accuracy(plan) >= target:
                best = plan.policy
                left = [other for other in left if other.stored > plan.stored]
            else:
                left = [other for other in left if not self._harsher(other, plan)]
        return best

    def out_of_reach(self, target: float) -> AccuracyError:
        best = max(self.accuracies.values(), default=math.nan)
        return AccuracyError(
            f"accuracy {target} is out of reach: the best measured ratios keep {best:.4f}.",
            "Ask for less, or leave search_by out, which tries smaller ratios.",
        )

    def _accuracy(self, plan: RatioPlan) -> float:
        assert plan.policy is not None
        if plan.policy not in self.accuracies:
            self.accuracies[plan.policy] = self.measure(plan).accuracy
        return self.accuracies[plan.policy]

    def _harsher(self, plan: RatioPlan, than: RatioPlan) -> bool:
        """Tell whether a plan has no smaller ratio, and no larger share of important tokens."""
        assert plan.policy is not None
        assert than.policy is not None
        ratios, other = _ratios(plan.policy), _ratios(than.policy)
        shares = zip(plan.policy.shares(self.layers), than.policy.shares(self.layers), strict=True)
        return all(a >= b for a, b in zip(ratios, other, strict=True)) and all(a <= b for a, b in shares)


def _policies(policy: Tiers, layers: int) -> Iterator[Tiers]:
    for share in SHARES:
        flat = replace(policy, important=share, layer_important=())
        for shape in (flat, *rising_shares(flat, layers)):
            for v_i, qk_i, v_u, qk_u in product(LEVELS, repeat=4):
                ordered = v_i <= qk_i <= qk_u and v_i <= v_u <= qk_u and qk_u > 0
                alike = (v_i, qk_i) == (v_u, qk_u)  # then shares mean nothing
                if ordered and not (alike and (share != SHARES[0] or shape is not flat)):
                    yield replace(shape, qk_important=qk_i, qk_unimportant=qk_u, v_important=v_i, v_unimportant=v_u)


def _ratios(policy: Tiers) -> tuple[float, float, float, float]:
    return policy.qk_important, policy.qk_unimportant, policy.v_important, policy.v_unimportant


def _numbers(policy: Tiers, layers: int) -> list[float]:
    """The first and the last layer's share, and the ratios."""
    shares = policy.shares(layers)
    return [shares[0], shares[-1], *_ratios(policy)]


def _policy(policy: Tiers, numbers: Sequence[float], layers: int) -> Tiers:
    """The policy of such numbers, as near to them as its order of shares and ratios allows."""
    first, last = (min(1.0, max(0.0, number)) for number in numbers[:2])
    qk_i, qk_u, v_i, v_u = (min(LARGEST, max(0.0, number)) for number in numbers[2:])
    v_i, qk_u = min(v_i, qk_i, v_u), max(qk_u, qk_i, v_u)
    shares = np.linspace(first, max(first, last), layers).round(4).tolist() if layers > 1 and last > first else ()
    return replace(
        policy,
        important=first,
        layer_important=tuple(shares),
        qk_important=qk_i,
        qk_unimportant=qk_u,
        v_important=v_i,
        v_unimportant=v_u,
    )
