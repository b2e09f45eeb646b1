"""Ranks that are the same share of columns everywhere (FDC's ablation without adaptive ranks)."""

from __future__ import annotations

from .plan import RankPlan, SpectraPath


class UniformPath(SpectraPath):
    """Path on which every group of every layer keeps the same share of its columns, on both sides.

    Source: FDC section 6.6 (/AC).
    """

    def _plans(self) -> list[RankPlan]:
        choice, only = self._only()
        columns = only[0].qk.shape[-1]
        plans = []
        for rank in range(columns, 0, -self.multiple_of):
            exact = [[(rank, rank)] * s.qk.shape[0] for s in only]
            plans.append(self._make(rank / columns, choice, exact))
        return plans
