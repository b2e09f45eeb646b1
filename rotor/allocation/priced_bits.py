"""Bits of every column, domain and group size of every layer, where what is saved are not bytes alone.

The cost of a group is no sum over its columns: predicted decode time is the longest of several limits, of which some
count bytes and others columns. So the columns of each group are first found for linear costs, where they are exact:
reading the cache, plus a share of all else, at many prices and for several shares. Each of these is then counted by the
group's real cost, and what lies on their lower hull stays. A sweep over prices takes from there the best columns of
each group, and the candidate of each layer of least loss plus price times cost.

Source: docs/design.md, Mathematics, Codes; Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..codes.allocation import priced_counts
from ..codes.layer import GroupColumns, LayerCodes, SideCodes, as_pair
from ..format.columns import WIDTHS, Columns, columns_per_word
from ..format.layout import AttentionShape
from .bits import GRAIN, coded_plan, no_word
from .plan import RankPath, RankPlan
from .sweep import price_range, sweep

PRICES = 160
"""Prices at which the columns of a group are found, for each of SHARES."""

SHARES = (0.0, 0.2, 1.0, 5.0, 100.0)
"""Of what is not reading the cache, against reading it, in the linear costs."""

Parts = tuple[float, float]
"""Cost of one side of a group: of reading it from the cache, and of all else, one after the other."""

SideParts = Callable[[str, Columns], tuple[Parts, ...]]
"""(candidate, columns) -> parts of what each latent of a group costs with these columns: that of keys and that of
values, or the one of both."""

CodedGroupCost = Callable[[str, Columns, Columns | None], float]
"""(candidate, columns of keys, columns of values or None where these are in the key latent) -> what one group costs, as
a share of the uncompressed model."""


@dataclass(frozen=True)
class _Group:
    """The columns among which a group chooses: the lower hull of loss over cost, by rising cost."""

    columns: GroupColumns
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
        parts, group_cost: of a candidate's groups; every layer alike.
    Raises:
        RecipeError: groups have too few columns for a word of the narrowest width.
    """

    def __init__(
        self,
        codes: Sequence[dict[str, LayerCodes]],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        parts: SideParts,
        group_cost: CodedGroupCost,
    ) -> None:
        super().__init__((), shape, 1)
        self.element_bytes, self.widths = element_bytes, widths
        self._parts, self._group_cost = parts, group_cost
        self._costs: dict[tuple[str, Columns, Columns | None], float] = {}
        self._layers = [
            {key: groups for key, found in layer.items() if (groups := self._candidate(key, found))} for layer in codes
        ]
        if not all(self._layers):
            raise no_word(widths, shape)

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
            columns = [
                [group.columns[at[place]] for group, at in zip(layer[key], chosen[key], strict=True)]
                for layer, key, (_, chosen) in zip(self._layers, choice, layers, strict=True)
            ]
            cost = sum(self._cost(key, *pair) for key, layer in zip(choice, columns, strict=True) for pair in layer)
            plans.append(coded_plan(price, choice, columns, self.shape, self.element_bytes, 1.0 - cost))
        return plans

    def _candidate(self, key: str, codes: LayerCodes) -> list[_Group]:
        """Of each group of a candidate of a layer; empty where they fill no word."""
        columns = codes.qk.weight.shape[-1]
        widths = [bits for bits in WIDTHS if bits in self.widths and columns >= columns_per_word(bits)]
        linear = self._linear(key, columns, widths)
        return [self._group(key, codes, group, widths, linear) for group in range(len(codes.qk.weight)) if widths]

    def _linear(self, key: str, columns: int, widths: list[int]) -> np.ndarray:
        """Costs of a column, [latents, reading and all else, widths]: the slopes from one word to all."""
        found = []
        for bits in widths:
            word = columns_per_word(bits)
            most = columns // word * word
            ends = [np.array(self._parts(key, Columns(**{f"n{bits}": count}))) for count in (word, most)]
            found.append((ends[1] - ends[0]) / (most - word) if most > word else ends[0] / word)
        return np.stack(found, -1).clip(min=0) if found else np.zeros((1, 2, 0))

    def _group(self, key: str, codes: LayerCodes, group: int, widths: list[int], linear: np.ndarray) -> _Group:
        sides = [_Side.of(side, group, widths) for side in codes.sides]
        counts = []
        for share in SHARES:
            costs = linear[:, 0] + share * linear[:, 1]
            top = 10 * sum(side.whole for side in sides) / max(costs.min(), np.finfo(float).tiny)
            prices = price_range(top, PRICES).numpy()
            counts.append(np.concatenate([s.counts(cost, prices) for s, cost in zip(sides, costs, strict=True)], 1))
        both = np.unique(np.concatenate(counts), axis=0)
        parts = np.split(both, len(sides), axis=1)
        loss = sum(side.loss(part) for side, part in zip(sides, parts, strict=True))
        assert isinstance(loss, np.ndarray)
        pairs = [
            as_pair([_columns(widths, own) for own in each]) for each in zip(*(p.tolist() for p in parts), strict=True)
        ]
        cost = np.array([self._cost(key, *pair) for pair in pairs])
        kept = lower_hull(cost, loss)
        return _Group([pairs[i] for i in kept], loss[kept], cost[kept])

    def _cost(self, key: str, qk: Columns, v: Columns | None) -> float:
        if (key, qk, v) not in self._costs:
            self._costs[key, qk, v] = self._group_cost(key, qk, v)
        return self._costs[key, qk, v]


@dataclass(frozen=True)
class _Side:
    """One side of a group. losses: of each column at 0 bits and at each of `widths`, [1 + widths, columns]."""

    widths: list[int]
    losses: Tensor

    @classmethod
    def of(cls, codes: SideCodes, group: int, widths: list[int]) -> _Side:
        return cls(widths, codes.losses(group, (0, *widths))[:, codes.order(group)])

    @property
    def whole(self) -> float:
        """The loss without any column."""
        return float(self.losses[0].sum())

    def counts(self, costs: np.ndarray, prices: np.ndarray) -> np.ndarray:
        return priced_counts(self.losses, (0, *self.widths), (0.0, *costs.tolist()), prices)

    def loss(self, counts: np.ndarray) -> np.ndarray:
        """With so many columns of each width, [n, widths] -> [n]."""
        table = self.losses.numpy()
        saved = np.cumsum(np.pad(table[0] - table[1:], ((0, 0), (1, 0))), axis=1)
        ends = np.cumsum(counts, axis=1)
        each = np.arange(len(self.widths))
        gained: np.ndarray = (saved[each, ends] - saved[each, ends - counts]).sum(1)
        return self.whole - gained


def _columns(widths: list[int], counts: list[int]) -> Columns:
    return Columns(**{f"n{bits}": count for bits, count in zip(widths, counts, strict=True)})


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
