"""Paths of plans by a price per unit of cost: at each price, what has the least loss plus price times cost.

Source: Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .plan import RankPath, RankPlan

PRICES = 2000
"""Prices in the sweep, equally spaced in logarithm."""

GAP, HALVINGS = 0.005, 10
"""Where neighbouring plans are further apart in saving than GAP and several choices changed at once, the interval of
prices between them is halved, at most this often: a small model has few plans, and each may be the one."""


@dataclass(frozen=True)
class Choice:
    """What a group, or a side of one, chooses among: options with the loss and the cost of each, [options].

    Of equally good options the first is taken. top: a price at which only the cheapest is worth its cost.
    """

    options: Sequence[Any]
    loss: np.ndarray
    cost: np.ndarray
    top: float


class _Priced(NamedTuple):
    """The plan of a price, and which option each choice of each layer takes."""

    plan: RankPlan
    taken: list[tuple[int, ...]]


class PricedPath(RankPath):
    """Path of the plans that are best at some price; a layer's candidate is the one of least loss plus priced cost."""

    @abstractmethod
    def _choices(self) -> list[dict[str, list[Choice]]]:
        """Of each layer, by candidate, what is chosen there."""

    @abstractmethod
    def _priced_plan(self, price: float, choice: tuple[str, ...], options: list[list[Any]]) -> RankPlan:
        """The plan of a candidate of each layer, with the option that each of its choices takes."""

    def _plans(self) -> list[RankPlan]:
        layers = self._choices()
        top = 10 * max(one.top for layer in layers for choices in layer.values() for one in choices)
        found = self._sweep(layers, np.logspace(-12, 0, PRICES) * (top or 1.0))
        for _ in range(HALVINGS):
            crowded = [a.plan.parameter * b.plan.parameter for a, b in pairwise(found) if _crowded(a, b)]
            if not crowded:
                break
            found += self._sweep(layers, np.sqrt(crowded))
            found.sort(key=lambda priced: priced.plan.parameter)
        return [priced.plan for priced in found]

    def _sweep(self, layers: list[dict[str, list[Choice]]], prices: np.ndarray) -> list[_Priced]:
        """The best plan at every price."""
        winners, taken = [], []
        for layer in layers:
            of_candidates = [_best(choices, prices) for choices in layer.values()]
            winners.append(np.stack([total for _, total in of_candidates]).argmin(0))
            taken.append([best for best, _ in of_candidates])
        found = []
        for place, price in enumerate(prices.tolist()):
            own = [(list(layer)[w[place]], w[place]) for layer, w in zip(layers, winners, strict=True)]
            at = [tuple(best[w][:, place].tolist()) for best, (_, w) in zip(taken, own, strict=True)]
            choice = tuple(key for key, _ in own)
            options = [
                [one.options[i] for one, i in zip(layer[key], indices, strict=True)]
                for layer, key, indices in zip(layers, choice, at, strict=True)
            ]
            found.append(_Priced(self._priced_plan(price, choice, options), at))
        return found


def _best(choices: list[Choice], prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best option of each choice at each price, [choices, prices], and their total at it, [prices]."""
    priced = [one.loss + prices[:, None] * one.cost for one in choices]
    return np.stack([loss.argmin(1) for loss in priced]), np.sum([loss.min(1) for loss in priced], axis=0)


def _crowded(first: _Priced, second: _Priced) -> bool:
    """Whether a plan between these two is wanted, and there may be one."""
    if abs(second.plan.saving - first.plan.saving) <= GAP:
        return False
    changes = 0
    for keys, taken in zip(
        zip(first.plan.choice, second.plan.choice, strict=True),
        zip(first.taken, second.taken, strict=True),
        strict=True,
    ):
        changes += 1 if keys[0] != keys[1] else sum(a != b for a, b in zip(*taken, strict=True))
    return changes > 1
