"""Ranks, form of keys and group size of every layer by gain per cost: water-filling on measured sensitivities.

The loss that a plan is predicted to make is the sum, over layers and sides, of a sensitivity times the dropped energy
(squared singular values). The sensitivity is measured at a few ranks, because it rises where a layer loses what it
works with, and interpolated between them. Rounding is inside the optimisation: only multiples are considered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..format.channels import Numbers
from ..format.layout import LayerRanks
from .plan import RankInputs, RankPlan, SideSensitivity, Spectra, SpectraPath
from .priced import Choice, PricedPath


class WaterFillingPath(PricedPath, SpectraPath):
    """Path of all plans that the sweep over prices gives; a side costs half of a group whose other side is as wide.

    Source: docs/design.md.
    """

    def __init__(self, inputs: RankInputs) -> None:
        super().__init__(inputs)
        assert inputs.cost is not None
        self._cost = inputs.cost()

    def _choices(self) -> list[dict[str, list[Choice]]]:
        return [
            {key: self._sides(key, found, sensitivity[key]) for key, found in layer.items()}
            for layer, sensitivity in zip(self.spectra, self.inputs.sensitivities, strict=True)
        ]

    def _sides(self, key: str, spectra: Spectra, sensitivity: tuple[SideSensitivity, SideSensitivity]) -> list[Choice]:
        """The ranks of each group's keys, then of each group's values, with their losses and costs.

        The largest rank first, so that a price of nothing removes nothing that carries energy.
        """
        found = []
        for side, values in enumerate((spectra.qk, spectra.vo)):
            columns = values.shape[-1]
            ranks = torch.tensor([*range(self.multiple_of, columns, self.multiple_of), columns])
            tails = values.square().flip(-1).cumsum(-1).flip(-1)
            tails = torch.cat([tails, tails.new_zeros(len(tails), 1)], dim=-1)
            losses = interpolated(sensitivity[side], ranks) * tails[:, ranks]
            losses = losses.flip(-1).cummax(-1).values  # fewer columns never cost less
            options = ranks.tolist()[::-1]
            cost = np.array([self._cost(key, Numbers(rank), Numbers(rank)) / 2 for rank in options])
            found += [Choice(options, loss, cost, float(loss.max() / cost.max())) for loss in losses.numpy()]
        return found

    def _priced_plan(self, price: float, choice: tuple[str, ...], options: list[list[Any]]) -> RankPlan:
        ranks: list[LayerRanks] = [
            list(zip(sides[: len(sides) // 2], sides[len(sides) // 2 :], strict=True)) for sides in options
        ]
        return self._make(price, choice, ranks)

    def _saving(self, choice: tuple[str, ...], rounded: list[LayerRanks]) -> float:
        pairs = ((key, pair) for key, layer in zip(choice, rounded, strict=True) for pair in layer)
        return 1.0 - sum(self._cost(key, Numbers(qk), Numbers(v)) for key, (qk, v) in pairs)


def interpolated(sensitivity: SideSensitivity, ranks: Tensor) -> Tensor:
    """The sensitivity at any ranks: its logarithm is linear in that of the rank, and constant beyond the probes."""
    if not sensitivity:
        return torch.zeros(len(ranks), dtype=torch.float64)
    known, values = np.log(np.array(sensitivity, dtype=float)).T
    return torch.from_numpy(np.exp(np.interp(np.log(ranks.numpy()), known, values)))
