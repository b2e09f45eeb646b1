"""From singular values to ranks: one removal rate shared by all groups and both sides."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import AttentionShape, compression

LayerRanks = list[tuple[int, int]]
"""(qk_rank, v_rank) of each group of a layer, in the order of the bases."""

TIE = 1e-12
"""Relative slack in comparing a tail with the removal rate, so that rounding errors do not decide ties."""


def removal_rate_ranks(singular_values: Tensor, removal_rate: float) -> list[int]:
    """Columns to keep in each row: the largest tail whose share of the sum is at most `removal_rate` is removed.

    One column always stays.

    Args:
        singular_values: [groups, columns], each row descending and not negative.
        removal_rate: in [0, 1).
    Source: FDC equation 1 (ZACK equation 6); the rank is j + 1 there.
    """
    return ranks_from_shares(tail_shares(singular_values), removal_rate)


def tail_shares(singular_values: Tensor) -> Tensor:
    """Share of the row's sum held by columns i, i + 1, ...: [groups, columns], non-increasing; zeros for a zero row."""
    tails = singular_values.flip(-1).cumsum(-1).flip(-1)
    return torch.where(tails[..., :1] > 0, tails / tails[..., :1], 0.0)


def ranks_from_shares(shares: Tensor, removal_rate: float) -> list[int]:
    """Equation 1 on the result of `tail_shares`."""
    return (shares > removal_rate + TIE).sum(-1).clamp(min=1).tolist()


def round_rank(rank: int, multiple_of: int, columns: int) -> int:
    """Round up to what the kernels' tiles need, but never beyond the columns that there are."""
    return min(-(-rank // multiple_of) * multiple_of, columns)


@dataclass(frozen=True)
class RankPlan:
    """Ranks of every group: exact as equation 1 gives them, and rounded as they are stored.

    removal_rate: the rate that gave them.
    planned, stored: compression (share of the KV cache removed) by the exact and the rounded ranks.
    """

    removal_rate: float
    exact: list[LayerRanks]
    rounded: list[LayerRanks]
    planned: float
    stored: float


class RankPath:
    """All rank plans that a shared removal rate can give, from spectra.

    Args:
        spectra: per layer the singular values of (qk, vo), each [num_groups, columns].
        multiple_of: stored ranks are rounded up to this.
        squares: apply the rate to squared singular values.
    """

    def __init__(
        self, spectra: list[tuple[Tensor, Tensor]], shape: AttentionShape, multiple_of: int, squares: bool
    ) -> None:
        self.shape = shape
        self.multiple_of = multiple_of
        power = 2 if squares else 1
        self._shares = [(tail_shares(qk**power), tail_shares(vo**power)) for qk, vo in spectra]
        self._steps: list[RankPlan] | None = None

    def plan(self, removal_rate: float) -> RankPlan:
        """Ranks of all groups at one shared removal rate in [0, 1)."""
        exact, rounded = [], []
        for qk_shares, vo_shares in self._shares:
            qk, vo = ranks_from_shares(qk_shares, removal_rate), ranks_from_shares(vo_shares, removal_rate)
            exact.append(list(zip(qk, vo, strict=True)))
            rounded.append([(self._round(a, qk_shares), self._round(b, vo_shares)) for a, b in exact[-1]])
        return RankPlan(removal_rate, exact, rounded, compression(exact, self.shape), compression(rounded, self.shape))

    def full(self) -> RankPlan:
        """All columns of every group: the plan that changes nothing."""
        ranks = [[(qk.shape[-1], vo.shape[-1])] * qk.shape[0] for qk, vo in self._shares]
        return RankPlan(0.0, ranks, ranks, 0.0, 0.0)

    def steps(self) -> list[RankPlan]:
        """One plan for each distinct set of stored ranks, by rising compression, each at its lowest removal rate."""
        if self._steps is None:
            # Only tails that start on a multiple change what is stored; the first column always stays.
            starts = slice(self.multiple_of, None, self.multiple_of)
            rates = {0.0}.union(*(s[:, starts].flatten().tolist() for pair in self._shares for s in pair))
            plans = [self.plan(rate) for rate in sorted(rates)]
            self._steps = [p for i, p in enumerate(plans) if i == 0 or p.rounded != plans[i - 1].rounded]
        return self._steps

    def at_compression(self, target: float) -> RankPlan | None:
        """The step of lowest removal rate that removes at least `target` of the cache, or None if none does."""
        index = bisect_left([plan.stored for plan in self.steps()], target - TIE)
        return self.steps()[index] if index < len(self.steps()) else None

    def _round(self, rank: int, shares: Tensor) -> int:
        return round_rank(rank, self.multiple_of, shares.shape[-1])
