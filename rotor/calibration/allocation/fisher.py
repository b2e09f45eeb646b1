"""Ranks in proportion to Fisher information: Palu's automatic rank search."""

from __future__ import annotations

from .plan import Plan, SpectraPath


class FisherPath(SpectraPath):
    """Path on which each key and value projection gets a rank in proportion to the sum of its squared gradients.

    Source: Palu, arXiv 2407.21118, section 3.2.
    """

    def _plans(self) -> list[Plan]:
        columns, information = max(self.columns), self.inputs.gradients()
        values = [float(v) for pair in information for side in pair for v in side]
        scale = columns / max(min(values), max(values) * 1e-6, 1e-300)  # all are 0 where no layer reaches anything
        # The largest factor gives even the least informative group all columns. Smaller ones follow down to the point
        # where the most informative group has one multiple left. A rank changes where factor * information crosses a
        # multiple.
        crossings = {
            rank / value
            for value in values
            if value > 0
            for rank in range(self.multiple_of, columns + 1, self.multiple_of)
        }
        factors = sorted({factor for factor in crossings if factor <= scale} | {scale}, reverse=True)
        plans = []
        for factor in factors:
            unrounded = []
            for pair, most in zip(information, self.columns, strict=True):
                sides = [[max(1, min(most, int(factor * float(v) + 1e-9))) for v in side] for side in pair]
                unrounded.append(list(zip(*sides, strict=True)))
            plans.append(self._make(factor, unrounded))
        return plans
