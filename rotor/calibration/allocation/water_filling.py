"""Ranks of every layer by gain per byte: water-filling on measured sensitivities.

The predicted loss of a plan is the sum, over layers and sides, of a sensitivity times the dropped energy (squared
singular values). The sensitivity rises as a layer loses directions that it needs, so it is measured at a few ranks and
interpolated between them. Only multiples are considered, so rounding is part of the optimisation. At each price of a
column, every side of every group takes the rank with the least loss plus price times rank.

Source: docs/design.md; Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988.
"""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from .plan import Plan, SideSensitivity, SpectraPath

PRICES = 2000
"""Prices in the sweep, equally spaced in logarithm."""

LARGEST_GAP = 0.005
"""Difference in compression above which a price between two neighbouring plans is tried, if several ranks changed at
once. A small model has few plans, so none should be missed."""

PRICE_HALVINGS = 10
"""Most rounds of trying prices in between."""


class WaterFillingPath(SpectraPath):
    """Path of the plans that are optimal at some price."""

    def _plans(self) -> list[Plan]:
        columns, multiple = self.columns, self.multiple_of
        ranks = np.array([*range(multiple, columns, multiple), columns])[::-1]  # descending: price 0 removes nothing
        losses = self._losses(ranks)
        held = np.array(self.shape.held_tokens(self.inputs.context_tokens or 1))
        shares = np.repeat(held / held.sum(), 2 * losses.shape[2])  # share of the cache, for each side of each group
        cost = shares[:, None] * ranks / (2 * columns * losses.shape[2])

        def sweep(prices: np.ndarray) -> list[Plan]:
            """Make the optimal plan at every price."""
            sides = zip(losses.reshape(-1, len(ranks)), cost, strict=True)
            taken = np.stack([(loss + prices[:, None] * side_cost).argmin(1) for loss, side_cost in sides])
            chosen = ranks[taken].reshape(*losses.shape[:3], len(prices)).transpose(3, 0, 2, 1).tolist()
            return [
                self._make(price, [[(qk, v) for qk, v in layer] for layer in layers])
                for price, layers in zip(prices.tolist(), chosen, strict=True)
            ]

        highest = 10 * losses.max() / cost.max()  # at this price only the smallest rank is worth its cost
        plans = sweep(np.logspace(-12, 0, PRICES) * (highest or 1.0))
        for _ in range(PRICE_HALVINGS):
            gaps = [a.parameter * b.parameter for a, b in pairwise(plans) if _wide_gap(a, b)]
            if not gaps:
                break
            plans = sorted(plans + sweep(np.sqrt(gaps)), key=lambda plan: plan.parameter)
        return plans

    def _losses(self, ranks: np.ndarray) -> np.ndarray:
        """Predict losses at these descending ranks, [layers, 2 sides, groups, ranks]."""
        by_side = []
        wanted = torch.from_numpy(ranks.copy())
        for spectra, sensitivity in zip(self.spectra, self.inputs.sensitivities, strict=True):
            for values, side_sensitivity in zip((spectra.qk, spectra.vo), sensitivity, strict=True):
                tails = values.square().flip(-1).cumsum(-1).flip(-1)
                tails = torch.cat([tails, tails.new_zeros(len(tails), 1)], dim=-1)
                losses = interpolated(side_sensitivity, wanted) * tails[:, wanted]
                by_side.append(losses.cummax(-1).values.numpy())  # fewer columns never cost less
        return np.stack(by_side).reshape(len(self.spectra), 2, -1, len(ranks))


def _wide_gap(first: Plan, second: Plan) -> bool:
    """Whether two neighbouring plans are far apart and a plan between them may exist."""
    if abs(second.stored - first.stored) <= LARGEST_GAP:
        return False
    pairs = zip(chain(*first.ranks), chain(*second.ranks), strict=True)
    return sum((a != c) + (b != d) for (a, b), (c, d) in pairs) > 1


def interpolated(sensitivity: SideSensitivity, ranks: Tensor) -> Tensor:
    """Interpolate the sensitivity: its logarithm is linear in that of the rank, and constant beyond the probes."""
    if not sensitivity:
        return torch.zeros(len(ranks), dtype=torch.float64)
    known, values = np.log(np.array(sensitivity, dtype=float)).T
    return torch.from_numpy(np.exp(np.interp(np.log(ranks.numpy()), known, values)))
