"""Ranks that are the same share of columns everywhere (FDC's ablation without adaptive ranks)."""

from __future__ import annotations

from .plan import Plan, SpectraPath


class UniformPath(SpectraPath):
    """Path on which every group of every layer keeps the same share of its columns, on both sides.

    Source: FDC section 6.6 (/AC).
    """

    def _plans(self) -> list[Plan]:
        return [
            self._make(rank / self.columns, [[(rank, rank)] * len(spectra.qk) for spectra in self.spectra])
            for rank in range(self.columns, 0, -self.multiple_of)
        ]
