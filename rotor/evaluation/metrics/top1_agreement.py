"""`top1_agreement`: how often the compressed model's first choice is the base model's."""

from __future__ import annotations

from typing import Any

from ..scoring import Scores, resample
from .base import EvaluationContext, Measurement, Metric, Seen


class Top1Agreement(Metric):
    """Share of positions of held-out text where both models have the same argmax, whether it is right or not."""

    def __init__(self, name: str, context: EvaluationContext) -> None:
        super().__init__(name, context)
        self._base: dict[str, Scores] = {}

    def measure_base(self, seen: Seen, split: str) -> dict[str, Any]:
        self._base[split] = seen.text
        return {}

    def measure(self, seen: Seen, split: str) -> Measurement:
        base, other = self._base[split].top1, seen.text.top1
        assert base is not None
        positions, agreed = base.size, (base == other).sum(-1)
        return Measurement.of(agreed.sum() / positions, resample(lambda total: total / positions, agreed))
