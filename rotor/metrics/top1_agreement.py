"""`top1_agreement`: how often the compressed model's first choice is the base model's."""

from __future__ import annotations

from ..evaluation import Scores, bootstrap
from ..layerwise import LayerwiseModel
from .base import Measurement, Metric


class Top1Agreement(Metric):
    """Share of positions of held-out text where both models have the same argmax, whether it is right or not."""

    def measure(self, model: LayerwiseModel, split: str, base: Scores, scores: Scores) -> Measurement:
        assert base.top1 is not None
        positions, agreed = base.top1.size, (base.top1 == scores.top1).sum(-1)
        value = round(float(agreed.sum() / positions), 6)
        bounds = bootstrap(lambda total: total / positions, agreed)
        return Measurement(value, bounds, {self.name: value})
