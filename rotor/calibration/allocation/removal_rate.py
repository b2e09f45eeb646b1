"""Ranks from singular values by one removal rate that all groups and both sides share."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .plan import COMPRESSION_SLACK, Plan, RankInputs, SpectraPath

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
        unrounded = [
            list(zip(ranks_from_shares(qk, removal_rate), ranks_from_shares(vo, removal_rate), strict=True))
            for qk, vo in self._shares
        ]
        return self._make(removal_rate, unrounded)

    def at_compression(self, target: float) -> Plan | None:
        """The mildest plan that removes at least `target` of the cache, or None: the removal rate solved for it.

        What is removed is a rising step function of the rate. Its plans number thousands in a large model; bisection
        makes some fifty.
        """
        from scipy.optimize import bisect  # slow to import

        def above(rate: float) -> float:
            return 1.0 if self.plan(rate).stored >= target - COMPRESSION_SLACK else -1.0

        largest = self._rates[-1]
        if above(largest) < 0:
            return None
        if above(0.0) > 0:
            return self.plan(0.0)
        step = bisect(above, 0.0, largest, xtol=SHARE_SLACK / 2)
        return self.plan(float(self._rates[np.searchsorted(self._rates, step + 2 * SHARE_SLACK, side="right") - 1]))

    @cached_property
    def _rates(self) -> np.ndarray:
        """Rates at which a stored rank falls, rising from 0 on. Only tails that start on a multiple change the stored
        ranks; the first column always stays."""
        starts = slice(self.multiple_of, None, self.multiple_of)
        rates = [s[:, starts].flatten() for pair in self._shares for s in pair]
        return np.unique(torch.cat([torch.zeros(1, dtype=torch.float64), *rates]).numpy())

    def _plans(self) -> list[Plan]:
        return [self.plan(rate) for rate in self._rates.tolist()]
