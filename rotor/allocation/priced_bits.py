"""Bits of every channel, form of keys and group size of every layer, where what is saved are not bytes alone.

What a group costs depends on its rows alone, whose planes are few: of every pair of a key and a value row the cost is
asked, and their lower hull of loss over cost kept. A sweep over prices takes from there the best rows of each group, and
the candidate of each layer of least loss plus price times cost.

Source: docs/design.md, Mathematics, Codes; Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..codes.layer import GroupChannels, LayerCodes, as_pair
from ..format.channels import Channels
from ..format.layout import AttentionShape
from .bits import GRAIN, coded_plan, layer_curves
from .plan import RankPath, RankPlan
from .sweep import sweep

CodedGroupCost = Callable[[str, Channels, Channels | None], float]
"""(candidate, channels of keys, channels of values or None where these are in the key latent) -> what one group costs,
as a share of the uncompressed model; by the widths of its rows."""


@dataclass(frozen=True)
class _Group:
    """The channels among which a group chooses: the lower hull of loss over cost, by rising cost."""

    channels: GroupChannels
    loss: np.ndarray
    cost: np.ndarray

    def at(self, prices: np.ndarray) -> np.ndarray:
        """Which are best at each price, [n]."""
        found: np.ndarray = (self.loss + prices[:, None] * self.cost).argmin(1)
        return found


class PricedBitsPath(RankPath):
    """Path of the plans of least predicted loss for what they cost; see BitsPath, which is exact for bytes.

    Args:
        codes, widths, element_bytes: see BitsPath.
        group_cost: of a candidate's groups; every layer alike.
    """

    def __init__(
        self,
        codes: Sequence[dict[str, LayerCodes]],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        group_cost: CodedGroupCost,
    ) -> None:
        super().__init__((), shape, 1)
        self.element_bytes, self.widths, self._group_cost = element_bytes, widths, group_cost
        self._costs: dict[tuple[str, int, int | None], float] = {}
        self._layers = [{key: self._groups(key, found) for key, found in layer.items()} for layer in codes]

    @property
    def grain(self) -> tuple[str, str]:
        return GRAIN

    def full(self) -> RankPlan:
        """The plan of most cost."""
        return self.steps()[0]

    def _plans(self) -> list[RankPlan]:
        gains = (
            group.loss.max() / group.cost.min()
            for layer in self._layers
            for groups in layer.values()
            for group in groups
        )
        return sweep(self._sweep, 10 * float(max(gains)))

    def _sweep(self, prices: Tensor) -> list[RankPlan]:
        """The best plan at every price."""
        numbers = prices.numpy()
        layers = [_best(layer, numbers) for layer in self._layers]
        plans = []
        for place, price in enumerate(numbers.tolist()):
            choice = tuple(list(layer)[keys[place]] for layer, (keys, _) in zip(self._layers, layers, strict=True))
            channels = [
                [group.channels[at[place]] for group, at in zip(layer[key], chosen[key], strict=True)]
                for layer, key, (_, chosen) in zip(self._layers, choice, layers, strict=True)
            ]
            cost = sum(self._cost(key, *pair) for key, layer in zip(choice, channels, strict=True) for pair in layer)
            plans.append(coded_plan(price, choice, channels, self.shape, self.element_bytes, 1.0 - cost))
        return plans

    def _groups(self, key: str, codes: LayerCodes) -> list[_Group]:
        """Of each group of a candidate of a layer: its rows of one plane and more, of keys with those of values."""
        curves, latents = layer_curves(codes, self.widths), len(codes.sides)
        found = []
        for first in range(0, len(curves), latents):
            own = curves[first : first + latents]
            rows = [[curve.channels(planes) for planes in range(1, len(curve.loss))] for curve in own]
            losses = [curve.loss[1:] for curve in own]
            if latents == 1:
                pairs, loss = [as_pair([row]) for row in rows[0]], losses[0]
            else:
                pairs = [(qk, v) for qk in rows[0] for v in rows[1]]
                loss = (losses[0][:, None] + losses[1]).ravel()
            cost = np.array([self._cost(key, *pair) for pair in pairs])
            kept = lower_hull(cost, loss)
            found.append(_Group([pairs[i] for i in kept], loss[kept], cost[kept]))
        return found

    def _cost(self, key: str, qk: Channels, v: Channels | None) -> float:
        known = key, qk.width, None if v is None else v.width
        if known not in self._costs:
            self._costs[known] = self._group_cost(key, qk, v)
        return self._costs[known]


def _best(layer: dict[str, list[_Group]], prices: np.ndarray) -> tuple[list[int], dict[str, list[np.ndarray]]]:
    """The best candidate at each price, by its place, and what each group of each candidate chooses there."""
    chosen = {key: [group.at(prices) for group in groups] for key, groups in layer.items()}
    totals = [
        sum(group.loss[at] + prices * group.cost[at] for group, at in zip(groups, chosen[key], strict=True))
        for key, groups in layer.items()
    ]
    return np.stack(totals).argmin(0).tolist(), chosen


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
