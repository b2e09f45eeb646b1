"""`top1_agreement`: how often the compressed model's first choice is the base model's."""

from __future__ import annotations

from ..scoring import resample
from .base import Measurement, Outputs, TextMetric


class Top1Agreement(TextMetric):
    """Share of positions of held-out text where both models have the same argmax, whether it is right or not."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        base, other = self._base[split].top1, outputs.text.top1
        assert base is not None
        positions, agreed = base.size, (base == other).sum(-1)
        return Measurement.of(agreed.sum() / positions, resample(lambda total: total / positions, agreed))
