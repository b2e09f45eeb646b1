"""Ranks from singular values by one removal rate that all groups and both sides share."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import Plan, RankInputs, SpectraPath

SHARE_SLACK = 1e-12
"""Slack in comparing a tail with the removal rate, so that rounding errors do not decide ties."""


def tail_shares(singular_values: Tensor) -> Tensor:
    """Share of a group's sum in the columns i, i + 1, ...: [groups, columns], non-increasing; 0 if the sum is 0.

    Args:
        singular_values: [groups, columns], descending in each group and not negative.
    """
    tails = singular_values.flip(-1).cumsum(-1).flip(-1)
    return torch.where(tails[..., :1] > 0, tails / tails[..., :1], 0.0)


def ranks_from_shares(shares: Tensor, removal_rate: float) -> list[int]:
    """Ranks of each group from `tail_shares`: the largest tail with a share of at most `removal_rate` is removed.

    One column always stays.

    Source: FDC equation 1 (ZACK equation 6); the rank is j + 1 there.
    """
    return (shares > removal_rate + SHARE_SLACK).sum(-1).clamp(min=1).tolist()


class RemovalRatePath(SpectraPath):
    """Path of all plans of a shared removal rate."""

    def __init__(self, inputs: RankInputs) -> None:
        super().__init__(inputs)
        self._shares = [(tail_shares(s.qk), tail_shares(s.vo)) for s in self.spectra]

    def plan(self, removal_rate: float) -> Plan:
        """Ranks of all groups at one shared removal rate in [0, 1)."""
        exact = [
            list(zip(ranks_from_shares(qk, removal_rate), ranks_from_shares(vo, removal_rate), strict=True))
            for qk, vo in self._shares
        ]
        return self._make(removal_rate, exact)

    def _plans(self) -> list[Plan]:
        # Only tails that start on a multiple change the stored ranks; the first column always stays.
        starts = slice(self.multiple_of, None, self.multiple_of)
        rates = {0.0}.union(*(s[:, starts].flatten().tolist() for pair in self._shares for s in pair))
        return [self.plan(rate) for rate in sorted(rates)]
