"""Bits of every channel, form of keys and group size of every layer, where what is saved are not bytes alone.

What a group costs depends on the widths of its rows alone, which are few: of every pair of a key and a value row the
cost is asked, and their lower hull of loss over cost is what the group chooses among.

Source: docs/design.md, Mathematics, Codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codes.layer import LayerCodes, as_pair
from ..format.channels import Channels
from ..format.layout import AttentionShape
from .bits import STEP, coded_plan, layer_curves
from .plan import GroupCost, RankPlan
from .priced import Choice, PricedPath


class PricedBitsPath(PricedPath):
    """Path of the plans of least predicted loss for what they cost; see BitsPath, which is exact for bytes.

    Args:
        codes, widths, element_bytes: see BitsPath.
        group_cost: of a candidate's groups; every layer alike.
    """

    step = STEP

    def __init__(
        self,
        codes: Sequence[dict[str, LayerCodes]],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        group_cost: GroupCost,
    ) -> None:
        self.codes, self.shape, self.element_bytes, self.widths = codes, shape, element_bytes, widths
        self._group_cost = group_cost
        self._costs: dict[tuple[str, int, int | None], float] = {}

    def _choices(self) -> list[dict[str, list[Choice]]]:
        return [{key: self._groups(key, found) for key, found in layer.items()} for layer in self.codes]

    def _priced_plan(self, price: float, choice: tuple[str, ...], options: list[list[Any]]) -> RankPlan:
        cost = sum(self._cost(key, *pair) for key, layer in zip(choice, options, strict=True) for pair in layer)
        return coded_plan(price, choice, options, self.shape, self.element_bytes, 1.0 - cost)

    def _groups(self, key: str, codes: LayerCodes) -> list[Choice]:
        """Of each group of a candidate of a layer: its rows of one plane and more, of keys with those of values."""
        curves, latents = layer_curves(codes, self.widths), len(codes.sides)
        found = []
        for first in range(0, len(curves), latents):
            own = curves[first : first + latents]
            rows = [[curve.channels(planes) for planes in range(1, len(curve.loss))] for curve in own]
            if latents == 1:
                pairs, loss = [as_pair([row]) for row in rows[0]], own[0].loss[1:]
            else:
                pairs = [(qk, v) for qk in rows[0] for v in rows[1]]
                loss = (own[0].loss[1:, None] + own[1].loss[1:]).ravel()
            cost = np.array([self._cost(key, *pair) for pair in pairs])
            kept = lower_hull(cost, loss)
            top = float(loss[kept].max() / cost[kept].min())
            found.append(Choice([pairs[i] for i in kept], loss[kept], cost[kept], top))
        return found

    def _cost(self, key: str, qk: Channels, v: Channels | None) -> float:
        known = key, qk.width, None if v is None else v.width
        if known not in self._costs:
            self._costs[known] = self._group_cost(key, qk, v)
        return self._costs[known]


def lower_hull(cost: np.ndarray, loss: np.ndarray) -> list[int]:
    """Indices of the points that are best at some price from 0 on, by rising cost and falling loss."""
    kept: list[int] = []
    for i in np.lexsort((loss, cost)).tolist():
        if kept and loss[i] >= loss[kept[-1]]:
            continue
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            # b stays if it lies below the line from a to i.
            if (loss[a] - loss[b]) * (cost[i] - cost[a]) > (loss[a] - loss[i]) * (cost[b] - cost[a]):
                break
            kept.pop()
        kept.append(i)
    return kept
