"""`default`, `token_accuracy` and `ppl_ratio`: next-token prediction on held-out text, as a ratio to the base model."""

from __future__ import annotations

from ..evaluation import Scores, interval, ratios
from ..layerwise import LayerwiseModel
from .base import Measurement, Metric


class NextToken(Metric):
    """Next-token accuracy ratio, perplexity ratio (base over compressed), or the smaller of both."""

    def measure(self, model: LayerwiseModel, split: str, base: Scores, scores: Scores) -> Measurement:
        value = ratios(base, scores)[self.name]
        return Measurement(value, interval(base, scores, self.name))
