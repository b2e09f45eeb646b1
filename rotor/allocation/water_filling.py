"""Ranks, domain and group size of every layer by gain per cost: water-filling on measured sensitivities.

The loss that a plan is predicted to make is the sum, over layers and sides, of a sensitivity times the dropped energy
(squared singular values). The sensitivity is measured at a few ranks, because it rises where a layer loses what it
works with, and interpolated between them. For a price per unit of cost each group takes the stored rank of least loss
plus price, each layer the candidate of least total; a sweep over prices gives the path. Rounding is inside the
optimisation: only multiples are considered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..codes.allocation import bit_path, equal_path
from ..format.layout import AttentionShape, LayerRanks
from .bits import least_loss
from .plan import Cost, GroupCost, RankInputs, RankPath, RankPlan, Sensitivity, SideSensitivity, Spectra
from .sweep import sweep

Curve = tuple[Tensor, Tensor, Tensor]
"""Of one side of a candidate: possible ranks [R], loss of each group at them [num_groups, R], cost at them [R]."""

Curves = dict[str, list[Curve]]
"""Both sides of each candidate of a layer."""


class WaterFillingPath(RankPath):
    """Path of all plans that the sweep gives.

    Args:
        sensitivities: per layer, by candidate.
        cost: of one group, by sides: what ranks are allocated by.
        group_cost: of one group as a whole: what the saving of a plan is counted in.
    Source: docs/design.md.
    """

    def __init__(
        self,
        spectra: Sequence[dict[str, Spectra]],
        shape: AttentionShape,
        multiple_of: int,
        sensitivities: Sequence[Sensitivity],
        cost: Cost,
        group_cost: GroupCost,
    ) -> None:
        super().__init__(spectra, shape, multiple_of)
        self.sensitivities = list(sensitivities)
        self.cost = cost
        self.group_cost = group_cost

    def _plans(self) -> list[RankPlan]:
        curves = [
            {key: self._curves(key, s, self.sensitivities[i][key]) for key, s in layer.items()}
            for i, layer in enumerate(self.spectra)
        ]
        gains = [
            float(loss.max() / cost.max())
            for layer in curves
            for sides in layer.values()
            for _, loss, cost in sides
            if loss.max() > 0
        ]
        return sweep(lambda prices: self._sweep(curves, prices), max(gains, default=1.0) * 10)

    def _sweep(self, curves: list[Curves], prices: Tensor) -> list[RankPlan]:
        """The best plan at every price."""
        layers = [self._layer(layer, prices) for layer in curves]
        plans = []
        for i, price in enumerate(prices.tolist()):
            choice = tuple(keys[i] for keys, _ in layers)
            ranks = [per_price[i] for _, per_price in layers]
            plans.append(self._make(price, choice, ranks))
        return plans

    def _saving(self, choice: tuple[str, ...], rounded: list[LayerRanks]) -> float:
        cost = sum(self.group_cost(key, qk, v) for key, layer in zip(choice, rounded, strict=True) for qk, v in layer)
        return 1.0 - cost

    def _curves(self, key: str, spectra: Spectra, sensitivity: tuple[SideSensitivity, SideSensitivity]) -> list[Curve]:
        """For each side: possible ranks [R], loss of each group at them [num_groups, R], cost at them [R]."""
        sides = []
        for side, values in enumerate((spectra.qk, spectra.vo)):
            columns = values.shape[-1]
            ranks = torch.tensor([*range(self.multiple_of, columns, self.multiple_of), columns])
            energy = values.square()
            tails = energy.flip(-1).cumsum(-1).flip(-1)
            tails = torch.cat([tails, tails.new_zeros(len(tails), 1)], dim=-1)
            loss = interpolated(sensitivity[side], ranks) * tails[:, ranks]
            loss = loss.flip(-1).cummax(-1).values.flip(-1)  # fewer columns never cost less
            cost = torch.tensor(self.cost(key, ranks.tolist())[side], dtype=torch.float64)
            sides.append((ranks, loss, cost))
        return sides

    def _layer(self, curves: Curves, prices: Tensor) -> tuple[list[str], list[LayerRanks]]:
        """The best candidate of a layer, and its ranks, at every price."""
        totals, ranks = [], []
        for sides in curves.values():
            total = torch.zeros_like(prices)
            chosen = []
            for possible, loss, cost in sides:
                priced = loss + prices[:, None, None] * cost  # [prices, num_groups, R]
                # Of equal values the largest rank, so that a price of nothing removes nothing that carries energy.
                best = priced.shape[-1] - 1 - priced.flip(-1).argmin(-1)
                total = total + priced.gather(-1, best.unsqueeze(-1)).squeeze(-1).sum(-1)
                chosen.append(possible[best].tolist())
            totals.append(total)
            ranks.append(chosen)
        winner = torch.stack(totals, dim=-1).argmin(-1).tolist()
        keys = list(curves)
        chosen_keys = [keys[w] for w in winner]
        per_price: list[LayerRanks] = [
            list(zip(ranks[w][0][i], ranks[w][1][i], strict=True)) for i, w in enumerate(winner)
        ]
        return chosen_keys, per_price


class UniformRowsPath(WaterFillingPath):
    """Path of the plans of least predicted loss whose layers all store rows of one width: one for each width.

    Exact, by dynamic programming over the groups and sides of a layer; nothing is priced.
    """

    def _plans(self) -> list[RankPlan]:
        layers = []
        for spectra, sensitivity in zip(self.spectra, self.sensitivities, strict=True):
            curves = {key: self._curves(key, s, sensitivity[key]) for key, s in spectra.items()}
            layers.append({key: bit_path(_by_width(sides)) for key, sides in curves.items()})
        best = [least_loss([path.loss for path in layer.values()], exact=True) for layer in layers]
        widths = np.unique(equal_path([loss for loss, _ in best]).each)
        plans = []
        for width in widths[widths > 0].tolist():
            choice = tuple(list(layer)[int(which[width])] for layer, (_, which) in zip(layers, best, strict=True))
            ranks = []
            for layer, key in zip(layers, choice, strict=True):
                split = layer[key].split(width)
                groups = len(split) // 2
                ranks.append(list(zip(split[:groups], split[groups:], strict=True)))
            plans.append(self._make(float(width), choice, ranks))
        return plans


def _by_width(sides: list[Curve]) -> list[np.ndarray]:
    """The loss of each group at exactly 0, 1, ... columns, infinite at what is no rank; keys of all, then values."""
    found = []
    for ranks, losses, _ in sides:
        for loss in losses:
            curve = np.full(int(ranks[-1]) + 1, np.inf)
            curve[ranks.numpy()] = loss.numpy()
            found.append(curve)
    return found


def interpolated(sensitivity: SideSensitivity, ranks: Tensor) -> Tensor:
    """The sensitivity at any ranks: its logarithm is linear in that of the rank, and constant beyond the probes."""
    if not sensitivity:
        return torch.zeros(len(ranks), dtype=torch.float64)
    known, values = np.log(np.array(sensitivity, dtype=float)).T
    return torch.from_numpy(np.exp(np.interp(np.log(ranks.numpy()), known, values)))


def path(inputs: RankInputs) -> WaterFillingPath:
    """The path over probed sensitivities."""
    assert inputs.sensitivities is not None  # who makes the inputs has probed
    costs = inputs.costs()
    sizes = inputs.spectra, inputs.shape, inputs.multiple_of
    kind = UniformRowsPath if inputs.uniform_rows else WaterFillingPath
    return kind(*sizes, inputs.sensitivities, costs.sides, costs.numbers)
