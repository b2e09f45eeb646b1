"""Ranks of every layer by gain per byte: water-filling on measured sensitivities.

The loss that a plan is predicted to make is the sum, over layers and sides, of a sensitivity times the dropped energy
(squared singular values). The sensitivity is measured at a few ranks, because it rises where a layer loses what it
works with, and interpolated between them. Rounding is inside the optimisation: only multiples are considered. At each
price of a column every side of every group takes the rank of least loss plus price times rank.

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

GAP, HALVINGS = 0.005, 10
"""Where neighbouring plans are further apart in compression than GAP and several ranks changed at once, the interval of
prices between them is halved, at most this often: a small model has few plans, and each may be the one."""


class WaterFillingPath(SpectraPath):
    """Path of the plans that are best at some price."""

    def _plans(self) -> list[Plan]:
        columns, step = self.columns, self.multiple_of
        ranks = np.array([*range(step, columns, step), columns])[::-1]  # a price of nothing removes nothing
        losses = self._losses(ranks)
        held = np.array(self.shape.held_tokens(self.inputs.context_tokens or 1))
        shares = np.repeat(held / held.sum(), 2 * losses.shape[2])  # of the cache, of each side of each group
        cost = shares[:, None] * ranks / (2 * columns * losses.shape[2])

        def sweep(prices: np.ndarray) -> list[Plan]:
            """The best plan at every price."""
            sides = zip(losses.reshape(-1, len(ranks)), cost, strict=True)
            taken = np.stack([(loss + prices[:, None] * own).argmin(1) for loss, own in sides])
            chosen = ranks[taken].reshape(*losses.shape[:3], len(prices)).transpose(3, 0, 2, 1).tolist()
            return [
                self._make(price, [[(qk, v) for qk, v in layer] for layer in layers])
                for price, layers in zip(prices.tolist(), chosen, strict=True)
            ]

        top = 10 * losses.max() / cost.max()  # here only the smallest rank is worth its cost
        found = sweep(np.logspace(-12, 0, PRICES) * (top or 1.0))
        for _ in range(HALVINGS):
            crowded = [a.parameter * b.parameter for a, b in pairwise(found) if _crowded(a, b)]
            if not crowded:
                break
            found = sorted(found + sweep(np.sqrt(crowded)), key=lambda plan: plan.parameter)
        return found

    def _losses(self, ranks: np.ndarray) -> np.ndarray:
        """Predicted losses at these descending ranks, [layers, 2 sides, groups, ranks]."""
        found, wanted = [], torch.from_numpy(ranks.copy())
        for spectra, sensitivity in zip(self.spectra, self.inputs.sensitivities, strict=True):
            for values, of_side in zip((spectra.qk, spectra.vo), sensitivity, strict=True):
                tails = values.square().flip(-1).cumsum(-1).flip(-1)
                tails = torch.cat([tails, tails.new_zeros(len(tails), 1)], dim=-1)
                losses = interpolated(of_side, wanted) * tails[:, wanted]
                found.append(losses.cummax(-1).values.numpy())  # fewer columns never cost less
        return np.stack(found).reshape(len(self.spectra), 2, -1, len(ranks))


def _crowded(first: Plan, second: Plan) -> bool:
    """Whether a plan between these two is wanted, and there may be one."""
    if abs(second.stored - first.stored) <= GAP:
        return False
    pairs = zip(chain(*first.ranks), chain(*second.ranks), strict=True)
    return sum((a != c) + (b != d) for (a, b), (c, d) in pairs) > 1


def interpolated(sensitivity: SideSensitivity, ranks: Tensor) -> Tensor:
    """The sensitivity at any ranks: its logarithm is linear in that of the rank, and constant beyond the probes."""
    if not sensitivity:
        return torch.zeros(len(ranks), dtype=torch.float64)
    known, values = np.log(np.array(sensitivity, dtype=float)).T
    return torch.from_numpy(np.exp(np.interp(np.log(ranks.numpy()), known, values)))
