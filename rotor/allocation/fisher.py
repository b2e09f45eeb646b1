"""Ranks in proportion to Fisher information: Palu's automatic rank search."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..format.layout import AttentionShape
from .plan import RankInputs, RankPath, RankPlan, Spectra


class FisherPath(RankPath):
    """Each key and value projection gets a rank in proportion to the sum of its squared gradients.

    Args:
        information: per layer the sum of squared gradients of the loss with respect to W_k and W_v of each group,
            each [num_groups].
    Source: Palu, arXiv 2407.21118, section 3.2.
    """

    def __init__(
        self,
        spectra: Sequence[dict[str, Spectra]],
        shape: AttentionShape,
        multiple_of: int,
        information: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(spectra, shape, multiple_of)
        self.information = list(information)

    def _plans(self) -> list[RankPlan]:
        choice, only = self._only()
        columns = only[0].qk.shape[-1]
        values = [float(v) for pair in self.information for side in pair for v in side]
        scale = columns / max(min(values), max(values) * 1e-6)
        # From the factor at which even the least informative group is full, down to where the most informative has
        # one multiple left; a rank changes where factor * information crosses a multiple.
        crossings = {
            rank / value
            for value in values
            if value > 0
            for rank in range(self.multiple_of, columns + 1, self.multiple_of)
        }
        factors = sorted({factor for factor in crossings if factor <= scale} | {scale}, reverse=True)
        plans = []
        for factor in factors:
            exact = []
            for pair, spectra in zip(self.information, only, strict=True):
                sides = [[_clip(factor * float(v), columns) for v in side] for side in pair]
                assert len(sides[0]) == spectra.qk.shape[0]
                exact.append(list(zip(*sides, strict=True)))
            plans.append(self._make(factor, choice, exact))
        return plans


def _clip(rank: float, columns: int) -> int:
    return max(1, min(columns, int(rank + 1e-9)))


def path(inputs: RankInputs) -> FisherPath:
    return FisherPath(inputs.spectra, inputs.shape, inputs.multiple_of, inputs.gradients())
