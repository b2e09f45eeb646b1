"""The choice of tiers: ratios per token that cost at most so much quality, measured; and a regression that predicts it.

Source: ZDC section 5.2, equations 5 and 6: of the constraints on ratios, p^u >= p^i as the text has it, which equation
6 contradicts. That keys lose more than values, of which the two say the opposite as well, is left to what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log1p

import numpy as np
from torch import Tensor

from ..errors import AccuracyError
from ..policies import Tiers
from ..progress import Progress
from ..rewriting.compressible import CompressibleModel
from .tier_grid import Candidates, TierGrid, TierMeter, row_of, tiers_of

TRIES = 4
"""Choices that are measured at most for one limit."""

NEAR = 0.9
"""A choice that costs at least this share of what it may is good enough."""


@dataclass(frozen=True)
class Tried:
    """A choice and what was measured of it. degradation: Q_d."""

    policy: Tiers
    degradation: float


def choose_tiers(network: CompressibleModel, rows: Tensor, limit: float, progress: Progress) -> tuple[Tiers, float]:
    """Ratios per token for a compressed model, and the Q_d that they were measured to cost.

    Args:
        network: its layers compressed. rows: [n, seq_len] text to measure on. limit: of Q_d.
    Raises:
        AccuracyError: nothing that removes anything costs so little.
    """
    meter = TierMeter(network, rows)
    with progress.task("tiers", TierGrid.cells(network.shape.num_layers), "cells") as advance:
        grid = TierGrid.measure(meter, advance)

    def measured(policy: Tiers) -> Tried:
        tried = Tried(policy, meter.degradation(policy))
        progress.message(f"tiers: {grid.removed(policy):.3f} of the rows removed, Q_d {tried.degradation:.4f}")
        return tried

    best = max(within(grid.candidates(), limit, measured), key=lambda tried: grid.removed(tried.policy), default=None)
    if best is None or not grid.removed(best.policy):
        raise AccuracyError(
            f"cache.tiers {limit:g}: no ratios per token that remove anything cost at most so much perplexity.",
            "Allow more, or export without tiers.",
        )
    return best.policy, best.degradation


def within(candidates: Candidates, limit: float, measure: Callable[[Tiers], Tried]) -> list[Tried]:
    """Choices that were measured to cost at most `limit` of Q_d: each the best that is predicted to cost at most what
    the one before should have had."""
    allowed, fitting, seen = log1p(limit), list[Tried](), set[Tiers]()
    for _ in range(TRIES):
        policy = candidates.best(allowed)
        if policy is None or policy in seen:
            break
        seen.add(policy)
        found = measure(policy)
        if found.degradation <= limit:
            fitting.append(found)
            if found.degradation >= NEAR * limit:
                break
        cost = max(log1p(max(found.degradation, -0.5)), log1p(limit) / 8)
        allowed *= min(2.0, max(0.5, 0.97 * log1p(limit) / cost))
    return fitting


class RatioRegression:
    """From Q_d to ratios, as ZDC predicts them: fitted to near-optimal choices at several Q_d of one model.

    A ridge regression of g of the first and of the last layer and of the four ratios on powers of log Q_d.
    """

    def __init__(self, limits: Sequence[float], choices: Sequence[Tiers]) -> None:
        from sklearn.linear_model import Ridge
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler

        self._layers = len(choices[0].layer_important)
        degree = 2 if len(limits) > 3 else 1
        self._model = make_pipeline(StandardScaler(), PolynomialFeatures(degree), Ridge(0.1))
        self._model.fit(self._inputs(limits), np.array([row_of(choice) for choice in choices]))

    def predict(self, limit: float) -> Tiers:
        """The ratios for a Q_d; unimportant tokens lose no less, deeper layers have no fewer important ones."""
        first, last, qk_i, qk_u, v_i, v_u = np.clip(self._model.predict(self._inputs([limit]))[0], 0.0, 0.95)
        return tiers_of([min(first, last), last, min(qk_i, qk_u), qk_u, min(v_i, v_u), v_u], self._layers)

    @staticmethod
    def _inputs(limits: Sequence[float]) -> np.ndarray:
        return np.log(np.array(limits))[:, None]
