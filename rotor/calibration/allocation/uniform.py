"""Ranks that are the same share of columns everywhere (FDC's ablation without adaptive ranks)."""

from __future__ import annotations

from .plan import Plan, SpectraPath


class UniformPath(SpectraPath):
    """Path on which every group of every layer keeps the same share of its columns, on both sides.

    Source: FDC section 6.6 (/AC).
    """

    def _plans(self) -> list[Plan]:
        widest = max(self.columns)
        plans = []
        for most in range(widest, 0, -self.multiple_of):
            ranks = [max(1, most * columns // widest) for columns in self.columns]
            pairs = zip(ranks, self.spectra, strict=True)
            plans.append(self._make(most / widest, [[(rank, rank)] * len(spectra.qk) for rank, spectra in pairs]))
        return plans
