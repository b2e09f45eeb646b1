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

from ...checkpoint.layout import LayerRanks
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
        # descending: price 0 removes nothing
        step = self.multiple_of
        ranks = [np.array([*range(step, columns, step), columns])[::-1] for columns in self.columns]
        losses = [self._losses(layer, layer_ranks) for layer, layer_ranks in enumerate(ranks)]
        held = np.array(self.shape.held_tokens(self.inputs.context_tokens or 1))
        kept = held * np.array([layer_shape.kv_width for layer_shape in self.shape.layers])
        shares = (kept / kept.sum()).tolist()  # of each layer in the cache
        sizes = zip(shares, ranks, losses, self.columns, strict=True)
        costs = [share * layer_ranks / (2 * columns * loss.shape[1]) for share, layer_ranks, loss, columns in sizes]

        def chosen(layer: int, prices: np.ndarray) -> list[LayerRanks]:
            """The ranks of a layer at every price."""
            # Groups and sides do not share ranks, so each takes its own minimum of loss plus price times cost.
            sides = losses[layer].reshape(-1, len(ranks[layer]))
            taken = np.stack([(loss + prices[:, None] * costs[layer]).argmin(1) for loss in sides])
            by_price = ranks[layer][taken].reshape(*losses[layer].shape[:2], len(prices)).transpose(2, 1, 0).tolist()
            return [[(qk, v) for qk, v in pairs] for pairs in by_price]

        def sweep(prices: np.ndarray) -> list[Plan]:
            """Make the optimal plan at every price."""
            layers = [chosen(layer, prices) for layer in range(len(ranks))]
            return [self._make(price, list(plan)) for price, *plan in zip(prices.tolist(), *layers, strict=True)]

        # at this price only the smallest rank is worth its cost
        highest = 10 * max(loss.max() for loss in losses) / max(cost.max() for cost in costs)
        plans = sweep(np.logspace(-12, 0, PRICES) * (highest or 1.0))
        # A plan between two neighbours, if there is one, is optimal at some price between theirs.
        for _ in range(PRICE_HALVINGS):
            gaps = [a.parameter * b.parameter for a, b in pairwise(plans) if _wide_gap(a, b)]
            if not gaps:
                break
            plans = sorted(plans + sweep(np.sqrt(gaps)), key=lambda plan: plan.parameter)
        return plans

    def _losses(self, layer: int, ranks: np.ndarray) -> np.ndarray:
        """Predict losses of a layer at these descending ranks, [2 sides, groups, ranks]."""
        by_side = []
        wanted = torch.from_numpy(ranks.copy())
        spectra, sensitivity = self.spectra[layer], self.inputs.sensitivities[layer]
        for values, side_sensitivity in zip((spectra.qk, spectra.vo), sensitivity, strict=True):
            # Energy that is dropped at each rank, summed from the smallest singular value on.
            tails = values.square().flip(-1).cumsum(-1).flip(-1)
            tails = torch.cat([tails, tails.new_zeros(len(tails), 1)], dim=-1)
            losses = interpolated(side_sensitivity, wanted) * tails[:, wanted]
            by_side.append(losses.cummax(-1).values.numpy())  # fewer columns never cost less
        return np.stack(by_side)


def _wide_gap(first: Plan, second: Plan) -> bool:
    """Tell whether two neighbouring plans are far apart and a plan between them may exist."""
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
